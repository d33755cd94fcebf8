/* The families: one row each. Names and defaults are those of Hugging Face transformers. */
#include <string.h>

#include "model/internal.h"

static const FamilyKeys llama_keys = {.hidden = "hidden_size",
                                      .layers = "num_hidden_layers",
                                      .heads = "num_attention_heads",
                                      .kv_heads = "num_key_value_heads",
                                      .head_dim = "head_dim",
                                      .ffn = "intermediate_size",
                                      .positions = "max_position_embeddings",
                                      .norm_eps = "rms_norm_eps",
                                      .activation = "hidden_act",
                                      .init_std = "initializer_range"};

static const FamilyKeys opt_keys = {.hidden = "hidden_size",
                                    .layers = "num_hidden_layers",
                                    .heads = "num_attention_heads",
                                    .ffn = "ffn_dim",
                                    .positions = "max_position_embeddings",
                                    .activation = "activation_function",
                                    .init_std = "init_std"};

static const FamilyKeys gpt2_keys = {.hidden = "n_embd",
                                     .layers = "n_layer",
                                     .heads = "n_head",
                                     .ffn = "n_inner",
                                     .positions = "n_positions",
                                     .norm_eps = "layer_norm_epsilon",
                                     .activation = "activation_function",
                                     .init_std = "initializer_range"};

static const FamilyNames llama_names = {.base = "model.",
                                        .embedding = "model.embed_tokens",
                                        .final_norm = "model.norm",
                                        .block = "model.layers.%d.",
                                        .norm1 = "input_layernorm",
                                        .q = "self_attn.q_proj",
                                        .k = "self_attn.k_proj",
                                        .v = "self_attn.v_proj",
                                        .q_norm = "self_attn.q_norm",
                                        .k_norm = "self_attn.k_norm",
                                        .o = "self_attn.o_proj",
                                        .norm2 = "post_attention_layernorm",
                                        .gate = "mlp.gate_proj",
                                        .up = "mlp.up_proj",
                                        .down = "mlp.down_proj",
                                        .buffers = {"rotary_emb.inv_freq"}};

static const FamilyNames phi3_names = {.base = "model.",
                                       .embedding = "model.embed_tokens",
                                       .final_norm = "model.norm",
                                       .block = "model.layers.%d.",
                                       .norm1 = "input_layernorm",
                                       .qkv = "self_attn.qkv_proj",
                                       .o = "self_attn.o_proj",
                                       .norm2 = "post_attention_layernorm",
                                       .gate_up = "mlp.gate_up_proj",
                                       .down = "mlp.down_proj",
                                       .buffers = {"rotary_emb.inv_freq"}};

static const FamilyNames opt_names = {.base = "model.",
                                      .embedding = "model.decoder.embed_tokens",
                                      .positions = "model.decoder.embed_positions",
                                      .project_in = "model.decoder.project_in",
                                      .project_out = "model.decoder.project_out",
                                      .final_norm = "model.decoder.final_layer_norm",
                                      .block = "model.decoder.layers.%d.",
                                      .norm1 = "self_attn_layer_norm",
                                      .q = "self_attn.q_proj",
                                      .k = "self_attn.k_proj",
                                      .v = "self_attn.v_proj",
                                      .o = "self_attn.out_proj",
                                      .norm2 = "final_layer_norm",
                                      .up = "fc1",
                                      .down = "fc2"};

static const FamilyNames gpt2_names = {.base = "transformer.",
                                       .embedding = "transformer.wte",
                                       .positions = "transformer.wpe",
                                       .final_norm = "transformer.ln_f",
                                       .block = "transformer.h.%d.",
                                       .norm1 = "ln_1",
                                       .qkv = "attn.c_attn",
                                       .o = "attn.c_proj",
                                       .norm2 = "ln_2",
                                       .up = "mlp.c_fc",
                                       .down = "mlp.c_proj",
                                       .in_out = true,
                                       .buffers = {".attn.bias", ".attn.masked_bias"}};

