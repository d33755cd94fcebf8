/* Parser of statements. */
#include <string.h>

#include "generation/jinja_ast.h"

/* ---- nodes ---- */

static Stmt *stmt_new(Parser *p, StmtKind kind) {
  Stmt *s = slab_take(p->slab, sizeof *s);
  *s = (Stmt){.kind = kind, .line = p->at->line};
  return s;
}

static void branch_push(Parser *p, BranchList *l, Branch b) {
  if (l->n == l->cap) {
    l->cap = l->cap ? 2 * l->cap : 4;
    Branch *v = slab_take(p->slab, (size_t)l->cap * sizeof *v);
    if (l->n) memcpy(v, l->v, (size_t)l->n * sizeof *v);
    l->v = v;
  }
  l->v[l->n++] = b;
}

/* ---- bodies ---- */

static int parse_statement(Parser *p, Stmt **out);

/* At a tag with one of these names? ends: "elif|else|endif". */
static bool at_end_tag(const Parser *p, const char *ends) {
  if (!parse_at(p, T_TAG_BEGIN, NULL) || p->at[1].kind != T_NAME) return false;
  const Str *name = &p->at[1].text;
  for (const char *end = ends; *end; end += strspn(end, "|")) {
    size_t n = strcspn(end, "|");
    if (n == name->len && memcmp(end, name->text, n) == 0) return true;
    end += n;
  }
  return false;
}

static int parse_print(Parser *p, Stmt **out) {
  *out = stmt_new(p, S_PRINT);
  p->at++;
  (*out)->expr = parse_tuple(p, true, NULL);
  return (*out)->expr ? parse_expect(p, T_PRINT_END, NULL) : -1;
}

static int parse_one(Parser *p, Stmt **out) {
  if (parse_at(p, T_DATA, NULL)) {
    *out = stmt_new(p, S_TEXT);
    (*out)->text = p->at++->text;
    return 0;
  }
  if (parse_at(p, T_PRINT_BEGIN, NULL)) return parse_print(p, out);
  p->at++;
  if (parse_deeper(p) || parse_statement(p, out)) return -1;
  p->depth--;
  return 0;
}

/* Up to a tag of `ends` (not taken) or, when ends is "", to the end of the template. */
static int parse_until(Parser *p, const char *ends, Stmt **out) {
  Stmt **last = out;
  *out = NULL;
  while (!at_end_tag(p, ends)) {
    if (parse_at(p, T_END, NULL))
      return *ends ? parse_fail(p, "the template ends; expected {%% %s %%}", ends) : 0;
    if (parse_one(p, last)) return -1;
    last = &(*last)->next;
  }
  return 0;
}

/* %} body, up to a tag of `ends` (its name is next). */
static int parse_body(Parser *p, const char *ends, Stmt **out) {
  parse_skip(p, T_OPERATOR, ":");
  if (parse_expect(p, T_TAG_END, NULL) || parse_until(p, ends, out)) return -1;
  p->at++;
  return 0;
}

/* %} body {% end */
static int parse_whole_body(Parser *p, const char *end, Stmt **out) {
  return parse_body(p, end, out) || parse_expect(p, T_NAME, end) ? -1 : 0;
}

/* The same for a body whose text is caught, which no loop outside can be left from. */
static int parse_caught_body(Parser *p, const char *end, Stmt **out) {
  bool outer = p->in_loop;
  p->in_loop = false;
  int rc = parse_whole_body(p, end, out);
  p->in_loop = outer;
  return rc;
}

/* ---- statements, each behind its name ---- */

static int parse_if(Parser *p, Stmt *s) {
  s->kind = S_IF;
  for (;;) {
    Branch b = {.test = parse_tuple(p, false, NULL)};
    if (!b.test || parse_body(p, "elif|else|endif", &b.body)) return -1;
    branch_push(p, &s->branches, b);
    if (!parse_skip(p, T_NAME, "elif")) break;
  }
  if (parse_skip(p, T_NAME, "else")) {
    Branch b = {0};
    if (parse_body(p, "endif", &b.body)) return -1;
    branch_push(p, &s->branches, b);
  }
  return parse_expect(p, T_NAME, "endif");
}

