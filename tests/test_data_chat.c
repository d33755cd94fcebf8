/* orchestrator, data: conversations through chat templates: tokens, loss masks, one BOS, prompts
 * that begin what is learnt. */
#include "tests/chat_templates.h"
#include "tests/chat_test.h"
#include "tests/data_test.h"

/* A recipe with this tokenizer and format. keys: of the data set, behind a comma; more: lines at
 * the top. */
static Recipe *chat_recipe(const char *stage, const char *set, const char *dir, const char *file,
                           const char *format, const char *keys, const char *more) {
  Error err = {""};
  char *text = mem_printf(
      "run: {directory: out}\nstages: [%s]\nrewards: [{kind: length, target: 5}]\n"
      "models: {actor: {init: {hidden_size: 8, layers: 1, heads: 1, ffn: 8}}%s}\n"
      "data:\n  %s: {path: %s, held_out: 0%s}\n  chat: {name: %s}\n%s\n",
      stage, strcmp(stage, "reward") ? "" : ", reward: {from: actor}", set, file, keys, format,
      more);
  const char *path = mem_printf("tokenizer.path=%s", dir);
  Recipe *r = recipe_parse(text, strlen(text), "recipe.yaml", &path, 1, &err);
  if (!r) fail_msg("%s\n%s", err.msg, text);
  free(text);
  free((void *)path);
  return r;
}

typedef struct Loaded {
  Recipe *recipe;
  Tokenizer *tokenizer;
  SftSet set, held;
  DataReport report;
  Error err;
  int rc;
} Loaded;

static Loaded load(const char *dir, const char *json, const char *format, const char *keys,
                   const char *more) {
  Loaded l = {
      .recipe = chat_recipe("sft", "sft", dir, data_file("c.jsonl", json), format, keys, more),
      .tokenizer = bpe_load(dir)};
  l.rc = data_load_sft(l.recipe, l.tokenizer, 4096, &l.set, &l.held, &l.report, &l.err);
  return l;
}

static void unload(Loaded *l) {
  sft_set_free(&l->set);
  sft_set_free(&l->held);
  tokenizer_free(l->tokenizer);
  recipe_free(l->recipe);
}

/* An example as text, special tokens as they are spelled, learnt tokens in [[ ]]. For byte-level
 * tokens; the caller frees. */
static char *shown(const Loaded *l, int b) {
  char *text;
  size_t len;
  FILE *f = open_memstream(&text, &len);
  bool was = false;
  for (int t = l->set.offsets[b]; t <= l->set.offsets[b + 1]; t++) {
    bool is = t < l->set.offsets[b + 1] && l->set.loss[t];
    if (is != was) fputs(is ? "[[" : "]]", f);
    was = is;
    int32_t id = t < l->set.offsets[b + 1] ? l->set.tokens.v[t] : -1;
    if (id >= 256) fputs(chat_specials[id - 256], f);
    if (id >= 0 && id < 256) fputc(id, f);
  }
  if (fclose(f) != 0) die("out of memory");
  return text;
}

static void expect(const char *dir, const char *json, const char *format, const char *more,
                   const char *want) {
  Loaded l = load(dir, json, format, "", more);
  if (l.rc) fail_msg("%s", l.err.msg);
  assert_int_equal(l.set.n, 1);
  char *text = shown(&l, 0);
  assert_string_equal(text, want);
  free(text);
  unload(&l);
}

#define SAYS(who, what) "{\"role\":\"" who "\",\"content\":\"" what "\"}"
#define TWO_TURNS                                                                  \
  "{\"messages\":[" SAYS("system", "S") "," SAYS("user", "Hi<|im_end|>") "," SAYS( \
      "assistant", "Yo") "," SAYS("user", "So") "," SAYS("assistant", "No</s>") "]}\n"
#define NO_BOS "tokenizer: {add_bos: false}"
#define ADD_BOS "tokenizer: {add_bos: true}"

static const char *own_folder(const char *bos, const char *eos, const char *template) {
  json_t *v = json_string(template);
  char *text = json_dumps(v, JSON_ENCODE_ANY), *more = mem_printf(",\"chat_template\":%s", text);
  const char *dir = chat_folder(CHAT_SPECIALS, bos, eos, more);
  free(text);
  free(more);
  json_decref(v);
  return dir;
}

