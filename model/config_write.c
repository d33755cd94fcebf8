/* config.json and generation_config.json of a saved model: standard keys in the older spelling,
 * which every loader reads, over whatever harmless else the source's config held. */
#include <math.h>
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

static void put(json_t *root, const char *key, json_t *value) {
  if (json_object_set_new(root, key, value)) die("out of memory for %s", key);
}

static json_t *json_floats(const float *x, int n) {
  json_t *list = json_array();
  for (int i = 0; i < n; i++) json_array_append_new(list, json_float(x[i]));
  return list;
}

/* The keys of the older spelling; NULL for the default kind. */
static json_t *json_rope_scaling(const ModelConfig *c) {
  static const char *const names[] = {
      [ROPE_LINEAR] = "linear",
      [ROPE_DYNAMIC] = "dynamic",
      [ROPE_LLAMA3] = "llama3",
      [ROPE_LONGROPE] = "longrope",
  };
  if (c->rope == ROPE_DEFAULT) return json_null();
  json_t *rope = json_pack("{s:s}", "rope_type", names[c->rope]);
  if (c->rope_factor > 0) put(rope, "factor", json_real(c->rope_factor));
  if (c->rope == ROPE_LLAMA3) {
    put(rope, "low_freq_factor", json_real(c->rope_low_freq));
    put(rope, "high_freq_factor", json_real(c->rope_high_freq));
    put(rope, "original_max_position_embeddings", json_integer(c->rope_original_positions));
  }
  if (c->rope == ROPE_LONGROPE) {
    put(rope, "type", json_string("longrope"));
    put(rope, "short_factor", json_floats(c->rope_short, rotary_width(c) / 2));
    put(rope, "long_factor", json_floats(c->rope_long, rotary_width(c) / 2));
    if (c->rope_attention_factor > 0)
      put(rope, "attention_factor", json_real(c->rope_attention_factor));
  }
  return rope;
}

static void put_rope(json_t *root, const ModelConfig *c) {
  put(root, "rope_theta", json_real(c->rope_theta));
  put(root, "rope_scaling", json_rope_scaling(c));
  if (c->rope == ROPE_LONGROPE)
    put(root, "original_max_position_embeddings", json_integer(c->rope_original_positions));
  if (!c->rotary_dim) return;
  /* Loaders round head_dim times this down. */
  double part = (double)c->rotary_dim / c->head_dim;
  if ((int)(part * c->head_dim) < c->rotary_dim) part = nextafter(part, 1);
  put(root, "partial_rotary_factor", json_real(part));
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

static void put_sizes(json_t *root, const Family *f, const ModelConfig *c) {
  const FamilyKeys *k = f->keys;
  bool grows = c->rope == ROPE_DYNAMIC; /* from these positions on */
  put(root, "vocab_size", json_integer(c->vocab_size));
  put(root, k->hidden, json_integer(c->hidden));
  put(root, k->ffn, json_integer(c->ffn));
  put(root, k->layers, json_integer(c->n_layers));
  put(root, k->heads, json_integer(c->n_heads));
  if (k->kv_heads) put(root, k->kv_heads, json_integer(c->n_kv_heads));
  if (k->head_dim) put(root, k->head_dim, json_integer(c->head_dim));
  put(root, k->positions, json_integer(grows ? c->rope_original_positions : c->max_positions));
  if (!f->names->project_in) return;
  put(root, "word_embed_proj_dim", json_integer(embed_width(c)));
  put(root, "do_layer_norm_before", json_boolean(!c->post_norm));
  put(root, "_remove_final_layer_norm", json_boolean(c->no_final_norm));
}

static void put_flag(json_t *root, FamilyFlag flag, bool value) {
  if (flag.key) put(root, flag.key, json_boolean(value));
}

static void put_window(json_t *root, const Family *f, const ModelConfig *c) {
  if (f->window == WINDOW_NEVER) return;
  if (f->window == WINDOW_SWITCH) {
    put(root, "use_sliding_window", json_boolean(c->window > 0));
    json_object_del(root, "layer_types"); /* follows from the others */
    if (c->window == 0) return;
    put(root, "max_window_layers", json_integer(0));
  }
  put(root, "sliding_window", c->window > 0 ? json_integer(c->window) : json_null());
}

static const char *activation_of(const Family *f, const ModelConfig *c) {
  return c->mlp == MLP_SWIGLU ? f->activation : activation_name(c->activation);
}

static void put_flags(json_t *root, const Family *f, const ModelConfig *c, DType dtype) {
  const FamilyKeys *k = f->keys;
  put(root, k->activation, json_string(activation_of(f, c)));
  if (k->norm_eps) put(root, k->norm_eps, json_float(c->norm_eps));
  put(root, k->init_std, json_float(c->init_std));
  put_flag(root, f->qkv_bias, c->qkv_bias);
  put_flag(root, f->o_bias, c->o_bias);
  put_flag(root, f->mlp_bias, c->mlp_bias);
  put_flag(root, f->tied_head, c->tied_head);
  if (!f->dropout[0]) put(root, "attention_dropout", json_real(0.0));
  put_window(root, f, c);
  if (c->rope != ROPE_NONE) put_rope(root, c);
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
  const Family *f = family_of(c);
  json_t *root = m->source_config ? json_deep_copy(m->source_config) : json_object();
  drop_source_keys(root);
  put(root, "architectures", json_pack("[s]", family_architecture(c->family, m->head)));
  put(root, "model_type", json_string(c->family));
  put_sizes(root, f, c);
  put_flags(root, f, c, dtype);
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
