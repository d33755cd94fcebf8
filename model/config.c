/* Reads config.json and generation_config.json of a Hugging Face folder into a ModelConfig.
 *
 * A family is a row of `families`. Both spellings are read: rope_theta beside rope_scaling, and
 * rope_parameters; torch_dtype and dtype. A flag that would change the mathematics and that this
 * version does not compute is refused by name: nothing is guessed, nothing is passed over. */
#include <math.h>
#include <string.h>

#include "core/fs.h"
#include "model/internal.h"

typedef struct Family {
  const char *model_type, *causal, *classifier;
  /* Keys of config.json that switch biases; NULL: the family has none. */
  const char *qkv_bias_key, *o_bias_key, *mlp_bias_key;
  double norm_eps, rope_theta; /* transformers' defaults where the key is absent */
  int max_positions;
} Family;

static const Family families[] = {
    {"llama", "LlamaForCausalLM", "LlamaForSequenceClassification", "attention_bias",
     "attention_bias", "mlp_bias", 1e-6, 10000.0, 2048},
};

static const Family *family_find(const char *model_type) {
  for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
    if (!strcmp(families[i].model_type, model_type)) return &families[i];
  return NULL;
}

const char *family_architecture(const char *family, HeadKind head) {
  const Family *f = family_find(family);
  if (!f) die("no family \"%s\"", family);
  return head == HEAD_LM ? f->causal : f->classifier;
}

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

static int read_sizes(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                      Error *err) {
  if (get_int(root, "vocab_size", file, 1, &c->vocab_size, err) ||
      get_int(root, "hidden_size", file, 1, &c->hidden, err) ||
      get_int(root, "intermediate_size", file, 1, &c->ffn, err) ||
      get_int(root, "num_hidden_layers", file, 1, &c->n_layers, err) ||
      get_int(root, "num_attention_heads", file, 1, &c->n_heads, err) ||
      get_int_or(root, "num_key_value_heads", file, 1, c->n_heads, &c->n_kv_heads, err) ||
      get_int_or(root, "max_position_embeddings", file, 1, f->max_positions, &c->max_positions,
                 err))
    return -1;
  const json_t *head_dim = json_object_get(root, "head_dim");
  if ((!head_dim || json_is_null(head_dim)) && c->hidden % c->n_heads)
    return error_set(err,
                     "%s: hidden_size %d is not a multiple of num_attention_heads %d and there is "
                     "no head_dim",
                     file, c->hidden, c->n_heads);
  double eps, std;
  if (get_int_or(root, "head_dim", file, 1, c->hidden / c->n_heads, &c->head_dim, err) ||
      json_get_f64_or(root, "rms_norm_eps", file, f->norm_eps, &eps, err) ||
      json_get_f64_or(root, "initializer_range", file, 0.02, &std, err))
    return -1;
  c->norm_eps = (float)eps;
  c->init_std = (float)std;
  return 0;
}

static int read_flag(const json_t *root, const char *key, const char *file, bool *out, Error *err) {
  *out = false;
  return key ? json_get_bool_or(root, key, file, false, out, err) : 0;
}

