/* Recipe: everything a run is told, from YAML. Plain struct, const once resolved. One row table
 * (core/recipe_table.c) holds for each key its YAML path, type, default, bounds, unit and one line
 * of help; loading, validation, printing, --set and the README's reference all come from that
 * table.
 *
 * Errors are collected: every problem of the file at once, one per line, each "file:line:column:
 * ..." with what was found, what was expected and, for an unknown key, the nearest known one.
 *
 * Strings are owned by the recipe; "" means not given. Input paths are relative to the recipe's
 * folder (those of --set to the working directory) and are stored absolute; run.directory is
 * relative to the working directory.
 *
 * What is resolved after loading: run.directory (runs/NAME of the recipe), the models that were not
 * given (reward from actor where a reward stage trains it; critic from reward, else from actor;
 * reference from actor), init_head (true where the source has no scalar head), rewards (one term,
 * model), data.chat.assistant_prefix, data.prompts.max_tokens (rollout.max_prompt_tokens), and
 * eval_every 0 where nothing is held out. */
#ifndef CORE_RECIPE_H
#define CORE_RECIPE_H

#include <stdint.h>
#include <stdio.h>

#include "core/error.h"

typedef enum StageKind { STAGE_SFT, STAGE_REWARD, STAGE_PPO } StageKind;

/* Where a model comes from: exactly one of path, from, init (init: when init.hidden_size > 0).
 * YAML: `actor: DIR`, `actor: {path: DIR}`, `critic: {from: reward}`, `actor: {init: {hidden_size:
 * 64, ...}}`. from: the name of another model of this section (actor, reward, critic); "actor" at
 * the time the stage starts, so that reference: {from: actor} is the SFT result. */
typedef struct InitConfig {
  int64_t vocab_size; /* 0: the tokenizer's */
  int64_t hidden_size, layers, heads, kv_heads /* 0: heads */, head_dim /* 0: hidden / heads */,
      ffn, max_positions;
  double rope_theta, norm_eps, init_std;
  bool tied_head;
} InitConfig;
typedef struct ModelSource {
  const char *path;
  const char *from;
  InitConfig init;
  bool init_head;
} ModelSource;

typedef struct DataSource {
  /* plain, custom (the pieces below), auto (the checkpoint's), llama2, llama3, mistral, chatml,
   * phi3 */
  const char
      *path; /* JSON Lines or a JSON array, gzip too; prompts: also a text file with a separator */
  const char *text_field, *prompt_field, *completion_field, *messages_field; /* sft */
  const char *chosen_field, *rejected_field, *margin_field;                  /* preference */
  const char *answer_field; /* prompts: expected answer, for the exact-answer reward */
  /* plain, custom (the pieces below), auto (the checkpoint's), llama2, llama3, mistral, chatml,
   * phi3 */
  const char
      *separator;  /* text files: stories parted by this line, e.g. <|endoftext|>; "" for JSON */
  double held_out; /* fraction for evaluation, taken by a seeded shuffle */
  int64_t max_records;  /* 0: all */
  int64_t max_tokens;   /* longer examples: see overlong */
  const char *overlong; /* "drop" | "truncate" | "error" */
} DataSource;

/* Conversation template: plain, pieces around each turn ({content} is the turn's text), the
 * checkpoint's own (Jinja), or a family's. Special tokens spelled in the template (never in
 * content) become their ids. */
typedef struct ChatTemplate {
  /* plain, custom (the pieces below), auto (the checkpoint's), or llama2, llama3, mistral, chatml,
   * phi3 */
  const char *name;
  const char *system, *user, *assistant; /* "Q: {content}\n", ... */
  const char *assistant_prefix; /* opens the answer at generation: must be the assistant piece up to
                                   {content} */
} ChatTemplate;

typedef struct OptimizerConfig {
  double lr, beta1, beta2, eps, weight_decay, max_grad_norm;
  const char *schedule; /* "constant" | "linear" | "cosine" */
  int64_t warmup_steps;
  double min_lr_ratio; /* of lr, at the end of linear and cosine */
} OptimizerConfig;

#define RECIPE_MAX_REWARDS 16
/* One term of the reward: weight * value. kind: "model" (the reward model), "length" (target; value
 * = -|n - target| / target, n in tokens), "words" (count of `words` present, each once, or minus
 * that with absent: true), "regex" (1 if the pattern matches, PCRE2), "exact" (1 if the answer
 * equals the record's answer field, blank-trimmed), "command" (external program, JSON Lines in and
 * out, time limit). */
typedef struct RewardTerm {
  const char *kind;
  double weight;
  int64_t target; /* length */
  const char **words;
  int n_words;            /* words */
  bool absent;            /* words */
  bool ignore_case;       /* words, regex, exact */
  const char *pattern;    /* regex */
  const char *command;    /* command: run by /bin/sh -c */
  double timeout_seconds; /* command */
} RewardTerm;

