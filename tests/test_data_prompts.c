/* orchestrator, data: prompts, and the order in which all data sets are walked. */
#include "tests/data_test.h"

typedef struct Loaded {
  Recipe *recipe;
  Tokenizer *tokenizer;
  PromptSet train, held;
  DataReport report;
  int rc;
  Error err;
} Loaded;

static Loaded load(const char *path, const char *keys, const char *more) {
  char *data = mem_printf("prompts: {path: %s%s}", path, keys);
  Loaded l = {.recipe = data_recipe("ppo", data, more), .tokenizer = data_tokenizer()};
  l.rc = data_load_prompts(l.recipe, l.tokenizer, 1024, &l.train, &l.held, &l.report, &l.err);
  free(data);
  return l;
}

static Loaded load_ok(const char *path, const char *keys, const char *more) {
  Loaded l = load(path, keys, more);
  if (l.rc) fail_msg("%s", l.err.msg);
  return l;
}

static void unload(Loaded *l) {
  prompt_set_free(&l->train);
  prompt_set_free(&l->held);
  tokenizer_free(l->tokenizer);
  recipe_free(l->recipe);
}

static void expect(const Loaded *l, int b, const char *shown, const Piece *pieces, int n) {
  data_expect(l->tokenizer, &l->train.tokens, l->train.offsets, b, pieces, n);
  assert_string_equal(l->train.text[b], shown);
}

#define ALL ", held_out: 0"
static const char chat[] =
    "  chat: {name: custom, user: \"Q: {content}\\n\", assistant: \"A: {content}\\n\"}\n";

static void shapes(void **state) {
  (void)state;
  const char *json =
      "{\"prompt\":\"Hi\"}\n"
      "{\"prompt\":[{\"role\":\"user\",\"content\":\"Ho\"}]}\n"
      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":"
      "\"b\"},"
      "{\"role\":\"user\",\"content\":\"c\"},{\"role\":\"assistant\",\"content\":\"d\"}]}\n"
      "{\"text\":\"Once upon\"}\n"
      "{\"prompt\":\"\"}\n"
      "{\"messages\":[{\"role\":\"assistant\",\"content\":\"d\"}]}\n";
  Loaded l = load_ok(data_file("p.jsonl", json), ALL, chat);
  assert_true(l.train.n == 4 && l.report.records == 6 && l.report.dropped == 2);
  assert_null(l.train.answer);
  expect(&l, 0, "Hi", PIECES({BOS, 0}, {START, "Q: Hi\nA: "}));
  expect(&l, 1, "Ho", PIECES({BOS, 0}, {START, "Q: Ho\nA: "}));
  expect(&l, 2, "Q: a\nA: b\nQ: c\n", PIECES({BOS, 0}, {START, "Q: a\nA: b\nQ: c\nA: "}));
  expect(&l, 3, "Once upon", PIECES({BOS, 0}, {START, "Once upon"})); /* no template */
  unload(&l);
  l = load_ok(data_file("p.txt", "Hi\n\n  Ho\n"), ALL, chat);
  assert_int_equal(l.train.n, 2);
  expect(&l, 0, "Hi", PIECES({BOS, 0}, {START, "Q: Hi\nA: "}));
  expect(&l, 1, "  Ho", PIECES({BOS, 0}, {START, "Q:   Ho\nA: "}));
  unload(&l);
  l = load_ok(data_file("p.txt", "Once\nupon\n---\nThe end\n"), ALL ", separator: ---", chat);
  assert_int_equal(l.train.n, 2);
  expect(&l, 0, "Once\nupon", PIECES({BOS, 0}, {START, "Once\nupon"}));
  unload(&l);
  l = load(data_file("p.jsonl", json), ALL ", overlong: error", chat);
  assert_non_null(strstr(l.err.msg, "p.jsonl:5: the prompt is empty"));
  unload(&l);
}

