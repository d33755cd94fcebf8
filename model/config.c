/* Reads config.json and generation_config.json of a Hugging Face folder into a ModelConfig.
 *
 * A family's row (families.c) says what its keys are called. Both spellings are read: rope_theta
 * beside rope_scaling, and rope_parameters; torch_dtype and dtype. A flag that would change the
 * mathematics and that this version does not compute is refused by name: nothing is guessed,
 * nothing is passed over. Flags are in config_flags.c, the rotary part in config_rope.c. */
#include <math.h>
#include <string.h>

#include "core/fs.h"
#include "model/internal.h"

/* ---- small readers ---- */

static int get_int(const json_t *root, const char *key, const char *file, int64_t lo, int *out,
                   Error *err) {
  int64_t v;
  if (json_get_i64(root, key, file, lo, INT32_MAX, &v, err)) return -1;
  *out = (int)v;
  return 0;
}

static int get_int_or(const json_t *root, const char *key, const char *file, int64_t lo, int dflt,
                      int *out, Error *err) {
  int64_t v;
  if (json_get_i64_or(root, key, file, lo, INT32_MAX, dflt, &v, err)) return -1;
  *out = (int)v;
  return 0;
}

/* A token id, -1 where the key is absent, null or no id of the vocabulary. */
static int get_id(const json_t *root, const char *key, const char *file, int vocab, int *out,
                  Error *err) {
  const json_t *v = json_object_get(root, key);
  if (json_is_array(v)) v = json_array_get(v, 0);
  *out = -1;
  if (!v || json_is_null(v)) return 0;
  if (!json_is_integer(v))
    return error_set(err, "%s: %s: expected a token id (an integer) or null", file, key);
  json_int_t id = json_integer_value(v);
  if (id >= 0 && id < vocab) *out = (int)id;
  return 0;
}

/* eos_token_id: one id, a list, null or absent. */
static int get_eos(const json_t *root, const char *file, ModelConfig *c, Error *err) {
  const json_t *v = json_object_get(root, "eos_token_id");
  if (!v || json_is_null(v)) return 0;
  size_t n = json_is_array(v) ? json_array_size(v) : 1;
  if (n > MODEL_MAX_EOS)
    return error_set(err, "%s: eos_token_id: %zu ids; at most %d are supported", file, n,
                     MODEL_MAX_EOS);
  c->n_eos = 0;
  for (size_t i = 0; i < n; i++) {
    const json_t *e = json_is_array(v) ? json_array_get(v, i) : v;
    if (!json_is_integer(e))
      return error_set(err, "%s: eos_token_id: expected a token id or a list of them", file);
    json_int_t id = json_integer_value(e);
    if (id < 0 || id >= c->vocab_size)
      return error_set(err, "%s: eos_token_id: %lld is no id of a vocabulary of %d", file,
                       (long long)id, c->vocab_size);
    c->eos_ids[c->n_eos++] = (int)id;
  }
  return 0;
}

/* ---- sections ---- */

static int read_architecture(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                             Error *err) {
  const json_t *list = json_object_get(root, "architectures");
  const char *name = json_is_array(list) && json_array_size(list) == 1
                         ? json_string_value(json_array_get(list, 0))
                         : NULL;
  if (!name)
    return error_set(err, "%s: architectures: expected a list of one name, [\"%s\"] or [\"%s\"]",
                     file, f->causal, f->classifier);
  if (!strcmp(name, f->causal))
    c->head = HEAD_LM;
  else if (!strcmp(name, f->classifier))
    c->head = HEAD_SCALAR;
  else
    return error_set(err, "%s: architectures: \"%s\" is not supported; expected \"%s\" or \"%s\"",
                     file, name, f->causal, f->classifier);
  if (c->head == HEAD_LM) return 0;
  const json_t *labels = json_object_get(root, "id2label");
  int64_t named = json_is_object(labels) ? (int64_t)json_object_size(labels) : 1, n;
  if (json_get_i64_or(root, "num_labels", file, 1, INT32_MAX, named, &n, err)) return -1;
  if (n != 1)
    return error_set(err, "%s: num_labels is %lld; a reward model has 1", file, (long long)n);
  return 0;
}

static int read_head_dim(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                         Error *err) {
  const json_t *given = f->keys->head_dim ? json_object_get(root, f->keys->head_dim) : NULL;
  bool there = given && !json_is_null(given);
  if (!there && !f->head_dim && c->hidden % c->n_heads)
    return error_set(err, "%s: %s %d is not a multiple of %s %d%s", file, f->keys->hidden,
                     c->hidden, f->keys->heads, c->n_heads,
                     f->keys->head_dim ? " and there is no head_dim" : "");
  c->head_dim = f->head_dim ? f->head_dim : c->hidden / c->n_heads;
  return there ? get_int(root, f->keys->head_dim, file, 1, &c->head_dim, err) : 0;
}

