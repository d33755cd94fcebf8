/* THE table of recipe keys. See recipe_table.h for what the columns mean. */
#include "core/recipe_table.h"

#include <math.h>
#include <string.h>

#define COUNT(rows) ((int)(sizeof(rows) / sizeof((rows)[0])))
#define SPAN(l, h) \
  { (l), (h), false, false } /* l <= x <= h */
#define ABOVE(l, h) \
  { (l), (h), true, false } /* l < x <= h */
#define BELOW(l, h) \
  { (l), (h), false, true } /* l <= x < h */
#define INSIDE(l, h) \
  { (l), (h), true, true } /* l < x < h */
#define BYTES(h) \
  { 0, (h), false, false } /* texts: most bytes */
#define NONE \
  { 0, 0, false, false }
#define MANY 1e12 /* a count that no run reaches, far below 2^53 */
#define TEXT BYTES(65536)
#define NAME BYTES(256)
#define PATHS BYTES(4095)

#define AT(field) offsetof(Recipe, field)
#define OF(type, field) offsetof(type, field)

static const RecipeRow top_rows[] = {
    {"stages", ROW_STAGES, AT(stages), "", NONE, .choices = "sft|reward|ppo",
     .help = "what to run, in this order, each stage at most once; required"},
};

static const RecipeRow run_rows[] = {
    {"directory", ROW_TEXT, AT(run.directory), "", PATHS,
     .help = "where everything is written, relative to the working directory; not given: "
             "`runs/` and the recipe's name"},
    {"seed", ROW_INT, AT(run.seed), "1", SPAN(0, 9007199254740991.0),
     .help = "of initial weights, shuffles and samples"},
    {"device", ROW_CHOICE, AT(run.device), "auto", NONE, .choices = "auto|cpu|cuda",
     .help = "what computes; auto: cuda where there is a GPU, else cpu"},
    {"precision", ROW_CHOICE, AT(run.precision), "auto", NONE,
     .choices = "auto|float32|bfloat16|fp32",
     .help =
         "of weights and activations in compute; masters, moments and losses are float32. auto: "
         "bfloat16 on cuda, float32 on cpu; fp32 is float32"},
    {"threads", ROW_INT, AT(run.threads), "0", SPAN(0, 4096), .unit = "threads",
     .help = "CPU threads of one rank; 0: its share of the machine's cores"},
    {"overwrite", ROW_BOOL, AT(run.overwrite), "false", NONE,
     .help = "start anew although the directory holds a run"},
};

#define SRC(field) OF(ModelSource, field)
static const RecipeRow model_rows[] = {
    {"path", ROW_PATH, SRC(path), "", PATHS, .help = "a Hugging Face folder"},
    {"from", ROW_CHOICE, SRC(from), "", NONE, .choices = "actor|critic|reward",
     .only = "critic|reward|reference",
     .help = "start as a copy of that model as it is when the stage starts"},
    {"init_head", ROW_BOOL, SRC(init_head), "false", NONE, .only = "critic|reward",
     .help = "start the scalar head at random; not given: true from the actor and with init, which "
             "have none"},
};

#define INIT(field) OF(InitConfig, field)
static const RecipeRow init_rows[] = {
    {"vocab_size", ROW_INT, INIT(vocab_size), "0", SPAN(0, 4194304), .unit = "tokens",
     .help = "0: the tokenizer's"},
    {"hidden_size", ROW_INT, INIT(hidden_size), "0", SPAN(0, 1048576),
     .help = "width of the residual stream; above 0: the model starts at random"},
    {"layers", ROW_INT, INIT(layers), "0", SPAN(0, 1024), .help = "decoder blocks"},
    {"heads", ROW_INT, INIT(heads), "0", SPAN(0, 4096), .help = "query heads"},
    {"kv_heads", ROW_INT, INIT(kv_heads), "0", SPAN(0, 4096),
     .help = "key and value heads; 0: as many as heads"},
    {"head_dim", ROW_INT, INIT(head_dim), "0", SPAN(0, 4096), .help = "0: hidden_size / heads"},
    {"ffn", ROW_INT, INIT(ffn), "0", SPAN(0, 4194304), .help = "width of the MLP"},
    {"max_positions", ROW_INT, INIT(max_positions), "2048", SPAN(1, 16777216), .unit = "tokens",
     .help = "longest sequence"},
    {"rope_theta", ROW_FLOAT, INIT(rope_theta), "10000", ABOVE(0, 1e12),
     .help = "base of the rotary embedding"},
    {"norm_eps", ROW_FLOAT, INIT(norm_eps), "1e-5", ABOVE(0, 1), .help = "inside RMSNorm"},
    {"init_std", ROW_FLOAT, INIT(init_std), "0.02", ABOVE(0, 10),
     .help = "standard deviation of the initial weights"},
    {"tied_head", ROW_BOOL, INIT(tied_head), "false", NONE,
     .help = "the language-model head is the embedding"},
};

