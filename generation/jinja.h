/* The template language of chat templates: the part of Jinja that published chat templates use,
 * rendered as transformers does (trim_blocks, lstrip_blocks, loop controls, {% generation %}).
 * What is not understood is refused by name; a template from anywhere may use up no more than
 * jinja_value.h says. Inside of generation/. */
#ifndef GENERATION_JINJA_H
#define GENERATION_JINJA_H

#include "generation/jinja_value.h"

typedef struct JinjaTemplate JinjaTemplate;
/* name: begins errors, "NAME: line L: ...". NULL on error. */
JinjaTemplate *jinja_compile(const char *name, const char *text, size_t len, Error *err);
void jinja_free(JinjaTemplate *t);
bool jinja_has_generation(const JinjaTemplate *t); /* {% generation %} blocks */

/* A render: open it, make the variables in it, run it, close it. The text lives in it. */
void render_open(Render *r, const JinjaTemplate *t, Error *err);
int render_run(Render *r, const JinjaTemplate *t, const Dict *variables, Str *out);
void render_close(Render *r);

#endif
