/* Values of the template language, and the state of one render. Inside of generation/jinja_*.c and
 * chat*.c.
 *
 * Values live in the slab of their render (constants: of their template) and are never freed one by
 * one. They do not change once made, but for namespaces. Strings carry a mark for each byte, so
 * that after any cutting and joining the render still knows which bytes users wrote. */
#ifndef GENERATION_JINJA_VALUE_H
#define GENERATION_JINJA_VALUE_H

#include <stdint.h>

#include "core/error.h"

/* ---- memory ---- */

typedef struct SlabBlock SlabBlock;
typedef struct Slab {
  SlabBlock *last;
  size_t used, size; /* of the last block */
  size_t total;      /* bytes of all blocks */
} Slab;
/* Aligned, uninitialised; dies when memory is out. */
void *slab_take(Slab *s, size_t bytes) __attribute__((returns_nonnull));
void slab_free(Slab *s);

/* ---- strings ---- */

/* A mark: 0 where the template wrote the byte; else 1 + the number of the message whose content it
 * is. The top bit: printed within {% generation %}. */
#define MARK_GENERATION 0x80000000u

typedef struct Str {
  const char *text;      /* not ended by NUL */
  const uint32_t *marks; /* [len]; NULL: every byte has `mark` */
  size_t len;
  uint32_t mark;
  bool markup; /* went through the filter safe */
} Str;

/* ---- values ---- */

typedef enum ValueKind {
  V_ABSENT, /* an argument that was not given; no value of an expression */
  V_UNDEFINED,
  V_NONE,
  V_BOOL,
  V_INT,
  V_FLOAT,
  V_STR,
  V_LIST,
  V_DICT,
  V_SPACE, /* namespace() */
  V_LOOP,
  V_MACRO,
  V_BUILTIN /* a function, or a method of `self` */
} ValueKind;

typedef struct Value Value;
/* What Python tells apart. LAZY: an iterator, which is empty after its first walk. */
typedef enum ListKind { LIST_PLAIN, LIST_TUPLE, LIST_RANGE, LIST_VIEW, LIST_LAZY } ListKind;
typedef struct List {
  ListKind kind;
  int n;
  Value *v;
} List;
typedef struct Pair Pair;
/* Pairs in the order of their insertion; keys differ. */
typedef struct Dict {
  int n, cap;
  Pair *pair;
} Dict;
typedef struct Loop Loop;
typedef struct MacroValue MacroValue;
typedef struct Builtin Builtin;
typedef struct Method Method;

struct Value {
  ValueKind kind;
  union {
    const char *name; /* UNDEFINED: what is missing, for messages */
    bool b;
    int64_t i;
    double f;
    Str s;
    List *list;
    Dict *dict; /* DICT and SPACE */
    const Loop *loop;
    const MacroValue *macro;
    const Method *method;
  };
};
struct Pair {
  Value key, value;
};
struct Loop {
  int index0, length;
  const List *list; /* of all items */
};
struct Method {
  const Builtin *row;
  Value self; /* ABSENT: a function */
};

/* ---- the render ---- */

/* What a template may use up. Templates come with checkpoints, from anywhere. */
enum {
  RENDER_WORK = 20 * 1000 * 1000, /* expressions evaluated and the like */
  RENDER_BYTES = 256 << 20,       /* of values */
  RENDER_OUTPUT = 8 << 20,        /* bytes of text */
  RENDER_DEPTH = 400,             /* expressions, statements and macros inside each other */
  RENDER_RANGE = 100000           /* numbers of a range */
};

typedef struct StrBuf {
  char *text;
  uint32_t *marks;
  size_t len, cap;
} StrBuf;
typedef struct Scope Scope;
typedef struct Render {
  Slab slab;
  const char *name; /* of the template, for messages */
  Error *err;
  int line, depth;
  int64_t work;
  StrBuf *out; /* where text goes now */
} Render;

