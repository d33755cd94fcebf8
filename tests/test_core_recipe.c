/* Loading as a whole: defaults that users rely on, several errors at once, --set, places, and the
 * printed recipe that loads back to the same. */
#include "core/recipe.h"

#include <stdio.h>
#include <unistd.h>

#include "core/fs.h"
#include "core/nearest.h"
#include "tests/test.h"

static const char base[] =
    "stages: [sft, reward, ppo]\n"
    "models: {actor: base}\n"
    "data: {sft: a.jsonl, preference: /abs/b.jsonl, prompts: ./c.jsonl}\n";

static Recipe *parse(const char *text, const char *const *sets, int n, Error *err) {
  err->msg[0] = 0;
  return recipe_parse(text, strlen(text), "dir/x.yaml", sets, n, err);
}

static Recipe *loaded(Recipe *r, const Error *err) {
  if (r) return r;
  fail_msg("%s", err->msg);
  abort(); /* fail_msg does not come back */
}

static Recipe *must(const char *text, const char *const *sets, int n) {
  Error err;
  return loaded(parse(text, sets, n, &err), &err);
}

static void gives(const char *text, const char *const *sets, int n, const char *message) {
  Error err;
  Recipe *r = parse(text, sets, n, &err);
  if (r) fail_msg("accepted:\n%s", text);
  if (strcmp(err.msg, message) != 0) fail_msg("gave:\n%s\nnot:\n%s", err.msg, message);
}

/* ---- values ---- */

static void published_defaults(void **state) {
  (void)state;
  Recipe *r = must(base, NULL, 0);
  assert_true(r->optimizer.actor.lr == 1e-6 && r->optimizer.critic.lr == 5e-6);
  assert_true(r->optimizer.actor.beta1 == 0.9 && r->optimizer.actor.beta2 == 0.95);
  assert_true(r->optimizer.sft.max_grad_norm == 1 && r->optimizer.sft.eps == 1e-8);
  assert_true(r->ppo.clip_low == 0.2 && r->ppo.clip_high == 0.2 && r->ppo.value_clip == 0.2);
  assert_true(r->ppo.gamma == 1 && r->ppo.lambda == 0.95 && r->ppo.whiten_advantages);
  assert_true(r->ppo.kl_coef == 0.05 && r->ppo.kl_target == 6 && r->ppo.kl_horizon == 10000);
  assert_string_equal(r->ppo.kl_estimator, "k1");
  assert_string_equal(r->ppo.kl_in, "reward");
  assert_string_equal(r->ppo.kl_controller, "fixed");
  assert_true(r->rollout.temperature == 1 && r->rollout.top_p == 1 && r->rollout.top_k == 0);
  assert_true(r->ppo.reward_clip == 5);
  recipe_free(r);
}

static void models_follow_from_each_other(void **state) {
  (void)state;
  Recipe *r = must(base, NULL, 0);
  assert_string_equal(r->models.reward.from, "actor");
  assert_true(r->models.reward.init_head);
  assert_string_equal(r->models.critic.from, "reward");
  assert_false(r->models.critic.init_head);
  assert_string_equal(r->models.reference.from, "actor");
  assert_int_equal(r->n_rewards, 1);
  assert_string_equal(r->rewards[0].kind, "model");
  recipe_free(r);
  const char *sets[] = {"stages=[ppo]", "rewards=[{kind: length, target: 5}]"};
  r = must(base, sets, 2);
  assert_string_equal(r->models.reward.from, "");
  assert_string_equal(r->models.critic.from, "actor");
  assert_true(r->models.critic.init_head);
  recipe_free(r);
  sets[1] = "models.reward={path: rm}";
  r = must(base, sets, 2);
  assert_string_equal(r->models.critic.from, "reward");
  assert_false(r->models.reward.init_head);
  recipe_free(r);
}

