/* rlhf score: log-probabilities of a causal model, or values of a reward model. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/cli.h"

enum { BATCH_TOKENS = 8192 /* of one forward on one rank */, BATCH_SEQUENCES = 4096 };

/* The log-probability of every token but the first of each sequence, at the token's place. */
static void logprobs_micro(Model *m, const Sequences *s, const MicroBatch *mb, double *out) {
  int32_t *from = mem_alloc((size_t)s->n, sizeof *from);
  for (int i = 0; i < s->n; i++) from[i] = 1;
  Pack p = pack_targets(s->offsets, s->tokens.v, from, mb);
  float *x = mem_alloc((size_t)p.n_rows, sizeof *x);
  model_logprobs(m, p.batch, p.n_rows, p.rows, p.targets, 1, x, NULL);
  for (int i = 0; i < p.n_rows; i++) out[p.index[i]] = (double)x[i];
  free(x);
  free(from);
  pack_free(&p);
}

/* The scalar head at every token. */
static void values_micro(Model *m, const Sequences *s, const MicroBatch *mb, double *out) {
  Pack p = pack_last(s->offsets, s->tokens.v, mb);
  int n = p.batch.n_seqs ? p.batch.offsets[p.batch.n_seqs] : 0, at = 0;
  int32_t *rows = mem_alloc((size_t)n, sizeof *rows);
  float *x = mem_alloc((size_t)n, sizeof *x);
  for (int i = 0; i < n; i++) rows[i] = i;
  model_values(m, p.batch, n, rows, x);
  for (int i = 0; i < mb->n_seqs; i++)
    for (int t = s->offsets[mb->ids[i]]; t < s->offsets[mb->ids[i] + 1]; t++)
      out[t] = (double)x[at++];
  free(rows);
  free(x);
  pack_free(&p);
}

/* Every rank scores its share; then all hold every result. */
static void score_all(Engine *e, const Sequences *s, double *out) {
  int32_t *lengths = mem_alloc((size_t)s->n, sizeof *lengths);
  for (int i = 0; i < s->n; i++) lengths[i] = s->offsets[i + 1] - s->offsets[i];
  memset(out, 0, (size_t)s->tokens.n * sizeof *out);
  BatchPlan plan = plan_batches(lengths, NULL, s->n, e->grid->rank, e->grid->world, BATCH_TOKENS);
  for (int i = 0; i < plan.n_micro; i++) {
    if (model_head(e->model) == HEAD_LM)
      logprobs_micro(e->model, s, &plan.micro[i], out);
    else
      values_micro(e->model, s, &plan.micro[i], out);
  }
  plan_free(&plan);
  free(lengths);
  comm_all_reduce_f64(e->grid->all, out, s->tokens.n, false);
}

static void print_list(const double *x, int n) {
  putchar('[');
  for (int i = 0; i < n; i++) {
    if (i) putchar(',');
    json_put_f32(stdout, (float)x[i]);
  }
  putchar(']');
}

static void print_scores(const Sequences *s, const double *x, bool causal) {
  for (int i = 0; i < s->n; i++) {
    const double *row = x + s->offsets[i];
    int n = s->offsets[i + 1] - s->offsets[i];
    if (causal) {
      double sum = 0;
      for (int t = 1; t < n; t++) sum += row[t];
      fputs("{\"logprobs\":", stdout);
      print_list(row + 1, n - 1);
      fputs(",\"sum\":", stdout);
      json_put_f64(stdout, sum);
    } else {
      fputs("{\"score\":", stdout);
      json_put_f32(stdout, (float)row[n - 1]);
      fputs(",\"values\":", stdout);
      print_list(row, n);
    }
    puts("}");
  }
}

/* Sequences that were read before a bad one are scored all the same. */
static int score_group(Engine *e, Input *in, Sequences *s, bool *end, Error *err) {
  Comm *all = e->grid->all;
  int64_t tokens = (int64_t)BATCH_TOKENS * e->grid->world;
  int rc = in ? input_next(in, BATCH_SEQUENCES, tokens, s, err) : 0;
  sequences_share(all, s, &rc);
  if (s->n > 0) {
    double *x = mem_alloc((size_t)s->tokens.n, sizeof *x);
    score_all(e, s, x);
    if (in) print_scores(s, x, model_head(e->model) == HEAD_LM);
    free(x);
    Error out = {""};
    if (in && out_flush(&out)) rc = rc ? rc : error_set(err, "%s", out.msg);
  }
  *end = s->end;
  return comm_agree(all, rc, err);
}

static int score_file(Engine *e, const char *path, bool as_text, Error *err) {
  const ModelConfig *c = model_config(e->model);
  InputLimits limits = {c->vocab_size, c->max_positions, "the model's positions"};
  Input *in =
      e->grid->rank == 0 ? input_open(path, as_text, e->tokenizer, NULL, limits, err) : NULL;
  int rc = comm_agree(e->grid->all, e->grid->rank == 0 && !in ? -1 : 0, err);
  Sequences s = {0};
  for (bool end = false; !rc && !end;) rc = score_group(e, in, &s, &end, err);
  sequences_free(&s);
  input_close(in);
  return rc;
}

static CliResult run_score(const Args *a, Error *err) {
  const char *input = args_one_of(a, "--tokens --text", err), *dir = args_text(a, "--model");
  if (!input) return CLI_USAGE;
  if (!dir) {
    error_set(err, "expected --model DIR");
    return CLI_USAGE;
  }
  bool as_text = !strcmp(input, "--text");
  Engine e;
  EngineOptions o = {
      .dir = dir, .head = -1, .need = as_text ? TOKENIZER_NEEDED : TOKENIZER_IF_THERE};
  if (args_device(a, &o.device, &o.precision, err)) return CLI_USAGE;
  int rc = engine_open(&e, &o, err);
  if (!rc) rc = score_file(&e, args_text(a, input), as_text, err);
  engine_close(&e);
  return rc ? CLI_FAILED : CLI_OK;
}

const Command command_score = {
    .name = "score",
    .operands = "",
    .help =
        "log-probabilities of sequences, or scores of a reward model\n"
        "Reads JSON Lines, writes one line for each: a causal model gives {\"logprobs\": [of "
        "every\n"
        "token but the first], \"sum\": x}, a reward model {\"score\": of the last token, "
        "\"values\":\n"
        "[at every token]}.",
    .example = "echo '{\"text\": \"Once upon a time\"}' | rlhf score --model DIR --text -",
    .options = {{"--model", OPT_TEXT, "DIR", "a Hugging Face folder", .dflt = NULL},
                {"--tokens", OPT_TEXT, "FILE",
                 "JSON Lines of {\"tokens\": [..]}; - is standard input", .dflt = NULL},
                {"--text", OPT_TEXT, "FILE",
                 "JSON Lines of {\"text\": \"..\"}; - is standard input", .dflt = NULL},
                DEVICE_OPTIONS},
    .run = run_score};
