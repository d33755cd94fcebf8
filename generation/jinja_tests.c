/* Tests (x is y), as Jinja has them. */
#include "generation/jinja_value.h"

typedef enum TestKind {
  IS_DEFINED,
  IS_UNDEFINED,
  IS_NONE,
  IS_BOOLEAN,
  IS_TRUE,
  IS_FALSE,
  IS_INTEGER,
  IS_FLOAT,
  IS_NUMBER,
  IS_STRING,
  IS_MAPPING,
  IS_SEQUENCE,
  IS_ITERABLE,
  IS_CALLABLE
} TestKind;

static bool is_sequence(const Value *v) {
  return v->kind == V_STR || v->kind == V_DICT || v->kind == V_UNDEFINED ||
         (v->kind == V_LIST && v->list->kind <= LIST_RANGE);
}

static bool kind_holds(TestKind kind, const Value *v) {
  switch (kind) {
    case IS_DEFINED:
      return v->kind != V_UNDEFINED;
    case IS_UNDEFINED:
      return v->kind == V_UNDEFINED;
    case IS_NONE:
      return v->kind == V_NONE;
    case IS_BOOLEAN:
      return v->kind == V_BOOL;
    case IS_TRUE:
      return v->kind == V_BOOL && v->b;
    case IS_FALSE:
      return v->kind == V_BOOL && !v->b;
    case IS_INTEGER:
      return v->kind == V_INT;
    case IS_FLOAT:
      return v->kind == V_FLOAT;
    case IS_NUMBER:
      return value_is_number(v);
    case IS_STRING:
      return v->kind == V_STR;
    case IS_MAPPING:
      return v->kind == V_DICT;
    case IS_SEQUENCE:
      return is_sequence(v);
    case IS_ITERABLE:
      return is_sequence(v) || v->kind == V_LIST || v->kind == V_LOOP;
    case IS_CALLABLE:
      return v->kind == V_BUILTIN || v->kind == V_MACRO || v->kind == V_UNDEFINED;
  }
  return false;
}

static int test_kind(Render *r, const BuiltinCall *c, Value *out) {
  (void)r;
  *out = value_of_bool(kind_holds((TestKind)c->row->how, &c->v[0]));
  return 0;
}

static int test_order(Render *r, const BuiltinCall *c, Value *out) {
  return value_binary(r, (Op)c->row->how, &c->v[0], &c->v[1], out);
}

/* how: the remainder of division by 2; -1: of division by the argument, 0. */
static int test_division(Render *r, const BuiltinCall *c, Value *out) {
  Value two = value_of_int(2), rest;
  if (value_binary(r, OP_MOD, &c->v[0], c->row->how < 0 ? &c->v[1] : &two, &rest)) return -1;
  Value want = value_of_int(c->row->how < 0 ? 0 : c->row->how);
  *out = value_of_bool(value_equal(r, &rest, &want));
  return 0;
}

int test_call(Render *r, const char *name, const Value *v, const CallArgs *args, bool *out) {
  static const Builtin rows[] = {
      {"defined", test_kind, .how = IS_DEFINED},
      {"undefined", test_kind, .how = IS_UNDEFINED},
      {"none", test_kind, .how = IS_NONE},
      {"boolean", test_kind, .how = IS_BOOLEAN},
      {"true", test_kind, .how = IS_TRUE},
      {"false", test_kind, .how = IS_FALSE},
      {"integer", test_kind, .how = IS_INTEGER},
      {"float", test_kind, .how = IS_FLOAT},
      {"number", test_kind, .how = IS_NUMBER},
      {"string", test_kind, .how = IS_STRING},
      {"mapping", test_kind, .how = IS_MAPPING},
      {"sequence", test_kind, .how = IS_SEQUENCE},
      {"iterable", test_kind, .how = IS_ITERABLE},
      {"callable", test_kind, .how = IS_CALLABLE},
      {"==", test_order, .params = {"other"}, .needed = 1, .how = OP_EQ},
      {"eq", test_order, .params = {"other"}, .needed = 1, .how = OP_EQ},
      {"equalto", test_order, .params = {"other"}, .needed = 1, .how = OP_EQ},
      {"!=", test_order, .params = {"other"}, .needed = 1, .how = OP_NE},
      {"ne", test_order, .params = {"other"}, .needed = 1, .how = OP_NE},
      {"<", test_order, .params = {"other"}, .needed = 1, .how = OP_LT},
      {"lt", test_order, .params = {"other"}, .needed = 1, .how = OP_LT},
      {"lessthan", test_order, .params = {"other"}, .needed = 1, .how = OP_LT},
      {"<=", test_order, .params = {"other"}, .needed = 1, .how = OP_LE},
      {"le", test_order, .params = {"other"}, .needed = 1, .how = OP_LE},
      {">", test_order, .params = {"other"}, .needed = 1, .how = OP_GT},
      {"gt", test_order, .params = {"other"}, .needed = 1, .how = OP_GT},
      {"greaterthan", test_order, .params = {"other"}, .needed = 1, .how = OP_GT},
      {">=", test_order, .params = {"other"}, .needed = 1, .how = OP_GE},
      {"ge", test_order, .params = {"other"}, .needed = 1, .how = OP_GE},
      {"in", test_order, .params = {"seq"}, .needed = 1, .how = OP_IN},
      {"odd", test_division, .how = 1},
      {"even", test_division, .how = 0},
      {"divisibleby", test_division, .params = {"num"}, .needed = 1, .how = -1},
  };
  const Builtin *row = builtin_find(rows, sizeof rows / sizeof *rows, name);
  Value yes;
  if (!row) return render_fail(r, "the test \"%s\" is not supported", name);
  if (builtin_call(r, row, v, args, &yes)) return -1;
  *out = value_truth(&yes);
  return 0;
}