static void every_type(void **state) {
  (void)state;
  Recipe *r = must(
      "stages:\n- ppo\n- sft\n"
      "run: {seed: 0x10, threads: +2, overwrite: true, device: 'cpu'}\n"
      "models:\n"
      "  actor: {init: {hidden_size: 64, layers: 2, heads: 4, ffn: 0o200, rope_theta: 5e5}}\n"
      "tokenizer: tok\n"
      "data:\n"
      "  sft: {path: ../s.txt, separator: <|endoftext|>, text_field: ''}\n"
      "  prompts: p.jsonl\n"
      "  chat: {name: custom, user: \"Q: {content}\\n\", assistant: \"A: {content}\\n\"}\n"
      "rewards:\n"
      "- {kind: words, words: [a b, 'yes', \"1\"], absent: true, weight: -.5}\n"
      "- {kind: length, target: 30}\n"
      "ppo: {kl_coef: 1e-2, steps: 3}\n"
      "sft:\n",
      NULL, 0);
  char cwd[4096], want[8192];
  if (!getcwd(cwd, sizeof cwd)) fail();
  assert_int_equal(r->n_stages, 2);
  assert_int_equal(r->stages[0], STAGE_PPO);
  assert_int_equal(r->stages[1], STAGE_SFT);
  assert_int_equal(r->run.seed, 16);
  assert_int_equal(r->run.threads, 2);
  assert_true(r->run.overwrite);
  assert_string_equal(r->run.device, "cpu");
  assert_string_equal(r->run.directory, "runs/x");
  assert_int_equal(r->models.actor.init.ffn, 128);
  assert_true(r->models.actor.init.rope_theta == 5e5);
  snprintf(want, sizeof want, "%s/dir/../s.txt", cwd);
  assert_string_equal(r->data.sft.path, want);
  snprintf(want, sizeof want, "%s/dir/p.jsonl", cwd);
  assert_string_equal(r->data.prompts.path, want);
  assert_string_equal(r->data.sft.text_field, "");
  assert_string_equal(r->data.sft.separator, "<|endoftext|>");
  assert_string_equal(r->data.chat.assistant_prefix, "A: ");
  assert_int_equal(r->rewards[0].n_words, 3);
  assert_string_equal(r->rewards[0].words[0], "a b");
  assert_string_equal(r->rewards[0].words[2], "1");
  assert_true(r->rewards[0].absent && r->rewards[0].weight == -0.5);
  assert_int_equal(r->rewards[1].target, 30);
  assert_true(r->ppo.kl_coef == 0.01);
  assert_int_equal(r->sft.epochs, 1); /* an empty section: its defaults */
  recipe_free(r);
}

static void anchors_hold(void **state) {
  (void)state;
  char text[1024];
  snprintf(text, sizeof text,
           "x-opt: &o {lr: 1e-4, schedule: linear}\n"
           "x-more: [anything, {at: all}]\n%s"
           "optimizer:\n"
           "  sft: &s {<<: *o, weight_decay: 0.1}\n"
           "  actor: *s\n"
           "  critic: {<<: [{lr: 2e-4}, *s]}\n",
           base);
  const char *set = "optimizer.sft.lr=7";
  Recipe *r = must(text, &set, 1);
  assert_true(r->optimizer.sft.lr == 7 && r->optimizer.sft.weight_decay == 0.1);
  assert_true(r->optimizer.actor.lr == 1e-4); /* shares its node with sft; --set must not */
  assert_true(r->optimizer.critic.lr == 2e-4 && r->optimizer.critic.weight_decay == 0.1);
  assert_string_equal(r->optimizer.critic.schedule, "linear");
  recipe_free(r);
  snprintf(text, sizeof text, "%srewards:\n- &t {kind: length, target: 5}\n- *t\n", base);
  set = "rewards.0.target=6";
  r = must(text, &set, 1);
  assert_int_equal(r->rewards[0].target, 6);
  assert_int_equal(r->rewards[1].target, 5);
  recipe_free(r);
}

/* ---- errors ---- */

static void all_errors_at_once(void **state) {
  (void)state;
  gives(
      "stages: [ppo]\n"
      "models:\n"
      "  actor: a\n"
      "ppo:\n"
      "  clp_low: 0.1\n"
      "  clip_high: -1\n"
      "  gamma: [1]\n"
      "  lr: 1e-6\n"
      "optimiser: {}\n"
      "rollout: {temperature: 0}\n"
      "data: {prompts: {path: p, held_out: '0.1', chosen_field: c}}\n"
      "rewards: [lenght]\n"
      "run: 5\n",
      NULL, 0,
      "dir/x.yaml:5:3: unknown key \"ppo.clp_low\"; did you mean \"clip_low\"?\n"
      "dir/x.yaml:6:14: ppo.clip_high: found -1; expected a number above 0, at most 100\n"
      "dir/x.yaml:7:10: ppo.gamma: found a list; expected a number from 0 to 1\n"
      "dir/x.yaml:8:3: unknown key \"ppo.lr\"; did you mean \"optimizer.sft.lr\" or "
      "\"optimizer.reward.lr\" or \"optimizer.actor.lr\" or \"optimizer.critic.lr\"?\n"
      "dir/x.yaml:9:1: unknown key \"optimiser\"; did you mean \"optimizer\"?\n"
      "dir/x.yaml:10:24: rollout.temperature: found 0; expected a number from 0.001 to 100 "
      "(for temperature 0 use greedy evaluation)\n"
      "dir/x.yaml:11:37: data.prompts.held_out: found the text \"0.1\"; expected a number from 0, "
      "below 1\n"
      "dir/x.yaml:11:44: unknown key \"data.prompts.chosen_field\"; did you mean "
      "\"data.preference.chosen_field\"?\n"
      "dir/x.yaml:12:11: rewards.0.kind: found \"lenght\"; expected one of model, length, words, "
      "regex, exact, command\n"
      "dir/x.yaml:13:6: run: found 5; expected a map of keys");
}

