/* orchestrator, data: SFT examples. */
#include "tests/data_test.h"

typedef struct Loaded {
  Recipe *recipe;
  Tokenizer *tokenizer;
  SftSet train, held;
  DataReport report;
  int rc;
  Error err;
} Loaded;

static Loaded load(const char *data, const char *more) {
  Loaded l = {.recipe = data_recipe("sft", data, more), .tokenizer = data_tokenizer()};
  l.rc = data_load_sft(l.recipe, l.tokenizer, 1024, &l.train, &l.held, &l.report, &l.err);
  return l;
}

static Loaded load_ok(const char *data, const char *more) {
  Loaded l = load(data, more);
  if (l.rc) fail_msg("%s", l.err.msg);
  return l;
}

static void unload(Loaded *l) {
  sft_set_free(&l->train);
  sft_set_free(&l->held);
  tokenizer_free(l->tokenizer);
  recipe_free(l->recipe);
}

static char *sft_data(const char *name, const char *text, const char *keys) {
  return mem_printf("sft: {path: %s, held_out: 0%s}", data_file(name, text), keys);
}

static Loaded load_text(const char *name, const char *text, const char *keys, const char *more) {
  char *data = sft_data(name, text, keys);
  Loaded l = load(data, more);
  free(data);
  return l;
}

static void expect_ok(const Loaded *l) {
  if (l->rc) fail_msg("%s", l->err.msg);
}

static int expect(const Loaded *l, int b, const Piece *pieces, int n) {
  return data_expect(l->tokenizer, &l->train.tokens, l->train.offsets, b, pieces, n);
}

/* The first learnt token of an example; all behind it are learnt as well. */
static int learnt_from(const Loaded *l, int b) {
  int from = 0, n = l->train.offsets[b + 1] - l->train.offsets[b];
  const uint8_t *loss = l->train.loss + l->train.offsets[b];
  while (from < n && !loss[from]) from++;
  for (int i = from; i < n; i++) assert_int_equal(loss[i], 1);
  return from;
}

static void raw_texts(void **state) {
  (void)state;
  const char *json = "{\"text\":\"Once upon a time\"}\n{\"text\":\"  \"}\n{\"text\":\"The end\"}\n";
  Loaded l = load_text("t.jsonl", json, "", "");
  expect_ok(&l);
  assert_int_equal(l.train.n, 2);
  assert_true(l.report.records == 3 && l.report.dropped == 1 && l.report.truncated == 0);
  expect(&l, 0, PIECES({BOS, 0}, {START, "Once upon a time"}, {EOS, 0}));
  expect(&l, 1, PIECES({BOS, 0}, {START, "The end"}, {EOS, 0}));
  assert_true(learnt_from(&l, 0) <= 1);
  unload(&l);
  l = load_text("t.txt", "Once upon a time\r\n\n   \nThe end", "", "");
  expect_ok(&l);
  assert_true(l.train.n == 2 && l.report.records == 2 && l.report.dropped == 0);
  expect(&l, 1, PIECES({BOS, 0}, {START, "The end"}, {EOS, 0}));
  unload(&l);
  l = load_text("s.txt", "\n##\nOnce\n\nupon\n\n##\n##\n \nThe end\n\n", ", separator: \"##\"", "");
  expect_ok(&l);
  assert_true(l.train.n == 2 && l.report.records == 2);
  expect(&l, 0, PIECES({BOS, 0}, {START, "Once\n\nupon"}, {EOS, 0}));
  expect(&l, 1, PIECES({BOS, 0}, {START, "The end"}, {EOS, 0}));
  unload(&l);
}

static void prompt_and_completion(void **state) {
  (void)state;
  const char *json =
      "[{\"prompt\":\"Once upon\",\"completion\":\" a time\"},"
      "{\"prompt\":\"\",\"completion\":\"The end\"},"
      "{\"prompt\":\"Once\",\"completion\":\"\"}]";
  Loaded l = load_text("p.json", json, "", "");
  expect_ok(&l);
  assert_true(l.train.n == 2 && l.report.records == 3 && l.report.dropped == 1);
  int from = data_expect(l.tokenizer, &l.train.tokens, l.train.offsets, 0,
                         PIECES({BOS, 0}, {START, "Once upon"}, {GO_ON, " a time"}, {EOS, 0}));
  assert_true(from > 0);
  TokenList prompt = {0};
  tokenizer_encode(l.tokenizer, "Once upon", 9, TOK_BOS, &prompt, &l.err);
  assert_int_equal(learnt_from(&l, 0), prompt.n);
  token_list_free(&prompt);
  expect(&l, 1, PIECES({BOS, 0}, {START, "The end"}, {EOS, 0}));
  assert_int_equal(learnt_from(&l, 1), 1);
  unload(&l);
  l = load_text("p.json", json, "", "sft: {loss_on: all}");
  expect_ok(&l);
  assert_int_equal(learnt_from(&l, 0), 0);
  unload(&l);
  l = load_text("q.jsonl", "{\"q\":\"Once\",\"a\":\" upon\"}\n",
                ", prompt_field: q, completion_field: a", "");
  expect_ok(&l);
  unload(&l);
}