static int read_flags(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                      Error *err) {
  if (read_flag(root, "tie_word_embeddings", file, &c->tied_head, err) ||
      read_flag(root, f->qkv_bias_key, file, &c->qkv_bias, err) ||
      read_flag(root, f->o_bias_key, file, &c->o_bias, err) ||
      read_flag(root, f->mlp_bias_key, file, &c->mlp_bias, err))
    return -1;
  const char *act, *dtype;
  if (json_get_str_or(root, "hidden_act", file, "silu", &act, err)) return -1;
  if (strcmp(act, "silu") != 0)
    return error_set(err, "%s: hidden_act \"%s\" is not supported; expected \"silu\"", file, act);
  int64_t tp;
  double dropout, rotary;
  if (json_get_i64_or(root, "pretraining_tp", file, 0, INT32_MAX, 1, &tp, err) ||
      json_get_f64_or(root, "attention_dropout", file, 0, &dropout, err) ||
      json_get_f64_or(root, "partial_rotary_factor", file, 1, &rotary, err))
    return -1;
  if (tp > 1)
    return error_set(err, "%s: pretraining_tp %lld is not supported; expected 1", file,
                     (long long)tp);
  if (dropout != 0)
    return error_set(err, "%s: attention_dropout %g is not supported; expected 0", file, dropout);
  if (rotary != 1)
    return error_set(err, "%s: partial_rotary_factor %g is not supported; expected 1", file,
                     rotary);
  const json_t *quant = json_object_get(root, "quantization_config");
  if (quant && !json_is_null(quant))
    return error_set(err, "%s: quantization_config: quantized checkpoints are not supported", file);
  if (json_get_str_or(root, "torch_dtype", file, NULL, &dtype, err)) return -1;
  if (!dtype && json_get_str_or(root, "dtype", file, "float32", &dtype, err)) return -1;
  if (!strcmp(dtype, "float32"))
    c->dtype = DT_F32;
  else if (!strcmp(dtype, "bfloat16"))
    c->dtype = DT_BF16;
  else if (!strcmp(dtype, "float16"))
    c->dtype = DT_F16;
  else
    return error_set(err,
                     "%s: dtype \"%s\" is not supported; expected \"float32\", \"bfloat16\" or "
                     "\"float16\"",
                     file, dtype);
  return 0;
}

int config_from_json(const json_t *root, const char *file, ModelConfig *out, Error *err) {
  ModelConfig c = {.bos_id = -1, .pad_id = -1};
  const char *type;
  if (!json_is_object(root)) return error_set(err, "%s: expected a JSON object", file);
  if (json_get_str_or(root, "model_type", file, NULL, &type, err)) return -1;
  if (!type) return error_set(err, "%s: model_type is missing; expected \"llama\"", file);
  const Family *f = family_find(type);
  if (!f)
    return error_set(err, "%s: family \"%s\" is not supported yet; expected \"llama\"", file, type);
  strcpy(c.family, f->model_type);
  if (read_architecture(root, file, f, &c, err) || read_sizes(root, file, f, &c, err) ||
      read_flags(root, file, f, &c, err) || config_read_rope(root, file, f->rope_theta, &c, err) ||
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
  const struct {
    const char *name;
    int value;
  } positive[] = {
      {"vocab_size", c->vocab_size},          {"hidden_size", c->hidden},
      {"num_hidden_layers", c->n_layers},     {"num_attention_heads", c->n_heads},
      {"num_key_value_heads", c->n_kv_heads}, {"head_dim", c->head_dim},
      {"intermediate_size", c->ffn},          {"max_position_embeddings", c->max_positions}};
  for (size_t i = 0; i < sizeof positive / sizeof positive[0]; i++)
    if (positive[i].value < 1)
      return error_set(err, "%s is %d; expected at least 1", positive[i].name, positive[i].value);
  if (!family_find(c->family)) return error_set(err, "no family \"%s\"", c->family);
  if (c->n_heads % c->n_kv_heads)
    return error_set(err, "num_attention_heads %d is not a multiple of num_key_value_heads %d",
                     c->n_heads, c->n_kv_heads);
  if (c->head_dim % 2)
    return error_set(err, "head_dim %d is odd; rotary positions turn pairs", c->head_dim);
  if (!(c->norm_eps > 0 && isfinite(c->norm_eps)))
    return error_set(err, "rms_norm_eps is %g; expected a number above 0", (double)c->norm_eps);
  if (!(c->rope_theta > 0 && isfinite(c->rope_theta)))
    return error_set(err, "rope_theta is %g; expected a number above 0", c->rope_theta);
  if (!(c->init_std >= 0 && isfinite(c->init_std)))
    return error_set(err, "initializer_range is %g; expected at least 0", (double)c->init_std);
  if (c->n_layers > 10000 || (int64_t)c->n_heads * c->head_dim > INT32_MAX / 4 ||
      c->ffn > INT32_MAX / 4)
    return error_set(err, "layers %d, heads %d x %d or ffn %d: too large", c->n_layers, c->n_heads,
                     c->head_dim, c->ffn);
  return 0;
}
