/* The parsed template. Inside of generation/jinja_*.c. Everything lives in the template's slab. */
#ifndef GENERATION_JINJA_AST_H
#define GENERATION_JINJA_AST_H

#include "generation/jinja_lexer.h"

/* ---- expressions ---- */

typedef enum ExprKind {
  E_CONST,     /* value */
  E_NAME,      /* name */
  E_LIST,      /* list */
  E_TUPLE,     /* list */
  E_DICT,      /* list: key, value, key, value, ... */
  E_ATTRIBUTE, /* a.name */
  E_ITEM,      /* a[b] */
  E_SLICE,     /* a[b:c:d], each of the three or NULL */
  E_CALL,      /* a(args) */
  E_FILTER,    /* a | name(args); a NULL: the text of a block */
  E_TEST,      /* a is name(args) */
  E_NOT,       /* not a */
  E_AND,
  E_OR,
  E_IF,      /* a if b else c; c may be NULL */
  E_UNARY,   /* op a */
  E_BINARY,  /* a op b */
  E_COMPARE, /* list[0] ops[0] list[1] ops[1] list[2] ... */
} ExprKind;

typedef struct Expr Expr;
typedef struct ExprList {
  Expr **v;
  int n, cap;
} ExprList;
typedef struct Arg {
  const char *name; /* NULL: by its place */
  Expr *value;
} Arg;
typedef struct ArgList {
  Arg *v;
  int n, cap;
} ArgList;
struct Expr {
  ExprKind kind;
  int line, height; /* height: of the tree below */
  Op op;
  const char *name;
  Expr *a, *b, *c, *d;
  ExprList list;
  ArgList args;
  Op *ops;
  Value value;
};

/* ---- statements ---- */

typedef enum StmtKind {
  S_TEXT,       /* text */
  S_PRINT,      /* expr */
  S_IF,         /* branches */
  S_FOR,        /* target in expr if test: body, else otherwise */
  S_SET,        /* target = expr */
  S_SET_BLOCK,  /* target = text of body, through the filters of expr (may be NULL) */
  S_MACRO,      /* name(args): body */
  S_WITH,       /* branches: targets and values; body */
  S_FILTER,     /* text of body through the filters of expr */
  S_GENERATION, /* body */
  S_BREAK,
  S_CONTINUE
} StmtKind;

typedef struct Stmt Stmt;
typedef struct Branch {
  Expr *test; /* NULL: else; of S_WITH: the value */
  Expr *target;
  Stmt *body;
} Branch;
typedef struct BranchList {
  Branch *v;
  int n, cap;
} BranchList;
struct Stmt {
  StmtKind kind;
  int line;
  Stmt *next;
  Str text;
  Expr *expr, *test, *target;
  const char *name;
  ArgList args; /* S_MACRO: parameters, value: the default or NULL */
  BranchList branches;
  Stmt *body, *otherwise;
};

/* ---- the parser ---- */

enum { PARSE_DEPTH = 100 /* of brackets, blocks, signs */, PARSE_HEIGHT = 200 /* of a tree */ };

typedef struct Parser {
  Slab *slab;
  const char *name;
  Error *err;
  const Token *at;
  int depth;
  bool in_loop;
  bool generation; /* the template has such a block */
} Parser;

int parse_fail(Parser *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* "the name \"x\"", "\"+\"", "the end of the template" */
const char *token_name(const Token *t, char out[80]);
bool parse_at(const Parser *p, TokenKind kind, const char *text); /* text NULL: any */
bool parse_skip(Parser *p, TokenKind kind, const char *text);
int parse_expect(Parser *p, TokenKind kind, const char *text);
const char *parse_name(Parser *p); /* NULL: error */
int parse_deeper(Parser *p);       /* depth + 1, or an error */
void list_push(Slab *s, ExprList *l, Expr *e);
void arg_push(Parser *p, ArgList *l, Arg arg);
Expr *expr_new(Parser *p, ExprKind kind, Expr *a, Expr *b);
/* Knows how high the tree is, so that walking it cannot use up the stack. NULL: too high. */
Expr *expr_done(Parser *p, Expr *e);

/* jinja_operands.c; NULL: error */
Expr *parse_word(Parser *p); /* a name, or a constant that is spelled as one */
Expr *parse_primary(Parser *p);
Expr *parse_postfix(Parser *p, Expr *e);           /* attributes, items and calls on e */
Expr *parse_filters_and_tests(Parser *p, Expr *e); /* on e */
Expr *parse_attribute(Parser *p, Expr *a);         /* behind "." */
/* | name(args) | name ...: filters on `subject`; first: the first | was left out. */
Expr *parse_filters(Parser *p, Expr *subject, bool first);

/* jinja_expressions.c */
Expr *parse_expression(Parser *p, bool with_if);
/* Expressions with commas between them are a tuple. end: a name that ends it, or NULL. */
Expr *parse_tuple(Parser *p, bool with_if, const char *end);
/* What can be assigned to: names, attributes of names where spaces, and tuples of them. */
Expr *parse_target(Parser *p, bool spaces, const char *end);

/* jinja_statements.c */
int parse_template(Parser *p, Stmt **out);

#endif
