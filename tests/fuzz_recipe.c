/* Fuzz target: the recipe reader. What loads must print to a recipe that loads and prints the same;
 * what does not must say where. Behind a byte 0x1E comes one --set assignment.
 * corpus: data/malformed/yaml-test-suite/src */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/recipe.h"
#include "tests/fuzz.h"

#define WHOLE                                                                        \
  "x-o: &o {lr: 1e-5, schedule: linear}\n"                                           \
  "stages: [sft, reward, ppo]\n"                                                     \
  "run: {seed: 0x10, directory: runs/a, overwrite: true}\n"                          \
  "models:\n"                                                                        \
  "  actor: {init: {hidden_size: 64, layers: 2, heads: 4, kv_heads: 2, ffn: 128}}\n" \
  "  critic: {from: reward}\n"                                                       \
  "tokenizer: tok\n"                                                                 \
  "data:\n"                                                                          \
  "  sft: {path: a.txt, separator: <|endoftext|>, held_out: 0.1}\n"                  \
  "  preference: b.jsonl.gz\n"                                                       \
  "  prompts: {path: c.json, answer_field: answer, overlong: truncate}\n"            \
  "  chat: {name: custom, user: \"Q: {content}\\n\", assistant: 'A: {content}'}\n"   \
  "rewards:\n"                                                                       \
  "- model\n"                                                                        \
  "- {kind: words, words: [a, 'b c'], absent: true, weight: -.5}\n"                  \
  "- {kind: regex, pattern: '^a+(b|c)$', ignore_case: true}\n"                       \
  "- {kind: length, target: 20}\n"                                                   \
  "- exact\n"                                                                        \
  "- {kind: command, command: \"cat | sort\\n\", timeout_seconds: 2.5}\n"            \
  "rollout: {prompts_per_step: 8, samples_per_prompt: 2, top_k: 5, filters: allow, " \
  "min_p: 0.1, repetition_penalty: 1.2, weights: tensor_parallel, format: int8}\n"   \
  "ppo: {minibatches: 4, kl_controller: adaptive, kl_coef: 0.02, clip_high: .3, "    \
  "importance: on, importance_cap: 3}\n"                                             \
  "zeropp: {refresh: auto, hpz: on, qwz: int8, refresh_check: 5}\n"                  \
  "optimizer:\n"                                                                     \
  "  sft: &s {<<: *o, weight_decay: 0.1}\n"                                          \
  "  actor: {<<: [{lr: 1e-6}, *s]}\n"

const FuzzSeed fuzz_seeds[] = {
    FUZZ_SEED(WHOLE),
    FUZZ_SEED(WHOLE "\x1erewards.1.weight=2"),
    FUZZ_SEED(WHOLE "\x1emodels.actor=../base"),
    FUZZ_SEED(WHOLE "\x1erollout.filters=renormalize\x1erollout.repetition_penalty=1"),
    FUZZ_SEED(WHOLE "\x1eppo={steps: 3, epochs: 1}"),
    FUZZ_SEED("stages: [sft]\nmodels: {actor: base}\ndata: {sft: a.jsonl}\n"),
    FUZZ_SEED("stages: [ppo]\nmodels: {actor: a, reward: {path: r, init_head: false}}\n"
              "data: {prompts: a.jsonl}\nrollout: {temperature: 0.7}\n"),
};
const int fuzz_n_seeds = sizeof fuzz_seeds / sizeof *fuzz_seeds;

static char *print(const Recipe *r) {
  char *s;
  size_t n;
  FILE *f = open_memstream(&s, &n);
  if (!f || recipe_print(r, f)) die("cannot print");
  fclose(f);
  return s;
}

static void check_message(const char *msg) {
  if (!*msg) die("refused without a message");
  for (const char *p = msg; p; p = strchr(p, '\n')) {
    p += *p == '\n';
    bool placed = !strncmp(p, "fuzz.yaml", 9) || !strncmp(p, "--set ", 6) || !strncmp(p, "and ", 4);
    if (!placed) die("no place in \"%s\"", msg);
  }
}

static void check_printed(const Recipe *r) {
  Error err;
  char *first = print(r);
  Recipe *again = recipe_parse(first, strlen(first), "again.yaml", NULL, 0, &err);
  if (!again) die("does not load back: %s\n%s", err.msg, first);
  char *second = print(again);
  if (strcmp(first, second) != 0) die("loads back to another recipe:\n%s\n%s", first, second);
  free(first);
  free(second);
  recipe_free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  const uint8_t *mark = len ? memchr(data, 0x1e, len) : NULL;
  size_t text = mark ? (size_t)(mark - data) : len;
  char *set = mark ? strndup((const char *)mark + 1, len - text - 1) : NULL;
  const char *sets[] = {set};
  Error err = {""};
  Recipe *r = recipe_parse((const char *)data, text, "fuzz.yaml", sets, set != NULL, &err);
  if (r)
    check_printed(r);
  else
    check_message(err.msg);
  recipe_free(r);
  free(set);
  return 0;
}