typedef struct Recipe {
  const char *file; /* as given on the command line */
  struct {
    const char *directory;
    int64_t seed;
    const char *device;    /* auto|cpu|cuda */
    const char *precision; /* auto|float32|bfloat16|fp32 */
    int64_t threads;
    bool overwrite;
  } run;
  struct {
    ModelSource actor, critic, reward, reference;
  } models;
  struct {
    const char *path;    /* "": the actor's folder */
    const char *add_bos; /* auto: as the tokenizer says | true | false */
    bool add_eos;        /* after SFT completions */
  } tokenizer;
  struct {
    DataSource sft, preference, prompts;
    ChatTemplate chat;
  } data;
  StageKind stages[8];
  int n_stages; /* "sft", "reward", "ppo": each at most once, in this order of appearance */
  struct {
    int64_t epochs;
    int64_t steps;       /* 0: by epochs */
    const char *loss_on; /* completion|all */
    int64_t eval_every;
  } sft;
  struct {
    int64_t epochs;
    int64_t steps;
    int64_t eval_every;
    bool normalize; /* store mean and std with the model */
  } reward;
  struct {
    int64_t prompts_per_step, samples_per_prompt, max_new_tokens, min_new_tokens, max_prompt_tokens,
        top_k, max_batch, page_size;
    double temperature, top_p, min_p, repetition_penalty;
    const char *filters; /* refuse|renormalize|allow: of the four above, in PPO */
    const char *weights; /* auto|replica|tensor_parallel|stream */
    const char *format;  /* auto|training|int8|fp8 */
  } rollout;
  struct {
    int64_t steps, epochs, minibatches;
    double gamma, lambda, clip_low, clip_high, value_clip, vf_coef, entropy_coef;
    const char *importance; /* auto|on|off */
    double importance_cap;
    const char *kl_estimator;  /* k1|k2|k3 */
    const char *kl_in;         /* reward|loss */
    const char *kl_controller; /* fixed|adaptive */
    double kl_coef, kl_target, kl_horizon;
    double reward_clip;    /* 0: off */
    bool normalize_scores; /* by the mean and std stored with the reward model */
    bool whiten_advantages;
    double missing_eos_penalty; /* subtracted from the score of a response that was cut by length */
    const char *mean;           /* token|sequence */
    int64_t critic_warmup_steps; /* steps that update the critic only */
    double ema_decay;            /* 0: off; the saved actor is the average when on */
    double max_kl; /* 0: off; stops the epochs of a step when the update's KL (k3, old against new)
                      passes it */
    int64_t eval_every, eval_prompts;
  } ppo;
  RewardTerm rewards[RECIPE_MAX_REWARDS];
  int n_rewards; /* default: one term "model", weight 1 */
  struct {
    OptimizerConfig sft, reward, actor, critic;
  } optimizer;
  struct {
    int64_t sft, reward /* pairs */;
    int64_t micro_tokens;
  } batch; /* global sequences per step; ppo: prompts_per_step * samples / minibatches */
  struct {
    int64_t stage, ranks_per_node;
    const char *recompute;       /* none|selective|full|auto */
    const char *wire;            /* float32|bfloat16 */
    const char *refresh;         /* dense|delta|auto */
    int64_t refresh_check;       /* refreshes; 0: never */
    const char *qwz, *hpz, *qgz; /* off|int8|fp8, off|on|quantized, off|int8|int4 */
    int64_t block;               /* elements to a scale */
    const char *scale;           /* float32|bfloat16 */
    bool error_feedback;
    double error_decay;
    int64_t error_reset;    /* steps; 0: never */
    const char *accumulate; /* micro|node */
    const char *gradients;  /* float32|bfloat16: of the owners' sums */
    const char *offload;    /* off|optimizer */
    int64_t prefetch;       /* units ahead; 0: off */
    double timeout_seconds; /* 0: none */
  } zeropp;
  struct {
    int64_t every, keep;
    const char *dtype; /* float32|bfloat16|float16 */
    double max_shard_gb;
  } checkpoint;
  struct {
    int64_t samples; /* held-out answers written at each evaluation */
    bool measure_peak;
    const char *progress; /* auto|bar|plain|off */
  } report;
} Recipe;

/* Loads, applies the --set assignments ("a.b=c", YAML values, in order, after the file), fills
 * defaults, validates. NULL on error: err holds all messages, one per line. */
Recipe *recipe_load(const char *path, const char *const *sets, int n_sets, Error *err);
/* The same from memory (tests, fuzzing); name stands in messages and its folder is the base of
 * paths. */
Recipe *recipe_parse(const char *text, size_t len, const char *name, const char *const *sets,
                     int n_sets, Error *err);
void recipe_free(Recipe *r);
/* The resolved recipe as YAML that loads back to the same recipe (every key, defaults included;
 * absolute paths). */
int recipe_print(const Recipe *r, FILE *out);
/* The reference of keys as Markdown: path, type, default, bounds, help. */
void recipe_help(FILE *out);
/* The keys by which answers are drawn from anything but the whole softmax, "rollout.top_k" and the
 * like; returns how many. */
enum { RECIPE_FILTERS = 4 };
int recipe_filters(const Recipe *r, const char *keys[RECIPE_FILTERS]);
/* Whether the update's log-probabilities are over what answers were drawn from. */
bool recipe_renormalizes(const Recipe *r);
/* Whether a rollout computes with other numbers than training does. */
bool recipe_rollout_rounds(const Recipe *r);
/* What ppo.importance comes to. */
bool recipe_corrects_importance(const Recipe *r);
/* "file:line:column" where a key was given, or "file (default)": for errors found later. Static
 * buffer per recipe; borrowed. */
const char *recipe_place(const Recipe *r, const char *key);

#endif