static int parse_for(Parser *p, Stmt *s) {
  bool outer = p->in_loop;
  s->kind = S_FOR;
  s->target = parse_target(p, false, "in");
  if (!s->target || parse_expect(p, T_NAME, "in")) return -1;
  if (s->target->kind == E_NAME && strcmp(s->target->name, "loop") == 0)
    return parse_fail(p, "cannot assign to \"loop\"");
  if (!(s->expr = parse_tuple(p, false, "recursive"))) return -1;
  if (parse_skip(p, T_NAME, "if") && !(s->test = parse_expression(p, true))) return -1;
  if (parse_at(p, T_NAME, "recursive")) return parse_fail(p, "recursive loops are not supported");
  p->in_loop = true;
  int rc = parse_body(p, "else|endfor", &s->body);
  p->in_loop = outer;
  if (rc) return -1;
  if (parse_skip(p, T_NAME, "else") && parse_body(p, "endfor", &s->otherwise)) return -1;
  return parse_expect(p, T_NAME, "endfor");
}

static int parse_set(Parser *p, Stmt *s) {
  s->kind = S_SET;
  if (!(s->target = parse_target(p, true, NULL))) return -1;
  if (parse_skip(p, T_OPERATOR, "=")) {
    s->expr = parse_tuple(p, true, NULL);
    return s->expr ? 0 : -1;
  }
  s->kind = S_SET_BLOCK;
  if (parse_at(p, T_OPERATOR, "|") && !(s->expr = parse_filters(p, NULL, false))) return -1;
  return parse_caught_body(p, "endset", &s->body);
}

static int parse_parameter(Parser *p, Stmt *s) {
  Arg arg = {.name = parse_name(p)};
  if (!arg.name) return -1;
  if (parse_skip(p, T_OPERATOR, "=")) {
    if (!(arg.value = parse_expression(p, true))) return -1;
  } else if (s->args.n && s->args.v[s->args.n - 1].value) {
    return parse_fail(p, "a parameter without a default behind one with a default");
  }
  ArgList *l = &s->args;
  Arg *v = slab_take(p->slab, (size_t)(l->n + 1) * sizeof *v);
  if (l->n) memcpy(v, l->v, (size_t)l->n * sizeof *v);
  v[l->n] = arg;
  *l = (ArgList){v, l->n + 1, l->n + 1};
  return 0;
}

static int parse_macro(Parser *p, Stmt *s) {
  s->kind = S_MACRO;
  if (!(s->name = parse_name(p)) || parse_expect(p, T_OPERATOR, "(")) return -1;
  while (!parse_at(p, T_OPERATOR, ")"))
    if ((s->args.n && parse_expect(p, T_OPERATOR, ",")) || parse_parameter(p, s)) return -1;
  p->at++;
  return parse_caught_body(p, "endmacro", &s->body);
}

static int parse_with(Parser *p, Stmt *s) {
  s->kind = S_WITH;
  while (!parse_at(p, T_TAG_END, NULL)) {
    Branch b = {0};
    if (s->branches.n && parse_expect(p, T_OPERATOR, ",")) return -1;
    if (!(b.target = parse_target(p, false, NULL)) || parse_expect(p, T_OPERATOR, "=") ||
        !(b.test = parse_expression(p, true)))
      return -1;
    branch_push(p, &s->branches, b);
  }
  return parse_whole_body(p, "endwith", &s->body);
}

static int parse_filter_block(Parser *p, Stmt *s) {
  s->kind = S_FILTER;
  if (!(s->expr = parse_filters(p, NULL, true))) return -1;
  return parse_caught_body(p, "endfilter", &s->body);
}

static int parse_generation(Parser *p, Stmt *s) {
  s->kind = S_GENERATION;
  p->generation = true;
  return parse_caught_body(p, "endgeneration", &s->body);
}

static int parse_jump(Parser *p, Stmt *s, StmtKind kind) {
  s->kind = kind;
  return p->in_loop ? 0 : parse_fail(p, "break or continue outside of a loop");
}

static int parse_break(Parser *p, Stmt *s) { return parse_jump(p, s, S_BREAK); }
static int parse_continue(Parser *p, Stmt *s) { return parse_jump(p, s, S_CONTINUE); }

/* Behind "{%". */
static int parse_statement(Parser *p, Stmt **out) {
  static const struct {
    const char *name;
    int (*parse)(Parser *p, Stmt *s);
  } all[] = {{"if", parse_if},
             {"for", parse_for},
             {"set", parse_set},
             {"macro", parse_macro},
             {"with", parse_with},
             {"filter", parse_filter_block},
             {"generation", parse_generation},
             {"break", parse_break},
             {"continue", parse_continue}};
  char found[80];
  *out = stmt_new(p, S_TEXT);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (parse_skip(p, T_NAME, all[i].name))
      return all[i].parse(p, *out) ? -1 : parse_expect(p, T_TAG_END, NULL);
  return parse_fail(p, "the statement %s is not supported here", token_name(p->at, found));
}

int parse_template(Parser *p, Stmt **out) { return parse_until(p, "", out); }
