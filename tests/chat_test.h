/* What the tests of chat templates share: a byte-level tokenizer with the special tokens of all
 * families, conversations in one line, and texts that show where the answers are. */
#ifndef CHAT_TEST_H
#define CHAT_TEST_H

#include "generation/chat.h"
#include "tests/bpe_test.h"

static const char *const chat_specials[] = {"<s>",
                                            "</s>",
                                            "<|begin_of_text|>",
                                            "<|start_header_id|>",
                                            "<|eot_id|>",
                                            "<|im_start|>",
                                            "<|im_end|>",
                                            "<|end_header_id|>",
                                            "<|system|>",
                                            "<|user|>",
                                            "<|assistant|>",
                                            "<|end|>",
                                            "<|endoftext|>",
                                            "<bos>",
                                            "<eos>",
                                            "<start_of_turn>",
                                            "<end_of_turn>",
                                            "<|end_of_text|>"};
enum { CHAT_SPECIALS = sizeof chat_specials / sizeof *chat_specials };

/* A folder with that tokenizer; the first `n` of its special tokens. more: further members of
 * tokenizer_config.json, behind a comma, or "". */
static inline const char *chat_folder(int n, const char *bos, const char *eos, const char *more) {
  char *root, *config;
  size_t len;
  FILE *f = open_memstream(&root, &len);
  fputs("\"added_tokens\":[", f);
  for (int i = 0; i < n; i++)
    fprintf(f, "%s{\"id\":%d,\"content\":\"%s\",\"special\":true}", i ? "," : "", 256 + i,
            chat_specials[i]);
  fputs("]", f);
  if (fclose(f) != 0) die("out of memory");
  config = mem_printf("{\"eos_token\":\"%s\"%s%s%s%s}", eos, bos ? ",\"bos_token\":\"" : "",
                      bos ? bos : "", bos ? "\"" : "", more);
  const char *dir = bpe_json_folder((BpeFile){.root = root}, config);
  free(root);
  free(config);
  return dir;
}

static inline Tokenizer *chat_tokenizer(const char *bos, const char *eos) {
  return bpe_load(chat_folder(CHAT_SPECIALS, bos, eos, ""));
}

/* "s:Be kind.~u:Hi~a:Yes" in static storage, until the next call. */
typedef struct Talk {
  ChatMessage m[16];
  int n;
} Talk;
static inline Talk talk(const char *text) {
  static char copy[1024];
  Talk t = {.n = 0};
  char *rest = copy, *part;
  snprintf(copy, sizeof copy, "%s", text);
  while ((part = strsep(&rest, "~"))) {
    const char *role = *part == 's' ? "system" : *part == 'u' ? "user" : "assistant";
    t.m[t.n++] = (ChatMessage){role, part + 2, strlen(part + 2)};
  }
  return t;
}

static inline Chat *chat_of(const char *text, const Tokenizer *t) {
  Error err = {""};
  Chat *c = chat_parse("chat_template", text, strlen(text), t, &err);
  if (!c) fail_msg("%s", err.msg);
  return c;
}

/* The text with its answers in [[ ]]; static storage, until the next call. */
static inline const char *chat_shown(const ChatText *t) {
  static char out[8192];
  size_t n = 0;
  for (size_t i = 0; i <= t->len; i++) {
    for (int k = 0; k < t->n_answers; k++) {
      if (t->answers[k].to == i) n += (size_t)sprintf(out + n, "]]");
      if (t->answers[k].from == i) n += (size_t)sprintf(out + n, "[[");
    }
    if (i < t->len) out[n++] = t->text[i];
  }
  out[n] = 0;
  return out;
}

static inline void chat_expect_prompt(const Chat *c, const char *messages, const char *want) {
  Error err = {""};
  Talk t = talk(messages);
  ChatText text;
  if (chat_render(c, t.m, t.n, true, &text, &err)) fail_msg("%s", err.msg);
  assert_string_equal(chat_shown(&text), want);
  chat_text_free(&text);
}

static inline void chat_expect_answers(const Chat *c, const char *messages, const char *want) {
  Error err = {""};
  Talk t = talk(messages);
  ChatText text;
  if (chat_render_answers(c, t.m, t.n, &text, &err)) fail_msg("%s", err.msg);
  assert_string_equal(chat_shown(&text), want);
  chat_text_free(&text);
}

static inline void chat_refuse(const Chat *c, const char *messages, const char *want) {
  Error err = {""};
  Talk t = talk(messages);
  ChatText text;
  bool answers = t.m[t.n - 1].role[0] == 'a';
  int rc = answers ? chat_render_answers(c, t.m, t.n, &text, &err)
                   : chat_render(c, t.m, t.n, true, &text, &err);
  if (rc == 0) fail_msg("%s", chat_shown(&text));
  if (!strstr(err.msg, want)) fail_msg("error is \"%s\"; expected \"%s\"", err.msg, want);
  assert_true(!text.text && !text.content && !text.answers);
}

#endif
