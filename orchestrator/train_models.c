/* Which weights a role starts from, and opening and storing models. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "core/rng.h"
#include "generation/chat.h"
#include "orchestrator/train_session.h"

const char *role_name(Role role) {
  static const char *const names[ROLE_COUNT] = {"actor", "reference", "critic", "reward"};
  return names[role];
}

const char *stage_name(StageKind kind) {
  return kind == STAGE_SFT ? "sft" : kind == STAGE_REWARD ? "reward" : "ppo";
}

HeadKind role_head(Role role) {
  return role == ROLE_CRITIC || role == ROLE_REWARD ? HEAD_SCALAR : HEAD_LM;
}

/* Place of a stage among the recipe's, or -1. */
static int stage_index(const Recipe *r, StageKind kind) {
  for (int i = 0; i < r->n_stages; i++)
    if (r->stages[i] == kind) return i;
  return -1;
}

bool stage_in_recipe(const Recipe *r, StageKind kind) { return stage_index(r, kind) >= 0; }

bool rewards_need_model(const Recipe *r) {
  for (int i = 0; i < r->n_rewards; i++)
    if (strcmp(r->rewards[i].kind, "model") == 0) return true;
  return false;
}

bool ppo_needs(const Recipe *r, Role role) {
  if (role == ROLE_REWARD) return rewards_need_model(r);
  if (role == ROLE_REFERENCE) return r->ppo.kl_coef > 0;
  return true;
}

/* ---- where weights come from ---- */

static const ModelSource *role_source(const Recipe *r, Role role) {
  const ModelSource *of[ROLE_COUNT] = {&r->models.actor, &r->models.reference, &r->models.critic,
                                       &r->models.reward};
  return of[role];
}

/* The folder that an ended stage left for this role, or NULL. */
static char *stage_result(const Recipe *r, Role role, int stages_done) {
  if (role != ROLE_ACTOR && role != ROLE_REWARD) return NULL;
  StageKind kind = role == ROLE_ACTOR ? STAGE_SFT : STAGE_REWARD;
  int i = stage_index(r, kind);
  return i >= 0 && i < stages_done ? fs_join(r->run.directory, stage_name(kind)) : NULL;
}

static int role_parse(const char *name) {
  for (Role i = 0; i < ROLE_COUNT; i++)
    if (strcmp(name, role_name(i)) == 0) return (int)i;
  return -1;
}

int model_start(const Recipe *r, Role role, int stages_done, ModelStart *out, Error *err) {
  *out = (ModelStart){.origin = role};
  for (int hops = 0; hops < ROLE_COUNT; hops++) {
    const ModelSource *src = role_source(r, out->origin);
    out->dir = stage_result(r, out->origin, stages_done);
    if (out->dir) return 0;
    if (src->init_head) out->init_head = true;
    if (src->path[0]) {
      out->dir = mem_strdup(src->path);
      return 0;
    }
    if (src->init.hidden_size > 0) {
      out->init = &src->init;
      return 0;
    }
    int from = role_parse(src->from);
    if (from < 0) break;
    out->origin = (Role)from;
    if (out->origin == ROLE_ACTOR) out->init_head = true; /* a causal model has no scalar head */
  }
  return error_set(err, "%s: models.%s: no path, no init and no model to start from: expected one",
                   r->file, role_name(role));
}

void model_start_free(ModelStart *m) {
  free(m->dir);
  m->dir = NULL;
}

ModelConfig init_model_config(const InitConfig *init, const Tokenizer *t) {
  ModelConfig c = {
      .family = "llama",
      .vocab_size = init->vocab_size > 0 ? (int)init->vocab_size : tokenizer_vocab_size(t),
      .hidden = (int)init->hidden_size,
      .n_layers = (int)init->layers,
      .n_heads = (int)init->heads,
      .n_kv_heads = (int)(init->kv_heads > 0 ? init->kv_heads : init->heads),
      .ffn = (int)init->ffn,
      .max_positions = (int)init->max_positions,
      .norm_eps = (float)init->norm_eps,
      .tied_head = init->tied_head,
      .rope = ROPE_DEFAULT,
      .rope_theta = init->rope_theta,
      .rope_factor = 1,
      .init_std = (float)init->init_std,
      .bos_id = tokenizer_bos(t),
      .pad_id = -1,
      .dtype = DT_F32};
  if (init->head_dim > 0)
    c.head_dim = (int)init->head_dim;
  else if (init->heads > 0)
    c.head_dim = (int)(init->hidden_size / init->heads);
  if (tokenizer_eos(t) >= 0) c.eos_ids[c.n_eos++] = tokenizer_eos(t);
  return c;
}

/* ---- opening and storing ---- */

ZeroPPConfig session_zeropp(const Session *s) {
  ZeroPPConfig c = zeropp_config(s->recipe);
  c.compute = s->compute;
  return c;
}

/* Answers end where the conversation's format ends a turn, also in what is saved. */
static int add_end_token(const Session *s, Model *m, Error *err) {
  int id = data_end_token(s->recipe, s->tokenizer), before = model_config(m)->n_eos;
  if (id < 0) return 0;
  if (model_add_eos(m, id, err)) return error_prefix(err, "models.actor: the end of a turn");
  if (model_config(m)->n_eos > before)
    log_info("models.actor: answers also end with token %d, the end of a turn in data.chat", id);
  return 0;
}

int model_open(Session *s, Role role, int stage, bool trainable, Model **out, Error *err) {
  const Recipe *r = s->recipe;
  ModelStart start;
  if (model_start(r, role, stage, &start, err)) return -1;
  ModelOptions o = {.head = role_head(role),
                    .trainable = trainable,
                    .recompute = s->recompute[r->stages[stage]].how,
                    .recompute_blocks = s->recompute[r->stages[stage]].blocks,
                    .init_head = start.init_head,
                    .seed = rng_mix((uint64_t)r->run.seed, rng_hash(role_name(start.origin))),
                    .zero = session_zeropp(s)};
  if (start.dir) {
    *out = model_load(s->device, s->grid, s->arena, start.dir, &o, err);
  } else {
    require(start.init);
    ModelConfig c = init_model_config(start.init, s->tokenizer);
    *out = model_create(s->device, s->grid, s->arena, &c, &o);
  }
  model_start_free(&start);
  if (!*out) return error_prefix(err, "models.%s", role_name(role));
  if (role == ROLE_ACTOR && add_end_token(s, *out, err)) {
    model_free(*out);
    *out = NULL;
    return -1;
  }
  report_watch(s->report, *out);
  return 0;
}

static DType saved_dtype(const char *name) {
  if (strcmp(name, "bfloat16") == 0) return DT_BF16;
  if (strcmp(name, "float16") == 0) return DT_F16;
  require(strcmp(name, "float32") == 0);
  return DT_F32;
}

int model_store(Session *s, Model *m, const char *name, StateKind kind, const json_t *extra,
                Error *err) {
  const Recipe *r = s->recipe;
  char *dir = fs_join(r->run.directory, name);
  SaveOptions o = {.dtype = saved_dtype(r->checkpoint.dtype),
                   .kind = kind,
                   .max_shard_bytes = (uint64_t)(r->checkpoint.max_shard_gb * 1e9),
                   .chat_template = chat_builtin(r->data.chat.name),
                   .tokenizer_dir = r->tokenizer.path[0] ? r->tokenizer.path : r->models.actor.path,
                   .extra = extra};
  Phase before = report_phase(s->report, PH_CHECKPOINT);
  int rc = model_save(m, dir, &o, err);
  report_phase(s->report, before);
  if (rc == 0) log_info("saved %s", dir);
  free(dir);
  return rc;
}
