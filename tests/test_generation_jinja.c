/* The template language, against what Jinja prints; errors with their lines; limits; marks. */
#include "tests/jinja_cases.h"
#include "tests/jinja_test.h"
#include "tests/test.h"

/* What the template prints with these variables; NULL: an error. The caller frees. */
static char *render(const char *template, size_t len, json_t *variables, Error *err) {
  JinjaTemplate *t = jinja_compile("t", template, len, err);
  if (!t) return NULL;
  Render r;
  Str text;
  char *out = NULL;
  render_open(&r, t, err);
  Value v = jinja_of_json(&r, variables);
  if (render_run(&r, t, v.dict, &text) == 0) {
    out = mem_zalloc(text.len + 1, 1);
    memcpy(out, text.text, text.len);
    assert_int_equal(strlen(out), text.len);
  }
  render_close(&r);
  jinja_free(t);
  return out;
}

static json_t *variables(void) {
  Error err = {""};
  json_t *v = json_parse(jinja_variables, strlen(jinja_variables), "variables", &err);
  if (!v) fail_msg("%s", err.msg);
  return v;
}

static void as_jinja(void **state) {
  (void)state;
  json_t *v = variables();
  for (size_t i = 0; i < sizeof jinja_cases / sizeof *jinja_cases; i++) {
    const char *template = jinja_cases[i].template;
    Error err = {""};
    char *text = render(template, strlen(template), v, &err);
    if (!text) fail_msg("%s\n%s", template, err.msg);
    if (strcmp(text, jinja_cases[i].text) != 0)
      fail_msg("%s\nprints \"%s\"\nexpected \"%s\"", template, text, jinja_cases[i].text);
    free(text);
  }
  json_decref(v);
}

static void errors_of_jinja(void **state) {
  (void)state;
  json_t *v = variables();
  for (size_t i = 0; i < sizeof jinja_errors / sizeof *jinja_errors; i++) {
    Error err = {""};
    char *text = render(jinja_errors[i], strlen(jinja_errors[i]), v, &err);
    if (text) fail_msg("%s\nprints \"%s\"", jinja_errors[i], text);
    if (strncmp(err.msg, "t: line 1: ", 11) != 0) fail_msg("%s\n%s", jinja_errors[i], err.msg);
  }
  json_decref(v);
}

static void expect_refused(const char *template, const char *want) {
  Error err = {""};
  json_t *v = variables();
  char *text = render(template, strlen(template), v, &err);
  if (text) fail_msg("%s\nprints \"%s\"", template, text);
  if (!strstr(err.msg, want)) fail_msg("%s\n%s\nexpected %s", template, err.msg, want);
  json_decref(v);
}

