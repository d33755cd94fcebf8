/* config.json and generation_config.json of a saved model: standard keys in the older spelling,
 * which every loader reads, over whatever harmless else the source's config held. */
#include <stdio.h>
#include <string.h>

#include "model/internal.h"

/* Floats as the shortest decimal that reads back to the same float: 1e-05, not 9.99999974e-06. */
static json_t *json_float(float x) {
  char text[32];
  for (int digits = 1; digits <= 9; digits++) {
    snprintf(text, sizeof text, "%.*g", digits, (double)x);
    if (strtof(text, NULL) == x) break;
  }
  return json_real(strtod(text, NULL));
}

static json_t *json_id(int id) { return id < 0 ? json_null() : json_integer(id); }

static json_t *json_eos(const ModelConfig *c) {
  if (c->n_eos <= 1) return json_id(c->n_eos ? c->eos_ids[0] : -1);
  json_t *list = json_array();
  for (int i = 0; i < c->n_eos; i++) json_array_append_new(list, json_integer(c->eos_ids[i]));
  return list;
}

static json_t *json_rope_scaling(const ModelConfig *c) {
  if (c->rope == ROPE_DEFAULT) return json_null();
  if (c->rope == ROPE_LINEAR)
    return json_pack("{s:s, s:f}", "rope_type", "linear", "factor", c->rope_factor);
  return json_pack("{s:s, s:f, s:f, s:f, s:i}", "rope_type", "llama3", "factor", c->rope_factor,
                   "low_freq_factor", c->rope_low_freq, "high_freq_factor", c->rope_high_freq,
                   "original_max_position_embeddings", c->rope_original_positions);
}

static const char *torch_name(DType t) {
  if (t == DT_BF16) return "bfloat16";
  return t == DT_F16 ? "float16" : "float32";
}

/* Keys of the source that would contradict what is written, or name things that are not there. */
static void drop_source_keys(json_t *root) {
  static const char *const keys[] = {"dtype",         "rope_parameters", "auto_map",
                                     "_name_or_path", "id2label",        "label2id",
                                     "num_labels",    "problem_type",    "transformers_version"};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) json_object_del(root, keys[i]);
}

static void put(json_t *root, const char *key, json_t *value) {
  if (json_object_set_new(root, key, value)) die("out of memory for %s", key);
}

static void put_sizes(json_t *root, const ModelConfig *c) {
  put(root, "vocab_size", json_integer(c->vocab_size));
  put(root, "hidden_size", json_integer(c->hidden));
  put(root, "intermediate_size", json_integer(c->ffn));
  put(root, "num_hidden_layers", json_integer(c->n_layers));
  put(root, "num_attention_heads", json_integer(c->n_heads));
  put(root, "num_key_value_heads", json_integer(c->n_kv_heads));
  put(root, "head_dim", json_integer(c->head_dim));
  put(root, "max_position_embeddings", json_integer(c->max_positions));
}

static void put_flags(json_t *root, const ModelConfig *c, DType dtype) {
  put(root, "hidden_act", json_string("silu"));
  put(root, "rms_norm_eps", json_float(c->norm_eps));
  put(root, "initializer_range", json_float(c->init_std));
  put(root, "attention_bias", json_boolean(c->qkv_bias));
  put(root, "mlp_bias", json_boolean(c->mlp_bias));
  put(root, "attention_dropout", json_real(0.0));
  put(root, "tie_word_embeddings", json_boolean(c->tied_head));
  put(root, "rope_theta", json_real(c->rope_theta));
  put(root, "rope_scaling", json_rope_scaling(c));
  put(root, "torch_dtype", json_string(torch_name(dtype)));
  put(root, "use_cache", json_true());
}

/* A source's own bos, eos and pad stay: a source may list an eos here and more in
 * generation_config.json. */
static void put_ids(json_t *root, const ModelConfig *c) {
  if (!json_object_get(root, "bos_token_id")) put(root, "bos_token_id", json_id(c->bos_id));
  if (!json_object_get(root, "eos_token_id")) put(root, "eos_token_id", json_eos(c));
  if (!json_object_get(root, "pad_token_id")) put(root, "pad_token_id", json_id(c->pad_id));
}

json_t *config_to_json(const Model *m, DType dtype, const json_t *extra) {
  const ModelConfig *c = &m->config;
  json_t *root = m->source_config ? json_deep_copy(m->source_config) : json_object();
  drop_source_keys(root);
  put(root, "architectures", json_pack("[s]", family_architecture(c->family, m->head)));
  put(root, "model_type", json_string(c->family));
  put_sizes(root, c);
  put_flags(root, c, dtype);
  put_ids(root, c);
  if (m->head == HEAD_SCALAR) {
    put(root, "num_labels", json_integer(1));
    put(root, "id2label", json_pack("{s:s}", "0", "LABEL_0"));
    put(root, "label2id", json_pack("{s:i}", "LABEL_0", 0));
  }
  if (extra && json_object_update(root, (json_t *)extra)) die("cannot merge extra config keys");
  return root;
}

json_t *generation_to_json(const Model *m) {
  const ModelConfig *c = &m->config;
  json_t *root = m->source_generation ? json_deep_copy(m->source_generation) : json_object();
  if (!json_object_get(root, "bos_token_id")) put(root, "bos_token_id", json_id(c->bos_id));
  put(root, "eos_token_id", json_eos(c));
  if (!json_object_get(root, "pad_token_id")) put(root, "pad_token_id", json_id(c->pad_id));
  return root;
}
