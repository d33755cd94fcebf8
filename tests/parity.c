/* parity DIR [DEVICE [PRECISION]]: every folder under DIR that holds a known fixture, against what
 * PyTorch computed.
 *
 * Layouts are told by what reference.safetensors holds, not by the folder's name. A folder that
 * fails to load or is outside the limits fails; no folder checked at all is a failure, too. Works
 * under mpirun. */
#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "orchestrator/orchestrator.h"
#include "tests/parity.h"

typedef struct Layout {
  const char *what, *tensor, *file; /* the tensor and the file that tell it; file may be NULL */
  int (*check)(Parity *p, Error *err);
} Layout;

static const Layout layouts[] = {
    {"ppo", "policy_loss", "hyperparameters.json", parity_ppo},
    {"reward", "pair_loss", "config.json", parity_reward},
    {"adamw", "grad_norms", NULL, parity_adamw},
    {"causal", "seq0.logits", "config.json", parity_causal},
};

static bool has_file(const char *dir, const char *name) {
  char *path = fs_join(dir, name);
  bool there = fs_exists(path);
  free(path);
  return there;
}

static const Layout *layout_of(const Parity *p) {
  for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
    const Layout *l = &layouts[i];
    if (parity_has(p, l->tensor) && (!l->file || has_file(p->dir, l->file))) return l;
  }
  return NULL;
}

/* Failed figures of the folder. */
static int print_figures(const Parity *p) {
  int failed = 0;
  for (int i = 0; i < p->n_figures; i++) {
    const Figure *f = &p->figure[i];
    bool ok = f->error <= f->limit;
    if (!ok) failed++;
    if (p->grid->rank != 0) continue;
    if (f->limit == 0)
      printf("  %-20s %s\n", f->name, ok ? "identical" : "differs  FAILED");
    else
      printf("  %-20s %9.2e  limit %.1e  at %s%s\n", f->name, f->error, f->limit, f->worst,
             ok ? "" : "  FAILED");
  }
  return failed;
}

typedef struct Totals {
  int checked, failed;
} Totals;

static void check_folder(Parity *p, const char *name, Totals *t) {
  Error err = {""};
  char *file = fs_join(p->dir, "reference.safetensors");
  p->reference = fs_exists(file) ? stset_open_file(file, &err) : NULL;
  if (fs_exists(file) && !p->reference) die("%s", err.msg);
  free(file);
  const Layout *l = p->reference ? layout_of(p) : NULL;
  if (!l) goto done; /* no fixture: other files may lie around */
  bool talk = p->grid->rank == 0;
  p->n_figures = 0;
  if (l->check(p, &err)) {
    t->checked++;
    t->failed++;
    if (talk) printf("%s: %s\n  FAILED: %s\n", name, l->what, err.msg);
    goto done;
  }
  t->checked++;
  if (talk) printf("%s: %s\n", name, l->what);
  if (print_figures(p)) t->failed++;
done:
  if (p->reference) stset_close(p->reference);
  p->reference = NULL;
  fflush(stdout);
}

static int by_name(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

static Totals check_all(Parity *p) {
  Totals t = {0};
  DIR *d = opendir(p->root);
  if (!d) die("%s: cannot open the folder of fixtures", p->root);
  char **names = NULL;
  int n = 0;
  for (struct dirent *e; (e = readdir(d));) {
    if (e->d_name[0] == '.') continue;
    names = mem_grow(names, (size_t)n + 1, sizeof *names);
    names[n++] = mem_strdup(e->d_name);
  }
  closedir(d);
  if (n) qsort(names, (size_t)n, sizeof *names, by_name);
  for (int i = 0; i < n; i++) {
    p->dir = fs_join(p->root, names[i]);
    if (fs_is_dir(p->dir)) check_folder(p, names[i], &t);
    free(p->dir);
    free(names[i]);
  }
  free(names);
  return t;
}

static void *arena_take(void *ctx, size_t bytes) { return device_alloc(ctx, bytes); }
static void arena_give(void *ctx, void *p) { device_free(ctx, p); }

int main(int argc, char **argv) {
  Error err = {""};
  if (launch_init(&argc, &argv, &err)) die("%s", err.msg);
  if (argc < 2 || argc > 4) die("usage: parity DIR [DEVICE [PRECISION]]");
  Parity p = {.root = argv[1]};
  p.grid = grid_create(0, &err);
  if (!p.grid) die("%s", err.msg);
  p.device = device_choose(p.grid, argc > 2 ? argv[2] : "cpu", 0, false, &err);
  if (!p.device || precision_choose(argc > 3 ? argv[3] : "float32", p.device, &p.compute, &err))
    die("%s", err.msg);
  p.arena = arena_create(p.device, arena_take, arena_give);
  if (p.grid->rank == 0) printf("%s, %s\n", device_describe(p.device), dtype_name(p.compute));
  Totals t = check_all(&p);
  if (p.grid->rank == 0) printf("%d folders checked, %d failed\n", t.checked, t.failed);
  if (t.checked == 0) log_warn("%s: no folder of a known layout that could be checked", p.root);
  arena_free(p.arena);
  grid_free(p.grid);
  device_close(p.device);
  launch_finish();
  return t.failed > 0 || t.checked == 0;
}
