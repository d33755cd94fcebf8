/* Everything that can be known about a run without training. */
#include "orchestrator/check.h"

#include <stdarg.h>
#include <string.h>

#include "orchestrator/train.h"

int check_note(Error *all, const char *fmt, ...) {
  size_t used = strlen(all->msg), room = sizeof all->msg - used;
  va_list ap;
  va_start(ap, fmt);
  if (used > 0 && room > 2) {
    all->msg[used++] = '\n';
    room--;
  }
  vsnprintf(all->msg + used, room, fmt, ap);
  va_end(ap);
  return 1;
}

static int check_tokenizer(Session *s, Error *err) {
  const Recipe *r = s->recipe;
  const char *path = r->tokenizer.path[0] ? r->tokenizer.path : r->models.actor.path;
  Error why = {""};
  if (!path[0])
    return check_note(err, "%s: tokenizer.path: expected one, since the actor is not a folder",
                      r->file);
  s->tokenizer = tokenizer_load(path, &why);
  if (s->tokenizer) return 0;
  if (r->tokenizer.path[0]) return check_note(err, "tokenizer.path: %s", why.msg);
  /* Where the folder is no model either, that is what is wrong. */
  ModelOptions o = {.head = HEAD_LM};
  ModelConfig config;
  Error model = {""};
  bool no_model = model_check(path, &o, &config, &model) != 0;
  return check_note(err, "models.actor: %s", no_model ? model.msg : why.msg);
}

int check_all(Session *s, Error *err) {
  Error found = {""};
  int n = check_tokenizer(s, &found);
  if (s->tokenizer) {
    n += check_run_models(s, &found);
    n += check_run_data(s, &found);
    n += check_run_rewards(s, &found);
  }
  Comm *all = s->grid->all;
  int rc = comm_agree(all, n > 0 ? -1 : 0, &found);
  if (rc == 0) rc = comm_agree(all, check_run_memory(s, &found) > 0 ? -1 : 0, &found);
  return rc ? error_set(err, "%s", found.msg) : 0;
}

int check_run(const Recipe *r, FILE *out, Error *err) {
  Session s;
  int rc = session_open(&s, r, err);
  if (rc == 0) rc = check_all(&s, err);
  if (rc == 0 && s.grid->rank == 0) rc = rundir_may_overwrite(r, err);
  if (rc == 0 && s.grid->rank == 0 && (recipe_print(r, out) || fflush(out)))
    rc = error_set(err, "the resolved recipe could not be written");
  if (s.grid) rc = comm_agree(s.grid->all, rc, err);
  session_close(&s);
  return rc;
}
