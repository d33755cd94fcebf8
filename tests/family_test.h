/* A tiny config of every family and of every flag that a family adds; sizes are odd where they may
 * be. */
#ifndef FAMILY_TEST_H
#define FAMILY_TEST_H

#include "model/internal.h"
#include "tests/model_test.h"

#define LLAMA_SIZES                                                                               \
  "\"vocab_size\":37,\"hidden_size\":15,\"intermediate_size\":22,\"num_hidden_layers\":2,"        \
  "\"num_attention_heads\":6,\"num_key_value_heads\":2,\"head_dim\":4,\"initializer_range\":0.2," \
  "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-05,\"bos_token_id\":1,\"eos_token_id\":2"
#define OPT_SIZES                                                                          \
  "\"model_type\":\"opt\",\"architectures\":[\"OPTForCausalLM\"],\"vocab_size\":37,"       \
  "\"hidden_size\":15,\"ffn_dim\":22,\"num_hidden_layers\":2,\"num_attention_heads\":3,"   \
  "\"max_position_embeddings\":64,\"init_std\":0.2,\"bos_token_id\":2,\"eos_token_id\":2," \
  "\"pad_token_id\":1,\"dropout\":0.1"
#define GPT2_SIZES                                                                         \
  "\"model_type\":\"gpt2\",\"architectures\":[\"GPT2LMHeadModel\"],\"vocab_size\":37,"     \
  "\"n_embd\":15,\"n_layer\":2,\"n_head\":3,\"n_positions\":64,\"initializer_range\":0.2," \
  "\"layer_norm_epsilon\":1e-05,\"bos_token_id\":0,\"eos_token_id\":0,\"resid_pdrop\":0.1"

static const struct FamilyCase {
  const char *name, *json;
} family_cases[] = {
    {"llama, dynamic",
     "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"]," LLAMA_SIZES
     ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2.0},\"max_position_embeddings\":9}"},
    {"mistral, window",
     "{\"model_type\":\"mistral\",\"architectures\":[\"MistralForCausalLM\"]," LLAMA_SIZES
     ",\"sliding_window\":4,\"attention_bias\":true}"},
    {"qwen2, tied",
     "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"]," LLAMA_SIZES
     ",\"tie_word_embeddings\":true,\"use_sliding_window\":false,\"sliding_window\":3}"},
    {"qwen2, window",
     "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"]," LLAMA_SIZES
     ",\"use_sliding_window\":true,\"sliding_window\":3,\"max_window_layers\":0}"},
    {"qwen3", "{\"model_type\":\"qwen3\",\"architectures\":[\"Qwen3ForCausalLM\"]," LLAMA_SIZES
              ",\"attention_bias\":true}"},
    {"phi3, longrope",
     "{\"model_type\":\"phi3\",\"architectures\":[\"Phi3ForCausalLM\"]," LLAMA_SIZES
     ",\"head_dim\":8,\"partial_rotary_factor\":0.5,\"original_max_position_embeddings\":9,"
     "\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1.0,1.25],"
     "\"long_factor\":[1.5,3.0]}}"},
    {"opt", "{" OPT_SIZES "}"},
    {"opt, post-norm, projected",
     "{" OPT_SIZES ",\"do_layer_norm_before\":false,\"word_embed_proj_dim\":7}"},
    {"opt, no biases, no final norm",
     "{" OPT_SIZES ",\"enable_bias\":false,\"_remove_final_layer_norm\":true,"
     "\"word_embed_proj_dim\":21,\"activation_function\":\"gelu\",\"tie_word_embeddings\":false}"},
    {"opt, post-norm", "{" OPT_SIZES ",\"do_layer_norm_before\":false}"}, /* no unit of the head */
    {"gpt2", "{" GPT2_SIZES "}"},
    {"gpt2, wide MLP", "{" GPT2_SIZES ",\"n_inner\":31,\"activation_function\":\"gelu_fast\"}"},
};
enum { N_FAMILY_CASES = sizeof family_cases / sizeof family_cases[0] };

static inline int family_parse(const char *text, ModelConfig *c, Error *err) {
  json_t *root = json_loads(text, 0, NULL);
  if (!root) die("not JSON: %s", text);
  *err = (Error){""};
  int rc = config_from_json(root, "config.json", c, err);
  json_decref(root);
  return rc;
}

static inline ModelConfig family_config(int i) {
  ModelConfig c;
  Error err;
  if (family_parse(family_cases[i].json, &c, &err))
    fail_msg("%s: %s", family_cases[i].name, err.msg);
  return c;
}

#endif