static const RecipeRow tokenizer_rows[] = {
    {"path", ROW_PATH, AT(tokenizer.path), "", PATHS,
     .help = "a folder with a tokenizer, or a .model file; not given: the actor's folder"},
    {"add_bos", ROW_CHOICE, AT(tokenizer.add_bos), "auto", NONE, .choices = "auto|true|false",
     .help = "begin every sequence with the BOS token; auto: as the tokenizer's files say"},
    {"add_eos", ROW_BOOL, AT(tokenizer.add_eos), "true", NONE,
     .help = "end completions and answers in training data with the EOS token"},
};

#define DATA(field) OF(DataSource, field)
static const RecipeRow data_rows[] = {
    {"path", ROW_PATH, DATA(path), "", PATHS, .only = "sft",
     .help = "JSON Lines or a JSON array of objects; a .txt file: one text a line, or see "
             "separator; gzip too"},
    {"path", ROW_PATH, DATA(path), "", PATHS, .only = "preference",
     .help = "JSON Lines or a JSON array of objects; gzip too"},
    {"path", ROW_PATH, DATA(path), "", PATHS, .only = "prompts",
     .help = "JSON Lines or a JSON array of objects; a .txt file: one prompt a line, or see "
             "separator; gzip too"},
    {"messages_field", ROW_TEXT, DATA(messages_field), "messages", NAME,
     .help = "conversation; the first choice where a record has it (preference: the turns before "
             "the answers)"},
    {"prompt_field", ROW_TEXT, DATA(prompt_field), "prompt", NAME,
     .help = "prompt (sft: with a completion); the second choice"},
    {"completion_field", ROW_TEXT, DATA(completion_field), "completion", NAME, .only = "sft",
     .help = "what the prompt is to be answered with"},
    {"text_field", ROW_TEXT, DATA(text_field), "text", NAME, .only = "sft|prompts",
     .help = "plain text; the last choice"},
    {"chosen_field", ROW_TEXT, DATA(chosen_field), "chosen", NAME, .only = "preference",
     .help = "preferred answer (text or messages)"},
    {"rejected_field", ROW_TEXT, DATA(rejected_field), "rejected", NAME, .only = "preference",
     .help = "other answer"},
    {"margin_field", ROW_TEXT, DATA(margin_field), "", NAME, .only = "preference",
     .help = "number by which the chosen score should lead; not given: 0"},
    {"answer_field", ROW_TEXT, DATA(answer_field), "", NAME, .only = "prompts",
     .help = "expected answer, for the exact reward"},
    {"separator", ROW_TEXT, DATA(separator), "", NAME, .only = "sft|prompts",
     .help = "the path is a text file whose texts are parted by this line"},
    {"held_out", ROW_FLOAT, DATA(held_out), "0.05", BELOW(0, 1),
     .help = "fraction kept for evaluation, chosen by the seed"},
    {"max_records", ROW_INT, DATA(max_records), "0", SPAN(0, 2000000000), .unit = "records",
     .help = "read no more; 0: all"},
    {"max_tokens", ROW_INT, DATA(max_tokens), "0", SPAN(0, 16777216), .unit = "tokens",
     .only = "sft|preference",
     .help = "longest example; 0: as many as the model has positions; see overlong"},
    {"overlong", ROW_CHOICE, DATA(overlong), "drop", NONE, .choices = "drop|truncate|error",
     .only = "sft|preference",
     .help = "what becomes of longer examples; truncate: the prompt loses its beginning, down to "
             "half of the room, then the answers their end"},
    {"overlong", ROW_CHOICE, DATA(overlong), "drop", NONE, .choices = "drop|truncate|error",
     .only = "prompts",
     .help = "what becomes of prompts longer than rollout.max_prompt_tokens; truncate: a prompt or "
             "conversation loses its beginning, a text its end"},
};

