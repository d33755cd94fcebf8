/* Sections against each other: what each pair of keys must agree on, and one message per mistake.
 */
#include <stdio.h>

#include "core/recipe.h"
#include "tests/test.h"

static const char base[] =
    "stages: [sft, reward, ppo]\n"
    "models: {actor: base}\n"
    "data: {sft: a.jsonl, preference: b.jsonl, prompts: c.jsonl}\n";

typedef struct Case {
  const char *sets[5];
  const char *message; /* NULL: accepted */
} Case;

static void run(const char *text, const Case *cases, size_t n) {
  for (size_t i = 0; i < n; i++) {
    int n_sets = 0;
    while (n_sets < 5 && cases[i].sets[n_sets]) n_sets++;
    Error err = {""};
    Recipe *r = recipe_parse(text, strlen(text), "x.yaml", cases[i].sets, n_sets, &err);
    const char *want = cases[i].message ? cases[i].message : "";
    if (strcmp(err.msg, want) != 0)
      fail_msg("%s %s\n gave: %s\n  not: %s", cases[i].sets[0], n_sets > 1 ? cases[i].sets[1] : "",
               err.msg, want);
    assert_true((r == NULL) == (cases[i].message != NULL));
    recipe_free(r);
  }
}
#define RUN(text, cases) run(text, cases, sizeof(cases) / sizeof((cases)[0]))

static void stages_need_data(void **state) {
  (void)state;
  static const Case cases[] = {
      {{"data.sft="}, "x.yaml:3:7: data.sft.path: not given; expected a file for stage sft"},
      {{"data.preference.path=null"},
       "x.yaml:3:34: data.preference.path: not given; expected a file for "
       "stage "
       "reward"},
      {{"data="},
       "x.yaml: data.sft.path: not given; expected a file for stage sft\n"
       "x.yaml: data.preference.path: not given; expected a file for stage reward\n"
       "x.yaml: data.prompts.path: not given; expected a file for stage ppo"},
      {{"data=", "stages=[]"},
       "--set stages=[]: stages: found an empty list; expected a list of sft, reward, ppo"},
      {{"stages=[sft, sft]"},
       "--set stages=[sft, sft]: stages: found \"sft\" twice; expected each stage once"},
      {{"data.prompts=", "data.preference=", "stages=[sft]"}, NULL},
      /* A wrong type is one mistake, not two. */
      {{"data.sft.path=5"},
       "--set data.sft.path=5: data.sft.path: found 5; expected the name of a file or folder (in "
       "quotes it is a text)"},
  };
  RUN(base, cases);
}

static void held_out_and_evaluation(void **state) {
  (void)state;
  static const Case cases[] = {
      {{"data.sft.held_out=0"}, NULL}, /* the default then is never */
      {{"data.sft.held_out=0", "sft.eval_every=5"},
       "--set sft.eval_every=5: sft.eval_every: found 5 with data.sft.held_out 0; expected 0, or "
       "something held out"},
      {{"data.prompts.held_out=0", "ppo.eval_every=5"},
       "--set ppo.eval_every=5: ppo.eval_every: found 5 with data.prompts.held_out 0; expected 0, "
       "or "
       "something held out"},
      {{"data.preference.held_out=0", "reward.eval_every=0"}, NULL},
  };
  RUN(base, cases);
  const char *set = "data.sft.held_out=0";
  Error err;
  Recipe *r = recipe_parse(base, strlen(base), "x.yaml", &set, 1, &err);
  assert_int_equal(r->sft.eval_every, 0);
  assert_int_equal(r->ppo.eval_every, 10);
  recipe_free(r);
}