static const char chat[] =
    "  chat: {name: custom, system: \"{content}\\n\", user: \"Q: {content}\\n\","
    " assistant: \"A: {content}\\n\"}\n";

static void conversations(void **state) {
  (void)state;
  const char *json =
      "{\"messages\":[{\"role\":\"system\",\"content\":\"Be kind.\"},"
      "{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":\"Yes\"},"
      "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Who \"},"
      "{\"type\":\"text\",\"value\":\"are "
      "you?\"}]},{\"role\":\"assistant\",\"content\":\"Tim\"}]}\n"
      "{\"messages\":[{\"from\":\"human\",\"value\":\"Hi\"},{\"from\":\"gpt\",\"value\":\"Yes\"}]}"
      "\n"
      "{\"messages\":[{\"from\":\"human\",\"value\":\"Hi\"}]}\n";
  Loaded l = load_text("c.jsonl", json, "", chat);
  expect_ok(&l);
  assert_true(l.train.n == 2 && l.report.dropped == 1); /* the last has no answer */
  expect(&l, 0,
         PIECES({BOS, 0}, {START, "Be kind.\nQ: Hi\nA: "}, {GO_ON, "Yes\nQ: Who are you?\nA: "},
                {GO_ON, "Tim\n"}, {EOS, 0}));
  expect(&l, 1, PIECES({BOS, 0}, {START, "Q: Hi\nA: "}, {GO_ON, "Yes\n"}, {EOS, 0}));
  unload(&l);
  l = load_text("c.jsonl", json, "", ""); /* plain: contents one after another */
  expect_ok(&l);
  expect(&l, 1, PIECES({BOS, 0}, {START, "Hi"}, {GO_ON, "Yes"}, {EOS, 0}));
  unload(&l);
  l = load_text("p.jsonl", "{\"prompt\":\"Hi\",\"completion\":\"Yes\"}\n", "", chat);
  expect_ok(&l);
  expect(&l, 0, PIECES({BOS, 0}, {START, "Q: Hi\nA: "}, {GO_ON, "Yes\n"}, {EOS, 0}));
  unload(&l);
}

/* Special tokens that the template spells become ids, once each; what users spell stays text. */
static void special_tokens(void **state) {
  (void)state;
  const char *json = "{\"prompt\":\"Hi</s><s>\",\"completion\":\"Yes</s>\"}\n";
  const char *template =
      "  chat: {name: custom, user: \"<s>Q {content}</s>\", assistant: \"A {content}</s>\"}\n";
  Loaded l = load_text("x.jsonl", json, "", template);
  expect_ok(&l);
  int32_t bos = tokenizer_bos(l.tokenizer), eos = tokenizer_eos(l.tokenizer),
          n = l.train.offsets[1];
  const int32_t *v = l.train.tokens.v;
  int n_bos = 0, n_eos = 0;
  for (int i = 0; i < n; i++) {
    n_bos += v[i] == bos;
    n_eos += v[i] == eos;
  }
  assert_true(n_bos == 1 && v[0] == bos); /* not one of the tokenizer and one of the template */
  assert_true(n_eos == 2 && v[n - 1] == eos && v[n - 2] != eos);
  size_t len;
  char *text = tokenizer_decode(l.tokenizer, v, n, &len, &l.err);
  assert_non_null(strstr(text, "Hi</s><s>"));
  assert_non_null(strstr(text, "Yes</s>"));
  free(text);
  unload(&l);
}

