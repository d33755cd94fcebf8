/* Tests that run models on the CPU and on a GPU: both devices, opened once, and what differs
 * between them. */
#ifndef TESTS_TWO_DEVICES_H
#define TESTS_TWO_DEVICES_H

#include "tests/model_test.h"

static struct {
  Bench cpu, gpu;
  int failures;
} two;

/* Skips the running test where there is no GPU. */
static inline void need_gpu(void) {
  Error err = {""};
  if (two.gpu.device) return;
  two.gpu = bench_open_on(DEVICE_CUDA, &err);
  if (!two.gpu.device) {
    print_message("%s\n", err.msg);
    skip();
  }
  two.cpu = bench_open();
}

static inline void done(void) {
  int failures = two.failures;
  two.failures = 0;
  if (failures) fail_msg("%d comparisons failed; see above", failures);
}

/* Heads of 64 and rows of whole 16-byte words, or nothing of that kind. */
static inline ModelConfig two_config(bool odd, int odd_ffn) {
  return (ModelConfig){.family = "llama",
                       .vocab_size = odd ? 997 : 1000,
                       .hidden = odd ? 90 : 256,
                       .n_layers = 3,
                       .n_heads = 4,
                       .n_kv_heads = 2,
                       .head_dim = odd ? 18 : 64,
                       .ffn = odd ? odd_ffn : 704,
                       .max_positions = 512,
                       .norm_eps = 1e-5f,
                       .rope_theta = 10000,
                       .init_std = odd ? 0.1f : 0.06f,
                       .bos_id = 1,
                       .pad_id = -1};
}

#endif