static void sources(void **state) {
  (void)state;
  static const Case cases[] = {
      {{"models.actor=", "tokenizer=t"},
       "x.yaml:2:9: models.actor: not given; expected path (a Hugging Face folder) or init"},
      {{"models.critic={path: a, from: actor}"},
       "--set models.critic={path: a, from: actor}: models.critic: found path, from; expected "
       "exactly "
       "one of path, from, init"},
      {{"models.actor.init={hidden_size: 8, layers: 1, heads: 2, ffn: 8}",
        "rollout.max_new_tokens=8"},
       "x.yaml:2:17: models.actor: found path and init; expected exactly one of path, from, init"},
      {{"models.critic={from: policy}"},
       "--set models.critic={from: policy}: models.critic.from: found \"policy\"; expected one of "
       "actor, critic, reward"},
      {{"models.critic={from: critic}"},
       "--set models.critic={from: critic}: models.critic.from: found itself; expected another "
       "model"},
      {{"models.reward={from: reward}"},
       "--set models.reward={from: reward}: models.reward.from: found itself; expected another "
       "model"},
      {{"models.critic={from: reward}", "models.reward={from: critic}"},
       "--set models.critic={from: reward}: models.critic.from: found reward, which is itself from "
       "critic; expected one of them from elsewhere"},
      {{"models.reference={from: reward}"},
       "--set models.reference={from: reward}: models.reference.from: found reward, whose head "
       "gives "
       "no probabilities; expected actor"},
      {{"models.reference={from: actor}", "models.reward={from: critic}",
        "models.critic={from: actor}"},
       NULL},
      {{"models.actor={from: reward}"},
       "--set models.actor={from: reward}: unknown key \"models.actor.from\"; did you mean "
       "\"models.critic.from\" or \"models.reward.from\" or \"models.reference.from\"?\n"
       "--set models.actor={from: reward}: models.actor: not given; expected path (a Hugging Face "
       "folder) or init"},
      {{"models.reward={from: actor, init_head: false}"},
       "--set models.reward={from: actor, init_head: false}: models.reward.init_head: found false, "
       "but the source has no scalar head; expected true"},
      {{"models.critic={from: reward, init_head: true}"}, NULL},
  };
  RUN(base, cases);
}

static void reward_models(void **state) {
  (void)state;
  static const Case cases[] = {
      {{"stages=[ppo]"},
       "x.yaml:2:9: models.reward: not given; expected a reward model or stage reward, or other "
       "kinds "
       "of rewards than model"},
      {{"stages=[ppo]", "models.reward={from: actor}"},
       "--set models.reward={from: actor}: models.reward: found a score head at random that no "
       "stage "
       "trains; expected a path, or stage reward"},
      {{"stages=[ppo]", "models.reward=rm"}, NULL},
      {{"stages=[ppo]", "rewards=[{kind: length, target: 3}]"}, NULL},
      {{"stages=[ppo]", "rewards=[{kind: length, target: 3}]", "models.critic={from: reward}"},
       "--set models.critic={from: reward}: models.critic.from: found reward, but there is no "
       "reward "
       "model; expected models.reward or stage reward"},
      {{"stages=[reward]", "models.actor=", "models.reward={path: rm, init_head: true}"},
       "x.yaml: tokenizer.path: not given; expected a folder with a tokenizer, since there is "
       "no "
       "actor"},
      {{"stages=[reward]", "models.actor=", "models.reward={path: rm, init_head: true}",
        "tokenizer=t"},
       NULL},
  };
  RUN(base, cases);
}

