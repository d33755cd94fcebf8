/* Walking the parsed template. Inside of generation/jinja_*.c. */
#ifndef GENERATION_JINJA_EVAL_H
#define GENERATION_JINJA_EVAL_H

#include "generation/jinja_ast.h"

/* Names of a block of the template. What is set in a loop's body, a macro or a block is gone
 * behind it; an if has no scope of its own. */
typedef struct Binding Binding;
struct Binding {
  const char *name;
  Value value;
  Binding *next;
};
struct Scope {
  Scope *parent;
  Binding *first;
};
struct MacroValue {
  const Stmt *stmt;
  Scope *scope; /* where it was written */
};

Scope *scope_new(Render *r, Scope *parent);
void scope_set(Render *r, Scope *s, const char *name, Value v);

int eval(Render *r, Scope *s, const Expr *e, Value *out);
/* Filters written without a subject, on the text of a block. */
int eval_block_filters(Render *r, Scope *s, const Expr *e, const Value *block, Value *out);
/* Sets names, attributes of namespaces, or the items of a tuple of them. */
int assign(Render *r, Scope *s, const Expr *target, const Value *v);

typedef enum Flow { FLOW_FAIL = -1, FLOW_ON, FLOW_BREAK, FLOW_CONTINUE } Flow;
Flow exec(Render *r, Scope *s, const Stmt *list);
int macro_call(Render *r, const MacroValue *m, const CallArgs *args, Value *out);

#endif
