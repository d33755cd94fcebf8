/* The table of `rlhf bench train`, and its JSON. */
#include <stdlib.h>

#include "orchestrator/cli_bench_train.h"

static double step_tokens(const TrainPlan *p) {
  return (double)p->n_seqs * p->length * p->micro_batches; /* of one rank */
}

/* 6 x parameters x tokens and causal attention; parameters are all, embedding and head too. */
static double step_flops(const TrainPlan *p) {
  int32_t *lengths = mem_alloc((size_t)p->n_seqs, sizeof *lengths);
  for (int s = 0; s < p->n_seqs; s++) lengths[s] = p->length;
  double attention = 3 * p->micro_batches * model_attention_flops(&p->config, p->n_seqs, lengths);
  free(lengths);
  return 6.0 * (double)model_config_params(&p->config, HEAD_LM) * step_tokens(p) + attention;
}

void train_print_head(const TrainPlan *p) {
  const Grid *g = p->rig.grid;
  printf("%s: %.2f million parameters; %s, %s\n", p->model,
         (double)model_config_params(&p->config, HEAD_LM) / 1e6, device_describe(p->rig.device),
         dtype_name(p->rig.compute));
  printf("%d node%s of %d; a rank's step: %d micro-batch%s of %d x %d tokens, %.2f TFLOP\n",
         g->nodes, g->nodes == 1 ? "" : "s", g->local, p->micro_batches,
         p->micro_batches == 1 ? "" : "es", p->n_seqs, p->length, step_flops(p) / 1e12);
  printf("\n%-8s %9s %10s %9s %9s %9s %9s %9s %9s %9s %9s %8s %9s\n", "mode", "step ms", "tok/s",
         "TFLOP/s", "forward", "backward", "optimizer", "exposed", "hidden", "inter MB", "intra MB",
         "GiB", "loss");
}

void train_print_recompute(const TrainPlan *p, const TrainTimes *t) {
  static const char *const names[] = {
      [RECOMPUTE_NONE] = "none", [RECOMPUTE_FULL] = "full", [RECOMPUTE_SELECTIVE] = "selective"};
  if (!p->recompute.by_memory) return;
  printf("recompute: %s", names[t->recompute]);
  if (t->blocks > 0) printf(", %d of %d blocks whole", t->blocks, p->config.n_layers);
  putchar('\n');
}

void train_print_row(const TrainPlan *p, const char *mode, const TrainTimes *t) {
  double world = p->rig.grid->world;
  printf("%-8s %9.2f %10.0f %9.4g %9.2f %9.2f %9.2f %9.2f %9.2f %9.1f %9.1f %8.2f %9.5f\n", mode,
         t->step * 1e3, step_tokens(p) * world / t->step, step_flops(p) / t->step / 1e12,
         t->forward * 1e3, t->backward * 1e3, t->optimizer * 1e3, t->exposed * 1e3, t->hidden * 1e3,
         t->inter / 1e6, t->intra / 1e6, t->peak / (1024.0 * 1024 * 1024), t->loss);
}

void train_print_foot(void) {
  puts(
      "\nMedian step, ms; the parts come from three steps apart. TFLOP/s: of one rank, 6 x "
      "parameters (embedding and head included) x "
      "tokens and causal\nattention, nothing that is computed again. tok/s: all ranks. forward "
      "ends "
      "at the first loss. exposed, hidden:\ncommunication that compute waited for, and behind it; "
      "MB received by a rank. GiB: device memory, the peak of a rank.");
}

void train_print_json(const TrainPlan *p, const char *mode, const TrainTimes *t) {
  json_t *o = json_pack(
      "{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, "
      "s:f, s:f}",
      "mode", mode, "model", p->model, "nodes", p->rig.grid->nodes, "local", p->rig.grid->local,
      "seqs", p->n_seqs, "length", p->length, "micro_batches", p->micro_batches, "parameters",
      (json_int_t)model_config_params(&p->config, HEAD_LM), "step_seconds", t->step,
      "tokens_per_second", step_tokens(p) * p->rig.grid->world / t->step, "flops_per_second",
      step_flops(p) / t->step, "forward_seconds", t->forward, "backward_seconds", t->backward,
      "optimizer_seconds", t->optimizer, "exposed_seconds", t->exposed, "hidden_seconds", t->hidden,
      "inter_bytes", t->inter, "intra_bytes", t->intra, "peak_bytes", t->peak, "loss", t->loss);
  char *text = o ? json_dumps(o, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
  if (!text) die("bench: figures that are no JSON");
  puts(text);
  free(text);
  json_decref(o);
}