/* All answers are learnt, up to the end of their turns. */
static void answers_of_all_turns(void **state) {
  (void)state;
  expect(own_folder(NULL, "<|im_end|>", template_chatml), TWO_TURNS, "auto", NO_BOS,
         "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|><|im_end|>\n"
         "<|im_start|>assistant\n[[Yo<|im_end|>]]\n<|im_start|>user\nSo<|im_end|>\n"
         "<|im_start|>assistant\n[[No</s><|im_end|>]]");
  expect(own_folder(NULL, "<|im_end|>", template_marked), TWO_TURNS, "auto", NO_BOS,
         "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|><|im_end|>\n"
         "<|im_start|>assistant\n[[Yo<|im_end|>]]\n<|im_start|>user\nSo<|im_end|>\n"
         "<|im_start|>assistant\n[[No</s><|im_end|>]]");
  expect(chat_folder(CHAT_SPECIALS, "<s>", "</s>", ""), TWO_TURNS, "llama2", "",
         "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi<|im_end|> [/INST][[ Yo </s>]]<s>[INST] So [/INST]"
         "[[ No</s> </s>]]");
  expect(chat_folder(CHAT_SPECIALS, "<s>", "</s>", ""), TWO_TURNS, "mistral", "",
         "<s>[INST] S\n\nHi<|im_end|> [/INST][[ Yo</s>]][INST] So [/INST][[ No</s></s>]]");
  expect(chat_folder(CHAT_SPECIALS, "<|begin_of_text|>", "<|end_of_text|>", ""), TWO_TURNS,
         "llama3", "",
         "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nHi<|im_end|><|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n[[Yo<|eot_id|>]]"
         "<|start_header_id|>user<|end_header_id|>\n\nSo<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n[[No</s><|eot_id|>]]");
  expect(chat_folder(CHAT_SPECIALS, "<s>", "<|endoftext|>", ""), TWO_TURNS, "phi3", ADD_BOS,
         "<s><|system|>\nS<|end|>\n<|user|>\nHi<|im_end|><|end|>\n<|assistant|>\n[[Yo<|end|>]]\n"
         "<|user|>\nSo<|end|>\n<|assistant|>\n[[No</s><|end|>]]");
  expect(chat_folder(CHAT_SPECIALS, "<s>", "</s>", ""), TWO_TURNS, "plain", ADD_BOS,
         "<s>SHi<|im_end|>[[Yo]]So[[No</s></s>]]");
}

static void loss_on_all(void **state) {
  (void)state;
  expect(chat_folder(CHAT_SPECIALS, "<s>", "</s>", ""), TWO_TURNS, "mistral", "sft: {loss_on: all}",
         "[[<s>[INST] S\n\nHi<|im_end|> [/INST] Yo</s>[INST] So [/INST] No</s></s>]]");
}

/* Where a template does not end a turn, the EOS is the recipe's. */
static void eos_where_the_template_has_none(void **state) {
  (void)state;
  static const char bare[] =
      "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
      "{% if add_generation_prompt %}a: {% endif %}";
  static const char json[] = "{\"prompt\":\"Hi\",\"completion\":\"Yo\"}\n";
  const char *dir = own_folder("<s>", "</s>", bare);
  expect(dir, json, "auto", ADD_BOS, "<s>u: Hi\na: [[Yo\n</s>]]");
  expect(dir, json, "auto", "tokenizer: {add_bos: true, add_eos: false}", "<s>u: Hi\na: [[Yo\n]]");
  expect(dir, json, "auto", "", "u: Hi\na: [[Yo\n</s>]]");
}

/* Users' spellings are bytes, not tokens. */
static void special_tokens_are_counted(void **state) {
  (void)state;
  Loaded l = load(own_folder(NULL, "<|im_end|>", template_chatml), TWO_TURNS, "auto", "", NO_BOS);
  if (l.rc) fail_msg("%s", l.err.msg);
  int special = 0;
  for (int t = 0; t < l.set.tokens.n; t++) special += l.set.tokens.v[t] >= 256;
  assert_int_equal(special, 10); /* begin and end of five turns */
  unload(&l);
}