static void random_weights(void **state) {
  (void)state;
#define SIZES "models.actor={init: {hidden_size: 24, layers: 1, heads: 4, ffn: 8}}"
  static const Case cases[] = {
      {{SIZES, "tokenizer=t"}, NULL},
      {{SIZES},
       "x.yaml: tokenizer.path: not given; expected a folder with a tokenizer, since the actor "
       "is "
       "not read from a folder"},
      {{"models.actor={init: {hidden_size: 24, heads: 4}}", "tokenizer=t"},
       "--set models.actor={init: {hidden_size: 24, heads: 4}}: models.actor.init.layers: found 0; "
       "expected at least 1 (init needs hidden_size, layers, heads, ffn)\n"
       "--set models.actor={init: {hidden_size: 24, heads: 4}}: models.actor.init.ffn: found 0; "
       "expected at least 1 (init needs hidden_size, layers, heads, ffn)"},
      {{SIZES, "tokenizer=t", "models.actor.init.heads=5"},
       "--set models.actor.init.heads=5: models.actor.init.heads: found 5; expected a divisor of "
       "hidden_size, 24, or a head_dim"},
      {{SIZES, "tokenizer=t", "models.actor.init.heads=5", "models.actor.init.head_dim=6"}, NULL},
      {{SIZES, "tokenizer=t", "models.actor.init.heads=8"},
       "--set models.actor.init.heads=8: models.actor.init.heads: found heads of odd size; "
       "expected "
       "an even one, as rotary embeddings pair their elements"},
      {{SIZES, "tokenizer=t", "models.actor.init.kv_heads=3"},
       "--set models.actor.init.kv_heads=3: models.actor.init.kv_heads: found 3; expected a "
       "divisor "
       "of heads, 4"},
      {{SIZES, "tokenizer=t", "models.actor.init.max_positions=128"},
       "x.yaml: rollout.max_new_tokens: found 128; expected less than max_positions "
       "of the actor, 128"},
      {{SIZES, "tokenizer=t", "models.actor.init.max_positions=129"}, NULL},
      {{SIZES, "tokenizer=t", "data.sft.max_tokens=1"},
       "--set data.sft.max_tokens=1: data.sft.max_tokens: found 1; expected at least 2, or 0: as "
       "many as the model has positions"},
      {{SIZES, "tokenizer=t", "models.actor.init.max_positions=1024", "rollout.max_new_tokens=800",
        "rollout.max_prompt_tokens=256"},
       "--set rollout.max_new_tokens=800: rollout.max_new_tokens: found 800 with max_prompt_tokens "
       "256; expected at most max_positions of the actor together, 1024"},
      {{SIZES, "tokenizer=t", "data.sft.max_tokens=3000", "data.preference.max_tokens=2049"},
       "--set data.sft.max_tokens=3000: data.sft.max_tokens: found 3000; expected at most "
       "max_positions of the actor, 2048\n"
       "--set data.preference.max_tokens=2049: data.preference.max_tokens: found 2049; expected at "
       "most max_positions of the actor, 2048"},
  };
  RUN(base, cases);
}