static void wrong_roots(void **state) {
  (void)state;
  gives("", NULL, 0, "dir/x.yaml: stages: not given; expected a list of sft, reward, ppo");
  gives("- a\n", NULL, 0,
        "dir/x.yaml:1:1: found a list; expected a map of sections: stages, models, data...");
  gives("hello", NULL, 0,
        "dir/x.yaml:1:1: found \"hello\"; expected a map of sections: stages, models, data...");
  gives(
      "a: [", NULL, 0,
      "dir/x.yaml:2:1: not YAML: did not find expected node content, while parsing a flow node at "
      "line 2");
}

static void names_with_odd_characters(void **state) {
  (void)state;
  Error err;
  assert_null(parse("\"a\\nb\": 1\n\"ppo.steps\": 2\nrun: {device: \"\\e[31m\"}\n", NULL, 0, &err));
  assert_non_null(
      strstr(err.msg, "x.yaml:1:1: unknown key \"a\\x0Ab\"; expected one of stages, run"));
  assert_non_null(
      strstr(err.msg, "x.yaml:2:1: found the key \"ppo.steps\"; expected a name without"));
  assert_non_null(strstr(err.msg, "found the text \"\\x1B[31m\"; expected one of auto, cpu, cuda"));
}

static void too_many_errors_are_counted(void **state) {
  (void)state;
  char *text = malloc(1 << 16), *p = text + sprintf(text, "ppo:\n");
  for (int i = 0; i < 1000; i++) p += sprintf(p, "  nothing_like_it_%d: 1\n", i);
  sprintf(p, "run: {seed: -1}\n");
  Error err;
  assert_null(parse(text, NULL, 0, &err));
  const char *tail = strstr(err.msg, "\nand ");
  assert_non_null(tail);
  int lines = 0;
  for (const char *s = err.msg; *s; s++) lines += *s == '\n';
  char want[64];
  /* 1000 unknown keys, the seed and the missing stages, of which 1000 are kept apart. */
  snprintf(want, sizeof want, "\nand %d more problems", 1002 - lines);
  assert_string_equal(tail, want);
  assert_null(recipe_parse(text, strlen(text), "x.yaml", NULL, 0, NULL)); /* no Error: no message */
  free(text);
}

static void files(void **state) {
  (void)state;
  Error err;
  assert_null(recipe_load("/nowhere/x.yaml", NULL, 0, &err));
  assert_non_null(strstr(err.msg, "/nowhere/x.yaml"));
  assert_null(recipe_load(test_tmp(), NULL, 0, &err)); /* a folder */
  assert_non_null(strstr(err.msg, test_tmp()));
  char path[512], want[600];
  snprintf(path, sizeof path, "%s/r.yaml", test_tmp());
  assert_int_equal(fs_write_atomic(path, base, sizeof base - 1, &err), 0);
  Recipe *r = loaded(recipe_load(path, NULL, 0, &err), &err);
  snprintf(want, sizeof want, "%s/a.jsonl", test_tmp());
  assert_string_equal(r->data.sft.path, want);
  assert_string_equal(r->data.preference.path, "/abs/b.jsonl");
  assert_string_equal(r->file, path);
  recipe_free(r);
}

/* ---- --set ---- */

static void sets_in_order(void **state) {
  (void)state;
  const char *sets[] = {"ppo.steps=5",
                        "ppo.steps=7",
                        "ppo={epochs: 2, steps: 9}",
                        "ppo.gamma=0.5",
                        "rewards=[{kind: length, target: 4}]",
                        "rewards.0.weight=2",
                        "rewards.1=model",
                        "models.actor.path=other",
                        "data.sft.max_tokens=77",
                        "run.directory=out=1",
                        "run.seed="};
  Recipe *r = must(base, sets, 11);
  assert_int_equal(r->ppo.steps, 9);
  assert_int_equal(r->ppo.epochs, 2);
  assert_true(r->ppo.gamma == 0.5);
  assert_int_equal(r->n_rewards, 2);
  assert_true(r->rewards[0].weight == 2 && r->rewards[0].target == 4);
  assert_string_equal(r->rewards[1].kind, "model");
  char cwd[4096], want[8192];
  if (!getcwd(cwd, sizeof cwd)) fail();
  snprintf(want, sizeof want, "%s/other", cwd); /* of the working directory, not the recipe's */
  assert_string_equal(r->models.actor.path, want);
  snprintf(want, sizeof want, "%s/dir/a.jsonl", cwd); /* the bare text stays beside the new key */
  assert_string_equal(r->data.sft.path, want);
  assert_int_equal(r->data.sft.max_tokens, 77);
  assert_string_equal(r->run.directory, "out=1");
  assert_int_equal(r->run.seed, 1); /* empty: the default */
  recipe_free(r);
}

