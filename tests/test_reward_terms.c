/* Programmatic rewards that look at the answer's text or length. */
#include <math.h>
#include <stdio.h>

#include "reward/reward.h"
#include "tests/test.h"

static RewardInput answer_of(const char *text) {
  return (RewardInput){.prompt_text = "a prompt",
                       .response_text = text,
                       .response_len = strlen(text),
                       .response_tokens = 4};
}

static float eval_one(RewardTerm term, RewardInput in) {
  Error err = {""};
  RewardTerms *t = reward_terms_create(&term, 1, &err);
  if (!t) fail_msg("%s", err.msg);
  float out = NAN;
  if (reward_terms_eval(t, &in, 1, &out, &err)) fail_msg("%s", err.msg);
  reward_terms_free(t);
  return out;
}

static void create_fails(RewardTerm term, const char *word) {
  Error err = {""};
  RewardTerm terms[2] = {{.kind = "model", .weight = 1}, term};
  assert_null(reward_terms_create(terms, 2, &err));
  if (!strstr(err.msg, word) || !strstr(err.msg, "rewards[1]"))
    fail_msg("\"%s\" does not name %s and the term", err.msg, word);
}

static void eval_fails(RewardTerm term, RewardInput in, const char *word) {
  Error err = {""};
  RewardTerms *t = reward_terms_create(&term, 1, &err);
  if (!t) fail_msg("%s", err.msg);
  float out = 42;
  assert_int_equal(reward_terms_eval(t, &in, 1, &out, &err), -1);
  if (!strstr(err.msg, word) || !strstr(err.msg, "rewards[0]"))
    fail_msg("\"%s\" does not name %s and the term", err.msg, word);
  assert_true(out == 42); /* no half result */
  reward_terms_free(t);
}

static void length_term(void **state) {
  (void)state;
  RewardTerm term = {.kind = "length", .weight = 1, .target = 10};
  const int tokens[] = {10, 0, 5, 15, 30};
  const float want[] = {0, -1, -0.5f, -0.5f, -2};
  for (int i = 0; i < 5; i++) {
    RewardInput in = {.response_text = "", .response_tokens = tokens[i]};
    assert_true(eval_one(term, in) == want[i]);
  }
  term.target = 0;
  create_fails(term, "target");
}

static float words(const char *text, bool ignore_case, bool absent) {
  static const char *list[] = {"cat", "C++", "na\xc3\xafve", "thank you"};
  return eval_one((RewardTerm){.kind = "words",
                               .weight = 1,
                               .words = list,
                               .n_words = 4,
                               .ignore_case = ignore_case,
                               .absent = absent},
                  answer_of(text));
}

static void words_term(void **state) {
  (void)state;
  assert_true(words("the cat sat", false, false) == 1);
  assert_true(words("cat", false, false) == 1);
  assert_true(words("a cat, a cat and a cat", false, false) == 1); /* each word once */
  assert_true(words("concatenate scat cats cat_ cat9", false, false) == 0);
  assert_true(words("cat\xc3\xa9", false, false) == 0); /* a letter beyond ASCII follows */
  assert_true(words("The Cat", false, false) == 0);
  assert_true(words("The Cat", true, false) == 1);
  assert_true(words("in C++, C+ or C", false, false) == 1);
  assert_true(words("a NA\xc3\x8fVE cat", true, false) == 2); /* case beyond ASCII */
  assert_true(words("thank you", false, false) == 1);
  assert_true(words("thank\xff cat\xfe", false, false) == 1); /* broken UTF-8 around a word */
  assert_true(words("", false, false) == 0);
  assert_true(words("the cat says thank you", false, true) == -2);
  assert_true(words("nothing", false, true) == 0);
  const char *empty[] = {"a", ""};
  create_fails((RewardTerm){.kind = "words", .words = empty, .n_words = 2}, "words[1]");
  create_fails((RewardTerm){.kind = "words"}, "words");
}

/* A response may hold a NUL: its length counts, not its first zero. */
static void text_with_nul(void **state) {
  (void)state;
  const char *list[] = {"cat"};
  RewardTerm term = {.kind = "words", .weight = 1, .words = list, .n_words = 1};
  RewardInput in = {.response_text = "a\0cat", .response_len = 5};
  assert_true(eval_one(term, in) == 1);
  in.response_len = 4; /* "a\0ca" */
  assert_true(eval_one(term, in) == 0);
}

static float regex(const char *pattern, const char *text, bool ignore_case) {
  return eval_one(
      (RewardTerm){.kind = "regex", .weight = 1, .pattern = pattern, .ignore_case = ignore_case},
      answer_of(text));
}