static void rollout_and_ppo(void **state) {
  (void)state;
  static const Case cases[] = {
      /* nothing that a float takes for 0 */
      {{"rollout.temperature=1e-50"},
       "--set rollout.temperature=1e-50: rollout.temperature: found 1e-50; expected a number from "
       "0.001 to 100 (for temperature 0 use greedy evaluation)"},
      {{"rollout.top_p=1e-50"},
       "--set rollout.top_p=1e-50: rollout.top_p: found 1e-50; expected a number from 0.0001 to 1"},
      {{"rollout.repetition_penalty=1e-50"},
       "--set rollout.repetition_penalty=1e-50: rollout.repetition_penalty: found 1e-50; expected "
       "a number from 0.01 to 100"},
      {{"ppo.importance_cap=1e-50"},
       "--set ppo.importance_cap=1e-50: ppo.importance_cap: found 1e-50; expected a number from "
       "0.01 to 1000000"},
      {{"ppo.minibatches=3", "rollout.prompts_per_step=5", "rollout.samples_per_prompt=2"},
       "--set ppo.minibatches=3: ppo.minibatches: found 3; expected a divisor of "
       "rollout.prompts_per_step * samples_per_prompt, 10"},
      {{"ppo.minibatches=5", "rollout.prompts_per_step=5", "rollout.samples_per_prompt=2"}, NULL},
      {{"ppo.minibatches=3", "stages=[sft]"}, NULL}, /* no ppo stage */
      {{"rollout.top_k=5"},
       "--set rollout.top_k=5: rollout.top_k: found sampling in PPO changed by rollout.top_k, "
       "while log-probabilities of the update are of the whole softmax; expected none of it, or "
       "rollout.filters: renormalize or allow"},
      {{"rollout.repetition_penalty=1.1", "rollout.min_p=0.05", "rollout.top_p=0.9"},
       "--set rollout.top_p=0.9: rollout.top_p: found sampling in PPO changed by rollout.top_p, "
       "rollout.min_p, rollout.repetition_penalty, while log-probabilities of the update are of "
       "the whole softmax; expected none of it, or rollout.filters: renormalize or allow"},
      {{"rollout.repetition_penalty=1.1", "rollout.filters=renormalize"},
       "--set rollout.repetition_penalty=1.1: rollout.repetition_penalty: found 1.1 with "
       "rollout.filters: renormalize, which knows what was left to draw from and not how it was "
       "changed; expected 1"},
      {{"rollout.top_p=0.9", "rollout.min_p=0.1", "rollout.filters=renormalize"}, NULL},
      {{"rollout.repetition_penalty=0.9", "rollout.filters=allow"}, NULL},
      {{"rollout.min_p=0", "rollout.repetition_penalty=1"}, NULL},
      {{"rollout.top_p=0.9", "rollout.top_k=4", "rollout.filters=allow"}, NULL},
      {{"rollout.min_new_tokens=129"},
       "--set rollout.min_new_tokens=129: rollout.min_new_tokens: found 129; expected at most "
       "rollout.max_new_tokens, 128"},
      {{"rollout.min_new_tokens=128"}, NULL},
      {{"ppo.kl_coef=0", "ppo.kl_controller=adaptive"},
       "--set ppo.kl_coef=0: ppo.kl_coef: found 0 with an adaptive controller, which multiplies "
       "it; "
       "expected a number above 0"},
      {{"ppo.kl_coef=0"}, NULL},
      {{"ppo.critic_warmup_steps=101"},
       "--set ppo.critic_warmup_steps=101: ppo.critic_warmup_steps: found 101; expected at most "
       "ppo.steps, 100"},
      {{"ppo.normalize_scores=true"}, NULL},
      {{"ppo.normalize_scores=true", "rewards=[{kind: length, target: 3}]"},
       "--set ppo.normalize_scores=true: ppo.normalize_scores: found true without a reward term of "
       "kind model; expected false"},
  };
  RUN(base, cases);
}

static void reward_terms(void **state) {
  (void)state;
  static const Case cases[] = {
      {{"rewards=[]"},
       "--set rewards=[]: rewards: found an empty list; expected a list of 1 to 16 "
       "terms"},
      {{"rewards=model"},
       "--set rewards=model: rewards: found \"model\"; expected a list of 1 to 16 "
       "terms"},
      {{"rewards=[[model]]"},
       "--set rewards=[[model]]: rewards.0: found a list; expected a map of keys"},
      {{"rewards=[{weight: 2}]"},
       "--set rewards=[{weight: 2}]: rewards.0.kind: not given; expected one of model, length, "
       "words, "
       "regex, exact, command"},
      {{"rewards=[model, model]"},
       "--set rewards=[model, model]: rewards.1: found kind model twice; expected once"},
      {{"rewards=[length]"},
       "--set rewards=[length]: rewards.0.target: not given; expected a length in tokens"},
      {{"rewards=[words]"},
       "--set rewards=[words]: rewards.0.words: not given; expected a list of texts"},
      {{"rewards=[{kind: words, words: [a, 5]}]"},
       "--set rewards=[{kind: words, words: [a, 5]}]: rewards.0.words: found 5; expected a list of "
       "texts"},
      {{"rewards=[{kind: words, words: ['']}]"},
       "--set rewards=[{kind: words, words: ['']}]: rewards.0.words.0: found an empty text; "
       "expected "
       "a word"},
      {{"rewards=[regex]"},
       "--set rewards=[regex]: rewards.0.pattern: not given; expected a PCRE2 pattern"},
      {{"rewards=[{kind: regex, pattern: 'a(b'}]"},
       "--set rewards=[{kind: regex, pattern: 'a(b'}]: rewards.0.pattern: found \"a(b\"; expected "
       "a "
       "PCRE2 pattern (missing closing parenthesis at byte 3)"},
      {{"rewards=[{kind: command, command: ' '}]"},
       "--set rewards=[{kind: command, command: ' '}]: rewards.0.command: not given; expected a "
       "shell "
       "command"},
      {{"rewards=[exact]"},
       "--set rewards=[exact]: rewards.0: found kind exact; expected data.prompts.answer_field to "
       "be "
       "given"},
      {{"rewards=[exact]", "data.prompts.answer_field=answer"}, NULL},
      {{"rewards=[{kind: exact, target: 3}]", "data.prompts.answer_field=answer"},
       "--set rewards=[{kind: exact, target: 3}]: rewards.0.target: found in a term of kind exact; "
       "expected only in kind length"},
      {{"rewards=[{kind: length, target: 3, trget: 3}]"},
       "--set rewards=[{kind: length, target: 3, trget: 3}]: unknown key \"rewards.0.trget\"; did "
       "you "
       "mean \"target\"?"},
      {{"rewards=[m,m,m,m,m,m,m,m,m,m,m,m,m,m,m,m,m]"},
       "--set rewards=[m,m,m,m,m,m,m,m,m,m,m,m,m,m,m,m,m]: rewards: found a list; expected a list "
       "of "
       "1 to 16 terms"},
  };
  RUN(base, cases);
}

