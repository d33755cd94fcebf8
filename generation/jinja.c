/* Templates from text to text: see jinja.h. */
#include "generation/jinja.h"

#include <stdlib.h>
#include <string.h>

#include "generation/jinja_eval.h"

struct JinjaTemplate {
  Slab slab;
  char *name;
  Stmt *body;
  bool generation;
};

JinjaTemplate *jinja_compile(const char *name, const char *text, size_t len, Error *err) {
  JinjaTemplate *t = mem_zalloc(1, sizeof *t);
  Parser p = {.slab = &t->slab, .name = name, .err = err};
  Tokens tokens;
  t->name = mem_strdup(name);
  if (jinja_lex(&t->slab, name, text, len, &tokens, err) == 0) {
    p.at = tokens.v;
    if (parse_template(&p, &t->body) == 0) {
      t->generation = p.generation;
      return t;
    }
  }
  jinja_free(t);
  return NULL;
}

void jinja_free(JinjaTemplate *t) {
  if (!t) return;
  slab_free(&t->slab);
  free(t->name);
  free(t);
}

bool jinja_has_generation(const JinjaTemplate *t) { return t->generation; }

void render_open(Render *r, const JinjaTemplate *t, Error *err) {
  *r = (Render){.name = t->name, .err = err, .line = 1};
}

void render_close(Render *r) { slab_free(&r->slab); }

int render_run(Render *r, const JinjaTemplate *t, const Dict *variables, Str *out) {
  StrBuf text = {0};
  Scope *globals = scope_new(r, NULL);
  for (int i = 0; i < variables->n; i++) {
    require(variables->pair[i].key.kind == V_STR);
    scope_set(r, globals, variables->pair[i].key.s.text, variables->pair[i].value);
  }
  r->out = &text;
  Flow flow = exec(r, scope_new(r, globals), t->body);
  r->out = NULL;
  /* A comparison that ran out of work had no way to say so. */
  if (flow == FLOW_FAIL || render_work(r, 1)) return -1;
  *out = buf_str(&text);
  return 0;
}