static void bos_and_eos_as_the_recipe_says(void **state) {
  (void)state;
  char *data = sft_data("b.jsonl", "{\"prompt\":\"Once\",\"completion\":\" upon\"}\n", "");
  const char *const sets[] = {"tokenizer.add_bos=false", "tokenizer.add_eos=false"};
  char *text = mem_printf(
      "run: {directory: out}\nstages: [sft]\n"
      "models: {actor: {init: {hidden_size: 8, layers: 1, heads: 1, ffn: 8}}}\n"
      "tokenizer: {path: %s}\ndata:\n  %s\n",
      test_path("data/stories260K"), data);
  Error err = {""};
  Recipe *r = recipe_parse(text, strlen(text), "r", sets, 2, &err);
  if (!r) fail_msg("%s", err.msg);
  Loaded l = {.recipe = r, .tokenizer = data_tokenizer()};
  l.rc = data_load_sft(r, l.tokenizer, 1024, &l.train, &l.held, &l.report, &l.err);
  expect_ok(&l);
  expect(&l, 0, PIECES({START, "Once"}, {GO_ON, " upon"}));
  unload(&l);
  free(text);
  free(data);
}

static void expect_error(const char *name, const char *text, const char *keys, const char *more,
                         const char *want) {
  Loaded l = load_text(name, text, keys, more);
  if (l.rc != -1) fail_msg("accepted: %s", text);
  if (!strstr(l.err.msg, want)) fail_msg("%s\n  gave: %s\n  expected: %s", text, l.err.msg, want);
  assert_null(l.train.tokens.v);
  unload(&l);
}

static void errors_name_the_place(void **state) {
  (void)state;
  static const struct {
    const char *name, *text, *want;
  } bad[] = {
      {"e.jsonl", "{\"text\":\"a\"}\n\n{\"txt\":\"b\",\"id\":1}\n",
       "e.jsonl:3: no field \"messages\", \"prompt\" or \"text\"; the record has: txt, id"},
      {"e.jsonl", "{}\n",
       "e.jsonl:1: no field \"messages\", \"prompt\" or \"text\"; the record has: nothing"},
      {"e.jsonl", "{\"prompt\":\"a\",\"answer\":\"b\"}\n",
       "e.jsonl:1: no field \"completion\"; the record has: prompt, answer"},
      {"e.jsonl", "{\"prompt\":\"a\",\"completion\":null}\n",
       "e.jsonl:1: no field \"completion\"; the record has: prompt, completion (null)"},
      {"e.jsonl", "{\"messages\":\"a\"}\n",
       "e.jsonl:1: field \"messages\" is a string; expected a list of messages"},
      {"e.json", "[{\"text\":\"a\"},{\"text\":3}]",
       "e.json: record 2: field \"text\" is an integer; expected a text"},
      {"e.jsonl", "{\"prompt\":3,\"completion\":\"b\"}\n",
       "e.jsonl:1: field \"prompt\" is an integer; expected a text, a message or a list"},
      {"e.jsonl", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},7]}\n",
       "field \"messages\", message 2: an integer; expected an object"},
      {"e.jsonl", "{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}\n",
       "field \"messages\", message 1: role \"tool\"; expected system, user"},
      {"e.jsonl", "{\"messages\":[{\"content\":\"a\"}]}\n",
       "message 1: no role; expected \"role\" or \"from\""},
      {"e.jsonl", "{\"messages\":[{\"role\":\"user\"}]}\n", "message 1: no content; expected"},
      {"e.jsonl",
       "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\",\"url\":\"x\"}]}]}\n",
       "message 1: content with a part that is no text"},
      {"e.jsonl", "{\"text\":\"a\xff\"}\n", "e.jsonl:1:"},
      {"e.jsonl", "[1,2]", "e.jsonl: record 1: found 1; expected an object"},
      {"e.jsonl", "", "e.jsonl: holds no records"},
      {"e.jsonl", "\n \n", "e.jsonl: holds no records"},
      {"e.json", "[]", "e.json: holds no records"},
      {"e.txt", "\n\n", "e.txt: holds no records"},
      {"e.jsonl", "{\"text\":\"\"}\n{\"text\":\" \"}\n",
       "e.jsonl: none of 2 records is left: 2 empty"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    expect_error(bad[i].name, bad[i].text, "", "", bad[i].want);
  expect_error("e.jsonl", "{\"text\":\"\"}\n", ", overlong: error", "",
               "e.jsonl:1: the answer is empty");
  expect_error("e.jsonl",
               "{\"messages\":[{\"role\":\"system\",\"content\":\"a\"},{\"role\":\"assistant\","
               "\"content\":\"b\"}]}\n",
               "", "  chat: {name: custom, user: \"{content}\", assistant: \"{content}\"}",
               "e.jsonl:1: has a system turn, but data.chat.system is not given");
  Recipe *r = data_recipe("sft", "sft: {path: absent.jsonl}", "");
  Tokenizer *t = data_tokenizer();
  SftSet a, b;
  DataReport rep;
  Error err = {""};
  assert_int_equal(data_load_sft(r, t, 1024, &a, &b, &rep, &err), -1);
  assert_non_null(strstr(err.msg, "absent.jsonl: cannot open"));
  tokenizer_free(t);
  recipe_free(r);
}