static void set_errors(void **state) {
  (void)state;
  const char *sets[] = {"ppo.stps=1",
                        "ppo.steps=x",
                        "ppo.gamma=[",
                        "nothing",
                        "=1",
                        "a..b=1",
                        ".a=1",
                        "rewards=[model]",
                        "rewards.3.weight=1",
                        "rewards.x=1",
                        "ppo.steps.a=1"};
  gives(
      base, sets, 11,
      "--set ppo.gamma=[: not YAML: did not find expected node content, while parsing a flow node "
      "at line 2\n"
      "--set nothing: expected KEY=VALUE, as in ppo.epochs=2\n"
      "--set =1: expected KEY=VALUE, as in ppo.epochs=2\n"
      "--set a..b=1: expected KEY=VALUE, as in ppo.epochs=2\n"
      "--set .a=1: expected KEY=VALUE, as in ppo.epochs=2\n"
      "--set rewards.3.weight=1: found element \"3\" of a list of 1; expected 0 to 1\n"
      "--set rewards.x=1: found element \"x\" of a list of 1; expected 0 to 1\n"
      "--set ppo.stps=1: unknown key \"ppo.stps\"; did you mean \"steps\"?\n"
      "--set ppo.steps.a=1: ppo.steps: found a map; expected a whole number from 1 to "
      "1000000000000");
  const char *over[] = {"ppo.steps=0"};
  gives("stages: [sft]\nmodels: {actor: a}\ndata: {sft: a}\nppo: {steps: 5}\nrun: {sed: 1}\n", over,
        1,
        "dir/x.yaml:5:7: unknown key \"run.sed\"; did you mean \"seed\"?\n"
        "--set ppo.steps=0: ppo.steps: found 0; expected a whole number from 1 to 1000000000000");
}

static void sets_repair_the_file(void **state) {
  (void)state;
  const char *set = "ppo.steps=5";
  Recipe *r = must("stages: [sft]\nmodels: {actor: a}\ndata: {sft: a}\nppo: {steps: 0}\n", &set, 1);
  assert_int_equal(r->ppo.steps, 5);
  recipe_free(r);
}

static void places(void **state) {
  (void)state;
  const char *sets[] = {"ppo.steps=5"};
  Recipe *r = must(base, sets, 1);
  assert_string_equal(recipe_place(r, "data.preference.path"), "dir/x.yaml:3:34");
  assert_string_equal(recipe_place(r, "models.actor"), "dir/x.yaml:2:17");
  assert_string_equal(recipe_place(r, "ppo.steps"), "--set ppo.steps=5");
  assert_string_equal(recipe_place(r, "ppo.gamma"), "dir/x.yaml (default)");
  recipe_free(r);
}

/* ---- printing ---- */

static char *print(const Recipe *r) {
  char *s;
  size_t n;
  FILE *f = open_memstream(&s, &n);
  assert_int_equal(recipe_print(r, f), 0);
  fclose(f);
  return s;
}

static void round_trip(const char *text, const char *const *sets, int n) {
  Recipe *r = must(text, sets, n);
  char *first = print(r);
  Error err;
  Recipe *again =
      loaded(recipe_parse(first, strlen(first), "elsewhere/other.yaml", NULL, 0, &err), &err);
  char *second = print(again);
  assert_string_equal(first, second);
  /* Every field, not only what is printed: pointers aside, the structs are the same. */
  assert_string_equal(r->run.directory, again->run.directory);
  assert_string_equal(r->rollout.filters, again->rollout.filters);
  assert_string_equal(r->rollout.weights, again->rollout.weights);
  assert_string_equal(r->rollout.format, again->rollout.format);
  again->rollout.filters = r->rollout.filters;
  again->rollout.weights = r->rollout.weights;
  again->rollout.format = r->rollout.format;
  assert_memory_equal(&r->rollout, &again->rollout, sizeof r->rollout);
  assert_memory_equal(&r->batch, &again->batch, sizeof r->batch);
  assert_memory_equal(&r->models.actor.init, &again->models.actor.init, sizeof(InitConfig));
  assert_int_equal(r->n_rewards, again->n_rewards);
  assert_int_equal(r->n_stages, again->n_stages);
  assert_true(r->optimizer.actor.lr == again->optimizer.actor.lr);
  assert_int_equal(r->data.prompts.max_tokens, again->data.prompts.max_tokens);
  free(first);
  free(second);
  recipe_free(r);
  recipe_free(again);
}

