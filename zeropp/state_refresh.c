/* state_refresh: the forms of refreshes in a state file, so that a resumed run refreshes in those
 * of one that was not interrupted. They are of whole units, so any grid can read them. A file
 * without starts as a new run does. */
#include <stdlib.h>

#include "zeropp/internal.h"

/* I32, by unit: EXACT, or a quarter of the bytes saved: messages are multiples of 4 bytes. */
static const char entry[] = "zeropp/refresh";
enum { EXACT = -1, SAVED_UNIT = 4 };

void state_refresh_add(const ZeroPP *z, StWriter *w) {
  if (delta_keeps_rules(z)) stw_add(w, entry, DT_I32, 1, (const int64_t[]){z->n_units});
}

int state_refresh_write(ZeroPP *z, StWriter *w, int index, Error *err) {
  if (!delta_keeps_rules(z) || z->grid->rank != 0) return 0;
  const RefreshRule *rule = delta_rules(z);
  int32_t *x = mem_alloc((size_t)z->n_units, sizeof *x);
  for (int i = 0; i < z->n_units; i++) {
    require(rule[i].saved / SAVED_UNIT <= INT32_MAX);
    x[i] = rule[i].coded ? (int32_t)(rule[i].saved / SAVED_UNIT) : EXACT;
  }
  int rc = stw_write_i32(w, index, 0, z->n_units, x, err);
  free(x);
  return rc;
}

int state_refresh_entries(const StFile *f) { return st_find(f, entry) != NULL; }

/* The numbers of the file, for the caller to free; NULL: there are none, or (*rc = -1) wrong ones.
 */
static int32_t *read_entry(const ZeroPP *z, const StFile *f, int *rc, Error *err) {
  const StEntry *e = st_find(f, entry);
  *rc = 0;
  if (!e || !delta_keeps_rules(z)) return NULL;
  *rc = -1;
  if (e->numel != z->n_units) {
    error_set(err, "%s: %s has %lld elements, the model has %d units", st_path(f), entry,
              (long long)e->numel, z->n_units);
    return NULL;
  }
  int32_t *x = mem_alloc((size_t)z->n_units, sizeof *x);
  *rc = st_read_i32(f, e, 0, z->n_units, x, err);
  for (int i = 0; i < z->n_units && *rc == 0; i++)
    if (x[i] < EXACT)
      *rc =
          error_set(err, "%s: %s [%d]: found %d, expected -1 or more", st_path(f), entry, i, x[i]);
  if (*rc == 0) return x;
  free(x);
  return NULL;
}

int state_refresh_check(const ZeroPP *z, const StFile *f, Error *err) {
  int rc;
  free(read_entry(z, f, &rc, err));
  return rc;
}

int state_refresh_read(ZeroPP *z, const StFile *f, Error *err) {
  int rc;
  if (!delta_keeps_rules(z)) return 0;
  int32_t *x = read_entry(z, f, &rc, err);
  RefreshRule *rule = delta_rules(z);
  for (int i = 0; i < z->n_units && rc == 0; i++) {
    rule[i] = (RefreshRule){0};
    if (x && x[i] != EXACT) rule[i] = (RefreshRule){true, (int64_t)x[i] * SAVED_UNIT};
  }
  free(x);
  return rc;
}
