/* A model with what runs it, for the commands that use one. */
#include <stdlib.h>

#include "core/fs.h"
#include "orchestrator/cli.h"

static void *arena_take(void *ctx, size_t bytes) { return device_alloc(ctx, bytes); }
static void arena_give(void *ctx, void *p) { device_free(ctx, p); }

static int open_tokenizer(Engine *e, const char *dir, TokenizerNeed need, Error *err) {
  if (!tokenizer_exists(dir) && need == TOKENIZER_IF_THERE) return 0;
  e->tokenizer = tokenizer_load(dir, err);
  return e->tokenizer ? 0 : -1;
}

static int open_model(Engine *e, const char *dir, int head, Error *err) {
  ModelConfig c;
  if (!fs_is_dir(dir)) error_set(err, "%s: no such folder", dir);
  int rc = fs_is_dir(dir) ? model_config_read(dir, &c, err) : -1;
  if (comm_agree(e->grid->all, rc, err)) return -1;
  ModelOptions o = {.head = head < 0 ? c.head : (HeadKind)head, .zero = {.stage = 3}};
  e->model = model_load(e->device, e->grid, e->arena, dir, &o, err);
  return e->model ? 0 : -1;
}

int engine_open(Engine *e, const char *dir, int head, TokenizerNeed need, Error *err) {
  *e = (Engine){0};
  e->grid = grid_create(0, err);
  if (!e->grid) return -1;
  e->device = device_open(DEVICE_CPU, 0, err);
  if (comm_agree(e->grid->all, e->device ? 0 : -1, err)) return -1;
  e->arena = arena_create(e->device, arena_take, arena_give);
  if (open_model(e, dir, head, err)) return -1;
  return comm_agree(e->grid->all, open_tokenizer(e, dir, need, err), err);
}

void engine_close(Engine *e) {
  tokenizer_free(e->tokenizer);
  if (e->model) model_free(e->model);
  if (e->arena) arena_free(e->arena);
  if (e->device) device_close(e->device);
  if (e->grid) grid_free(e->grid);
}
