/* The run directory: RUN/recipe.yaml, metrics.jsonl, report.json, samples/, checkpoints/ and the
 * stages' models. A directory that holds anything is never mixed with a new run. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "core/fs.h"
#include "orchestrator/train_session.h"

/* A name inside dir (the caller frees), or NULL when it is empty or absent. */
static char *any_entry(const char *dir, Error *err) {
  DIR *d = opendir(dir);
  if (!d) {
    if (errno != ENOENT) error_set(err, "%s: %s", dir, strerror(errno));
    return NULL;
  }
  char *found = NULL;
  for (struct dirent *e = readdir(d); e && !found; e = readdir(d))
    if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) found = mem_strdup(e->d_name);
  closedir(d);
  return found;
}

/* The recipe as a run writes it. The caller frees. */
static char *recipe_text(const Recipe *r, size_t *len) {
  char *text = NULL;
  FILE *out = open_memstream(&text, len);
  if (!out || recipe_print(r, out) || fclose(out)) die("recipe: cannot be printed");
  return text;
}

static int write_recipe(const Recipe *r, Error *err) {
  char *path = fs_join(r->run.directory, "recipe.yaml");
  size_t len;
  char *text = recipe_text(r, &len);
  int rc = fs_write_atomic(path, text, len, err);
  free(text);
  free(path);
  return rc;
}

static int compare_recipe(Session *s, const char *path, Error *err) {
  size_t len, old_len;
  char *old = fs_read(path, &old_len, err);
  if (!old) return -1;
  char *text = recipe_text(s->recipe, &len);
  recipe_changes(old, old_len, text, len, s->changes, sizeof s->changes);
  free(text);
  free(old);
  return 0;
}

/* Two processes that write one run, such as a job and its restart, would spoil it for both. The
 * lock ends with the process, however that ends. Nothing to do where the directory is not there
 * yet. */
static int lock(const char *dir, int *fd, Error *err) {
  if (*fd < 0) *fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (*fd < 0) return errno == ENOENT ? 0 : error_set(err, "%s: %s", dir, strerror(errno));
  if (flock(*fd, LOCK_EX | LOCK_NB) == 0) return 0;
  if (errno == EWOULDBLOCK)
    return error_set(
        err, "%s: another process runs in this directory; wait for it to end, or stop it", dir);
  log_warn("%s: cannot be locked (%s): take care that no other process runs in it", dir,
           strerror(errno));
  return 0;
}

static int prepare(Session *s, bool resume, Error *err) {
  const Recipe *r = s->recipe;
  const char *dir = r->run.directory;
  char *recipe = fs_join(dir, "recipe.yaml"), *samples = fs_join(dir, "samples");
  int rc = lock(dir, &s->lock, err);
  if (rc == 0 && resume && !fs_exists(recipe))
    rc = error_set(err, "%s: nothing to resume: no recipe.yaml of an earlier run", dir);
  if (rc == 0 && !resume && r->run.overwrite)
    rc = rundir_may_overwrite(r, err) || rundir_remove(dir, err) ? -1 : 0;
  if (rc == 0 && !resume && !r->run.overwrite) {
    Error why = {""};
    char *found = any_entry(dir, &why);
    if (found)
      rc = error_set(err,
                     "%s: not empty (%s): --resume goes on with a run, run.overwrite: true starts "
                     "it anew",
                     dir, found);
    else if (why.msg[0])
      rc = error_set(err, "%s", why.msg);
    free(found);
  }
  if (rc == 0) rc = fs_make_dirs(samples, err); /* before recipe.yaml: train_overwrite.c */
  if (rc == 0) rc = lock(dir, &s->lock, err);
  if (rc == 0) rc = resume ? compare_recipe(s, recipe, err) : write_recipe(r, err);
  free(recipe);
  free(samples);
  return rc;
}

int rundir_open(Session *s, bool resume, Error *err) {
  return comm_agree(s->grid->all, s->grid->rank == 0 ? prepare(s, resume, err) : 0, err);
}

int rundir_resumed(Session *s, Error *err) {
  return comm_agree(s->grid->all, s->grid->rank == 0 ? write_recipe(s->recipe, err) : 0, err);
}

void rundir_close(Session *s) {
  if (s->lock >= 0) close(s->lock);
}
