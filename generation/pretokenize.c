/* The steps of pre-tokenization, through PCRE2: patterns are compiled to machine code where PCRE2
 * can do that, and a match gives up when it takes far more steps than the text is long. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "generation/pretokenize.h"

#include <pcre2.h>
#include <stdlib.h>

const char pretokenize_gpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char pretokenize_qwen2[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* A sound pattern looks at a character a few times; 10 million steps are a tenth of a second. */
enum { MATCH_LIMIT = 10000000, STEPS_PER_BYTE = 32, HEAP_LIMIT_KIB = 1 << 20 };

typedef struct Step {
  pcre2_code *code;
  bool covers;
} Step;

struct Pretokenizer {
  Step *steps;
  int n_steps;
};

/* One text on its way through the steps. */
typedef struct Cut {
  const Pretokenizer *p;
  const char *text;
  size_t offset;
  pcre2_match_data *match;
  pcre2_match_context *limits;
  WordUse use;
  void *ctx;
} Cut;

Pretokenizer *pretokenizer_create(void) { return mem_zalloc(1, sizeof(Pretokenizer)); }

void pretokenizer_free(Pretokenizer *p) {
  if (!p) return;
  for (int i = 0; i < p->n_steps; i++) pcre2_code_free(p->steps[i].code);
  free(p->steps);
  free(p);
}

int pretokenizer_steps(const Pretokenizer *p) { return p->n_steps; }

static pcre2_code *compile(const char *pattern, size_t len, uint32_t options, Error *err) {
  int code;
  PCRE2_SIZE place;
  pcre2_compile_context *context = pcre2_compile_context_create(NULL);
  if (!context) die("out of memory for a pattern");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  pcre2_code *c = pcre2_compile((PCRE2_SPTR)pattern, len, options, &code, &place, context);
  pcre2_compile_context_free(context);
  if (c) return c;
  PCRE2_UCHAR why[256];
  pcre2_get_error_message(code, why, sizeof why);
  int shown = len < PATTERN_SHOWN ? (int)len : PATTERN_SHOWN;
  error_set(err, "pattern \"%.*s\": %s at byte %zu", shown, pattern, (const char *)why,
            (size_t)place);
  return NULL;
}

int pretokenizer_add(Pretokenizer *p, const char *pattern, size_t len, SplitKind kind, bool covers,
                     Error *err) {
  if (len == 0) return error_set(err, "the pattern is empty");
  pcre2_code *code;
  if (kind == SPLIT_LITERAL) {
    code = compile(pattern, len, PCRE2_UTF | PCRE2_LITERAL, err);
  } else {
    size_t n;
    char *regex = pretokenize_regex(pattern, len, &n, err);
    if (!regex) return -1;
    code = compile(regex, n, PCRE2_UTF | PCRE2_UCP, err);
    free(regex);
  }
  if (!code) return -1;
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* where it cannot, the interpreter does the same */
  p->steps = mem_grow(p->steps, (size_t)p->n_steps + 1, sizeof *p->steps);
  p->steps[p->n_steps++] = (Step){code, covers};
  return 0;
}

/* The next match in text, from `at` on; both ends are the text's when there is none. */
static int next_match(const Cut *c, const Step *s, const char *text, size_t len, size_t at,
                      size_t *start, size_t *end, Error *err) {
  uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
  PCRE2_SPTR subject = (PCRE2_SPTR)text;
  int rc = pcre2_match(s->code, subject, len, at, options, c->match, c->limits);
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter takes what it needs from the heap */
    rc = pcre2_match(s->code, subject, len, at, options | PCRE2_NO_JIT, c->match, c->limits);
  *start = *end = len;
  if (rc == PCRE2_ERROR_NOMATCH) return 0;
  if (rc < 0) {
    PCRE2_UCHAR why[256];
    pcre2_get_error_message(rc, why, sizeof why);
    return error_set(err, "the pre-tokenizer's pattern gives up at byte %zu of the text: %s",
                     c->offset + (size_t)(text - c->text) + at, (const char *)why);
  }
  const PCRE2_SIZE *extent = pcre2_get_ovector_pointer(c->match);
  *start = extent[0];
  *end = extent[1];
  return 0;
}

static int cut(const Cut *c, int step, const char *text, size_t len, Error *err) {
  if (step == c->p->n_steps) return c->use(c->ctx, text, len, err);
  const Step *s = &c->p->steps[step];
  for (size_t at = 0, start = len, end = len; at < len; at = end) {
    if (next_match(c, s, text, len, at, &start, &end, err)) return -1;
    if (start > at && s->covers)
      return error_set(err, "byte %zu of the text is matched by no pattern of the pre-tokenizer",
                       c->offset + (size_t)(text - c->text) + at);
    if (start > at && cut(c, step + 1, text + at, start - at, err)) return -1;
    if (end > start && cut(c, step + 1, text + start, end - start, err)) return -1;
  }
  return 0;
}

int pretokenize(const Pretokenizer *p, const char *text, size_t len, size_t offset, WordUse use,
                void *ctx, Error *err) {
  Cut c = {p,   text, offset, pcre2_match_data_create(1, NULL), pcre2_match_context_create(NULL),
           use, ctx};
  if (!c.match || !c.limits) die("out of memory for pre-tokenization");
  size_t steps = MATCH_LIMIT + STEPS_PER_BYTE * len;
  pcre2_set_match_limit(c.limits, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
  pcre2_set_heap_limit(c.limits, HEAP_LIMIT_KIB);
  int rc = cut(&c, 0, text, len, err);
  pcre2_match_context_free(c.limits);
  pcre2_match_data_free(c.match);
  return rc;
}