/* Bytes that are no UTF-8 in a text file become byte tokens: this vocabulary has them. */
static void broken_utf8_in_text(void **state) {
  (void)state;
  Loaded l = load_text("u.txt", "caf\xe9 ol\xc3\n", "", "");
  expect_ok(&l);
  expect(&l, 0, PIECES({BOS, 0}, {START, "caf\xe9 ol\xc3"}, {EOS, 0}));
  unload(&l);
}

static const char long_json[] =
    "{\"prompt\":\"One day a girl named Lily went to the park to play\",\"completion\":\" and then "
    "she went "
    "home to sleep\"}\n{\"text\":\"Once\"}\n";

static void overlong_examples(void **state) {
  (void)state;
  Loaded whole = load_text("o.jsonl", long_json, "", "");
  expect_ok(&whole);
  int n = whole.train.offsets[1], prompt = learnt_from(&whole, 0), answer = n - prompt;
  const int32_t *v = whole.train.tokens.v;
  Loaded l = load_text("o.jsonl", long_json, ", max_tokens: 8, overlong: drop", "");
  expect_ok(&l);
  assert_true(l.train.n == 1 && l.report.dropped == 1 && l.report.truncated == 0);
  unload(&l);
  expect_error("o.jsonl", long_json, ", max_tokens: 8, overlong: error", "", "o.jsonl:1: ");
  expect_error("o.jsonl", long_json, ", max_tokens: 2", "",
               "records is left: 2 longer than max_tokens, 2");
  for (int limit = 2; limit <= n; limit++) {
    char keys[80];
    snprintf(keys, sizeof keys, ", max_tokens: %d, overlong: truncate", limit);
    l = load_text("o.jsonl", long_json, keys, "");
    expect_ok(&l);
    assert_true(l.train.n == 2 && l.report.dropped == 0);
    int got = l.train.offsets[1], from = learnt_from(&l, 0);
    assert_int_equal(got, limit);
    assert_true(from < got); /* something is left to learn */
    /* The answer is whole as soon as it takes no more than half of the room. */
    int kept = got - from < answer ? got - from : answer;
    if (answer <= limit - limit / 2) assert_int_equal(kept, answer);
    assert_memory_equal(l.train.tokens.v + from, v + prompt, (size_t)kept * sizeof *v);
    /* The prompt lost its beginning, but for the BOS. */
    assert_int_equal(l.train.tokens.v[0], v[0]);
    assert_memory_equal(l.train.tokens.v + 1, v + prompt - from + 1,
                        (size_t)(from - 1) * sizeof *v);
    unload(&l);
  }
  unload(&whole);
}

static Loaded load_hundred(const char *keys, int64_t seed) {
  char *text = NULL;
  size_t len;
  FILE *f = open_memstream(&text, &len);
  for (int i = 0; i < 100; i++) fprintf(f, "{\"text\":\"number %d\"}\n", i);
  fclose(f);
  char *data = mem_printf("sft: {path: %s%s}", data_file("h.jsonl", text), keys);
  Loaded l = {.recipe = data_recipe("sft", data, ""), .tokenizer = data_tokenizer()};
  l.recipe->run.seed = seed;
  l.rc = data_load_sft(l.recipe, l.tokenizer, 1024, &l.train, &l.held, &l.report, &l.err);
  expect_ok(&l);
  free(text);
  free(data);
  return l;
}

/* The numbers that a set's texts hold. */
static void mark(const Loaded *l, const SftSet *s, int *seen) {
  for (int i = 0; i < s->n; i++) {
    size_t len;
    Error err = {""};
    char *text = tokenizer_decode(l->tokenizer, s->tokens.v + s->offsets[i],
                                  s->offsets[i + 1] - s->offsets[i], &len, &err);
    seen[atoi(text + strlen("number "))]++;
    free(text);
  }
}