static const RecipeRow chat_rows[] = {
    {"name", ROW_CHOICE, AT(data.chat.name), "plain", NONE,
     .choices = "plain|custom|auto|llama2|llama3|mistral|chatml|phi3",
     .help = "plain: contents one after another; custom: the pieces below; auto: the chat_template "
             "of the tokenizer's folder; else that family's format"},
    {"system", ROW_TEXT, AT(data.chat.system), "", TEXT,
     .help = "piece of a system turn; {content} is its text"},
    {"user", ROW_TEXT, AT(data.chat.user), "", TEXT, .help = "piece of a user turn"},
    {"assistant", ROW_TEXT, AT(data.chat.assistant), "", TEXT, .help = "piece of an answer"},
    {"assistant_prefix", ROW_TEXT, AT(data.chat.assistant_prefix), "", TEXT,
     .help = "opens the answer at generation; not given: the assistant piece up to {content}"},
};

static const RecipeRow sft_rows[] = {
    {"epochs", ROW_INT, AT(sft.epochs), "1", SPAN(1, 1000000), .help = "passes over the data"},
    {"steps", ROW_INT, AT(sft.steps), "0", SPAN(0, MANY), .unit = "steps",
     .help = "end after so many instead; 0: by epochs"},
    {"loss_on", ROW_CHOICE, AT(sft.loss_on), "completion", NONE, .choices = "completion|all",
     .help = "tokens that are trained (plain text: all in both cases)"},
    {"eval_every", ROW_INT, AT(sft.eval_every), "100", SPAN(0, MANY), .unit = "steps",
     .help = "held-out loss every so many; 0: never"},
};

static const RecipeRow reward_rows[] = {
    {"epochs", ROW_INT, AT(reward.epochs), "1", SPAN(1, 1000000), .help = "passes over the pairs"},
    {"steps", ROW_INT, AT(reward.steps), "0", SPAN(0, MANY), .unit = "steps",
     .help = "end after so many instead; 0: by epochs"},
    {"eval_every", ROW_INT, AT(reward.eval_every), "100", SPAN(0, MANY), .unit = "steps",
     .help = "held-out accuracy every so many; 0: never"},
    {"normalize", ROW_BOOL, AT(reward.normalize), "true", NONE,
     .help = "store the scores' mean and deviation with the model"},
};

