/* state_error: error feedback in a state file: what each rank has for each hop, as it lies in
 * memory.
 *
 * It fits the grid and the blocks that wrote it only. Anything else finds errors of zero: they
 * correct the next gradients by less than a step of the quantization, and are no part of the model.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zeropp/internal.h"

static const char grid_name[] = "error/grid"; /* I32 [3]: nodes, local, elements between cuts */
enum { CHUNK = 1 << 16 };

static void entry_name(char *out, size_t size, int rank, int hop) {
  snprintf(out, size, "error/%d.%d", rank, hop + 1);
}

/* Elements that a rank has for a hop. */
static int64_t error_count(const ZeroPP *z, int rank, int hop) {
  const Grid *g = z->grid;
  int64_t n = 0;
  if (hop == 0) return z->numel;
  for (int i = 0; i < z->n_units; i++)
    for (int node = 0; node < g->nodes; node++)
      n += pieces_numel(z, (Pieces){&z->units[i], rank % g->local * g->nodes + node, 1});
  return n;
}

void state_error_add(const ZeroPP *z, StWriter *w) {
  char name[64];
  if (!z->error[0]) return;
  stw_add(w, grid_name, DT_I32, 1, (const int64_t[]){3});
  for (int r = 0; r < z->grid->world; r++)
    for (int hop = 0; hop < 2; hop++) {
      entry_name(name, sizeof name, r, hop);
      stw_add(w, name, DT_BF16, 1, (const int64_t[]){error_count(z, r, hop)});
    }
}

static int write_hop(const ZeroPP *z, StWriter *w, int index, int hop, Error *err) {
  int64_t count = error_count(z, z->grid->rank, hop);
  float *x = mem_alloc(CHUNK, sizeof *x);
  uint16_t *raw = mem_alloc(CHUNK, sizeof *raw);
  int rc = 0;
  for (int64_t at = 0; at < count && rc == 0; at += CHUNK) {
    int64_t n = count - at < CHUNK ? count - at : CHUNK;
    device_download(z->device, raw, z->error[hop] + at, (size_t)n * sizeof *raw);
    convert_to_f32(raw, DT_BF16, x, (size_t)n);
    rc = stw_write_f32(w, index, at, n, x, err);
  }
  free(raw);
  free(x);
  return rc;
}

int state_error_write(const ZeroPP *z, StWriter *w, int index, Error *err) {
  const int32_t grid[3] = {z->grid->nodes, z->grid->local, (int32_t)z->cut};
  if (!z->error[0]) return 0;
  int rc = z->grid->rank == 0 ? stw_write_i32(w, index, 0, 3, grid, err) : 0;
  for (int hop = 0; hop < 2 && rc == 0; hop++)
    rc = write_hop(z, w, index + 1 + 2 * z->grid->rank + hop, hop, err);
  return rc;
}

int state_error_entries(const StFile *f) {
  int n = 0;
  for (int i = 0; i < st_count(f); i++) n += strncmp(st_entry(f, i)->name, "error/", 6) == 0;
  return n;
}

/* 1: the file's errors are this rank's; 0: they are of another grid, or there are none. */
static int fits(const ZeroPP *z, const StFile *f, Error *err) {
  const StEntry *e = st_find(f, grid_name);
  int32_t grid[3];
  char name[64];
  if (!e || e->numel != 3) return 0;
  if (st_read_i32(f, e, 0, 3, grid, err)) return -1;
  if (grid[0] != z->grid->nodes || grid[1] != z->grid->local || grid[2] != z->cut) return 0;
  for (int hop = 0; hop < 2; hop++) {
    entry_name(name, sizeof name, z->grid->rank, hop);
    e = st_find(f, name);
    if (!e || e->dtype != DT_BF16 || e->numel != error_count(z, z->grid->rank, hop))
      return error_set(err, "%s: %s is not there, or not BF16 of %lld", st_path(f), name,
                       (long long)error_count(z, z->grid->rank, hop));
  }
  return 1;
}

static int read_hop(const ZeroPP *z, const StFile *f, int hop, Error *err) {
  char name[64];
  entry_name(name, sizeof name, z->grid->rank, hop);
  const StEntry *e = st_find(f, name);
  float *x = mem_alloc(CHUNK, sizeof *x);
  uint16_t *raw = mem_alloc(CHUNK, sizeof *raw);
  int rc = 0;
  for (int64_t at = 0; at < e->numel && rc == 0; at += CHUNK) {
    int64_t n = e->numel - at < CHUNK ? e->numel - at : CHUNK;
    rc = st_read_f32(f, e, at, n, x, err);
    if (rc) break;
    convert_from_f32(x, raw, DT_BF16, (size_t)n);
    device_upload(z->device, z->error[hop] + at, raw, (size_t)n * sizeof *raw);
  }
  free(raw);
  free(x);
  return rc;
}

int state_error_read(ZeroPP *z, const StFile *f, Error *err) {
  if (!z->error[0]) return 0;
  reduce_forget_errors(z);
  int rc = fits(z, f, err);
  if (rc == 0) log_info("%s: no error feedback of this grid: it starts at zero", st_path(f));
  if (rc <= 0) return rc;
  rc = read_hop(z, f, 0, err);
  return rc ? rc : read_hop(z, f, 1, err);
}
