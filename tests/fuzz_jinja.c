/* Fuzz target: chat templates. Whatever the template, a render ends, an error names the line, what
 * users wrote is known as theirs byte for byte, and answers lie within the text. */
#include <stdlib.h>
#include <string.h>

#include "generation/chat_internal.h"
#include "tests/chat_templates.h"
#include "tests/fuzz.h"

/* No template spells this: inputs with a part of it are passed over (libFuzzer finds it). */
static const char secret[] = "<|qX7~zK@|>";

const FuzzSeed fuzz_seeds[] = {
    FUZZ_SEED(template_llama2),
    FUZZ_SEED(template_llama3),
    FUZZ_SEED(template_llama31),
    FUZZ_SEED(template_mistral1),
    FUZZ_SEED(template_mistral3),
    FUZZ_SEED(template_qwen25),
    FUZZ_SEED(template_qwen3),
    FUZZ_SEED(template_phi3),
    FUZZ_SEED(template_chatml),
    FUZZ_SEED(template_zephyr),
    FUZZ_SEED(template_gemma),
    FUZZ_SEED(template_marked),
    FUZZ_SEED("{% macro f(x, y=2) %}{{ x ~ y }}{% endmacro %}{{ f(1) }}{{ f(y=3, x='a') }}"),
    FUZZ_SEED("{% for m in messages if m.role is in ['user'] %}{{ loop.index }}{% if loop.last %}"
              "{% break %}{% endif %}{% else %}none{% endfor %}{% raw %}{{ x }}{% endraw %}"),
    FUZZ_SEED("{% set ns = namespace(n=0, s='') %}{% for m in messages[1:][::-1] %}"
              "{% set ns.n = ns.n + 1 %}{% set ns.s = ns.s ~ m.content[1:-1] %}{% endfor %}"
              "{{ ns.s | replace('a', '\\x41\\u00e9') | trim | tojson(indent=2) }}{{ ns.n // 2 }}"),
    FUZZ_SEED(
        "{% set x | upper %}{{ messages | map(attribute='role') | join(', ') }}{% endset %}"
        "{{ x[0] ~ x[-1] }}{{ messages | selectattr('role', '==', 'user') | list | length }}"),
    FUZZ_SEED("{%- with a = 1.5e3, b = -7 % 3 -%}{{ a // b ** 2 }}{{ [a, b, (1,), {'k': none}] }}"
              "{%- endwith -%}{# c -#} {{ 'a b'.split()[0].strip('a') or 'x' if tools else y }}"),
};
const int fuzz_n_seeds = sizeof fuzz_seeds / sizeof *fuzz_seeds;

static void check_text(const ChatText *t) {
  for (size_t i = 0; i + sizeof secret - 1 <= t->len; i++) {
    if (memcmp(t->text + i, secret, sizeof secret - 1) != 0) continue;
    if (memchr(t->content + i, 0, sizeof secret - 1))
      die("what a user wrote passes for a template");
  }
  for (int k = 0; k < t->n_answers; k++) {
    size_t before = k ? t->answers[k - 1].to : 0;
    ChatSpan a = t->answers[k];
    if (a.from < before || a.to < a.from || a.to > t->len) die("answer %d lies elsewhere", k);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  static Added added = {.text = (char *)secret, .len = sizeof secret - 1, .id = 1, .special = true};
  const Tokenizer tokenizer = {.added = &added, .n_added = 1, .bos = 1, .eos = -1};
  const ChatMessage m[] = {{"user", "a<|qX7~zK@|>b", 13},
                           {"assistant", "<|qX7~zK@|>", 11},
                           {"user", " \xc3\xa9\"'\n", 6},
                           {"assistant", "Yes <|qX7~zK@|>", 15}};
  Error err = {""};
  ChatText text;
  if (memmem(data, len, "X7", 2) || memmem(data, len, "K@", 2)) return 0;
  Chat *c = chat_parse("t", (const char *)data, len, &tokenizer, &err);
  json_t *without_bos = c ? json_object() : NULL;
  if (c) {
    json_decref(c->roles); /* whose spelling is the secret */
    c->roles = without_bos;
  }
  for (int open = 0; c && open < 2; open++) {
    int rc =
        open ? chat_render(c, m, 3, true, &text, &err) : chat_render_answers(c, m, 4, &text, &err);
    if (rc) continue;
    check_text(&text);
    chat_text_free(&text);
  }
  if (err.msg[0] && strncmp(err.msg, "t: line ", 8) != 0 && strncmp(err.msg, "the chat ", 9) != 0)
    die("no place in \"%s\"", err.msg);
  chat_free(c);
  return 0;
}