static const RecipeRow rollout_rows[] = {
    {"prompts_per_step", ROW_INT, AT(rollout.prompts_per_step), "64", SPAN(1, 1000000),
     .unit = "prompts", .help = "global, all ranks together"},
    {"samples_per_prompt", ROW_INT, AT(rollout.samples_per_prompt), "1", SPAN(1, 1024),
     .help = "answers to each prompt"},
    {"max_new_tokens", ROW_INT, AT(rollout.max_new_tokens), "128", SPAN(1, 16777216),
     .unit = "tokens", .help = "longest answer"},
    {"min_new_tokens", ROW_INT, AT(rollout.min_new_tokens), "0", SPAN(0, 16777216),
     .unit = "tokens", .help = "the end cannot be drawn before"},
    {"max_prompt_tokens", ROW_INT, AT(rollout.max_prompt_tokens), "0", SPAN(0, 16777216),
     .unit = "tokens",
     .help = "longest prompt; 0: what max_new_tokens leaves of the models' positions; see "
             "data.prompts.overlong"},
    {"temperature", ROW_FLOAT, AT(rollout.temperature), "1", SPAN(0.001, 100),
     .help = "of sampling, and of all log-probabilities in the update",
     .hint = "for temperature 0 use greedy evaluation"},
    {"top_k", ROW_INT, AT(rollout.top_k), "0", SPAN(0, 4194304), .unit = "tokens",
     .help = "sample among the likeliest so many; 0: all; see filters"},
    {"top_p", ROW_FLOAT, AT(rollout.top_p), "1", SPAN(0.0001, 1),
     .help = "sample among the likeliest with this much probability; see filters"},
    {"min_p", ROW_FLOAT, AT(rollout.min_p), "0", SPAN(0, 1),
     .help = "sample among those at least so many times as likely as the likeliest; 0: all; see "
             "filters"},
    {"repetition_penalty", ROW_FLOAT, AT(rollout.repetition_penalty), "1", SPAN(0.01, 100),
     .help = "logits of tokens that prompt or answer have had are divided by it where above 0, "
             "else multiplied, before the temperature; 1: none; see filters"},
    {"filters", ROW_CHOICE, AT(rollout.filters), "refuse", NONE,
     .choices = "refuse|renormalize|allow",
     .help = "what becomes of top_k, top_p, min_p and repetition_penalty in PPO. renormalize: the "
             "update's log-probabilities are over the tokens that each was drawn from, which takes "
             "a bit per token of the vocabulary for every answer token on every rank; not with a "
             "penalty. allow: they are of the whole softmax; see ppo.importance"},
    {"max_batch", ROW_INT, AT(rollout.max_batch), "0", SPAN(0, 1000000), .unit = "sequences",
     .help = "decoded together on one rank; 0: as memory allows"},
    {"page_size", ROW_INT, AT(rollout.page_size), "16", SPAN(1, 4096), .unit = "tokens",
     .help = "of one page of the KV cache"},
    {"weights", ROW_CHOICE, AT(rollout.weights), "auto", NONE,
     .choices = "auto|replica|tensor_parallel|stream",
     .help = "what a rank holds of the actor: all of it, some rows of each matrix (the ranks of a "
             "node decode together), or one unit after the other in each step; auto: the first "
             "that memory allows"},
    {"format", ROW_CHOICE, AT(rollout.format), "auto", NONE, .choices = "auto|training|int8|fp8",
     .help = "of the actor's matrices: as training computes with them, or in codes of a byte; "
             "auto: training's codes where it has them (zeropp.qwz with hpz off or quantized)"},
};

