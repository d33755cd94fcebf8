/* Speed of a tokenizer on one core: a text, repeated to 100 MB, to ids and back, and words without
 * end, which merging must not be quadratic in. usage: bench_tokenizer TOKENIZER TEXT
 *
 * The bound: 100 MB of text in seconds, 5 MB/s at least. Each text is encoded in one call.
 * Seconds are those of the processor, since others may use the machine too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/fs.h"
#include "generation/generation.h"

enum { TEXT_BYTES = 100000000, WORD_BYTES = 1000000 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* unit, over and over, n bytes in all. */
static char *repeat(const char *unit, size_t len, size_t n) {
  char *s = mem_alloc(n, 1);
  for (size_t at = 0; at < n; at += len) memcpy(s + at, unit, n - at < len ? n - at : len);
  return s;
}

static int measure(const Tokenizer *t, const char *what, const char *text, size_t len, Error *err) {
  TokenList ids = {0};
  size_t back;
  double start = now();
  if (tokenizer_encode(t, text, len, 0, &ids, err)) return -1;
  double encoded = now();
  char *again = tokenizer_decode(t, ids.v, ids.n, &back, err);
  double decoded = now();
  if (!again) return -1;
  bool same = back == len && memcmp(again, text, len) == 0;
  printf("%-24s %6.1f MB  %9d tokens  %6.2f s  %6.1f MB/s  %5.1f Mtokens/s  decode %6.1f MB/s%s\n",
         what, (double)len / 1e6, ids.n, encoded - start, (double)len / 1e6 / (encoded - start),
         ids.n / 1e6 / (encoded - start), (double)len / 1e6 / (decoded - encoded),
         same ? "" : "  (comes back changed)");
  free(again);
  token_list_free(&ids);
  return 0;
}

static int run(const char *tokenizer, const char *file, Error *err) {
  static const char *const words[] = {"a", "qx", " ", "\n", "\xe6\x97\xa5"};
  double start = now();
  Tokenizer *t = tokenizer_load(tokenizer, err);
  if (!t) return -1;
  printf("%s, %d tokens, loaded in %.2f s\n", tokenizer_kind(t), tokenizer_vocab_size(t),
         now() - start);
  size_t len;
  char *sample = fs_read(file, &len, err);
  if (!sample || len == 0) return -1;
  char *text = repeat(sample, len, TEXT_BYTES);
  int rc = measure(t, "text", text, TEXT_BYTES, err);
  free(text);
  free(sample);
  for (size_t i = 0; i < sizeof words / sizeof *words && !rc; i++) {
    char what[64];
    snprintf(what, sizeof what, "one word of \"%s\"", *words[i] == '\n' ? "\\n" : words[i]);
    text = repeat(words[i], strlen(words[i]), WORD_BYTES);
    rc = measure(t, what, text, WORD_BYTES, err);
    free(text);
  }
  tokenizer_free(t);
  return rc;
}

int main(int argc, char **argv) {
  Error err = {""};
  if (argc != 3) {
    fprintf(stderr, "usage: %s TOKENIZER TEXT\n", argv[0]);
    return 2;
  }
  if (run(argv[1], argv[2], &err) == 0) return 0;
  fprintf(stderr, "%s: %s\n", argv[0], *err.msg ? err.msg : "the text is empty");
  return 1;
}