static void prints_what_loads_back(void **state) {
  (void)state;
  round_trip(base, NULL, 0);
  static const char terms[] =
      "rewards=[{kind: length, target: 4, weight: -0.1}, {kind: words, words: [a, "
      "'b c', \"\\u2028\"]}, model, {kind: regex, pattern: '\\d+\"\\\\'}, exact, "
      "{kind: command, command: \"cat\\n#\\t\\x85\\x7f\\uFEFF\\uFFFE é 字\"}]";
  const char *sets[] = {terms,
                        "optimizer.actor.lr=3.3333333333333335e-7",
                        "data.prompts.answer_field=answer",
                        "data.sft={path: s, held_out: 0, separator: '', text_field: ''}",
                        "data.chat={name: custom, user: 'U {content}', assistant: 'A {content}.'}",
                        "run.seed=9007199254740991",
                        "ppo.kl_coef=0.1",
                        "models.actor={init: {hidden_size: 24, layers: 1, heads: 2, ffn: 8}}",
                        "tokenizer=t"};
  round_trip(base, sets, 9);
}

static void texts_print_and_load(void **state) {
  (void)state;
  const char *set =
      "rewards=[{kind: command, command: \"a\\\"\\\\\\n\\t\\r\\x01\\x85\\u2029\\uFEFF\\uFFFF"
      " é #: '\"}]";
  Recipe *r = must(base, &set, 1);
  char *text = print(r);
  Error err;
  Recipe *again = loaded(recipe_parse(text, strlen(text), "y.yaml", NULL, 0, &err), &err);
  assert_string_equal(r->rewards[0].command, again->rewards[0].command);
  assert_int_equal(strlen(r->rewards[0].command), 26);
  free(text);
  recipe_free(r);
  recipe_free(again);
}

static void help_names_every_section(void **state) {
  (void)state;
  char *s;
  size_t n;
  FILE *f = open_memstream(&s, &n);
  recipe_help(f);
  fclose(f);
  static const char *const parts[] = {"### run\n",           "### models.actor\n",
                                      "### rewards[]\n",     "| `clip_low` | number | `0.2` |",
                                      "### optimizer.sft\n", "`lr` 1e-6",
                                      "| `stages` |",        "k1, k2, k3"};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (!strstr(s, parts[i])) fail_msg("no %s", parts[i]);
  free(s);
}

static void distances(void **state) {
  (void)state;
  assert_int_equal(edit_distance("", "abc"), 3);
  assert_int_equal(edit_distance("kitten", "sitting"), 3);
  assert_int_equal(edit_distance("clip_low", "clp_low"), 1);
  assert_int_equal(edit_distance("lenght", "length"), 1); /* neighbours swapped */
  static const char *const names[] = {"train", "check", "score", "generate"};
  assert_string_equal(nearest_name("tarin", names, 4), "train");
  assert_string_equal(nearest_name("gen", names, 4), "generate");
  assert_string_equal(nearest_name("generator", names, 4), "generate");
  assert_null(nearest_name("zzz", names, 4));
  assert_null(nearest_name("", names, 4));
  char longest[300];
  memset(longest, 'a', sizeof longest - 1);
  longest[sizeof longest - 1] = 0;
  assert_null(nearest_name(longest, names, 4));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(published_defaults),
    cmocka_unit_test(models_follow_from_each_other),
    cmocka_unit_test(every_type),
    cmocka_unit_test(anchors_hold),
    cmocka_unit_test(all_errors_at_once),
    cmocka_unit_test(wrong_roots),
    cmocka_unit_test(names_with_odd_characters),
    cmocka_unit_test(too_many_errors_are_counted),
    cmocka_unit_test(files),
    cmocka_unit_test(sets_in_order),
    cmocka_unit_test(set_errors),
    cmocka_unit_test(sets_repair_the_file),
    cmocka_unit_test(places),
    cmocka_unit_test(prints_what_loads_back),
    cmocka_unit_test(texts_print_and_load),
    cmocka_unit_test(help_names_every_section),
    cmocka_unit_test(distances),
};
TEST_MAIN(tests)
