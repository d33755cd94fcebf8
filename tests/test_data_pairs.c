/* orchestrator, data: preference pairs, in the shapes of the published files. */
#include "tests/data_test.h"

typedef struct Loaded {
  Recipe *recipe;
  Tokenizer *tokenizer;
  PairSet train, held;
  DataReport report;
  int rc;
  Error err;
} Loaded;

static Loaded load(const char *path, const char *keys, const char *more) {
  char *data = mem_printf("preference: {path: %s%s}", path, keys);
  Loaded l = {.recipe = data_recipe("reward", data, more), .tokenizer = data_tokenizer()};
  l.rc = data_load_pairs(l.recipe, l.tokenizer, 1024, &l.train, &l.held, &l.report, &l.err);
  free(data);
  return l;
}

static Loaded load_ok(const char *path, const char *keys, const char *more) {
  Loaded l = load(path, keys, more);
  if (l.rc) fail_msg("%s", l.err.msg);
  return l;
}

static void unload(Loaded *l) {
  pair_set_free(&l->train);
  pair_set_free(&l->held);
  tokenizer_free(l->tokenizer);
  recipe_free(l->recipe);
}

static void expect(const Loaded *l, int sequence, const Piece *pieces, int n) {
  data_expect(l->tokenizer, &l->train.tokens, l->train.offsets, sequence, pieces, n);
}

#define ALL ", held_out: 0"
static const char chat[] =
    "  chat: {name: custom, system: \"{content}\\n\", user: \"Q: {content}\\n\","
    " assistant: \"A: {content}\\n\"}\n";

static void all_shapes(void **state) {
  (void)state;
  static const struct {
    const char *json, *keys;
  } same[] = {
      {"{\"prompt\":\"Hi\",\"chosen\":\"Yes\",\"rejected\":\"No\"}", ""},
      {"{\"q\":\"Hi\",\"a\":\"Yes\",\"b\":\"No\"}",
       ", prompt_field: q, chosen_field: a, rejected_field: b"},
      {"{\"conversations\":[{\"from\":\"human\",\"value\":\"Hi\"}],"
       "\"chosen\":{\"from\":\"gpt\",\"value\":\"Yes\"},\"rejected\":{\"from\":\"gpt\",\"value\":"
       "\"No\"}}",
       ", messages_field: conversations"},
      {"{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"chosen\":\"Yes\",\"rejected\":"
       "\"No\"}",
       ""},
      {"{\"prompt\":[{\"role\":\"user\",\"content\":\"Hi\"}],"
       "\"chosen\":[{\"role\":\"assistant\",\"content\":\"Yes\"}],"
       "\"rejected\":[{\"role\":\"assistant\",\"content\":\"No\"}]}",
       ""},
      {"{\"chosen\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":"
       "\"Yes\"}],"
       "\"rejected\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":"
       "\"No\"}]}",
       ""},
      /* the prompt is there twice: the whole conversation wins */
      {"{\"prompt\":\"Hi\","
       "\"chosen\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":"
       "\"Yes\"}],"
       "\"rejected\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":"
       "\"No\"}]}",
       ""},
  };
  for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
    char *keys = mem_printf("%s" ALL, same[i].keys);
    Loaded l = load_ok(data_file("s.jsonl", same[i].json), keys, chat);
    assert_int_equal(l.train.n, 1);
    assert_true(l.train.margins[0] == 0);
    expect(&l, 0, PIECES({BOS, 0}, {START, "Q: Hi\nA: "}, {GO_ON, "Yes\n"}, {EOS, 0}));
    expect(&l, 1, PIECES({BOS, 0}, {START, "Q: Hi\nA: "}, {GO_ON, "No\n"}, {EOS, 0}));
    unload(&l);
    free(keys);
  }
}