static const RecipeRow ppo_rows[] = {
    {"steps", ROW_INT, AT(ppo.steps), "100", SPAN(1, MANY), .unit = "steps",
     .help = "rollouts, each followed by an update"},
    {"epochs", ROW_INT, AT(ppo.epochs), "4", SPAN(1, 1000),
     .help = "passes over a rollout; 1 is usual from 7 billion parameters on"},
    {"minibatches", ROW_INT, AT(ppo.minibatches), "1", SPAN(1, 1000000),
     .help = "optimizer steps per epoch; divides prompts_per_step * samples_per_prompt"},
    {"gamma", ROW_FLOAT, AT(ppo.gamma), "1", SPAN(0, 1), .help = "discount per token"},
    {"lambda", ROW_FLOAT, AT(ppo.lambda), "0.95", SPAN(0, 1), .help = "of the advantage estimate"},
    {"clip_low", ROW_FLOAT, AT(ppo.clip_low), "0.2", INSIDE(0, 1),
     .help = "the ratio is clipped below at 1 - this"},
    {"clip_high", ROW_FLOAT, AT(ppo.clip_high), "0.2", ABOVE(0, 100),
     .help = "the ratio is clipped above at 1 + this"},
    {"value_clip", ROW_FLOAT, AT(ppo.value_clip), "0.2", SPAN(0, 1e6),
     .help = "values may move by this from the old ones; 0: no clipping"},
    {"vf_coef", ROW_FLOAT, AT(ppo.vf_coef), "0.5", ABOVE(0, 1000),
     .help = "factor of the value loss"},
    {"importance", ROW_CHOICE, AT(ppo.importance), "auto", NONE, .choices = "auto|on|off",
     .help = "each token's policy loss is weighed by how much likelier it was in the update's "
             "forward, before the first update, than where it was drawn, at most importance_cap. "
             "auto: on where rollout.filters, min_new_tokens or format lets the two differ by more "
             "than rounding"},
    {"importance_cap", ROW_FLOAT, AT(ppo.importance_cap), "2", SPAN(0.01, 1e6),
     .help = "largest such weight"},
    {"entropy_coef", ROW_FLOAT, AT(ppo.entropy_coef), "0", SPAN(0, 1000),
     .help = "entropy bonus; 0: none"},
    {"kl_estimator", ROW_CHOICE, AT(ppo.kl_estimator), "k1", NONE, .choices = "k1|k2|k3",
     .help = "of the divergence from the reference"},
    {"kl_in", ROW_CHOICE, AT(ppo.kl_in), "reward", NONE, .choices = "reward|loss",
     .help = "where it is charged"},
    {"kl_coef", ROW_FLOAT, AT(ppo.kl_coef), "0.05", SPAN(0, 1000),
     .help = "its factor (adaptive: at the start); 0: no reference model"},
    {"kl_controller", ROW_CHOICE, AT(ppo.kl_controller), "fixed", NONE, .choices = "fixed|adaptive",
     .help = "adaptive: the factor follows kl_target"},
    {"kl_target", ROW_FLOAT, AT(ppo.kl_target), "6", ABOVE(0, 1e6), .unit = "nats per answer",
     .help = "of the adaptive controller"},
    {"kl_horizon", ROW_FLOAT, AT(ppo.kl_horizon), "10000", ABOVE(0, 1e12), .unit = "sequences",
     .help = "of the adaptive controller"},
    {"reward_clip", ROW_FLOAT, AT(ppo.reward_clip), "5", SPAN(0, 1e9),
     .help = "scores are cut to +- this; 0: off"},
    {"normalize_scores", ROW_BOOL, AT(ppo.normalize_scores), "false", NONE,
     .help = "by the mean and deviation stored with the reward model"},
    {"whiten_advantages", ROW_BOOL, AT(ppo.whiten_advantages), "true", NONE,
     .help = "over all answer tokens of all ranks"},
    {"missing_eos_penalty", ROW_FLOAT, AT(ppo.missing_eos_penalty), "0", SPAN(0, 1e6),
     .help = "taken from the score of an answer that was cut by length"},
    {"mean", ROW_CHOICE, AT(ppo.mean), "token", NONE, .choices = "token|sequence",
     .help = "losses are means over all tokens, or over sequences of their own means"},
    {"critic_warmup_steps", ROW_INT, AT(ppo.critic_warmup_steps), "0", SPAN(0, MANY),
     .unit = "steps", .help = "first steps that update the critic only"},
    {"ema_decay", ROW_FLOAT, AT(ppo.ema_decay), "0", BELOW(0, 1),
     .help = "of an average of the actor, which is then what is saved; 0: off"},
    {"max_kl", ROW_FLOAT, AT(ppo.max_kl), "0", SPAN(0, 1e6), .unit = "nats per token",
     .help = "a step's epochs end when its own update moved further; 0: off"},
    {"eval_every", ROW_INT, AT(ppo.eval_every), "10", SPAN(0, MANY), .unit = "steps",
     .help = "held-out prompts every so many; 0: never"},
    {"eval_prompts", ROW_INT, AT(ppo.eval_prompts), "32", SPAN(1, 1000000), .unit = "prompts",
     .help = "held-out prompts of one evaluation, at most"},
};

#define TERM(field) OF(RewardTerm, field)
static const RecipeRow term_rows[] = {
    {"kind", ROW_CHOICE, TERM(kind), "", NONE, .choices = "model|length|words|regex|exact|command",
     .help = "required"},
    {"weight", ROW_FLOAT, TERM(weight), "1", SPAN(-1e6, 1e6), .help = "factor in the sum"},
    {"target", ROW_INT, TERM(target), "0", SPAN(1, 16777216), .only = "length", .unit = "tokens",
     .help = "the value is minus the answer's distance from it, in parts of it"},
    {"words", ROW_WORDS, TERM(words), "", NAME, .only = "words",
     .help = "the value is how many of them occur"},
    {"absent", ROW_BOOL, TERM(absent), "false", NONE, .only = "words",
     .help = "minus how many occur"},
    {"ignore_case", ROW_BOOL, TERM(ignore_case), "false", NONE, .only = "words|regex|exact",
     .help = "compare without regard to case"},
    {"pattern", ROW_TEXT, TERM(pattern), "", TEXT, .only = "regex",
     .help = "PCRE2; the value is 1 where it matches, else 0"},
    {"command", ROW_TEXT, TERM(command), "", TEXT, .only = "command",
     .help = "run by /bin/sh; reads and writes JSON Lines"},
    {"timeout_seconds", ROW_FLOAT, TERM(timeout_seconds), "60", ABOVE(0, 86400), .only = "command",
     .unit = "seconds", .help = "for one batch"},
};