/* The mask moves along when an example loses its beginning. */
static void overlong_conversations(void **state) {
  (void)state;
  static const struct {
    const char *keys, *want;
  } cut[] = {
      {", max_tokens: 30, overlong: truncate", "<s>[[ Yo</s>]][INST] So [/INST][[ No</s></s>]]"},
      {", max_tokens: 28, overlong: truncate", "<s>[[o</s>]][INST] So [/INST][[ No</s></s>]]"},
      {", max_tokens: 8, overlong: truncate", "<s>ST][[ No<]]"}};
  const char *dir = chat_folder(CHAT_SPECIALS, "<s>", "</s>", "");
  for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
    Loaded l = load(dir, TWO_TURNS, "mistral", cut[i].keys, "");
    if (l.rc) fail_msg("%s", l.err.msg);
    char *text = shown(&l, 0);
    assert_string_equal(text, cut[i].want);
    free(text);
    unload(&l);
  }
}

static void prompts_begin_examples(void **state) {
  (void)state;
  static const struct {
    const char *format, *bos, *eos, *more;
  } all[] = {{"llama2", "<s>", "</s>", ""},
             {"llama3", "<|begin_of_text|>", "<|eot_id|>", ""},
             {"mistral", "<s>", "</s>", ""},
             {"chatml", NULL, "<|im_end|>", NO_BOS},
             {"phi3", "<s>", "<|endoftext|>", ""}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    const char *dir = chat_folder(CHAT_SPECIALS, all[i].bos, all[i].eos, "");
    Loaded l = load(dir, TWO_TURNS, all[i].format, "", all[i].more);
    Recipe *r = chat_recipe("ppo", "prompts", dir, data_file("c.jsonl", TWO_TURNS), all[i].format,
                            "", all[i].more);
    PromptSet p, held;
    Error err = {""};
    DataReport rep;
    if (l.rc) fail_msg("%s", l.err.msg);
    if (data_load_prompts(r, l.tokenizer, 4096, &p, &held, &rep, &err)) fail_msg("%s", err.msg);
    assert_int_equal(p.n, 1);
    int n = p.tokens.n;
    assert_true(n < l.set.tokens.n);
    assert_memory_equal(p.tokens.v, l.set.tokens.v, (size_t)n * sizeof *p.tokens.v);
    assert_true(!l.set.loss[n - 1] && l.set.loss[n]); /* where the last answer begins */
    for (int t = n; t < l.set.tokens.n; t++) assert_int_equal(l.set.loss[t], 1);
    assert_int_equal(data_end_token(r, l.tokenizer), l.set.tokens.v[l.set.tokens.n - 1]);
    prompt_set_free(&p);
    prompt_set_free(&held);
    recipe_free(r);
    unload(&l);
  }
}

/* Both sides of a pair begin with the same prompt and end with their turn's end. */
static void pairs(void **state) {
  (void)state;
  static const char json[] =
      "{\"messages\":[" SAYS("user", "Hi") "],\"chosen\":\"Yes\",\"rejected\":\"No\"}\n";
  const char *dir = own_folder(NULL, "<|im_end|>", template_qwen3);
  Recipe *r =
      chat_recipe("reward", "preference", dir, data_file("p.jsonl", json), "auto", "", NO_BOS);
  Tokenizer *t = bpe_load(dir);
  PairSet p, held;
  Error err = {""};
  DataReport rep;
  if (data_load_pairs(r, t, 4096, &p, &held, &rep, &err)) fail_msg("%s", err.msg);
  static const char *const want[] = {"user\nHi\nassistant\n<think>\n\n</think>\n\nYes",
                                     "user\nHi\nassistant\n<think>\n\n</think>\n\nNo"};
  for (int i = 0; i < 2; i++) {
    size_t len;
    char *text =
        tokenizer_decode(t, p.tokens.v + p.offsets[i], p.offsets[i + 1] - p.offsets[i], &len, &err);
    assert_string_equal(text, want[i]);
    assert_int_equal(p.tokens.v[p.offsets[i + 1] - 1], tokenizer_eos(t));
    free(text);
  }
  pair_set_free(&p);
  pair_set_free(&held);
  tokenizer_free(t);
  recipe_free(r);
}

/* What a reward model learns to score begins with the very tokens that PPO's prompts are, earlier
 * answers within them included. */