static int read_sizes(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                      Error *err) {
  const FamilyKeys *k = f->keys;
  if (get_int(root, "vocab_size", file, 1, &c->vocab_size, err) ||
      get_int(root, k->hidden, file, 1, &c->hidden, err) ||
      get_int(root, k->layers, file, 1, &c->n_layers, err) ||
      get_int(root, k->heads, file, 1, &c->n_heads, err) ||
      get_int_or(root, k->positions, file, 1, f->max_positions, &c->max_positions, err))
    return -1;
  c->n_kv_heads = c->n_heads;
  if (k->kv_heads && get_int_or(root, k->kv_heads, file, 1, c->n_heads, &c->n_kv_heads, err))
    return -1;
  if (c->hidden > INT32_MAX / 8) return error_set(err, "%s: %s: too large", file, k->hidden);
  /* GPT-2's may be left out: four times the hidden size. */
  bool may_lack = !strcmp(k->ffn, "n_inner");
  if (may_lack ? get_int_or(root, k->ffn, file, 1, 4 * c->hidden, &c->ffn, err)
               : get_int(root, k->ffn, file, 1, &c->ffn, err))
    return -1;
  if (read_head_dim(root, file, f, c, err)) return -1;
  double eps = f->norm_eps, std;
  if ((k->norm_eps && json_get_f64_or(root, k->norm_eps, file, f->norm_eps, &eps, err)) ||
      json_get_f64_or(root, k->init_std, file, 0.02, &std, err))
    return -1;
  c->norm_eps = (float)eps;
  c->init_std = (float)std;
  return 0;
}

int config_from_json(const json_t *root, const char *file, ModelConfig *out, Error *err) {
  ModelConfig c = {.bos_id = -1, .pad_id = -1};
  const char *type;
  if (!json_is_object(root)) return error_set(err, "%s: expected a JSON object", file);
  if (json_get_str_or(root, "model_type", file, NULL, &type, err)) return -1;
  if (!type) return error_set(err, "%s: model_type is missing; expected %s", file, family_list());
  const Family *f = family_find(type);
  if (!f)
    return error_set(err, "%s: family \"%s\" is not supported; expected %s", file, type,
                     family_list());
  strcpy(c.family, f->model_type);
  if (read_architecture(root, file, f, &c, err) || read_sizes(root, file, f, &c, err) ||
      config_read_flags(root, file, f, &c, err) || config_read_rope(root, file, f, &c, err) ||
      get_id(root, "bos_token_id", file, c.vocab_size, &c.bos_id, err) ||
      get_id(root, "pad_token_id", file, c.vocab_size, &c.pad_id, err) ||
      get_eos(root, file, &c, err))
    return -1;
  if (model_config_check(&c, err)) return error_prefix(err, "%s", file);
  *out = c;
  return 0;
}

int model_config_read_file(const char *file, ModelConfig *out, Error *err) {
  json_t *root = json_read(file, err);
  int rc = root ? config_from_json(root, file, out, err) : -1;
  json_decref(root);
  return rc;
}

int model_config_read(const char *dir, ModelConfig *out, Error *err) {
  char *file = fs_join(dir, "config.json");
  int rc = model_config_read_file(file, out, err);
  free(file);
  if (rc) return -1;
  file = fs_join(dir, "generation_config.json");
  if (fs_exists(file)) {
    json_t *root = json_read(file, err);
    rc = root ? get_eos(root, file, out, err) : -1;
    json_decref(root);
  }
  free(file);
  return rc;
}

int model_config_check(const ModelConfig *c, Error *err) {
  const Family *f = family_find(c->family);
  if (!f) return error_set(err, "no family \"%s\"", c->family);
  const struct {
    const char *name;
    int value;
  } positive[] = {{"vocab_size", c->vocab_size},
                  {f->keys->hidden, c->hidden},
                  {f->keys->layers, c->n_layers},
                  {f->keys->heads, c->n_heads},
                  {"num_key_value_heads", c->n_kv_heads},
                  {"head_dim", c->head_dim},
                  {f->keys->ffn, c->ffn},
                  {f->keys->positions, c->max_positions}};
  for (size_t i = 0; i < sizeof positive / sizeof positive[0]; i++)
    if (positive[i].value < 1)
      return error_set(err, "%s is %d; expected at least 1", positive[i].name, positive[i].value);
  if (c->n_heads % c->n_kv_heads)
    return error_set(err, "%s %d is not a multiple of num_key_value_heads %d", f->keys->heads,
                     c->n_heads, c->n_kv_heads);
  if (f->learned_positions != (c->rope == ROPE_NONE))
    return error_set(err, "positions of a %s: expected %s ones", c->family,
                     f->learned_positions ? "learned" : "rotary");
  if (c->rope != ROPE_NONE && rotary_width(c) % 2)
    return error_set(err, "head_dim: %d rotary channels are odd; rotary positions turn pairs",
                     rotary_width(c));
  if (c->rope != ROPE_NONE && !(c->rope_theta > 0 && isfinite(c->rope_theta)))
    return error_set(err, "rope_theta is %g; expected a number above 0", c->rope_theta);
  if (!(c->norm_eps > 0 && isfinite(c->norm_eps)))
    return error_set(err, "%s is %g; expected a number above 0",
                     f->keys->norm_eps ? f->keys->norm_eps : "norm_eps", (double)c->norm_eps);
  if (!(c->init_std >= 0 && isfinite(c->init_std)))
    return error_set(err, "%s is %g; expected at least 0", f->keys->init_std, (double)c->init_std);
  if (c->n_layers > 10000 || (int64_t)c->n_heads * c->head_dim > INT32_MAX / 4 ||
      c->ffn > INT32_MAX / 4)
    return error_set(err, "layers %d, heads %d x %d or ffn %d: too large", c->n_layers, c->n_heads,
                     c->head_dim, c->ffn);
  return 0;
}