static void sharding(void **state) {
  (void)state;
  static const Case cases[] = {
      {{"zeropp={qwz: int8, hpz: quantized, qgz: int4, error_feedback: true, accumulate: node}"},
       NULL},
      {{"zeropp={stage: 0, wire: bfloat16}"}, NULL},
      {{"zeropp.hpz=on"}, NULL},
      {{"zeropp.stage=2", "zeropp.qwz=fp8", "zeropp.accumulate=node"}, NULL},
      {{"zeropp.hpz=quantized"},
       "--set zeropp.hpz=quantized: zeropp.hpz: found quantized with zeropp.qwz off; expected on, "
       "or "
       "qwz"},
      {{"zeropp.hpz=on", "zeropp.refresh=delta"}, NULL},
      {{"zeropp.refresh=delta"},
       "--set zeropp.refresh=delta: zeropp.refresh: found delta with zeropp.hpz off; expected "
       "dense, "
       "or hpz on"},
      {{"zeropp={qwz: int8, hpz: on}", "zeropp.refresh=auto"}, NULL},
      {{"zeropp={qwz: int8, hpz: quantized}", "zeropp.refresh=auto"},
       "--set zeropp.refresh=auto: zeropp.refresh: found auto with zeropp.hpz quantized; expected "
       "dense, "
       "or hpz on"},
      {{"zeropp={qwz: int8, hpz: on}", "zeropp.refresh=delta"},
       "--set zeropp.refresh=delta: zeropp.refresh: found delta with zeropp.qwz int8; expected "
       "dense, or qwz off"},
      {{"zeropp.error_feedback=true"},
       "--set zeropp.error_feedback=true: zeropp.error_feedback: found true with zeropp.qgz off, "
       "which loses nothing; expected false, or qgz"},
      {{"zeropp.block=255"},
       "--set zeropp.block=255: zeropp.block: found 255; expected an even number"},
      {{"zeropp.stage=2", "zeropp.hpz=on"},
       "--set zeropp.hpz=on: zeropp.hpz: found on with zeropp.stage 2; expected stage 3"},
      {{"zeropp.stage=0", "zeropp.qgz=int8"},
       "--set zeropp.qgz=int8: zeropp.qgz: found int8 with zeropp.stage 0; expected stage 1 or "
       "above"},
      {{"zeropp.stage=1", "zeropp.accumulate=node"},
       "--set zeropp.accumulate=node: zeropp.accumulate: found node with zeropp.stage 1; expected "
       "stage 2 or above"},
      {{"zeropp.qwz=int4"},
       "--set zeropp.qwz=int4: zeropp.qwz: found \"int4\"; expected one of off, int8, fp8"},
  };
  RUN(base, cases);
}