static void answers(void **state) {
  (void)state;
  const char *json =
      "{\"prompt\":\"1+1\",\"is\":\"two\"}\n{\"prompt\":\"2+2\",\"is\":4}\n{\"prompt\":\"3\","
      "\"is\":2.5}\n";
  Loaded l = load_ok(data_file("a.jsonl", json), ALL ", answer_field: is", "");
  assert_string_equal(l.train.answer[0], "two");
  assert_string_equal(l.train.answer[1], "4");
  assert_string_equal(l.train.answer[2], "2.5");
  unload(&l);
  l = load(data_file("a.jsonl", json), ALL ", answer_field: answer", "");
  assert_non_null(strstr(l.err.msg, "a.jsonl:1: no field \"answer\"; the record has: prompt, is"));
  unload(&l);
  l = load(data_file("a.jsonl", "{\"prompt\":\"a\",\"is\":[]}"), ALL ", answer_field: is", "");
  assert_non_null(
      strstr(l.err.msg, "a.jsonl:1: field \"is\" is an array; expected a text or a number"));
  unload(&l);
}

static void errors_name_the_place(void **state) {
  (void)state;
  static const struct {
    const char *json, *want;
  } bad[] = {
      {"{\"question\":\"a\"}",
       "b.jsonl:1: no field \"messages\", \"prompt\" or \"text\"; the record has: question"},
      {"{\"prompt\":1}", "b.jsonl:1: field \"prompt\" is an integer"},
      {"{\"text\":[]}", "b.jsonl:1: field \"text\" is an array; expected a text"},
      {"\n\n", "b.jsonl: holds no records"},
      {"{\"prompt\":\"\"}", "b.jsonl: none of 1 records is left: 1 empty"},
      {"hello", "b.jsonl:1:5: not valid JSON"},
      {"{\"prompt\":\"a\\u0000b\"}", "b.jsonl:1: the prompt holds a NUL character"},
      {"{\"prompt\":\"a\",\"gold\":\"1\\u0000\"}",
       "b.jsonl:1: field \"gold\" holds a NUL character"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    bool answers = strstr(bad[i].json, "gold");
    Loaded l =
        load(data_file("b.jsonl", bad[i].json), answers ? ALL ", answer_field: gold" : ALL, "");
    if (l.rc != -1) fail_msg("accepted: %s", bad[i].json);
    if (!strstr(l.err.msg, bad[i].want)) fail_msg("%s\n  gave: %s", bad[i].json, l.err.msg);
    unload(&l);
  }
}

/* A prompt loses its beginning, a text its end; what is shown is what is left. */
static void overlong_prompts(void **state) {
  (void)state;
  const char *json =
      "{\"prompt\":\"One day a girl named Lily went to the park\"}\n"
      "{\"text\":\"One day a girl named Lily went to the park\"}\n{\"prompt\":\"a\"}\n";
  const char *path = data_file("o.jsonl", json);
  Loaded whole = load_ok(path, ALL, "");
  const int32_t *v = whole.train.tokens.v;
  int n = whole.train.offsets[1];
  Loaded l = load_ok(path, ALL ", overlong: truncate", "rollout: {max_prompt_tokens: 7}");
  const int32_t *w = l.train.tokens.v;
  assert_true(l.report.truncated == 2 && l.train.n == 3 && n > 7);
  assert_true(l.train.offsets[1] == 7 && l.train.offsets[2] == 14);
  assert_int_equal(w[0], v[0]);
  assert_memory_equal(w + 1, v + n - 6, 6 * sizeof *v);
  assert_memory_equal(w + 7, v, 7 * sizeof *v);
  const char *text = "One day a girl named Lily went to the park", *shown = l.train.text[0];
  assert_true(strlen(shown) > 0 && strlen(shown) < strlen(text));
  assert_string_equal(shown, text + strlen(text) - strlen(shown));
  assert_memory_equal(l.train.text[1], text, strlen(l.train.text[1]));
  unload(&l);
  l = load_ok(path, ALL, ""); /* 0: as many as there is room for */
  assert_int_equal(l.report.dropped, 0);
  unload(&l);
  l = load_ok(path, ALL, "rollout: {max_prompt_tokens: 7}"); /* drop is the default */
  assert_true(l.train.n == 1 && l.report.dropped == 2);
  unload(&l);
  l = load(path, ALL ", overlong: error", "rollout: {max_prompt_tokens: 7}");
  assert_non_null(strstr(l.err.msg, "tokens; expected at most rollout.max_prompt_tokens, 7"));
  unload(&l);
  unload(&whole);
}

static void held_out_prompts_keep_their_texts(void **state) {
  (void)state;
  char *text = NULL;
  size_t len;
  FILE *f = open_memstream(&text, &len);
  for (int i = 0; i < 60; i++) fprintf(f, "{\"prompt\":\"number %d\",\"answer\":%d}\n", i, i);
  fclose(f);
  Loaded l = load_ok(data_file("h.jsonl", text), ", held_out: 0.25, answer_field: answer", "");
  assert_true(l.held.n == 15 && l.train.n == 45);
  const PromptSet *sets[] = {&l.train, &l.held};
  int seen[60] = {0};
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < sets[k]->n; i++) {
      size_t n;
      const PromptSet *s = sets[k];
      char *decoded = tokenizer_decode(l.tokenizer, s->tokens.v + s->offsets[i],
                                       s->offsets[i + 1] - s->offsets[i], &n, &l.err);
      assert_string_equal(decoded, s->text[i]);
      assert_string_equal(s->text[i] + strlen("number "), s->answer[i]);
      seen[atoi(s->answer[i])]++;
      free(decoded);
    }
  for (int i = 0; i < 60; i++) assert_int_equal(seen[i], 1);
  unload(&l);
  free(text);
}

