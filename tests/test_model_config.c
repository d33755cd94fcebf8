/* config.json in both spellings, what is refused, the parameter table. */
#include "tests/family_test.h"

#define BASE                                                                             \
  "\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":50," \
  "\"hidden_size\":24,\"intermediate_size\":40,\"num_hidden_layers\":2,"                 \
  "\"num_attention_heads\":6,\"num_key_value_heads\":2,\"hidden_act\":\"silu\","         \
  "\"max_position_embeddings\":128,\"rms_norm_eps\":1e-05,\"bos_token_id\":1,\"eos_token_id\":2"

static int parse(const char *text, ModelConfig *c, Error *err) {
  json_t *root = json_loads(text, 0, NULL);
  assert_non_null(root);
  *err = (Error){""};
  int rc = config_from_json(root, "config.json", c, err);
  json_decref(root);
  return rc;
}

static ModelConfig parsed(const char *text) {
  ModelConfig c;
  Error err;
  if (parse(text, &c, &err)) fail_msg("%s: %s", text, err.msg);
  return c;
}

static void plain(void **state) {
  (void)state;
  ModelConfig c = parsed("{" BASE "}");
  assert_int_equal(c.head_dim, 4);
  assert_int_equal(c.n_kv_heads, 2);
  assert_true(c.rope == ROPE_DEFAULT && c.rope_theta == 10000);
  assert_true(c.norm_eps == 1e-5f && c.init_std == 0.02f);
  assert_true(!c.tied_head && !c.qkv_bias && !c.o_bias && !c.mlp_bias);
  assert_true(c.dtype == DT_F32 && c.head == HEAD_LM);
  assert_int_equal(c.bos_id, 1);
  assert_int_equal(c.pad_id, -1);
  assert_true(c.n_eos == 1 && c.eos_ids[0] == 2);
  c = parsed("{" BASE
             ",\"pad_token_id\":-1,\"head_dim\":8,\"attention_bias\":true,"
             "\"mlp_bias\":true,\"tie_word_embeddings\":true}");
  assert_true(c.pad_id == -1 && c.head_dim == 8 && c.qkv_bias && c.o_bias && c.mlp_bias);
  assert_true(c.tied_head);
}

static void same(const char *older, const char *newer) {
  ModelConfig a = parsed(older), b = parsed(newer);
  assert_true(a.rope == b.rope && a.rope_theta == b.rope_theta && a.dtype == b.dtype);
  assert_true(a.rope_factor == b.rope_factor && a.rope_low_freq == b.rope_low_freq);
  assert_true(a.rope_high_freq == b.rope_high_freq);
  assert_int_equal(a.rope_original_positions, b.rope_original_positions);
}

static void both_spellings(void **state) {
  (void)state;
  same("{" BASE ",\"rope_theta\":500000.0,\"torch_dtype\":\"bfloat16\"}",
       "{" BASE
       ",\"rope_parameters\":{\"rope_theta\":500000.0,\"rope_type\":\"default\"},"
       "\"dtype\":\"bfloat16\"}");
  same("{" BASE ",\"rope_theta\":1000,\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0}}",
       "{" BASE
       ",\"rope_parameters\":{\"rope_theta\":1000,\"rope_type\":\"linear\",\"factor\":2.0}}");
  same("{" BASE
       ",\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
       "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
       "\"original_max_position_embeddings\":32}}",
       "{" BASE
       ",\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
       "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":32,"
       "\"rope_theta\":500000.0}}");
  ModelConfig c = parsed("{" BASE
                         ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,"
                         "\"low_freq_factor\":1,\"high_freq_factor\":4,"
                         "\"original_max_position_embeddings\":32}}");
  assert_true(c.rope == ROPE_LLAMA3 && c.rope_factor == 8 && c.rope_original_positions == 32);
}

static void eos_lists(void **state) {
  (void)state;
  ModelConfig c = parsed("{" BASE "}");
  assert_int_equal(c.n_eos, 1);
  json_t *root = json_loads("{" BASE "}", 0, NULL);
  json_object_set_new(root, "eos_token_id", json_pack("[i,i,i]", 2, 7, 9));
  Error err = {""};
  assert_int_equal(config_from_json(root, "c", &c, &err), 0);
  assert_true(c.n_eos == 3 && c.eos_ids[0] == 2 && c.eos_ids[2] == 9);
  json_object_set_new(root, "eos_token_id", json_null());
  assert_int_equal(config_from_json(root, "c", &c, &err), 0);
  assert_int_equal(c.n_eos, 0);
  json_object_set_new(root, "eos_token_id", json_integer(50));
  assert_int_equal(config_from_json(root, "c", &c, &err), -1);
  json_decref(root);
}