static void conversations(void **state) {
  (void)state;
#define CHAT "data.chat={name: custom, user: 'U {content}', assistant: 'A {content}.'}"
  static const Case cases[] = {
      {{CHAT}, NULL},
      {{CHAT, "data.chat.assistant_prefix='A '"}, NULL},
      {{CHAT, "data.chat.assistant_prefix='A'"},
       "--set data.chat.assistant_prefix='A': data.chat.assistant_prefix: found \"A\"; expected "
       "\"A "
       "\", the assistant piece up to {content}"},
      {{CHAT, "data.chat.user=x"},
       "--set data.chat.user=x: data.chat.user: found no {content}; expected it once"},
      {{CHAT, "data.chat.system='{content}{content}'"},
       "--set data.chat.system='{content}{content}': data.chat.system: found {content} twice; "
       "expected once"},
      {{"data.chat.name=custom"},
       "--set data.chat.name=custom: data.chat.user: not given; expected a text with {content}\n"
       "--set data.chat.name=custom: data.chat.assistant: not given; expected a text with "
       "{content}"},
      {{"data.chat.user='{content}'"},
       "--set data.chat.user='{content}': data.chat.name: found plain with pieces; expected "
       "custom"},
  };
  RUN(base, cases);
}

/* What ppo.importance auto comes to: on where a rollout draws from other numbers than are trained.
 */
static void importance_where_the_rollout_differs(void **state) {
  (void)state;
  static const struct {
    const char *sets[4];
    bool weighs;
  } cases[] = {
      {{"ppo.importance=auto"}, false},
      {{"ppo.importance=on"}, true},
      {{"rollout.top_k=5", "rollout.filters=allow"}, true},
      {{"rollout.top_k=5", "rollout.filters=allow", "ppo.importance=off"}, false},
      {{"rollout.top_k=5", "rollout.filters=renormalize"}, false},
      {{"rollout.min_new_tokens=3"}, true}, /* the end is banned so long */
      {{"rollout.min_new_tokens=3", "rollout.filters=renormalize"}, false},
      {{"rollout.format=training"}, false},
      {{"rollout.format=int8"}, true},
      {{"rollout.format=int8", "ppo.importance=off"}, false},
      {{"rollout.format=int8", "zeropp.qwz=int8"}, false}, /* training's own codes */
      {{"rollout.format=fp8", "zeropp.qwz=int8"}, true},
      {{"rollout.format=int8", "zeropp.qwz=int8", "zeropp.hpz=quantized"}, false},
      {{"rollout.format=int8", "zeropp.qwz=int8", "zeropp.hpz=on"}, true},
      {{"rollout.format=int8", "zeropp.qwz=int8", "zeropp.stage=2"}, true},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int n = 0;
    while (n < 4 && cases[i].sets[n]) n++;
    Error err = {""};
    Recipe *r = recipe_parse(base, strlen(base), "x.yaml", cases[i].sets, n, &err);
    if (!r) fail_msg("%s", err.msg);
    if (recipe_corrects_importance(r) != cases[i].weighs)
      fail_msg("%s: not %d", cases[i].sets[0], cases[i].weighs);
    recipe_free(r);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(stages_need_data), cmocka_unit_test(held_out_and_evaluation),
    cmocka_unit_test(sources),          cmocka_unit_test(reward_models),
    cmocka_unit_test(random_weights),   cmocka_unit_test(rollout_and_ppo),
    cmocka_unit_test(reward_terms),     cmocka_unit_test(sharding),
    cmocka_unit_test(conversations),    cmocka_unit_test(importance_where_the_rollout_differs),
};
TEST_MAIN(tests)
