/* The switches of config.json: biases, activation, norms, windows, types; and what is refused. */
#include <string.h>

#include "model/internal.h"

static int read_flag(const json_t *root, FamilyFlag flag, const char *file, bool *out, Error *err) {
  *out = flag.otherwise;
  return flag.key ? json_get_bool_or(root, flag.key, file, flag.otherwise, out, err) : 0;
}

/* ---- activation ---- */

static const struct {
  const char *name;
  Activation activation;
} activations[] = {{"relu", ACT_RELU}, /* the first of a kind is what a saved config says */
                   {"gelu", ACT_GELU},
                   {"gelu_new", ACT_GELU_TANH},
                   {"gelu_pytorch_tanh", ACT_GELU_TANH},
                   {"gelu_fast", ACT_GELU_TANH}};
enum { N_ACTIVATIONS = sizeof activations / sizeof activations[0] };

const char *activation_name(Activation a) {
  int i = 0;
  while (activations[i].activation != a) i++;
  return activations[i].name;
}

static int read_activation(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                           Error *err) {
  const char *key = f->keys->activation, *name;
  if (json_get_str_or(root, key, file, f->activation, &name, err)) return -1;
  c->mlp = f->mlp;
  if (f->mlp == MLP_SWIGLU) {
    if (!strcmp(name, f->activation)) return 0;
    return error_set(err, "%s: %s \"%s\" is not supported; expected \"%s\"", file, key, name,
                     f->activation);
  }
  for (int i = 0; i < N_ACTIVATIONS; i++) {
    if (strcmp(activations[i].name, name) != 0) continue;
    c->activation = activations[i].activation;
    return 0;
  }
  return error_set(err,
                   "%s: %s \"%s\" is not supported; expected \"relu\", \"gelu\" or \"gelu_new\"",
                   file, key, name);
}

/* ---- what the mathematics here does not have ---- */

static const struct {
  const char *key;
  bool expected; /* also when the key is absent */
} fixed_flags[] = {{"layer_norm_elementwise_affine", true},
                   {"scale_attn_weights", true},
                   {"scale_attn_by_inverse_layer_idx", false},
                   {"add_cross_attention", false}};

static bool may_drop_out(const Family *f, const char *key) {
  for (int i = 0; i < 4 && f->dropout[i]; i++)
    if (!strcmp(f->dropout[i], key)) return true;
  return false;
}

static int refuse_dropout(const json_t *root, const char *file, const Family *f, Error *err) {
  static const char *const keys[] = {"attention_dropout", "dropout",    "activation_dropout",
                                     "resid_pdrop",       "embd_pdrop", "attn_pdrop",
                                     "layerdrop"};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    double rate;
    if (json_get_f64_or(root, keys[i], file, 0, &rate, err)) return -1;
    if (rate != 0 && !may_drop_out(f, keys[i]))
      return error_set(err, "%s: %s %g is not supported; expected 0", file, keys[i], rate);
  }
  return 0;
}

static int refuse_flags(const json_t *root, const char *file, const Family *f, Error *err) {
  int64_t tp;
  if (json_get_i64_or(root, "pretraining_tp", file, 0, INT32_MAX, 1, &tp, err)) return -1;
  if (tp > 1)
    return error_set(err, "%s: pretraining_tp %lld is not supported; expected 1", file,
                     (long long)tp);
  for (size_t i = 0; i < sizeof fixed_flags / sizeof fixed_flags[0]; i++) {
    bool found, expected = fixed_flags[i].expected;
    if (json_get_bool_or(root, fixed_flags[i].key, file, expected, &found, err)) return -1;
    if (found != expected)
      return error_set(err, "%s: %s %s is not supported; expected %s", file, fixed_flags[i].key,
                       found ? "true" : "false", expected ? "true" : "false");
  }
  const json_t *quant = json_object_get(root, "quantization_config");
  if (quant && !json_is_null(quant))
    return error_set(err, "%s: quantization_config: quantized checkpoints are not supported", file);
  return refuse_dropout(root, file, f, err);
}

