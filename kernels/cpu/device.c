/* The CPU as a device: its table of ops, memory, number of threads, and what it is called. */
#include <dnnl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"

static const Ops cpu_ops = {
    .gemm = cpu_gemm,
    .linear_bias = cpu_linear_bias,
    .embedding_fwd = cpu_embedding_fwd,
    .embedding_bwd = cpu_embedding_bwd,
    .rmsnorm_fwd = cpu_rmsnorm_fwd,
    .rmsnorm_bwd = cpu_rmsnorm_bwd,
    .layernorm_fwd = cpu_layernorm_fwd,
    .layernorm_bwd = cpu_layernorm_bwd,
    .qk_norm_fwd = cpu_qk_norm_fwd,
    .qk_norm_bwd = cpu_qk_norm_bwd,
    .rope = cpu_rope,
    .attention_fwd = cpu_attention_fwd,
    .attention_bwd = cpu_attention_bwd,
    .kv_write = cpu_kv_write,
    .attention_decode = cpu_attention_decode,
    .rope_write = cpu_rope_write,
    .linear = cpu_linear,
    .decode_attend = cpu_decode_attend,
    .decode_advance = cpu_decode_advance,
    .join_columns = cpu_join_columns,
    .swiglu_fwd = cpu_swiglu_fwd,
    .swiglu_bwd = cpu_swiglu_bwd,
    .act_fwd = cpu_act_fwd,
    .act_bwd = cpu_act_bwd,
    .bias_add = cpu_bias_add,
    .bias_grad = cpu_bias_grad,
    .logprob_fwd = cpu_logprob_fwd,
    .logprob_bwd = cpu_logprob_bwd,
    .gather_rows = cpu_gather_rows,
    .scatter_add_rows = cpu_scatter_add_rows,
    .sample = cpu_sample,
    .keep_only = cpu_keep_only,
    .adamw = cpu_adamw,
    .sum_squares = cpu_sum_squares,
    .axpy = cpu_axpy,
    .scale = cpu_scale,
    .lerp = cpu_lerp,
    .quantize = cpu_quantize,
    .dequantize = cpu_dequantize,
    .requantize = cpu_requantize,
    .delta_encode = cpu_delta_encode,
    .delta_apply = cpu_delta_apply,
    .checksum = cpu_checksum,
};

/* ---- memory: the size lies in front of each block ---- */

enum { ALIGN = 64 };

static void *cpu_alloc(Device *d, size_t bytes) {
  (void)d;
  if (bytes > SIZE_MAX - 2 * (size_t)ALIGN) return NULL;
  size_t whole = (bytes + 2 * (size_t)ALIGN - 1) / ALIGN * ALIGN;
  char *p = aligned_alloc(ALIGN, whole);
  if (!p) return NULL;
  memcpy(p, &bytes, sizeof bytes);
  return p + ALIGN;
}

static size_t cpu_release(Device *d, void *p) {
  (void)d;
  size_t bytes;
  memcpy(&bytes, (const char *)p - ALIGN, sizeof bytes);
  free((char *)p - ALIGN);
  return bytes;
}

static void cpu_release_host(Device *d, void *p) { cpu_release(d, p); }

float *scratch_alloc(int64_t floats) {
  size_t bytes = (size_t)floats * sizeof(float);
  float *p = aligned_alloc(ALIGN, (bytes + ALIGN) / ALIGN * ALIGN);
  if (!p) die("out of memory: %zu bytes of scratch", bytes);
  return p;
}

static void cpu_zero(Device *d, void *p, size_t bytes) {
  (void)d;
  memset(p, 0, bytes);
}

void host_copy(int threads, void *dst, const void *src, size_t bytes) {
  enum { PIECE = 1 << 16 };
#pragma omp parallel for num_threads(threads) schedule(static) if (bytes > 4 * PIECE)
  for (size_t i = 0; i < bytes; i += PIECE)
    memcpy((char *)dst + i, (const char *)src + i, bytes - i < PIECE ? bytes - i : PIECE);
}