/* What Jinja or transformers know and this does not, by name and line. */
static void what_is_refused(void **state) {
  (void)state;
  static const char *const bad[][2] = {
      {"a\n{% include 'x' %}", "t: line 2: the statement \"include\" is not supported"},
      {"{% call f() %}{% endcall %}", "the statement \"call\" is not supported"},
      {"\n\n{{ s | wordwrap }}", "t: line 3: the filter \"wordwrap\" is not supported"},
      {"{{ s is filter }}", "the test \"filter\" is not supported"},
      {"{% if true %}\n\n{{ s.format(1) }}{% endif %}",
       "t: line 3: the method \"format\" of a string is not supported"},
      {"{{ l.append(1) }}", "the method \"append\" of a list is not supported"},
      {"{{ d.update({}) }}", "the method \"update\" of a mapping is not supported"},
      {"{{ strftime_now('%d') }}", "the text would depend on the day"},
      {"{{ nothing() }}", "the function or method \"nothing\" is undefined or not supported"},
      {"{{ nothing.a }}", "\"nothing\" is undefined"},
      {"{{ d.zzz.a }}", "\"zzz\" is undefined"},
      {"{% for m in messages recursive %}{% endfor %}", "recursive loops are not supported"},
      {"{{ loop.cycle(1) }}", "\"loop\" is undefined"},
      {"{{ range(*l) }}", "arguments from a list"},
      {"{{ '%s' % s }}", "% between a string and a string is not supported"},
      {"{{ 9223372036854775807 + 1 }}", "does not fit into 64 bits"},
      {"{{ 9223372036854775807 * 2 }}", "does not fit into 64 bits"},
      {"{{ -(-9223372036854775807 - 1) }}", "does not fit into 64 bits"},
      {"{{ (-9223372036854775807 - 1) // -1 }}", "does not fit into 64 bits"},
      {"{{ 99999999999999999999 }}", "more than 64 bits"},
      {"{{ u | upper }}", "only supported for ASCII, found byte 0xC3"},
      {"{{ [u] }}", "text beyond ASCII is not supported"},
      {"{{ '<b>' + (s|safe) }}", "joining HTML"},
      {"{{ l | tojson(sort_keys=true) }}", "the argument sort_keys is not supported"},
      {"{{ l | tojson(ensure_ascii=true) }}", "only ensure_ascii=false is supported"},
      {"{{ range(100001) }}", "range: 100001 numbers; at most 100000"},
      {"{{ '\\N{DASH}' }}", "escape that is not supported"},
      {"{{ '\\ud800' }}", "a broken \\ escape"},
      {"{% macro f() %}{{ varargs }}{% endmacro %}", "the name varargs is not supported"},
      {"{{ s\n.a(1,\nb=2, 3) }}", "t: line 3: an argument without a name behind one with a name"},
      {"{{ raise_exception('a' ~ s) }}", "the template refuses the conversation: aHello World foo"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) expect_refused(bad[i][0], bad[i][1]);
}

/* before, n pieces, "a", n closing pieces (NULL: neither), after */
static char *repeat(const char *before, const char *piece, int n, const char *close,
                    const char *after) {
  size_t len;
  char *text;
  FILE *f = open_memstream(&text, &len);
  fputs(before, f);
  for (int i = 0; i < n; i++) fputs(piece, f);
  if (close) fputs("a", f);
  for (int i = 0; i < n && close; i++) fputs(close, f);
  fputs(after, f);
  if (fclose(f) != 0) die("out of memory");
  return text;
}

/* Hostile templates end with an error, soon and without much memory or stack. */
static void limits_of_the_parser(void **state) {
  (void)state;
  static const struct {
    const char *before, *piece;
    int n;
    const char *close, *after, *want;
  } bad[] = {
      {"{{ ", "(", 200, ")", " }}", "nested too deeply"},
      {"{{ ", "[", 200, "]", " }}", "nested too deeply"},
      {"{{ ", "{1:", 300, "}", " }}", "nested too deeply"},
      {"{{ ", "not ", 5000, NULL, "1 }}", "nested too deeply"},
      {"{{ ", "-", 5000, NULL, "1 }}", "nested too deeply"},
      {"{{ 1", "+1", 5000, NULL, " }}", "too long or nested too deeply"},
      {"{{ s", ".a", 5000, NULL, " }}", "too long or nested too deeply"},
      {"{{ s", "|trim", 5000, NULL, " }}", "too long or nested too deeply"},
      {"{{ 1", " if 1 else 1", 5000, NULL, " }}", "nested too deeply"},
      {"", "{% if 1 %}", 5000, "{% endif %}", "", "nested too deeply"},
      {"{% set ", "(", 200, ")", " = 1 %}", "nested too deeply"},
      {"", "aaaaaaaaaaaaaaaa", 20000, NULL, "", "320000 bytes; expected at most 262144"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    char *template = repeat(bad[i].before, bad[i].piece, bad[i].n, bad[i].close, bad[i].after);
    expect_refused(template, bad[i].want);
    free(template);
  }
}

#define TIMES(n, body) "{% for a in range(" #n ") %}" body "{% endfor %}"

static void limits_of_the_render(void **state) {
  (void)state;
  static const char *const bad[][2] = {
      {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"},
      {TIMES(100000, TIMES(100000, "")), "more than 256 MiB of memory"},
      {"{% set x = 'x' * 1000000 %}" TIMES(1000, "{{ 'y' in x }}"), "does not come to an end"},
      {"{% set x = 'x' * 1000 %}" TIMES(100000, "{{ x }}"), "a text of more than 8388608 bytes"},
      {"{{ 'x' * 1000000000000 }}", "a text of more than 8388608 bytes"},
      {"{{ [1] * 1000000000000 }}", "more than 256 MiB of memory"},
      {"{{ [1] * 9223372036854775807 }}", "more than 256 MiB of memory"},
      {"{% set n = namespace(x='x') %}" TIMES(64, "{% set n.x = n.x ~ n.x %}"),
       "a text of more than 8388608 bytes"},
      {"{% set n = namespace(x=[]) %}" TIMES(1000, "{% set n.x = [n.x] %}") "{{ n.x }}",
       "nested too deeply"},
      {"{% set n = namespace(x=[]) %}" TIMES(1000, "{% set n.x = [n.x] %}") "{{ n.x | tojson }}",
       "nested too deeply"},
      {"{% set n = namespace(x=[], y=[]) %}" TIMES(
           1000, "{% set n.x = [n.x] %}{% set n.y = [n.y] %}") "{{ n.x == n.y }}",
       "does not come to an end"},
      {"{% set n = namespace(x=[1]) %}" TIMES(60, "{% set n.x = n.x + n.x %}"),
       "more than 256 MiB of memory"},
      {TIMES(100000, "{% set x = 'x' * 100000 %}"), "more than 256 MiB of memory"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) expect_refused(bad[i][0], bad[i][1]);
}

/* Bytes of the user are upper case here, those of templates are not: whatever the template does to
 * them, marks and case agree. */
static void marks_follow_the_bytes(void **state) {
  (void)state;
  static const char *const templates[] = {
      "{{ c }}",
      "{{ 'a' ~ c ~ 'b' }}",
      "{{ 'a' + c + 'b' + c }}",
      "{{ c | trim }}|{{ c.strip() }}",
      "{{ c[2:5] }}{{ c[::-1] }}{{ c[::2] }}{{ c[0] }}{{ c[-1] }}",
      "{{ c.split() | join('-') }}",
      "{{ c.split('B')[1] }}",
      "{{ c | replace('B', 'xyz') }}{{ 'abc' | replace('b', c) }}",
      "{{ c.replace('', '-') }}",
      "{{ c | tojson }}{{ [c, 'a'] | tojson(indent=1) }}",
      "{{ [c] }}",
      "{{ {'a': c} }}",
      "{{ c | list | join }}",
      "{% for x in c %}{{ x }}-{% endfor %}",
      "{{ 'a-b-c'.split('-') | join(c) }}",
      "{{ c * 3 }}",
      "{% set x %}a{{ c }}b{% endset %}{{ x }}{{ x | trim | string }}",
      "{% macro f(x) %}a{{ x }}{% endmacro %}{{ f(c) ~ f('b') }}",
      "{% filter trim %} a{{ c }}{% endfilter %}",
      "{% generation %}a{{ c }}{% endgeneration %}",
      "{{ c | first }}{{ c | last }}{{ c | reverse }}",
      "{{ c | default('x') }}{{ e | default(c) }}",
      "{{ [c] | map('trim') | join }}{{ [{'k': c}] | map(attribute='k') | join('+') }}",
      "{{ c.removeprefix(' A') }}{{ c.removesuffix(' ') }}{{ c.rsplit(' ', 1)[1] }}",
      "{{ c | safe }}",
      "{{ 'x' ~ (c | safe) ~ 'y' }}",
      "{{ c if c else 'n' }}{{ c or 'n' }}{{ c and 'n' }}",
  };
  for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
    Error err = {""};
    JinjaTemplate *t = jinja_compile("t", templates[i], strlen(templates[i]), &err);
    if (!t) fail_msg("%s: %s", templates[i], err.msg);
    Render r;
    Str text;
    render_open(&r, t, &err);
    Dict *d = dict_new(&r);
    Str content = {.text = " AB C\"\n'BD ", .len = 11, .mark = 7};
    dict_put(&r, d, value_of_str(str_of("c")), value_of_str(content));
    if (render_run(&r, t, d, &text)) fail_msg("%s: %s", templates[i], err.msg);
    for (size_t k = 0; k < text.len; k++) {
      char c = text.text[k];
      bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      uint32_t mark = str_mark(&text, k) & ~MARK_GENERATION;
      bool escape = k > 0 && text.text[k - 1] == '\\';
      if (letter && !escape && mark != (c <= 'Z' ? 7u : 0u))
        fail_msg("%s: byte %zu of \"%.*s\" has mark %u", templates[i], k, (int)text.len, text.text,
                 mark);
      bool generation = strstr(templates[i], "generation") != NULL;
      assert_int_equal((str_mark(&text, k) & MARK_GENERATION) != 0, generation);
    }
    render_close(&r);
    jinja_free(t);
  }
}

/* Changing the case keeps the marks as well. */
static void marks_survive_case(void **state) {
  (void)state;
  Error err = {""};
  static const char template[] = "{{ (c ~ 'X') | lower }}{{ (c ~ 'X').title() }}";
  JinjaTemplate *t = jinja_compile("t", template, strlen(template), &err);
  Render r;
  Str text;
  render_open(&r, t, &err);
  Dict *d = dict_new(&r);
  dict_put(&r, d, value_of_str(str_of("c")),
           value_of_str((Str){.text = "aB", .len = 2, .mark = 3}));
  if (render_run(&r, t, d, &text)) fail_msg("%s", err.msg);
  assert_memory_equal(text.text, "abxAbx", 6);
  for (size_t k = 0; k < 6; k++) assert_int_equal(str_mark(&text, k), k % 3 == 2 ? 0 : 3);
  render_close(&r);
  jinja_free(t);
}

/* NUL is a character like others; broken UTF-8 in the template is no trap. */
static void any_bytes(void **state) {
  (void)state;
  Error err = {""};
  static const char nul[] = "a\0{{ '\\0b' | length }}",
                    broken[] = "\xff{{ '\xc3' | length }}\xe2\x82";
  JinjaTemplate *t = jinja_compile("t", nul, sizeof nul - 1, &err);
  Render r;
  Str text;
  render_open(&r, t, &err);
  assert_int_equal(render_run(&r, t, dict_new(&r), &text), 0);
  assert_true(text.len == 3 && !memcmp(text.text, "a\0002", 3));
  render_close(&r);
  jinja_free(t);
  json_t *v = variables();
  char *printed = render(broken, sizeof broken - 1, v, &err);
  assert_string_equal(printed,
                      "\xff"
                      "1\xe2\x82");
  free(printed);
  json_decref(v);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(as_jinja),
    cmocka_unit_test(errors_of_jinja),
    cmocka_unit_test(what_is_refused),
    cmocka_unit_test(limits_of_the_parser),
    cmocka_unit_test(limits_of_the_render),
    cmocka_unit_test(marks_follow_the_bytes),
    cmocka_unit_test(marks_survive_case),
    cmocka_unit_test(any_bytes),
};
TEST_MAIN(tests)