static void whole_dialogues(void **state) {
  (void)state;
  const char *json = "{\"chosen\":\"Q: Hi A: Yes\",\"rejected\":\"Q: Hi A: No\"}";
  Loaded l = load_ok(data_file("w.jsonl", json), ALL, chat);
  expect(&l, 0, PIECES({BOS, 0}, {START, "Q: Hi A: Yes"}, {EOS, 0}));
  unload(&l);
  /* With a field that may be the prompt, it has to be named, or switched off. */
  json = "{\"question\":\"Hi\",\"chosen\":\"Yes\",\"rejected\":\"No\"}";
  l = load(data_file("w.jsonl", json), ALL, "");
  assert_int_equal(l.rc, -1);
  assert_non_null(strstr(l.err.msg,
                         "w.jsonl:1: no field \"messages\" or \"prompt\"; the record has: "
                         "question, chosen, rejected"));
  unload(&l);
  l = load_ok(data_file("w.jsonl", json), ALL ", prompt_field: \"\", messages_field: \"\"", "");
  expect(&l, 0, PIECES({BOS, 0}, {START, "Yes"}, {EOS, 0}));
  unload(&l);
}

static void published_files(void **state) {
  (void)state;
  static const struct {
    const char *path, *keys;
    int records;
  } files[] = {
      {"data/preferences/dpo_en_demo.json", ", messages_field: conversations, max_records: 100",
       100},
      {"data/preferences/v1_dpo_demo.jsonl",
       ", chosen_field: chosen_messages, rejected_field: rejected_messages", 10},
      {"data/preferences/hh-rlhf-harmless-base-test.jsonl.gz", ", max_records: 100", 100},
  };
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    char *keys = mem_printf("%s, max_tokens: 4096, held_out: 0.1", files[i].keys);
    Loaded l = load_ok(test_path(files[i].path), keys, chat);
    assert_int_equal(l.report.records, files[i].records);
    assert_int_equal(l.train.n + l.held.n + l.report.dropped, files[i].records);
    assert_true(l.train.n * 10 > files[i].records * 7 && l.held.n > 0);
    int32_t bos = tokenizer_bos(l.tokenizer), eos = tokenizer_eos(l.tokenizer);
    int shared = 0;
    for (int k = 0; k < 2 * l.train.n; k++) {
      const int32_t *v = l.train.tokens.v + l.train.offsets[k];
      int n = l.train.offsets[k + 1] - l.train.offsets[k];
      assert_true(n <= 4096 && v[0] == bos && v[1] != bos && v[n - 1] == eos && v[n - 2] != eos);
      if (k % 2) shared += !memcmp(v, l.train.tokens.v + l.train.offsets[k - 1], 5 * sizeof *v);
    }
    assert_true(shared == l.train.n); /* both answers follow the same prompt */
    unload(&l);
    free(keys);
  }
}

static void margins(void **state) {
  (void)state;
  const char *json =
      "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\",\"m\":1.5}\n"
      "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"d\",\"m\":2}\n";
  Loaded l = load_ok(data_file("m.jsonl", json), ALL ", margin_field: m", "");
  assert_true(l.train.margins[0] == 1.5f && l.train.margins[1] == 2);
  unload(&l);
}

/* A pair's margin is how many letters o it has, all in its prompt. */
static void expect_margins(const Loaded *l, const PairSet *s) {
  for (int i = 0; i < s->n; i++) {
    Error err = {""};
    size_t len;
    int from = s->offsets[2 * i];
    char *text = tokenizer_decode(l->tokenizer, s->tokens.v + from, s->offsets[2 * i + 1] - from,
                                  &len, &err);
    int letters = 0;
    for (const char *c = text; *c; c++) letters += *c == 'o';
    assert_true(s->margins[i] == (float)letters);
    free(text);
  }
}

static void margins_stay_with_their_pairs(void **state) {
  (void)state;
  char *text = NULL;
  size_t size;
  FILE *f = open_memstream(&text, &size);
  for (int i = 0; i < 20; i++)
    fprintf(f, "{\"prompt\":\"%.*s\",\"chosen\":\"b\",\"rejected\":\"c\",\"m\":%d}\n", i + 1,
            "oooooooooooooooooooo", i + 1);
  fclose(f);
  Loaded l = load_ok(data_file("m.jsonl", text), ", held_out: 0.4, margin_field: m", "");
  assert_true(l.train.n == 12 && l.held.n == 8);
  expect_margins(&l, &l.train);
  expect_margins(&l, &l.held);
  unload(&l);
  free(text);
}

static void left_out(void **state) {
  (void)state;
  const char *json =
      "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\"}\n"
      "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"b\"}\n" /* equal */
      "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"\"}\n"
      "{\"prompt\":\"a\",\"chosen\":\" \\n\",\"rejected\":\"c\"}\n";
  Loaded l = load_ok(data_file("l.jsonl", json), ALL, "");
  assert_true(l.train.n == 1 && l.report.records == 4 && l.report.dropped == 3);
  unload(&l);
  l = load(data_file("l.jsonl", json), ALL ", overlong: error", "");
  assert_int_equal(l.rc, -1);
  assert_non_null(strstr(l.err.msg, "l.jsonl:3: an answer is empty"));
  unload(&l);
}