static void cpu_copy(Device *d, void *dst, const void *src, size_t bytes) {
  host_copy(d->threads, dst, src, bytes);
}

static void cpu_sync(Device *d) { (void)d; }
static void cpu_close(Device *d) { free(d); }

static bool cpu_takes_codes(const Device *d, DType compute) {
  (void)d;
  return compute == DT_F32;
}

static const Backend cpu_backend = {
    .ops = &cpu_ops,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .release = cpu_release,
    .alloc_host = cpu_alloc,
    .release_host = cpu_release_host,
    .zero = cpu_zero,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .sync = cpu_sync,
    .takes_codes = cpu_takes_codes,
};

/* ---- what the machine has ---- */

/* The number in a one-number file, or `otherwise` ("max" in cgroup files, or no such file). */
static size_t read_size(const char *path, size_t otherwise) {
  FILE *f = fopen(path, "r");
  unsigned long long n = 0;
  int found = f ? fscanf(f, "%llu", &n) : 0;
  if (f) fclose(f);
  return found == 1 ? (size_t)n : otherwise;
}

/* Smallest memory limit of this process's cgroup (version 2) and those above it. */
static size_t cgroup_limit(size_t limit) {
  char line[1024], path[1200];
  FILE *f = fopen("/proc/self/cgroup", "r");
  if (!f) return limit;
  while (fgets(line, sizeof line, f)) {
    if (strncmp(line, "0::/", 4) != 0) continue;
    line[strcspn(line, "\n")] = 0;
    for (char *dir = line + 3, *cut; (cut = strrchr(dir, '/')); *cut = 0) {
      snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", dir);
      size_t here = read_size(path, limit);
      if (here < limit) limit = here;
    }
  }
  fclose(f);
  size_t root = read_size("/sys/fs/cgroup/memory.max", limit);
  size_t v1 = read_size("/sys/fs/cgroup/memory/memory.limit_in_bytes", limit);
  if (root < limit) limit = root;
  return v1 < limit ? v1 : limit;
}

static size_t memory_per_rank(void) {
  size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
  return cgroup_limit(machine) / (size_t)launch_host_ranks();
}

static int cores_per_rank(void) {
  cpu_set_t set;
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  int mine = cores / launch_core_ranks();
  return mine > 0 ? mine : 1;
}

int cpu_choose_threads(int asked) {
  if (asked > 0) return asked;
  const char *env = getenv("OMP_NUM_THREADS");
  long wanted = env ? strtol(env, NULL, 10) : 0; /* "4,2": the first is the outer level */
  return wanted > 0 && wanted < 4096 ? (int)wanted : cores_per_rank();
}

static void cpu_name(char *out, size_t size) {
  char line[512];
  FILE *f = fopen("/proc/cpuinfo", "r");
  snprintf(out, size, "CPU");
  while (f && fgets(line, sizeof line, f)) {
    char *value = strncmp(line, "model name", 10) == 0 ? strchr(line, ':') : NULL;
    if (!value) continue;
    line[strcspn(line, "\n")] = 0;
    snprintf(out, size, "%s", value + 1 + strspn(value + 1, " "));
    break;
  }
  if (f) fclose(f);
}

Device *cpu_device_open(int threads, Error *err) {
  (void)err; /* a CPU is always there */
  char name[128];
  int used = cpu_choose_threads(threads);
  Device *d = mem_zalloc(1, sizeof *d);
  cpu_name(name, sizeof name);
  d->kind = DEVICE_CPU;
  d->backend = &cpu_backend;
  d->threads = used;
  d->total_memory = memory_per_rank();
  const dnnl_version_t *v = dnnl_version();
  snprintf(d->describe, sizeof d->describe, "%s, %d thread%s, oneDNN %d.%d.%d", name, used,
           used == 1 ? "" : "s", v->major, v->minor, v->patch);
  return d;
}