/* "NAME: line L: ..."; -1. */
int render_fail(Render *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Counts work; -1 when it is too much. */
int render_work(Render *r, size_t n);
/* May so many bytes more be taken? -1: no. */
int render_room(Render *r, size_t bytes);

/* ---- making values (jinja_value.c) ---- */

Value value_undefined(const char *name);
Value value_none(void);
Value value_of_bool(bool b);
Value value_of_int(int64_t i);
Value value_of_float(double f);
Value value_of_str(Str s);
Value value_of_list(List *l);
Str str_of(const char *text); /* of a C string that stays, marked 0 */
/* Room for n items, n of them to be filled in. NULL: too many. */
List *list_new(Render *r, ListKind kind, int64_t n);
Dict *dict_new(Render *r);
/* Sets or adds. -1: no more room. */
int dict_put(Render *r, Dict *d, Value key, Value value);
/* NULL: no such key. */
const Value *dict_find(Render *r, const Dict *d, const Value *key);
const Value *dict_get(const Dict *d, const char *key);

/* ---- asking values ---- */

const char *value_kind_name(const Value *v); /* "a string", "undefined", ... */
bool value_is_number(const Value *v);        /* bool, int, float */
bool value_truth(const Value *v);
bool str_equal(const Str *a, const Str *b);
bool str_is(const Str *s, const char *text);
bool value_equal(Render *r, const Value *a, const Value *b);
/* *out: what a loop over v walks, used up if v is lazy. -1: v cannot be walked. */
int value_walk(Render *r, const Value *v, List **out);

/* ---- strings with marks (jinja_str.c) ---- */

uint32_t str_mark(const Str *s, size_t i);
Str str_cut(const Str *s, size_t from, size_t len);
int buf_put(Render *r, StrBuf *b, const Str *s);
int buf_put_text(Render *r, StrBuf *b, const char *text, uint32_t mark);
Str buf_str(const StrBuf *b);
/* Bytes of the UTF-8 character at s; 1 where it is broken. */
size_t utf8_step(const char *s, size_t len);
size_t str_count(const Str *s); /* characters */
/* Where needle is found from byte `from` on; len of s + 1: nowhere. */
size_t str_find(const Str *s, const Str *needle, size_t from);
/* Without the characters of `chars` (NULL: Unicode's blanks) at its ends. */
Str str_strip(const Str *s, const Str *chars, bool left, bool right);
int str_split(Render *r, const Str *s, const Str *by, int64_t most, bool from_right, Value *out);
int str_replace(Render *r, const Str *s, const Str *old, const Str *by, int64_t most, Value *out);
typedef enum StrCase { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITAL, CASE_WORDS } StrCase;
int str_case(Render *r, const Str *s, StrCase how, Value *out);
int str_join(Render *r, const Str *a, const Str *b, Value *out);

/* ---- text of values (jinja_print.c) ---- */

/* What {{ v }} prints. */
int value_print(Render *r, const Value *v, Str *out);
int value_to_json(Render *r, const Value *v, int indent, Value *out);

/* ---- operators (jinja_operators.c) ---- */

typedef enum Op {
  OP_ADD,
  OP_SUB,
  OP_MUL,
  OP_DIV,
  OP_FLOORDIV,
  OP_MOD,
  OP_POW,
  OP_CONCAT,
  OP_EQ,
  OP_NE,
  OP_LT,
  OP_LE,
  OP_GT,
  OP_GE,
  OP_IN,
  OP_NOT_IN,
  OP_NEG,
  OP_POS
} Op;
bool value_is_whole(const Value *v);           /* bool, int */
int64_t value_whole(const Value *v);           /* of such */
int undefined_used(Render *r, const Value *v); /* -1, naming what is undefined */
int value_binary(Render *r, Op op, const Value *a, const Value *b, Value *out);
int value_unary(Render *r, Op op, const Value *a, Value *out);
int value_compare(Render *r, Op op, const Value *a, const Value *b, bool *out);

/* ---- items and attributes (jinja_items.c) ---- */

/* a[b] and a.name; methods included. */
int value_item(Render *r, const Value *a, const Value *key, Value *out);
int value_attribute(Render *r, const Value *a, const char *name, Value *out);
/* a[from:to:step]; each of the three may be absent. */
int value_slice(Render *r, const Value *a, const Value bounds[3], Value *out);

/* ---- functions, methods, filters, tests ---- */

typedef struct NamedArg {
  const char *name;
  Value value;
} NamedArg;
typedef struct CallArgs {
  Value *v;
  int n;
  NamedArg *named;
  int n_named;
} CallArgs;
enum { MAX_PARAMS = 4 };
/* v[0]: the subject (of a function: absent); v[1..]: the parameters, those not given absent. */
typedef struct BuiltinCall {
  const Builtin *row;
  Value v[1 + MAX_PARAMS];
  const CallArgs *args; /* as they were given */
} BuiltinCall;
struct Builtin {
  const char *name;
  int (*call)(Render *r, const BuiltinCall *c, Value *out);
  const char *params[MAX_PARAMS];
  int needed;     /* so many must be given */
  int how;        /* of functions that serve several rows */
  bool takes_any; /* nothing is bound to parameters */
};
int builtin_call(Render *r, const Builtin *b, const Value *self, const CallArgs *args, Value *out);
const Builtin *builtin_find(const Builtin *rows, int n, const char *name);
/* Arguments of one type; -1, naming what was found. maybe_*: not given (or none) is NULL, dflt. */
int need_str(Render *r, const BuiltinCall *c, int i, const Str **s);
int maybe_str(Render *r, const BuiltinCall *c, int i, const Str **s);
int maybe_int(Render *r, const BuiltinCall *c, int i, int64_t dflt, int64_t *out);
/* NULL: none of that name. */
const Builtin *function_find(const char *name);
const Builtin *method_find(const Value *self, const char *name);
/* Python has such a method, but it is not supported. */
bool method_refused(const Value *self, const char *name);
int filter_call(Render *r, const char *name, const Value *v, const CallArgs *args, Value *out);
int test_call(Render *r, const char *name, const Value *v, const CallArgs *args, bool *out);

#endif