/* generation_config.json overrides config.json's single id. */
static void eos_of_generation_config(void **state) {
  (void)state;
  Error err = {""};
  char *dir = mem_printf("%s/eos-%d", test_tmp(), launch_rank());
  assert_int_equal(fs_make_dirs(dir, &err), 0);
  char *config = fs_join(dir, "config.json"), *gen = fs_join(dir, "generation_config.json");
  const char *text = "{" BASE "}", *list = "{\"eos_token_id\":[2,11]}";
  assert_int_equal(fs_write_atomic(config, text, strlen(text), &err), 0);
  ModelConfig c;
  assert_int_equal(model_config_read(dir, &c, &err), 0);
  assert_int_equal(c.n_eos, 1);
  assert_int_equal(fs_write_atomic(gen, list, strlen(list), &err), 0);
  assert_int_equal(model_config_read(dir, &c, &err), 0);
  assert_true(c.n_eos == 2 && c.eos_ids[1] == 11);
  assert_int_equal(fs_write_atomic(gen, "{", 1, &err), 0);
  assert_int_equal(model_config_read(dir, &c, &err), -1);
  assert_non_null(strstr(err.msg, "generation_config.json"));
  free(config);
  free(gen);
  free(dir);
}

/* Each refusal names what was found. */
static void refusals(void **state) {
  (void)state;
  static const struct {
    const char *extra, *says;
  } cases[] = {
      {"\"model_type\":\"gemma\"", "family \"gemma\" is not supported; expected llama, mistral"},
      {"\"model_type\":\"qwen2\"", "\"LlamaForCausalLM\" is not supported"},
      {"\"architectures\":[\"LlamaModel\"]", "LlamaModel"},
      {"\"architectures\":[]", "architectures"},
      {"\"hidden_act\":\"gelu\"", "gelu"},
      {"\"pretraining_tp\":2", "pretraining_tp"},
      {"\"attention_dropout\":0.1", "attention_dropout"},
      {"\"quantization_config\":{}", "quantization_config"},
      {"\"partial_rotary_factor\":0.5", "partial_rotary_factor"},
      {"\"torch_dtype\":\"float8\"", "float8"},
      {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2}", "yarn"},
      {"\"rope_scaling\":{\"type\":\"linear\"}", "factor"},
      {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":-1}", "factor"},
      {"\"rope_scaling\":3", "rope_scaling"},
      {"\"rope_parameters\":{\"rope_theta\":5},\"rope_theta\":6", "rope_theta"},
      {"\"rope_parameters\":{\"factor\":5},\"rope_scaling\":{\"factor\":6}", "differ"},
      {"\"num_attention_heads\":5", "hidden_size"},
      {"\"num_key_value_heads\":4", "num_key_value_heads"},
      {"\"head_dim\":3", "odd"},
      {"\"vocab_size\":0", "vocab_size"},
      {"\"vocab_size\":\"x\"", "vocab_size"},
      {"\"rms_norm_eps\":0", "rms_norm_eps"},
      {"\"rope_theta\":0", "rope_theta"},
      {"\"architectures\":[\"LlamaForSequenceClassification\"],\"num_labels\":3", "num_labels"},
      {"\"architectures\":[\"LlamaForSequenceClassification\"],"
       "\"id2label\":{\"0\":\"a\",\"1\":\"b\"}",
       "num_labels"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char *extra = mem_printf("{%s}", cases[i].extra);
    json_t *root = json_loads("{" BASE "}", 0, NULL), *more = json_loads(extra, 0, NULL);
    assert_non_null(more);
    json_object_update(root, more);
    ModelConfig c;
    Error err = {""};
    if (!config_from_json(root, "config.json", &c, &err)) fail_msg("accepted %s", extra);
    if (!strstr(err.msg, cases[i].says) || !strstr(err.msg, "config.json"))
      fail_msg("%s: \"%s\" does not say \"%s\"", extra, err.msg, cases[i].says);
    json_decref(root);
    json_decref(more);
    free(extra);
  }
}

/* What only some families have, and what of it is refused. NULL: accepted. */
static void families(void **state) {
  (void)state;
  static const struct {
    const char *name, *extra, *says;
  } cases[] = {
      {"gpt2", "{\"scale_attn_weights\":false}", "scale_attn_weights false"},
      {"gpt2", "{\"scale_attn_by_inverse_layer_idx\":true}", "scale_attn_by_inverse_layer_idx"},
      {"gpt2", "{\"add_cross_attention\":true}", "add_cross_attention"},
      {"gpt2", "{\"activation_function\":\"silu\"}", "silu"},
      {"gpt2", "{\"n_head\":4}", "n_embd 15 is not a multiple of n_head 4"},
      {"gpt2", "{\"attn_pdrop\":0.1,\"rope_scaling\":null}", NULL},
      {"opt", "{\"layer_norm_elementwise_affine\":false}", "layer_norm_elementwise_affine"},
      {"opt", "{\"word_embed_proj_dim\":0}", "word_embed_proj_dim"},
      {"opt", "{\"do_layer_norm_before\":1}", "do_layer_norm_before"},
      {"opt", "{\"architectures\":[\"OPTForQuestionAnswering\"]}", "OPTForQuestionAnswering"},
      {"qwen2, window", "{\"max_window_layers\":1}", "max_window_layers"},
      {"qwen2, window", "{\"max_window_layers\":2}", NULL}, /* no layer slides */
      {"qwen2, window", "{\"layer_types\":[\"full_attention\",\"sliding_attention\"]}",
       "layer_types"},
      {"qwen2, window", "{\"layer_types\":[\"linear_attention\",\"full_attention\"]}",
       "linear_attention"},
      {"qwen3", "{\"layer_types\":[\"sliding_attention\",\"sliding_attention\"]}",
       "use_sliding_window is false"},
      {"mistral, window", "{\"sliding_window\":0}", "sliding_window"},
      {"mistral, window", "{\"sliding_window\":null}", NULL},
      {"phi3, longrope", "{\"resid_pdrop\":0.1}", "resid_pdrop"},
      {"phi3, longrope", "{\"partial_rotary_factor\":1.0}", "short_factor"},
      {"phi3, longrope", "{\"partial_rotary_factor\":0.1}", "partial_rotary_factor"},
      {"phi3, longrope", "{\"partial_rotary_factor\":0.4}", "3 rotary channels"},
      {"phi3, longrope", "{\"original_max_position_embeddings\":1.5}", "original_max"},
      {"phi3, longrope",
       "{\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,0],\"long_factor\":[1,1]}}",
       "short_factor[1]"},
      {"phi3, longrope",
       "{\"rope_scaling\":{\"type\":\"su\",\"short_factor\":[1,1],"
       "\"long_factor\":[1,1]}}",
       NULL},
      {"llama, dynamic", "{\"rope_scaling\":{\"type\":\"dynamic\"}}", "factor"},
      {"llama, dynamic",
       "{\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2,"
       "\"original_max_position_embeddings\":8}}",
       "differs from max_position_embeddings 9"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int at = 0;
    while (strcmp(family_cases[at].name, cases[i].name) != 0) at++;
    json_t *root = json_loads(family_cases[at].json, 0, NULL);
    json_t *more = json_loads(cases[i].extra, 0, NULL);
    assert_non_null(more);
    if (strstr(cases[i].extra, "0.4}")) /* the factors' number would be refused first */
      json_object_del(root, "rope_scaling");
    json_object_update(root, more);
    ModelConfig c;
    Error err = {""};
    int rc = config_from_json(root, "config.json", &c, &err);
    if (rc && !cases[i].says) fail_msg("%s %s: %s", cases[i].name, cases[i].extra, err.msg);
    if (!rc && cases[i].says) fail_msg("accepted %s %s", cases[i].name, cases[i].extra);
    if (rc && !strstr(err.msg, cases[i].says))
      fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].extra, err.msg, cases[i].says);
    json_decref(root);
    json_decref(more);
  }
}