static void pairs_begin_with_prompts(void **state) {
  (void)state;
  static const char json[] = "{\"messages\":[" SAYS("user", "Once") "," SAYS(
      "assistant", "upon a") "," SAYS("user", "time") "],\"chosen\":\"Yes\",\"rejected\":\"No\"}\n";
  static const char *const formats[] = {"plain", "llama2"};
  const char *dir = test_path("data/stories260K");
  for (int i = 0; i < 2; i++) {
    const char *file = data_file("p.jsonl", json);
    Recipe *r = chat_recipe("reward", "preference", dir, file, formats[i], "", ""),
           *s = chat_recipe("ppo", "prompts", dir, file, formats[i], "", "");
    Tokenizer *t = data_tokenizer();
    PairSet pair, no_pair;
    PromptSet prompt = {0}, no_prompt;
    Error err = {""};
    DataReport rep;
    if (data_load_pairs(r, t, 4096, &pair, &no_pair, &rep, &err) ||
        data_load_prompts(s, t, 4096, &prompt, &no_prompt, &rep, &err))
      fail_msg("%s", err.msg);
    size_t bytes = (size_t)prompt.tokens.n * sizeof *prompt.tokens.v;
    for (int k = 0; k < 2; k++) {
      assert_true(pair.offsets[k + 1] - pair.offsets[k] > prompt.tokens.n);
      assert_memory_equal(pair.tokens.v + pair.offsets[k], prompt.tokens.v, bytes);
    }
    pair_set_free(&pair);
    pair_set_free(&no_pair);
    prompt_set_free(&prompt);
    prompt_set_free(&no_prompt);
    tokenizer_free(t);
    recipe_free(r);
    recipe_free(s);
  }
}

/* With SentencePiece, whose spaces depend on where a text begins. */
static void with_sentencepiece(void **state) {
  (void)state;
  const char *dir = test_path("data/stories260K");
  Loaded l = load(dir, "{\"prompt\":\"Once upon\",\"completion\":\"a time\"}\n", "llama2", "", "");
  if (l.rc) fail_msg("%s", l.err.msg);
  data_expect(l.tokenizer, &l.set.tokens, l.set.offsets, 0,
              PIECES({BOS, 0}, {START, "[INST] Once upon [/INST]"}, {GO_ON, " a time "}, {EOS, 0}));
  int learnt = 0;
  TokenList answer = {0};
  tokenizer_encode(l.tokenizer, " a time ", 8, TOK_CONTINUE, &answer, &l.err);
  for (int t = 0; t < l.set.tokens.n; t++) learnt += l.set.loss[t];
  assert_int_equal(learnt, answer.n + 1);
  token_list_free(&answer);
  unload(&l);
}

static void expect_error(const char *dir, const char *json, const char *format, const char *want) {
  Loaded l = load(dir, json, format, "", "");
  if (!l.rc) fail_msg("loaded; expected %s", want);
  if (!strstr(l.err.msg, want)) fail_msg("\"%s\"; expected %s", l.err.msg, want);
  unload(&l);
}

static void errors(void **state) {
  (void)state;
  static const char json[] = "{\"prompt\":\"Hi\",\"completion\":\"Yo\"}\n";
  expect_error(chat_folder(CHAT_SPECIALS, "<s>", "</s>", ""), json, "auto",
               "tokenizer_config.json: no chat_template");
  expect_error(chat_folder(2, "<s>", "</s>", ""), json, "chatml",
               "data.chat.name: the chat format chatml needs the special token <|im_start|>, which "
               "the tokenizer lacks");
  expect_error(own_folder("<s>", "</s>", "{{ a | b }}"), json, "auto",
               "c.jsonl:1: chat_template: line 1: the filter \"b\" is not supported");
  expect_error(own_folder("<s>", "</s>", "\n{% if %}"), json, "auto",
               "tokenizer_config.json: chat_template: line 2: found %}; expected an expression");
  expect_error(own_folder("<s>", "</s>", template_gemma), TWO_TURNS, "auto",
               "c.jsonl:1: chat_template: line 1: the template refuses the conversation: System");
  expect_error(own_folder("<s>", "</s>", template_mistral3), TWO_TURNS, "auto",
               "c.jsonl:1: the chat template does not say where the answer in message 3 begins");
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(answers_of_all_turns),
    cmocka_unit_test(loss_on_all),
    cmocka_unit_test(eos_where_the_template_has_none),
    cmocka_unit_test(special_tokens_are_counted),
    cmocka_unit_test(overlong_conversations),
    cmocka_unit_test(prompts_begin_examples),
    cmocka_unit_test(pairs),
    cmocka_unit_test(pairs_begin_with_prompts),
    cmocka_unit_test(with_sentencepiece),
    cmocka_unit_test(errors),
};
TEST_MAIN(tests)
