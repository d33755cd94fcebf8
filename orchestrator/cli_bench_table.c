/* The modes of the benchmark and its table. */
#include <stdlib.h>
#include <string.h>

#include "core/nearest.h"
#include "orchestrator/cli_bench.h"

#define STAGE_3 .stage = 3, .wire = WIRE_BF16
#define ALL STAGE_3, .qwz = WIRE_INT8, .hpz = HPZ_ON, .qgz = WIRE_INT4, .accumulate_node = true
static const BenchMode bench_modes[] = {
    {"zero3", {STAGE_3}},
    {"qwz", {STAGE_3, .qwz = WIRE_INT8}},
    {"hpz", {STAGE_3, .hpz = HPZ_ON}},
    {"qgz", {STAGE_3, .qgz = WIRE_INT4}},
    {"all", {ALL}},
    {"all-ef", {ALL, .error_feedback = true, .error_decay = 0.8, .error_reset = 1024}},
    {"delta",
     {STAGE_3, .hpz = HPZ_ON, .refresh = REFRESH_DELTA, .qgz = WIRE_INT4, .accumulate_node = true}},
    {"auto", {ALL, .refresh = REFRESH_AUTO}}};
enum { N_MODES = sizeof bench_modes / sizeof bench_modes[0] };

static const BenchMode *mode_find(const char *name, size_t len) {
  for (int i = 0; i < N_MODES; i++)
    if (strlen(bench_modes[i].name) == len && !strncmp(bench_modes[i].name, name, len))
      return &bench_modes[i];
  return NULL;
}

static int fail_mode(const char *name, size_t len, Error *err) {
  const char *names[N_MODES];
  for (int i = 0; i < N_MODES; i++) names[i] = bench_modes[i].name;
  char *word = mem_printf("%.*s", (int)len, name);
  const char *near = nearest_name(word, names, N_MODES);
  error_set(err, "--modes: unknown mode \"%s\"%s%s%s", word, near ? "; did you mean \"" : "",
            near ? near : "", near ? "\"?" : "");
  free(word);
  return -1;
}

int bench_modes_parse(const char *list, BenchMode **out, Error *err) {
  int n = 0;
  *out = NULL;
  for (const char *p = list; p;) {
    size_t len = strcspn(p, ",");
    const BenchMode *m = mode_find(p, len);
    if (!m) {
      free(*out);
      return fail_mode(p, len, err);
    }
    *out = mem_grow(*out, (size_t)n + 1, sizeof **out);
    (*out)[n++] = *m;
    p = p[len] ? p + len + 1 : NULL;
  }
  if (list) return n;
  *out = mem_alloc(N_MODES, sizeof **out);
  memcpy(*out, bench_modes, sizeof bench_modes);
  return N_MODES;
}

/* ---- the table ---- */

static double model_bytes(const BenchPlan *p) {
  return 2.0 * (double)model_config_params(&p->config, HEAD_LM);
}

/* Bytes that enter a node, in units of M * (nodes - 1) / nodes: a full set of 16-bit weights that
 * comes in once is 1. */
static double inter_units(const BenchPlan *p, const BenchResult *r) {
  int nodes = p->grid->nodes;
  if (nodes == 1) return 0;
  return r->inter_bytes * p->grid->local * nodes / (nodes - 1) / model_bytes(p);
}

/* The same for a rank and its node. */
static double intra_units(const BenchPlan *p, const BenchResult *r) {
  int local = p->grid->local;
  if (local == 1) return 0;
  return r->intra_bytes * local / (local - 1) / model_bytes(p);
}

void bench_print_head(const BenchPlan *p) {
  const Grid *g = p->grid;
  printf("%s: %.2f million parameters, M = %.2f MB in 16 bits\n", p->model, model_bytes(p) / 2e6,
         model_bytes(p) / 1e6);
  printf("%d rank%s: %d node%s of %d; ", g->world, g->world == 1 ? "" : "s", g->nodes,
         g->nodes == 1 ? "" : "s", g->local);
  printf("%d tokens a rank and micro-batch, %d micro-batch%s a step, %d steps\n\n", p->tokens,
         p->micro_batches, p->micro_batches == 1 ? "" : "es", p->steps);
  printf("%-8s %9s %7s %9s %9s %9s %8s %8s %9s %9s %9s\n", "mode", "step s", "faster", "tok/s",
         "inter MB", "intra MB", "inter M", "intra M", "hidden s", "exposed s", "loss");
}

void bench_print_row(const BenchPlan *p, const BenchMode *mode, const BenchResult *r,
                     const BenchResult *first) {
  printf("%-8s %9.4f %6.2fx %9.0f %9.3f %9.3f %8.3f %8.3f %9.4f %9.4f %9.6f\n", mode->name,
         r->seconds, first->seconds / r->seconds, r->tokens_per_second, r->inter_bytes / 1e6,
         r->intra_bytes / 1e6, inter_units(p, r), intra_units(p, r), r->hidden, r->exposed,
         r->loss);
}

void bench_print_foot(const BenchPlan *p) {
  puts(
      "\nPer step. MB: received by a rank, inter from other nodes, intra from its own; mean over "
      "the "
      "ranks.\ninter M: bytes that enter a node, divided by (nodes - 1) / nodes, over M; intra M: "
      "the same for a rank\nin its node. hidden, exposed: seconds of communication behind compute, "
      "and waited for.");
  if (p->grid->world == 1) puts("One rank moves nothing: start it under mpirun.");
}

void bench_print_json(const BenchPlan *p, const BenchMode *mode, const BenchResult *r) {
  json_t *o = json_pack(
      "{s:s, s:s, s:i, s:i, s:i, s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "mode",
      mode->name, "model", p->model, "nodes", p->grid->nodes, "local", p->grid->local, "tokens",
      p->tokens, "micro_batches", p->micro_batches, "parameters",
      (json_int_t)model_config_params(&p->config, HEAD_LM), "step_seconds", r->seconds,
      "tokens_per_second", r->tokens_per_second, "inter_bytes", r->inter_bytes, "intra_bytes",
      r->intra_bytes, "inter_units", inter_units(p, r), "intra_units", intra_units(p, r),
      "hidden_seconds", r->hidden, "exposed_seconds", r->exposed, "loss", r->loss);
  char *text = o ? json_dumps(o, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
  if (!text) die("bench: figures that are no JSON");
  puts(text);
  free(text);
  json_decref(o);
}
