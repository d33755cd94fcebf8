/* A small driver for fuzz targets: mutates the seeds and the files it is given, the same way every
 * time. No coverage feedback; libFuzzer is for long hunts, this is for every run of the tests.
 * usage: fuzz_X ITERATIONS SEED LAST_INPUT [FILE|FOLDER]...
 *        fuzz_X --seeds FOLDER    (writes the target's own seeds there, for libFuzzer)
 * LAST_INPUT holds the input that is being tried, so that it is there after a crash of any kind. */
#include "tests/fuzz.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/fs.h"
#include "core/rng.h"

enum { LONGEST = 1 << 16 /* bytes of an input */, MAX_SEEDS = 2000 };

typedef struct Corpus {
  FuzzSeed seed[MAX_SEEDS];
  int n;
} Corpus;

/* Random numbers of one iteration, in order. */
typedef struct Dice {
  uint64_t seed, iteration, drawn;
} Dice;

static size_t roll(Dice *d, size_t sides) {
  RngBlock b = rng_block(d->seed, d->iteration, d->drawn++);
  return sides ? ((size_t)b.v[0] << 32 | b.v[1]) % sides : 0;
}

static void add_path(Corpus *c, const char *path) {
  DIR *d = opendir(path);
  if (!d) {
    size_t len;
    char *text = c->n < MAX_SEEDS ? fs_read(path, &len, NULL) : NULL;
    if (text && len <= LONGEST)
      c->seed[c->n++] = (FuzzSeed){text, len};
    else
      free(text);
    return;
  }
  for (struct dirent *e; (e = readdir(d));) {
    if (e->d_name[0] == '.') continue;
    char *child = fs_join(path, e->d_name);
    add_path(c, child);
    free(child);
  }
  closedir(d);
}

/* Folder order is not the same everywhere, and the walk over seeds should be. */
static int by_content(const void *a, const void *b) {
  const FuzzSeed *x = a, *y = b;
  if (x->len != y->len) return x->len < y->len ? -1 : 1;
  return memcmp(x->data, y->data, x->len);
}

static size_t insert(uint8_t *buf, size_t len, size_t at, const void *piece, size_t n) {
  if (len + n > LONGEST) return len;
  memmove(buf + at + n, buf + at, len - at);
  memcpy(buf + at, piece, n);
  return len + n;
}

static size_t cut(uint8_t *buf, size_t len, size_t at, size_t n) {
  memmove(buf + at, buf + at + n, len - at - n);
  return len - n;
}

static size_t mutate(const Corpus *c, Dice *d, uint8_t *buf, size_t len) {
  static const char *const words[] = {"0",       "-1",   "9223372036854775807",
                                      "1e999",   "null", "\"",
                                      "\\u0000", "{",    "}",
                                      "[",       "]",    ":",
                                      ",",       "&a",   "*a",
                                      "<<",      "!!",   "|",
                                      "\n",      " "};
  size_t at = roll(d, len + 1), left = len - at;
  uint8_t byte = (uint8_t)roll(d, 256);
  switch (roll(d, 8)) {
    case 0: /* flip a bit */
      if (left) buf[at] ^= (uint8_t)(1u << (byte & 7));
      return len;
    case 1: /* another byte */
      if (left) buf[at] = byte;
      return len;
    case 2:
      return insert(buf, len, at, &byte, 1);
    case 3:
      return cut(buf, len, at, roll(d, left < 64 ? left + 1 : 64));
    case 4: { /* a word of the formats */
      const char *w = words[roll(d, sizeof words / sizeof *words)];
      return insert(buf, len, at, w, strlen(w));
    }
    case 5: { /* a piece of another seed */
      const FuzzSeed *s = &c->seed[roll(d, (size_t)c->n)];
      size_t from = roll(d, s->len + 1), n = roll(d, s->len - from + 1);
      return insert(buf, len, at, s->data + from, n < 256 ? n : 256);
    }
    case 6: { /* a piece of itself, elsewhere */
      uint8_t piece[256];
      size_t n = roll(d, left < sizeof piece ? left + 1 : sizeof piece);
      memcpy(piece, buf + at, n);
      return insert(buf, len, roll(d, len + 1), piece, n);
    }
    default: /* cut short */
      return roll(d, 4) ? len : at;
  }
}

static void keep(int fd, const uint8_t *data, size_t len) {
  if (ftruncate(fd, 0) != 0 || pwrite(fd, data, len, 0) != (ssize_t)len)
    die("cannot write the last input");
}

static int write_seeds(const char *folder) {
  Error err = {""};
  for (int i = 0; i < fuzz_n_seeds; i++) {
    char *path = mem_printf("%s/seed-%d", folder, i);
    if (fs_write_atomic(path, fuzz_seeds[i].data, fuzz_seeds[i].len, &err)) die("%s", err.msg);
    free(path);
  }
  return 0;
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "--seeds")) return write_seeds(argv[2]);
  if (argc < 4) {
    fprintf(stderr, "usage: %s ITERATIONS SEED LAST_INPUT [FILE|FOLDER]...\n", argv[0]);
    return 2;
  }
  static Corpus c;
  for (int i = 0; i < fuzz_n_seeds; i++) c.seed[c.n++] = fuzz_seeds[i];
  for (int i = 4; i < argc; i++) add_path(&c, argv[i]);
  qsort(c.seed, (size_t)c.n, sizeof *c.seed, by_content);
  int fd = open(argv[3], O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) die("cannot create %s", argv[3]);
  uint64_t n = strtoull(argv[1], NULL, 10), seed = strtoull(argv[2], NULL, 10);
  for (uint64_t i = 0; i < n + (uint64_t)c.n; i++) {
    Dice d = {seed, i, 0};
    const FuzzSeed *s = &c.seed[i % (uint64_t)c.n];
    uint8_t *buf = mem_alloc(LONGEST, 1);
    size_t len = s->len;
    memcpy(buf, s->data, len);
    /* First every seed as it is. */
    for (size_t k = i < (uint64_t)c.n ? 0 : 1 + roll(&d, 8); k > 0; k--)
      len = mutate(&c, &d, buf, len);
    keep(fd, buf, len);
    buf = mem_grow(buf, len, 1); /* exactly as long, so that a sanitizer sees a read beyond */
    LLVMFuzzerTestOneInput(buf, len);
    free(buf);
  }
  close(fd);
  unlink(argv[3]);
  printf("%d seeds, %llu mutations\n", c.n, (unsigned long long)n);
  return 0;
}
