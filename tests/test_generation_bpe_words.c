/* Pre-tokenization: how patterns cut text, what of Oniguruma's syntax is refused because PCRE2
 * would read it otherwise, and patterns that never end. */
#include <stdio.h>

#include "generation/pretokenize.h"
#include "generation/unicode.h"
#include "tests/test.h"

typedef struct Words {
  char text[512];
  size_t n;
  int limit; /* words after which use says no; 0: never */
} Words;

/* Writes the words with a bar behind each. */
static int put_word(void *ctx, const char *word, size_t len, Error *err) {
  Words *w = ctx;
  if (w->n + len + 2 > sizeof w->text) die("too many words");
  memcpy(w->text + w->n, word, len);
  w->n += len;
  w->text[w->n++] = '|';
  return w->limit && --w->limit == 0 ? error_set(err, "enough") : 0;
}

static Pretokenizer *regex(const char *pattern) {
  Error err = {""};
  Pretokenizer *p = pretokenizer_create();
  if (pretokenizer_add(p, pattern, strlen(pattern), SPLIT_REGEX, false, &err))
    fail_msg("%s", err.msg);
  return p;
}

static void expect_words(const char *pattern, const char *text, const char *want) {
  Error err = {""};
  Words w = {.n = 0};
  Pretokenizer *p = regex(pattern);
  if (pretokenize(p, text, strlen(text), 0, put_word, &w, &err)) fail_msg("%s", err.msg);
  w.text[w.n] = 0;
  if (strcmp(w.text, want) != 0) fail_msg("\"%s\" is cut %s, expected %s", text, w.text, want);
  pretokenizer_free(p);
}

static void test_gpt2(void **state) {
  (void)state;
  expect_words(pretokenize_gpt2, "I'll don't, it'S", "I|'ll| don|'t|,| it|'|S|");
  expect_words(pretokenize_gpt2, "a  b   \n c \n", "a| | b|   \n| c| \n|");
  expect_words(pretokenize_gpt2, "abc123 456,,", "abc|123| 456|,,|");
  expect_words(pretokenize_gpt2, "\xe6\x97\xa5\xc2\xbd \xc3\xa9",
               "\xe6\x97\xa5|\xc2\xbd| \xc3\xa9|");
}

static void test_qwen2(void **state) {
  (void)state;
  expect_words(pretokenize_qwen2, "I'LL (ok)\n\n 12", "I|'LL| (|ok|)\n\n| |1|2|");
  expect_words(pretokenize_qwen2, "a \r\n \t b", "a| \r\n| \t| b|");
  expect_words(pretokenize_qwen2, "\tx\xc2\xa0y", "\tx|\xc2\xa0y|");
}

/* Spaces are Unicode's White_Space: not U+180E, which PCRE2 takes for one, nor U+200B. */
static void test_spaces(void **state) {
  (void)state;
  expect_words("\\s+", "a\341\240\216b", "a\341\240\216b|");
  expect_words("\\s+", "a\342\200\213b", "a\342\200\213b|");
  expect_words("\\S+", "\341\240\216\302\205\341\232\200z", "\341\240\216|\302\205\341\232\200|z|");
  expect_words("[\\s]+", "a\302\205\343\200\200b", "a|\302\205\343\200\200|b|");
  expect_words("[^\\S\\n]+", "a \n b", "a| |\n| |b|");
  for (uint32_t c = 0x800; c < 0x10000; c++) {
    if (c >= 0xd800 && c < 0xe000) continue;
    char s[4] = {(char)(0xe0 | c >> 12), (char)(0x80 | (c >> 6 & 63)), (char)(0x80 | (c & 63)), 0};
    size_t size;
    bool space = c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
                 c == 0x202f || c == 0x205f || c == 0x3000;
    assert_int_equal(utf8_first(s, 3, &size), c);
    assert_int_equal(utf8_last(s, 3, &size), c);
    assert_int_equal(unicode_is_space(c), space);
  }
}

