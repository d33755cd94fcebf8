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

static int open_model(Engine *e, const EngineOptions *eo, Error *err) {
  const char *dir = eo->dir;
  ModelConfig c;
  ZeroPPConfig zero = {.stage = 3};
  if (precision_choose(eo->precision, e->device, &zero.compute, err))
    return error_prefix(err, "--precision");
  if (!fs_is_dir(dir)) error_set(err, "%s: no such folder", dir);
  int rc = fs_is_dir(dir) ? model_config_read(dir, &c, err) : -1;
  if (comm_agree(e->grid->all, rc, err)) return -1;
  ModelOptions o = {.head = eo->head < 0 ? c.head : (HeadKind)eo->head, .zero = zero};
  e->model = model_load(e->device, e->grid, e->arena, dir, &o, err);
  return e->model ? 0 : -1;
}

int engine_open(Engine *e, const EngineOptions *o, Error *err) {
  *e = (Engine){0};
  e->grid = grid_create(0, err);
  if (!e->grid) return -1;
  e->device = device_choose(e->grid, o->device, 0, false, err);
  if (!e->device) return -1;
  e->arena = arena_create(e->device, arena_take, arena_give);
  if (open_model(e, o, err)) return -1;
  return comm_agree(e->grid->all, open_tokenizer(e, o->dir, o->need, err), err);
}

void engine_close(Engine *e) {
  tokenizer_free(e->tokenizer);
  if (e->model) model_free(e->model);
  if (e->arena) arena_free(e->arena);
  if (e->grid) grid_free(e->grid); /* may hold communicators of the device */
  if (e->device) device_close(e->device);
}