static void held_out_examples(void **state) {
  (void)state;
  int held[3][100] = {{0}};
  for (int k = 0; k < 3; k++) { /* seed 1 twice, then seed 2 */
    int all[100] = {0};
    Loaded l = load_hundred(", held_out: 0.2", k < 2 ? 1 : 2);
    assert_true(l.held.n == 20 && l.train.n == 80);
    mark(&l, &l.train, all);
    mark(&l, &l.held, all);
    mark(&l, &l.held, held[k]);
    for (int i = 0; i < 100; i++) assert_int_equal(all[i], 1); /* each in one of the two */
    unload(&l);
  }
  assert_memory_equal(held[0], held[1], sizeof held[0]);
  assert_memory_not_equal(held[0], held[2], sizeof held[0]);
  static const struct {
    const char *keys;
    int train, held;
  } sizes[] = {{", held_out: 0", 100, 0},
               {", held_out: 0.999", 1, 99},
               {", held_out: 0.001", 99, 1},
               {", held_out: 0.5, max_records: 1", 1, 0},
               {", held_out: 0.01, max_records: 2", 1, 1}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    Loaded l = load_hundred(sizes[i].keys, 1);
    assert_int_equal(l.train.n, sizes[i].train);
    assert_int_equal(l.held.n, sizes[i].held);
    unload(&l);
  }
}

/* The examples of `part`, each beside the same in `whole`: tokens are its own and so is its mask.
 */
static void expect_masks(const SftSet *part, const SftSet *whole) {
  for (int i = 0; i < part->n; i++) {
    int from = part->offsets[i], n = part->offsets[i + 1] - from, found = 0;
    for (int k = 0; k < whole->n; k++) {
      int at = whole->offsets[k];
      if (whole->offsets[k + 1] - at != n ||
          memcmp(whole->tokens.v + at, part->tokens.v + from, (size_t)n * sizeof(int32_t)) != 0)
        continue;
      assert_memory_equal(whole->loss + at, part->loss + from, (size_t)n);
      found++;
    }
    assert_int_equal(found, 1);
  }
}

static void masks_stay_with_their_examples(void **state) {
  (void)state;
  static const char words[] = "one day a girl went to the park and saw a bird";
  char *text = NULL;
  size_t len;
  FILE *f = open_memstream(&text, &len);
  for (int i = 0; i < 30; i++)
    fprintf(f, "{\"prompt\":\"number %d %.*s\",\"completion\":\" %.*s\"}\n", i, 2 + 11 * i % 40,
            words, 2 + 7 * i % 40, words);
  fclose(f);
  const char *path = data_file("masks.jsonl", text);
  char *all = mem_printf("sft: {path: %s, held_out: 0}", path),
       *some = mem_printf("sft: {path: %s, held_out: 0.4}", path);
  Loaded whole = load_ok(all, ""), parts = load_ok(some, "");
  assert_true(whole.train.n == 30 && parts.train.n == 18 && parts.held.n == 12);
  expect_masks(&parts.train, &whole.train);
  expect_masks(&parts.held, &whole.train);
  unload(&whole);
  unload(&parts);
  free(all);
  free(some);
  free(text);
}

static void real_stories(void **state) {
  (void)state;
  char *data =
      mem_printf("sft: {path: %s, separator: <|endoftext|>, max_records: 50, held_out: 0.1}",
                 test_path("data/tinystories/tinystories_sample.txt"));
  Loaded l = load_ok(data, "");
  assert_true(l.report.records == 50 && l.train.n + l.held.n + l.report.dropped == 50);
  assert_true(l.held.n >= 4);
  for (int i = 0; i < l.train.n; i++) {
    assert_int_equal(l.train.tokens.v[l.train.offsets[i]], tokenizer_bos(l.tokenizer));
    assert_int_equal(l.train.tokens.v[l.train.offsets[i + 1] - 1], tokenizer_eos(l.tokenizer));
  }
  free(data);
  unload(&l);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(raw_texts),
    cmocka_unit_test(prompt_and_completion),
    cmocka_unit_test(conversations),
    cmocka_unit_test(special_tokens),
    cmocka_unit_test(bos_and_eos_as_the_recipe_says),
    cmocka_unit_test(errors_name_the_place),
    cmocka_unit_test(broken_utf8_in_text),
    cmocka_unit_test(overlong_examples),
    cmocka_unit_test(masks_stay_with_their_examples),
    cmocka_unit_test(held_out_examples),
    cmocka_unit_test(real_stories),
};
TEST_MAIN(tests)
