/* rlhf bench zeropp: what each part of ZeRO++ buys on this machine or cluster. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "orchestrator/cli_bench.h"

/* Thirteen million parameters, few of them in the embedding: bound by a slow network, small enough
 * for any host. */
static ModelConfig default_model(void) {
  return (ModelConfig){.family = "llama",
                       .vocab_size = 1024,
                       .hidden = 256,
                       .n_layers = 16,
                       .n_heads = 4,
                       .n_kv_heads = 4,
                       .head_dim = 64,
                       .ffn = 688,
                       .max_positions = 1024,
                       .norm_eps = 1e-5F,
                       .rope = ROPE_DEFAULT,
                       .rope_theta = 10000,
                       .rope_factor = 1,
                       .init_std = 0.02F,
                       .bos_id = -1,
                       .pad_id = -1,
                       .head = HEAD_LM,
                       .dtype = DT_F32};
}

static int read_model(BenchPlan *p, const char *path, Error *err) {
  p->model = path ? path : "a Llama of 16 layers, hidden 256";
  p->config = default_model();
  if (!path) return 0;
  int rc = fs_is_dir(path) ? model_config_read(path, &p->config, err)
                           : model_config_read_file(path, &p->config, err);
  if (rc) return -1;
  if (p->config.head != HEAD_LM) return error_set(err, "%s: expected a language model", path);
  return 0;
}

static int check_plan(const BenchPlan *p, Error *err) {
  if (model_config_check(&p->config, err)) return error_prefix(err, "%s", p->model);
  return 0;
}

static int run_modes(const BenchPlan *p, const BenchMode *modes, int n, bool json, Error *err) {
  bool root = p->grid->rank == 0;
  BenchResult first = {0};
  if (root && !json) bench_print_head(p);
  for (int i = 0; i < n; i++) {
    BenchResult r;
    if (bench_run(p, &modes[i], &r, err)) return -1;
    if (i == 0) first = r;
    if (root && json) bench_print_json(p, &modes[i], &r);
    if (root && !json) bench_print_row(p, &modes[i], &r, &first);
    if (comm_agree(p->grid->all, root ? out_flush(err) : 0, err)) return -1;
  }
  if (root && !json) bench_print_foot(p);
  return 0;
}

static CliResult run_bench(const Args *a, Error *err) {
  if (strcmp(a->operand[0], "zeropp") != 0) {
    error_set(err, "found \"%s\"; expected zeropp", a->operand[0]);
    return CLI_USAGE;
  }
  BenchMode *modes;
  int n = bench_modes_parse(args_text(a, "--modes"), &modes, err);
  if (n < 0) return CLI_USAGE;
  BenchPlan p = {.steps = (int)args_int(a, "--steps"),
                 .tokens = (int)args_int(a, "--tokens"),
                 .micro_batches = (int)args_int(a, "--micro-batches"),
                 .threads = (int)args_int(a, "--threads"),
                 .prefetch = (int)args_int(a, "--prefetch")};
  p.grid = grid_create((int)args_int(a, "--ranks-per-node"), err);
  int rc = p.grid ? 0 : -1;
  if (rc == 0) {
    rc = read_model(&p, args_text(a, "--model"), err);
    if (rc == 0) rc = check_plan(&p, err);
    rc = comm_agree(p.grid->all, rc, err);
  }
  if (rc == 0) rc = run_modes(&p, modes, n, args_given(a, "--json"), err);
  grid_free(p.grid);
  free(modes);
  return rc ? CLI_FAILED : CLI_OK;
}

const Command command_bench = {
    .name = "bench",
    .operands = "zeropp",
    .help =
        "what each part of ZeRO++ buys on this network\n"
        "Trains a model on random tokens, from the same random weights in every mode, and prints "
        "step time,\ntokens, traffic by link, hidden and exposed communication, and the loss "
        "behind it. Nothing is written.",
    .example = "mpirun -n 4 rlhf bench zeropp --ranks-per-node 2 --model runs/demo/actor",
    .more =
        "modes:\n"
        "  zero3   stage 3 in 16 bits, hierarchical: every byte enters a node once per gather\n"
        "  qwz     weights cross the network in int8\n"
        "  hpz     a whole copy in each node, refreshed once a step\n"
        "  qgz     gradients travel in int4, summed in two hops\n"
        "  all     the three together\n"
        "  all-ef  the three, with error feedback on the gradients",
    .min_operands = 1,
    .max_operands = 1,
    .options =
        {{"--model", OPT_TEXT, "DIR|FILE", "config.json, or a folder with one", .dflt = NULL},
         {"--modes", OPT_TEXT, "A,B,..", "these modes, in this order", .dflt = "all of them"},
         {"--ranks-per-node", OPT_INT, "N", "ranks of a node; 0: the ranks of a host", 0, 1 << 20,
          .dflt = "0"},
         {"--steps", OPT_INT, "N", "measured steps, after one that is not", 1, 1 << 20,
          .dflt = "10"},
         {"--tokens", OPT_INT, "N", "tokens of a rank's micro-batch", 2, 1 << 24, .dflt = "256"},
         {"--micro-batches", OPT_INT, "N", "micro-batches of a step", 1, 1 << 16, .dflt = "1"},
         {"--prefetch", OPT_INT, "N", "units gathered ahead; 0: no overlap", 0, 64, .dflt = "1"},
         {"--threads", OPT_INT, "N", "threads of a rank; 0: its share of the cores", 0, 1024,
          .dflt = "0"},
         {"--json", OPT_FLAG, NULL, "one JSON object per mode", .dflt = NULL}},
    .run = run_bench};