#define OPT(field) OF(OptimizerConfig, field)
static const RecipeRow optimizer_rows[] = {
    {"lr", ROW_FLOAT, OPT(lr), "1e-5", ABOVE(0, 10), .help = "learning rate, the highest"},
    {"schedule", ROW_CHOICE, OPT(schedule), "constant", NONE, .choices = "constant|linear|cosine",
     .help = "after the warm-up"},
    {"warmup_steps", ROW_INT, OPT(warmup_steps), "0", SPAN(0, MANY), .unit = "steps",
     .help = "of linear warm-up"},
    {"min_lr_ratio", ROW_FLOAT, OPT(min_lr_ratio), "0.1", SPAN(0, 1),
     .help = "part of lr that is left on the last step of linear and cosine"},
    {"beta1", ROW_FLOAT, OPT(beta1), "0.9", BELOW(0, 1), .help = "AdamW"},
    {"beta2", ROW_FLOAT, OPT(beta2), "0.95", BELOW(0, 1), .help = "AdamW"},
    {"eps", ROW_FLOAT, OPT(eps), "1e-8", ABOVE(0, 1), .help = "AdamW"},
    {"weight_decay", ROW_FLOAT, OPT(weight_decay), "0", SPAN(0, 10), .help = "of matrices only"},
    {"max_grad_norm", ROW_FLOAT, OPT(max_grad_norm), "1", SPAN(0, 1e9),
     .help = "longer gradients are scaled down to it; 0: off"},
};

static const RecipeRow batch_rows[] = {
    {"sft", ROW_INT, AT(batch.sft), "32", SPAN(1, 1000000), .unit = "sequences",
     .help = "per step, all ranks together"},
    {"reward", ROW_INT, AT(batch.reward), "32", SPAN(1, 1000000), .unit = "pairs",
     .help = "per step, all ranks together"},
    {"micro_tokens", ROW_INT, AT(batch.micro_tokens), "8192", SPAN(1, 1073741824), .unit = "tokens",
     .help = "of one forward and backward on one rank; changes memory, no result"},
};