static void test_syntax(void **state) {
  (void)state;
  expect_words("\\u0041|\\x42|\\x{43}", "ABCD", "A|B|C|D|");
  expect_words("[\\x41-\\x43\\-]+", "xAB-y", "x|AB-|y|");
  expect_words("(?i:ab)+?|c{2}|d{2,3}?", "ABabccddd", "AB|ab|cc|dd|d|");
  expect_words("(?i)x|y", "XY", "X|Y|");
  expect_words("(?<=a)b|c(?=d)|e(?!f)|(?>g+)", "abbcdcefegg", "a|b|b|c|dcef|e|gg|");
  expect_words("a.c", "abc\303\251a\nca\303\251c", "abc|\303\251a\nc|a\303\251c|");
  expect_words("[\\p{L}\\p{^N}&]|\\P{L}", "a1", "a|1|");
  expect_words("\\d+|[#\\]]", "12\xd9\xa3#]", "12\xd9\xa3|#|]|");
  expect_words("a*", "baab", "b|aa|b|");
}

static void test_refused_syntax(void **state) {
  (void)state;
  static const struct {
    const char *pattern, *what;
  } cases[] = {{"a\\w+", "\"\\w\" at byte 1"},
               {"\\bx", "\"\\b\" at byte 0"},
               {"\\h", "\"\\h\""},
               {"\\Gx", "\"\\G\""},
               {"(a)\\1", "\"\\1\""},
               {"^a", "\"^\" at byte 0"},
               {"a$", "\"$\" at byte 1"},
               {"[a[bc]]", "\"[b\" at byte 2"},
               {"[[:alpha:]]", "\"[:\""},
               {"[a-z&&[^b]]", "\"&&\" at byte 4"},
               {"[]a]", "\"[]a\""},
               {"[a-z", "\"[a-z\""},
               {"[\\s-x]", "\"\\s-x\""},
               {"[!-\\s]", "\"-\\s\""},
               {"[\\w]", "\"\\w\""},
               {"\\p{Han}", "\"\\p{Han}\""},
               {"\\p{IsL}", "\"\\p{IsL}\""},
               {"\\pL", "\"\\pL"},
               {"\\p{L", "\"\\p{L\""},
               {"a{2}+", "\"{2}+\""},
               {"a{2,3}+", "\"{2,3}+\""},
               {"a{2}?", "\"{2}?\""},
               {"a{,2}", "\"{\" at byte 1"},
               {"{", "\"{\" at byte 0"},
               {"a(?i)b", "\"(?i)\""},
               {"(?m:a)", "\"(?m:\""},
               {"(?<n>a)", "\"(?<n\""},
               {"(*FAIL)", "\"(*FA\""},
               {"\\x{110000000}", "\"\\x{11000"},
               {"\\xZ", "\"\\x\""},
               {"a\\", "\"\\\" at byte 1"},
               {"(a", "pattern \"(a\""},
               {"a**", "pattern \"a**\""},
               {"", "empty"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Error err = {""};
    Pretokenizer *p = pretokenizer_create();
    const char *pattern = cases[i].pattern;
    if (!pretokenizer_add(p, pattern, strlen(pattern), SPLIT_REGEX, false, &err))
      fail_msg("\"%s\" was taken", pattern);
    if (!strstr(err.msg, cases[i].what))
      fail_msg("\"%s\": error is \"%s\", expected %s", pattern, err.msg, cases[i].what);
    pretokenizer_free(p);
  }
}

/* The reason stands behind the pattern, and the room for a message is limited. */
static void test_long_pattern_leaves_its_reason(void **state) {
  (void)state;
  static const char *const ends[] = {"(", "\\b"}, *const whats[] = {"parenthesis",
                                                                    "\"\\b\" at byte"};
  char pattern[9000];
  for (int i = 0; i < 2; i++) {
    Error err = {""};
    Pretokenizer *p = pretokenizer_create();
    memset(pattern, 'a', sizeof pattern);
    memcpy(pattern + sizeof pattern - 10, ends[i], strlen(ends[i]));
    assert_int_equal(pretokenizer_add(p, pattern, sizeof pattern, SPLIT_REGEX, false, &err), -1);
    if (!strstr(err.msg, whats[i])) fail_msg("error is \"%s\", expected %s", err.msg, whats[i]);
    pretokenizer_free(p);
  }
}

static void test_steps(void **state) {
  (void)state;
  Error err = {""};
  Words w = {.n = 0};
  Pretokenizer *p = pretokenizer_create();
  assert_int_equal(pretokenize(p, "a b.", 4, 0, put_word, &w, &err), 0);
  assert_memory_equal(w.text, "a b.|", w.n);
  assert_int_equal(pretokenizer_add(p, " ", 1, SPLIT_REGEX, false, &err), 0);
  assert_int_equal(pretokenizer_add(p, ".", 1, SPLIT_LITERAL, false, &err), 0);
  assert_int_equal(pretokenizer_steps(p), 2);
  w.n = 0;
  assert_int_equal(pretokenize(p, "a. b.c", 6, 0, put_word, &w, &err), 0);
  assert_memory_equal(w.text, "a|.| |b|.|c|", w.n);
  w = (Words){.limit = 2};
  assert_int_equal(pretokenize(p, "a. b.c", 6, 0, put_word, &w, &err), -1);
  assert_string_equal(err.msg, "enough");
  pretokenizer_free(p);
}

/* Two nested repetitions: the number of ways to match doubles with every letter. */
static void test_endless_pattern(void **state) {
  (void)state;
  Error err = {""};
  Words w = {.n = 0};
  Pretokenizer *p = regex("(?:a|aa)+b");
  static const char text[] = "xxaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-b";
  assert_int_equal(pretokenize(p, text, strlen(text), 7, put_word, &w, &err), -1);
  assert_non_null(strstr(err.msg, "gives up at byte 7 of the text"));
  pretokenizer_free(p);
}

static int count_word(void *ctx, const char *word, size_t len, Error *err) {
  (void)word, (void)len, (void)err;
  ++*(int *)ctx;
  return 0;
}

/* A repetition that machine code would need more stack for than it has. */
static void test_deep_pattern(void **state) {
  (void)state;
  enum { LEN = 200000 };
  Error err = {""};
  Pretokenizer *p = regex("(?:a|b)+c|.");
  char *text = mem_alloc(LEN, 1);
  memset(text, 'a', LEN);
  text[LEN - 1] = 'c';
  int words = 0;
  if (pretokenize(p, text, LEN, 0, count_word, &words, &err)) fail_msg("%s", err.msg);
  assert_int_equal(words, 1);
  free(text);
  pretokenizer_free(p);
}

/* ---- normal form C ---- */

static void expect_nfc(const char *text, const char *want) {
  size_t len;
  char *got = unicode_nfc(text, strlen(text), &len);
  if (!want) {
    assert_null(got);
    return;
  }
  assert_non_null(got);
  assert_int_equal(len, strlen(want));
  assert_memory_equal(got, want, len);
  free(got);
}

static void test_nfc(void **state) {
  (void)state;
  expect_nfc("", NULL);
  expect_nfc("plain, caf\xc3\xa9, \xe6\x97\xa5", NULL);
  expect_nfc("e\xcc\x81", "\xc3\xa9");
  expect_nfc("A\xcc\x8a\xff\xcc\x81z", "\xc3\x85\xff\xcc\x81z"); /* broken bytes part the text */
  expect_nfc("\xe2\x84\xab", "\xc3\x85");                        /* the Angstrom sign */
  expect_nfc("\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81"); /* Hangul */
  expect_nfc("a\xcc\xa7\xcc\x81", "\xc3\xa1\xcc\xa7");                /* marks in their order */
  expect_nfc("a\xcc", NULL);
  expect_nfc("\xef\xbf\xbe\xef\xbf\xbf\xf4\x8f\xbf\xbf", NULL); /* no characters, yet not broken */
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_gpt2),           cmocka_unit_test(test_qwen2),
    cmocka_unit_test(test_spaces),         cmocka_unit_test(test_syntax),
    cmocka_unit_test(test_refused_syntax), cmocka_unit_test(test_long_pattern_leaves_its_reason),
    cmocka_unit_test(test_steps),          cmocka_unit_test(test_endless_pattern),
    cmocka_unit_test(test_deep_pattern),   cmocka_unit_test(test_nfc)};
TEST_MAIN(tests)