/* ---- OPT: where the norms are, and how wide the embedding is ---- */

static int read_norms(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                      Error *err) {
  c->norm = f->norm;
  c->qk_norm = f->qk_norm;
  if (!f->names->project_in) return 0;
  bool before;
  int64_t width;
  if (json_get_bool_or(root, "do_layer_norm_before", file, true, &before, err) ||
      json_get_bool_or(root, "_remove_final_layer_norm", file, false, &c->no_final_norm, err) ||
      json_get_i64_or(root, "word_embed_proj_dim", file, 1, INT32_MAX / 8, c->hidden, &width, err))
    return -1;
  c->post_norm = !before;
  c->embed_dim = width == c->hidden ? 0 : (int)width;
  return 0;
}

/* ---- sliding windows ---- */

static int mixed_layers(const char *file, const char *key, Error *err) {
  return error_set(
      err,
      "%s: %s: layers with and without a sliding window are not supported; expected all "
      "alike",
      file, key);
}

/* layer_types: -1 with a message; else whether the layers slide, `otherwise` where it is absent. */
static int read_layer_types(const json_t *root, const char *file, int otherwise, Error *err) {
  const json_t *list = json_object_get(root, "layer_types");
  if (!list || json_is_null(list)) return otherwise;
  int slides = -1;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const char *type = json_string_value(json_array_get(list, i));
    bool sliding = type && !strcmp(type, "sliding_attention");
    if (!sliding && !(type && !strcmp(type, "full_attention")))
      return error_set(err,
                       "%s: layer_types: \"%s\" is not supported; expected \"full_attention\" or "
                       "\"sliding_attention\"",
                       file, type ? type : "?");
    if (slides >= 0 && slides != (int)sliding) return mixed_layers(file, "layer_types", err);
    slides = sliding;
  }
  if (slides < 0) return error_set(err, "%s: layer_types: expected a list of names", file);
  return slides;
}

static int read_window(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                       Error *err) {
  if (f->window == WINDOW_NEVER) return 0;
  const json_t *given = json_object_get(root, "sliding_window");
  int64_t size, from;
  bool on = true;
  if (json_get_i64_or(root, "sliding_window", file, 1, INT32_MAX, f->window_size, &size, err))
    return -1;
  if (f->window == WINDOW_SIZE) {
    c->window = json_is_null(given) ? 0 : (int)size;
    return 0;
  }
  if (json_get_bool_or(root, "use_sliding_window", file, false, &on, err) ||
      json_get_i64_or(root, "max_window_layers", file, 0, INT32_MAX, 28, &from, err))
    return -1;
  on = on && !json_is_null(given);
  /* The first max_window_layers layers see everything, unless layer_types says it all. */
  bool listed = json_is_array(json_object_get(root, "layer_types"));
  if (on && !listed && from > 0 && from < c->n_layers)
    return mixed_layers(file, "max_window_layers", err);
  int slides = read_layer_types(root, file, on && from == 0, err);
  if (slides < 0) return -1;
  if (slides && !on)
    return error_set(err, "%s: layer_types slide, but use_sliding_window is false", file);
  c->window = slides ? (int)size : 0;
  return 0;
}

/* ---- all of them ---- */

static int read_dtype(const json_t *root, const char *file, ModelConfig *c, Error *err) {
  const char *dtype;
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

int config_read_flags(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                      Error *err) {
  if (read_flag(root, f->tied_head, file, &c->tied_head, err) ||
      read_flag(root, f->qkv_bias, file, &c->qkv_bias, err) ||
      read_flag(root, f->o_bias, file, &c->o_bias, err) ||
      read_flag(root, f->mlp_bias, file, &c->mlp_bias, err) ||
      read_activation(root, file, f, c, err) || refuse_flags(root, file, f, err) ||
      read_norms(root, file, f, c, err) || read_window(root, file, f, c, err))
    return -1;
  return read_dtype(root, file, c, err);
}