static const RecipeRow zeropp_rows[] = {
    {"stage", ROW_INT, AT(zeropp.stage), "3", SPAN(0, 3),
     .help = "what is sharded: 0 nothing, 1 moments, 2 gradients too, 3 weights too"},
    {"ranks_per_node", ROW_INT, AT(zeropp.ranks_per_node), "0", SPAN(0, 4096), .unit = "ranks",
     .help = "0: by the hosts"},
    {"recompute", ROW_CHOICE, AT(zeropp.recompute), "none", NONE,
     .choices = "none|selective|full|auto",
     .help =
         "what the backward pass computes again instead of keeping it; full: all but "
         "the residual stream, selective: norms and activations, a third of the memory for next "
         "to no time; auto: as little as the memory plan allows"},
    {"wire", ROW_CHOICE, AT(zeropp.wire), "float32", NONE, .choices = "float32|bfloat16",
     .help = "how weights and gradients travel that are not quantized; weights that are computed "
             "with in bfloat16 travel in it anyway"},
    {"qwz", ROW_CHOICE, AT(zeropp.qwz), "off", NONE, .choices = "off|int8|fp8",
     .help = "weights travel between nodes in blocks of so few bits; stages 1 to 3"},
    {"hpz", ROW_CHOICE, AT(zeropp.hpz), "off", NONE, .choices = "off|on|quantized",
     .help = "every node keeps a copy of the weights, refreshed once a step; quantized: as qwz "
             "brought it; stage 3"},
    {"refresh", ROW_CHOICE, AT(zeropp.refresh), "dense", NONE, .choices = "dense|delta|auto",
     .help =
         "how nodes learn of new weights. dense: whole, in qwz's format (off: in bfloat16 or as "
         "wire says). delta: of the weights of hpz only those cross nodes whose bfloat16 value "
         "changed, "
         "which loses nothing; a unit that changed too much is sent whole. Needs hpz on, qwz "
         "off, and weights in bfloat16. auto: each unit, each step, by delta or as qwz says, "
         "whichever is shorter; after a step as qwz says it stays so until what deltas would "
         "have saved pays for the exact weights that they need to start from. Frozen models, "
         "and all on one node, are exact. Needs hpz on and bfloat16; with qwz, 2 bytes more "
         "for each weight that a rank owns"},
    {"refresh_check", ROW_INT, AT(zeropp.refresh_check), "100", SPAN(0, MANY), .unit = "refreshes",
     .help = "delta and auto: the nodes' copies are compared every so many; 0: never"},
    {"qgz", ROW_CHOICE, AT(zeropp.qgz), "off", NONE, .choices = "off|int8|int4",
     .help = "gradients travel in blocks of so few bits, within nodes and between; stages 1 to 3"},
    {"block", ROW_INT, AT(zeropp.block), "256", SPAN(2, 4096), .unit = "elements",
     .help = "share a scale, all in one row; even"},
    {"scale", ROW_CHOICE, AT(zeropp.scale), "float32", NONE, .choices = "float32|bfloat16",
     .help = "of a block"},
    {"error_feedback", ROW_BOOL, AT(zeropp.error_feedback), "false", NONE,
     .help = "add what quantization took from a gradient to later ones; needs qgz"},
    {"error_decay", ROW_FLOAT, AT(zeropp.error_decay), "0.8", BELOW(0, 1),
     .help = "of the moving average of errors; 0: the last error alone"},
    {"error_reset", ROW_INT, AT(zeropp.error_reset), "1024", SPAN(0, MANY), .unit = "steps",
     .help = "forget errors every so often; 0: never"},
    {"accumulate", ROW_CHOICE, AT(zeropp.accumulate), "micro", NONE, .choices = "micro|node",
     .help = "node: gradients of micro-batches are summed within nodes, in float32, and cross "
             "between them once a step; stages 2 and 3"},
    {"gradients", ROW_CHOICE, AT(zeropp.gradients), "float32", NONE, .choices = "float32|bfloat16",
     .help = "of the summed gradient that a rank keeps; bfloat16 halves its memory: a sum over "
             "ranks is taken in float32 and rounded once, that of several micro-batches after "
             "each; on GPUs, stages 1 to 3"},
    {"offload", ROW_CHOICE, AT(zeropp.offload), "off", NONE, .choices = "off|optimizer",
     .help =
         "optimizer: moments, and where unquantized bfloat16 weights travel float32 weights too, "
         "lie in the host's memory, which a step reads and writes over the bus; on GPUs"},
    {"prefetch", ROW_INT, AT(zeropp.prefetch), "1", SPAN(0, 16), .unit = "units",
     .help = "weights that are on their way while others compute; 0: neither they nor gradients "
             "travel behind compute"},
    {"timeout_seconds", ROW_FLOAT, AT(zeropp.timeout_seconds), "60", SPAN(0, 1e9),
     .unit = "seconds", .help = "a rank that waits so long for another ends the run; 0: never"},
};

static const RecipeRow checkpoint_rows[] = {
    {"every", ROW_INT, AT(checkpoint.every), "100", SPAN(0, MANY), .unit = "steps",
     .help = "save so that --resume can go on; 0: only at the end of a stage"},
    {"keep", ROW_INT, AT(checkpoint.keep), "2", SPAN(1, 1000000), .help = "newest so many"},
    {"dtype", ROW_CHOICE, AT(checkpoint.dtype), "float32", NONE,
     .choices = "float32|bfloat16|float16", .help = "of the saved models"},
    {"max_shard_gb", ROW_FLOAT, AT(checkpoint.max_shard_gb), "5", SPAN(1e-6, 1e6), .unit = "GB",
     .help = "larger models are saved in several files"},
};

static const RecipeRow report_rows[] = {
    {"samples", ROW_INT, AT(report.samples), "4", SPAN(0, 1000000), .unit = "answers",
     .help = "written at each evaluation"},
    {"measure_peak", ROW_BOOL, AT(report.measure_peak), "true", NONE,
     .help = "measure the machine's rate at the start, for utilisation"},
    {"progress", ROW_CHOICE, AT(report.progress), "auto", NONE, .choices = "auto|bar|plain|off",
     .help = "auto: a bar on a terminal, else a line per step"},
};