static const Family families[] = {
    {.model_type = "llama",
     .causal = "LlamaForCausalLM",
     .classifier = "LlamaForSequenceClassification",
     .keys = &llama_keys,
     .names = &llama_names,
     .qkv_bias = {"attention_bias", false},
     .o_bias = {"attention_bias", false},
     .mlp_bias = {"mlp_bias", false},
     .tied_head = {"tie_word_embeddings", false},
     .activation = "silu",
     .norm_eps = 1e-6,
     .rope_theta = 10000,
     .max_positions = 2048},
    {.model_type = "mistral",
     .causal = "MistralForCausalLM",
     .classifier = "MistralForSequenceClassification",
     .keys = &llama_keys,
     .names = &llama_names,
     .tied_head = {"tie_word_embeddings", false},
     .activation = "silu",
     .window = WINDOW_SIZE,
     .window_size = 4096,
     .norm_eps = 1e-6,
     .rope_theta = 10000,
     .max_positions = 131072},
    {.model_type = "qwen2",
     .causal = "Qwen2ForCausalLM",
     .classifier = "Qwen2ForSequenceClassification",
     .keys = &llama_keys,
     .names = &llama_names,
     .qkv_bias = {NULL, true},
     .tied_head = {"tie_word_embeddings", false},
     .activation = "silu",
     .window = WINDOW_SWITCH,
     .window_size = 4096,
     .norm_eps = 1e-6,
     .rope_theta = 10000,
     .max_positions = 32768},
    {.model_type = "qwen3",
     .causal = "Qwen3ForCausalLM",
     .classifier = "Qwen3ForSequenceClassification",
     .keys = &llama_keys,
     .names = &llama_names,
     .qkv_bias = {"attention_bias", false},
     .o_bias = {"attention_bias", false},
     .tied_head = {"tie_word_embeddings", false},
     .activation = "silu",
     .qk_norm = true,
     .window = WINDOW_SWITCH,
     .window_size = 4096,
     .norm_eps = 1e-6,
     .rope_theta = 10000,
     .head_dim = 128,
     .max_positions = 32768},
    {.model_type = "phi3",
     .causal = "Phi3ForCausalLM",
     .classifier = "Phi3ForSequenceClassification",
     .keys = &llama_keys,
     .names = &phi3_names,
     .tied_head = {"tie_word_embeddings", false},
     .activation = "silu",
     .window = WINDOW_SIZE,
     .partial_rotary = true,
     .norm_eps = 1e-5,
     .rope_theta = 10000,
     .max_positions = 4096},
    {.model_type = "opt",
     .causal = "OPTForCausalLM",
     .classifier = "OPTForSequenceClassification",
     .keys = &opt_keys,
     .names = &opt_names,
     .qkv_bias = {"enable_bias", true},
     .o_bias = {"enable_bias", true},
     .mlp_bias = {"enable_bias", true},
     .tied_head = {"tie_word_embeddings", true},
     .norm = NORM_LAYER,
     .mlp = MLP_PLAIN,
     .activation = "relu",
     .learned_positions = true,
     .position_offset = 2,
     .dropout = {"dropout", "attention_dropout", "activation_dropout", "layerdrop"},
     .norm_eps = 1e-5,
     .max_positions = 2048},
    {.model_type = "gpt2",
     .causal = "GPT2LMHeadModel",
     .classifier = "GPT2ForSequenceClassification",
     .keys = &gpt2_keys,
     .names = &gpt2_names,
     .qkv_bias = {NULL, true},
     .o_bias = {NULL, true},
     .mlp_bias = {NULL, true},
     .tied_head = {"tie_word_embeddings", true},
     .norm = NORM_LAYER,
     .mlp = MLP_PLAIN,
     .activation = "gelu_new",
     .learned_positions = true,
     .dropout = {"resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"},
     .norm_eps = 1e-5,
     .max_positions = 1024},
};
enum { N_FAMILIES = sizeof families / sizeof families[0] };

const Family *family_find(const char *model_type) {
  for (size_t i = 0; i < N_FAMILIES; i++)
    if (!strcmp(families[i].model_type, model_type)) return &families[i];
  return NULL;
}

const Family *family_of(const ModelConfig *c) {
  const Family *f = family_find(c->family);
  if (!f) die("no family \"%s\"", c->family);
  return f;
}

const char *family_list(void) { return "llama, mistral, qwen2, qwen3, phi3, opt or gpt2"; }

const char *family_architecture(const char *family, HeadKind head) {
  const Family *f = family_find(family);
  if (!f) die("no family \"%s\"", family);
  return head == HEAD_LM ? f->causal : f->classifier;
}