static void errors_name_the_place(void **state) {
  (void)state;
  static const struct {
    const char *json, *keys, *want;
  } bad[] = {
      {"{\"prompt\":\"a\",\"chosen\":\"b\"}", "",
       "b.jsonl:1: no field \"rejected\"; the record has: prompt, chosen"},
      {"{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":null}", "", "no field \"rejected\""},
      {"{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":4}", "",
       "field \"rejected\" is an integer; expected a text"},
      {"{\"prompt\":true,\"chosen\":\"b\",\"rejected\":\"c\"}", "",
       "field \"prompt\" is a boolean"},
      {"{\"chosen\":{\"role\":\"assistant\",\"content\":\"b\"},\"rejected\":\"c\"}", "",
       "no field \"messages\" or \"prompt\""},
      {"{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\"}", ", margin_field: m",
       "no field \"m\""},
      {"{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\",\"m\":\"1\"}", ", margin_field: m",
       "field \"m\" is a string; expected a number"},
      {"", "", "holds no records"},
      {"{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"b\"}", "", "none of 1 records is left"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    Loaded l = load(data_file("b.jsonl", bad[i].json), bad[i].keys, "");
    if (l.rc != -1) fail_msg("accepted: %s", bad[i].json);
    if (!strstr(l.err.msg, bad[i].want)) fail_msg("%s\n  gave: %s", bad[i].json, l.err.msg);
    unload(&l);
  }
}

static void overlong_pairs(void **state) {
  (void)state;
  const char *json =
      "{\"prompt\":\"One day a girl named Lily went to the park to play.\","
      "\"chosen\":\" She was very happy.\",\"rejected\":\" She was sad because it was dark.\"}\n"
      "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\"}\n";
  const char *path = data_file("o.jsonl", json);
  Loaded whole = load_ok(path, ALL, "");
  const int32_t *v = whole.train.tokens.v, *at = whole.train.offsets;
  int n[2] = {at[1], at[2] - at[1]}, prompt = 0, longest = n[0] > n[1] ? n[0] : n[1];
  while (v[prompt] == v[at[1] + prompt]) prompt++;
  for (int limit = 6; limit < longest; limit++) {
    char keys[100];
    snprintf(keys, sizeof keys, ALL ", max_tokens: %d, overlong: truncate", limit);
    Loaded l = load_ok(path, keys, "");
    assert_true(l.report.truncated == 1 && l.report.dropped == 0 && l.train.n == 2);
    int keep = 0;
    const int32_t *w = l.train.tokens.v, *to = l.train.offsets;
    for (int k = 0; k < 2; k++) assert_true(to[k + 1] - to[k] <= limit && w[to[k]] == v[0]);
    while (w[keep] == w[to[1] + keep]) keep++;
    assert_memory_equal(w + 1, v + prompt - keep + 1, (size_t)(keep - 1) * sizeof *w);
    for (int k = 0; k < 2; k++) /* then the answer from its start */
      assert_memory_equal(w + to[k] + keep, v + at[k] + prompt,
                          (size_t)(to[k + 1] - to[k] - keep) * sizeof *w);
    unload(&l);
  }
  Loaded l = load_ok(path, ALL ", max_tokens: 8", "");
  assert_true(l.train.n == 1 && l.report.dropped == 1);
  unload(&l);
  l = load(path, ALL ", max_tokens: 8, overlong: error", "");
  assert_non_null(strstr(l.err.msg, "o.jsonl:1: "));
  assert_non_null(strstr(l.err.msg, "tokens; expected at most max_tokens, 8"));
  unload(&l);
  unload(&whole);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(all_shapes),
    cmocka_unit_test(whole_dialogues),
    cmocka_unit_test(published_files),
    cmocka_unit_test(margins),
    cmocka_unit_test(margins_stay_with_their_pairs),
    cmocka_unit_test(left_out),
    cmocka_unit_test(errors_name_the_place),
    cmocka_unit_test(overlong_pairs),
};
TEST_MAIN(tests)