static void table(void **state) {
  (void)state;
  ModelConfig c = tiny_config(false, true);
  ParamSpec *s;
  int n = model_specs(&c, HEAD_LM, &s);
  /* Per block: 2 norms, q k v o, gate up down, and a bias for each of the seven. */
  assert_int_equal(n, 1 + 2 * (2 + 7 + 7) + 2);
  assert_string_equal(s[0].name, "model.embed_tokens.weight");
  assert_string_equal(s[n - 1].name, "lm_head.weight");
  int64_t sum = 0;
  for (int i = 0; i < n; i++) {
    sum += s[i].dim[0] * s[i].dim[1];
    assert_true(s[i].unit >= 0 && s[i].unit <= 3 && (i == 0 || s[i].unit >= s[i - 1].unit));
    bool is_bias = strstr(s[i].name, ".bias") != NULL, is_norm = strstr(s[i].name, "norm") != NULL;
    assert_true(s[i].decay == (s[i].ndim == 2) && (s[i].ndim == 1) == (is_bias || is_norm));
    bool follows =
        strstr(s[i].name, "k_proj") || strstr(s[i].name, "v_proj") || strstr(s[i].name, "up_proj");
    assert_true(s[i].joined == follows);
  }
  assert_int_equal(sum, model_config_params(&c, HEAD_LM));
  free(s);
  c.tied_head = true;
  assert_int_equal(model_config_params(&c, HEAD_LM), sum - 37 * 15); /* no row of its own */
  n = model_specs(&c, HEAD_SCALAR, &s);
  assert_string_equal(s[n - 2].name, "score.weight");
  assert_string_equal(s[n - 1].name, "score.bias");
  free(s);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(plain),     cmocka_unit_test(both_spellings),
    cmocka_unit_test(eos_lists), cmocka_unit_test(eos_of_generation_config),
    cmocka_unit_test(refusals),  cmocka_unit_test(families),
    cmocka_unit_test(table),
};
TEST_MAIN(tests)