/* A default that differs by what is trained: small steps for a policy that is already good. */
static const RowDefault sft_lr[] = {{"schedule", "cosine"}, {NULL, NULL}};
static const RowDefault actor_lr[] = {{"lr", "1e-6"}, {NULL, NULL}};
static const RowDefault critic_lr[] = {{"lr", "5e-6"}, {NULL, NULL}};

#define MODEL(which, text) \
  { "models." #which, #which, AT(models.which), model_rows, COUNT(model_rows), "path", NULL, text }
#define MODEL_INIT(which, text)                                                                 \
  {                                                                                             \
    "models." #which ".init", #which, AT(models.which.init), init_rows, COUNT(init_rows), NULL, \
        NULL, text                                                                              \
  }
#define DATASET(which, text) \
  { "data." #which, #which, AT(data.which), data_rows, COUNT(data_rows), "path", NULL, text }
#define OPTIMIZER(which, dflts, text)                                                              \
  {                                                                                                \
    "optimizer." #which, #which, AT(optimizer.which), optimizer_rows, COUNT(optimizer_rows), NULL, \
        dflts, text                                                                                \
  }
#define SECTION(name, rows, short, text) \
  { name, name, 0, rows, COUNT(rows), short, NULL, text }

static const RecipeGroup groups[] = {
    SECTION("", top_rows, NULL, ""),
    SECTION("run", run_rows, NULL, "The run."),
    MODEL(actor, "The policy: exactly one of path and init."),
    MODEL_INIT(actor, "Random weights of this Llama."),
    MODEL(critic, "Not given: from the reward model, or from the actor where there is none."),
    MODEL_INIT(critic, "Random weights of this Llama."),
    MODEL(reward, "Not given: from the actor, where a reward stage trains it."),
    MODEL_INIT(reward, "Random weights of this Llama."),
    MODEL(reference, "What the policy is held near to. Not given: from the actor."),
    SECTION("tokenizer", tokenizer_rows, "path", "SentencePiece or byte-level BPE."),
    DATASET(sft, "Texts, prompts with completions, or conversations."),
    DATASET(preference, "Pairs of answers."),
    DATASET(prompts, "What PPO answers."),
    SECTION("data.chat", chat_rows, NULL, "How conversations become text."),
    SECTION("sft", sft_rows, NULL, "The sft stage."),
    SECTION("reward", reward_rows, NULL, "The reward stage."),
    SECTION("rollout", rollout_rows, NULL, "Generation in the ppo stage."),
    SECTION("ppo", ppo_rows, NULL, "The ppo stage."),
    OPTIMIZER(sft, sft_lr, "AdamW of the sft stage."),
    OPTIMIZER(reward, sft_lr, "AdamW of the reward stage."),
    OPTIMIZER(actor, actor_lr, "AdamW of the actor in the ppo stage."),
    OPTIMIZER(critic, critic_lr, "AdamW of the critic in the ppo stage."),
    SECTION("batch", batch_rows, NULL, "Sizes of batches."),
    SECTION("zeropp", zeropp_rows, NULL, "Sharding."),
    SECTION("checkpoint", checkpoint_rows, NULL, "Saving."),
    SECTION("report", report_rows, NULL, "What is written about the run."),
};

static const RecipeGroup term_group =
    SECTION("rewards", term_rows, "kind",
            "A list of terms whose weighted sum is an answer's score. Not given: one term, model.");

int recipe_group_count(void) { return COUNT(groups); }
const RecipeGroup *recipe_group(int i) { return &groups[i]; }
const RecipeGroup *recipe_term_group(void) { return &term_group; }

bool row_applies(const RecipeRow *row, const char *name) {
  if (!row->only) return true;
  size_t len = strlen(name);
  for (const char *p = row->only; p; p = strchr(p, '|')) {
    if (*p == '|') p++;
    if (!strncmp(p, name, len) && (p[len] == '|' || !p[len])) return true;
  }
  return false;
}

const char *row_default(const RecipeGroup *g, const RecipeRow *row) {
  for (const RowDefault *d = g->defaults; d && d->key; d++)
    if (!strcmp(d->key, row->key)) return d->dflt;
  return row->dflt;
}