/* ---- data_order ---- */

static void every_epoch_is_a_permutation(void **state) {
  (void)state;
  static const int32_t sizes[] = {1, 2, 3, 7, 63, 64, 65, 1000, 4097};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    int32_t n = sizes[k], same = 0;
    for (int64_t epoch = 0; epoch < 3; epoch++) {
      char *seen = mem_zalloc((size_t)n, 1);
      for (int64_t i = 0; i < n; i++) {
        int32_t at = data_order(1, "sft", epoch * n + i, n);
        assert_in_range(at, 0, n - 1);
        assert_false(seen[at]);
        seen[at] = 1;
        same += at == data_order(1, "sft", i, n) && epoch > 0;
      }
      free(seen);
    }
    if (n > 60) assert_true(same < n / 4); /* epochs differ: two places in n stay, on average */
  }
  int32_t huge = INT32_MAX;
  for (int64_t i = 0; i < 1000; i++) assert_in_range(data_order(2, "x", i, huge), 0, huge - 1);
}

static void order_depends_on_seed_and_name_alone(void **state) {
  (void)state;
  int other_seed = 0, other_name = 0;
  for (int64_t i = 0; i < 1000; i++) {
    int32_t at = data_order(1, "sft", i, 1000);
    assert_int_equal(at, data_order(1, "sft", i, 1000));
    other_seed += at == data_order(2, "sft", i, 1000);
    other_name += at == data_order(1, "prompts", i, 1000);
  }
  assert_true(other_seed < 20 && other_name < 20); /* one in 1000 places agrees by chance */
}

/* Each of 7 items in each of 7 places equally often: chi-square with 36 degrees of freedom stays
 * below 73 with probability 1 - 3e-4, and the seed is fixed. */
static void order_is_fair(void **state) {
  (void)state;
  enum { ROUNDS = 7000, K = 7 };
  int count[K][K] = {{0}};
  for (int64_t i = 0; i < (int64_t)ROUNDS * K; i++) count[i % K][data_order(3, "x", i, K)]++;
  double chi = 0, want = ROUNDS;
  want /= K;
  for (int i = 0; i < K; i++)
    for (int j = 0; j < K; j++) chi += (count[i][j] - want) * (count[i][j] - want) / want;
  assert_true(chi < 73);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(shapes),
    cmocka_unit_test(answers),
    cmocka_unit_test(errors_name_the_place),
    cmocka_unit_test(overlong_prompts),
    cmocka_unit_test(held_out_prompts_keep_their_texts),
    cmocka_unit_test(every_epoch_is_a_permutation),
    cmocka_unit_test(order_depends_on_seed_and_name_alone),
    cmocka_unit_test(order_is_fair),
};
TEST_MAIN(tests)