static void regex_term(void **state) {
  (void)state;
  assert_true(regex("\\d+ apples", "I have 12 apples.", false) == 1);
  assert_true(regex("^\\d+$", "12 apples", false) == 0);
  assert_true(regex("apples", "APPLES", false) == 0);
  assert_true(regex("apples", "APPLES", true) == 1);
  assert_true(regex("^.$", "\xc3\xa9", false) == 1); /* one character, two bytes */
  assert_true(regex("^\xc3\x89$", "\xc3\xa9", true) == 1);
  assert_true(regex("b.*c", "\xff\xfe b x c", false) == 1);
  assert_true(regex("a.c",
                    "a\xff"
                    "c",
                    false) == 0); /* an invalid byte is no character */
  assert_true(regex("c$", "abc\xff", false) == 0 && regex("^a",
                                                          "\xff"
                                                          "abc",
                                                          false) == 0);
  assert_true(regex("^$", "", false) == 1);
  create_fails((RewardTerm){.kind = "regex", .pattern = "a(b"}, "a(b");
  create_fails((RewardTerm){.kind = "regex", .pattern = "\xff"}, "pattern");
  create_fails((RewardTerm){.kind = "regex", .pattern = ""}, "pattern");
  create_fails((RewardTerm){.kind = "regex"}, "pattern");
}

static void catastrophic_regex(void **state) {
  (void)state;
  RewardInput in = answer_of("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!");
  eval_fails((RewardTerm){.kind = "regex", .weight = 1, .pattern = "^(a+)+$"}, in, "^(a+)+$");
}

static float exact(const char *text, const char *answer, bool ignore_case) {
  RewardInput in = answer_of(text);
  in.answer = answer;
  return eval_one((RewardTerm){.kind = "exact", .weight = 1, .ignore_case = ignore_case}, in);
}

static void exact_term(void **state) {
  (void)state;
  assert_true(exact("42", "42", false) == 1);
  assert_true(exact(" \t42\n", "42 \r\n", false) == 1);
  assert_true(exact("4 2", "42", false) == 0);
  assert_true(exact("42.", "42", false) == 0);
  assert_true(exact("Paris", "paris", false) == 0);
  assert_true(exact("Paris", "paris", true) == 1);
  assert_true(exact("\xc3\x89t\xc3\xa9", "\xc3\xa9T\xc3\x89", true) == 1);
  assert_true(exact("a.b", "A+B", true) == 0); /* an answer is no pattern */
  assert_true(exact("a+b", "A+B", true) == 1);
  assert_true(exact("ab", "A", true) == 0 && exact("a", "AB", true) == 0);
  assert_true(exact("", "  ", false) == 1 && exact(" ", "", true) == 1);
  assert_true(exact("x\xff", "X", true) == 0);
  eval_fails((RewardTerm){.kind = "exact", .weight = 1}, answer_of("42"), "a prompt");
}

static void weighted_sum(void **state) {
  (void)state;
  const char *list[] = {"yes"};
  RewardTerm terms[] = {{.kind = "model", .weight = 0.5},
                        {.kind = "length", .weight = 2, .target = 4},
                        {.kind = "words", .weight = -3, .words = list, .n_words = 1},
                        {.kind = "model", .weight = 0.25},
                        {.kind = "regex", .weight = 10, .pattern = "!$"}};
  Error err = {""};
  RewardTerms *t = reward_terms_create(terms, 5, &err);
  assert_non_null(t);
  RewardInput in[3] = {answer_of("yes!"), answer_of("no"), answer_of("yes")};
  in[2].response_tokens = 6;
  float out[3];
  assert_int_equal(reward_terms_eval(t, in, 3, out, &err), 0);
  assert_true(out[0] == 7 && out[1] == 0 && out[2] == -4);
  assert_int_equal(reward_terms_eval(t, in, 0, NULL, &err), 0);
  reward_terms_free(t);

  reward_terms_free(NULL);
}

static void unknown_kinds_and_weights(void **state) {
  (void)state;
  create_fails((RewardTerm){.kind = "lenght", .weight = 1}, "lenght");
  create_fails((RewardTerm){.kind = "exact", .weight = NAN}, "weight");
  RewardTerm huge = {.kind = "length", .weight = 1e300, .target = 1};
  eval_fails(huge, answer_of("x"), "out of range");
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(length_term),        cmocka_unit_test(words_term),
    cmocka_unit_test(text_with_nul),      cmocka_unit_test(regex_term),
    cmocka_unit_test(catastrophic_regex), cmocka_unit_test(exact_term),
    cmocka_unit_test(weighted_sum),       cmocka_unit_test(unknown_kinds_and_weights),
};
TEST_MAIN(tests)
