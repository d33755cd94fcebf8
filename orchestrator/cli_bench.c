/* rlhf bench: the benchmarks by name, and the options of all of them. */
#include <string.h>

#include "orchestrator/cli_bench.h"

#define EVERY "--ranks-per-node --threads --device --precision "
static const struct {
  const char *name;
  CliResult (*run)(const Args *a, Error *err);
  const char *takes; /* options */
} benches[] = {
    {"zeropp", bench_zeropp,
     EVERY "--model --modes --steps --tokens --micro-batches --lr --prefetch --json"},
    {"train", bench_train,
     EVERY "--model --modes --stage --steps --seqs --length --micro-batches --recompute --lr "
           "--gradients --offload --prefetch --json"},
    {"kernels", bench_kernels, EVERY "--model --seqs --length"},
    {"ppo", bench_ppo,
     EVERY "--model --steps --prompts --prompt-length --answer-length --micro-tokens --recompute"},
    {"comm", bench_comm, EVERY "--largest --json"},
    {"rollout", bench_rollout,
     EVERY "--model --modes --steps --prompts --prompt-length --response --lengths --rows --look "
           "--weights --format"},
};
enum { N_BENCHES = sizeof benches / sizeof benches[0] };

static bool takes(const char *list, const char *name) {
  size_t n = strlen(name);
  for (const char *at = strstr(list, name); at; at = strstr(at + n, name))
    if (at[n] == ' ' || at[n] == 0) return true;
  return false;
}

/* What a benchmark would pass over is refused: its figures would not be those that were asked for.
 */
static CliResult check_options(const Args *a, const char *bench, const char *list, Error *err) {
  for (const Option *o = a->command->options; o->name; o++) {
    if (!args_given(a, o->name) || takes(list, o->name)) continue;
    error_set(err, "%s: found for %s, which takes %s", o->name, bench, list);
    return CLI_USAGE;
  }
  return CLI_OK;
}

static CliResult run_bench(const Args *a, Error *err) {
  char known[128] = "";
  for (int i = 0; i < N_BENCHES; i++) {
    if (strcmp(a->operand[0], benches[i].name) == 0) {
      CliResult rc = check_options(a, benches[i].name, benches[i].takes, err);
      return rc == CLI_OK ? benches[i].run(a, err) : rc;
    }
    size_t used = strlen(known);
    snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", benches[i].name);
  }
  error_set(err, "found \"%s\"; expected %s", a->operand[0], known);
  return CLI_USAGE;
}

const Command command_bench = {
    .name = "bench",
    .operands = "zeropp|train|kernels|ppo|comm|rollout",
    .help =
        "rates of this machine, with random weights and tokens\n"
        "zeropp: what each part of ZeRO++ buys on this network: step time, tokens, traffic by "
        "link, hidden\nand exposed communication, and the loss behind it, in every mode from the "
        "same weights.\n"
        "train: time of a training step, tokens and model TFLOP/s, memory, and where the time "
        "goes.\n"
        "kernels: every kernel of a step: time, share of what bounds it, difference from the CPU.\n"
        "ppo: an iteration of PPO with four models of one shape, phase by phase.\n"
        "comm: what the collectives carry, over the host's memory and the device's, within a node "
        "and between\nnodes, by size.\n"
        "rollout: answers to random prompts: prefill and decode, what a decode step reads, how "
        "many of its\nrows draw. --steps: rollouts, one if not given; the fastest counts.\n"
        "Nothing is written.",
    .example = "mpirun -n 4 rlhf bench zeropp --ranks-per-node 2 --model runs/demo/actor",
    .more =
        "modes:\n"
        "  zero3   stage 3 in 16 bits, hierarchical: every byte enters a node once per gather\n"
        "  qwz     weights cross the network in int8\n"
        "  hpz     a whole copy in each node, refreshed once a step\n"
        "  qgz     gradients travel in int4, summed in two hops\n"
        "  all     the three together\n"
        "  all-ef  the three, with error feedback on the gradients\n"
        "  delta   all, but of the weights only those that changed, in 16 bits: for small --lr\n"
        "  auto    all or delta, whichever sends less",
    .min_operands = 1,
    .max_operands = 1,
    .options =
        {{"--model", OPT_TEXT, "DIR|FILE", "config.json, or a folder with one", .dflt = NULL},
         {"--modes", OPT_TEXT, "A,B,..",
          "these modes, in this order; train: instead of --stage; rollout: one",
          .dflt = "zeropp: all of them"},
         {"--ranks-per-node", OPT_INT, "N", "ranks of a node; 0: the ranks of a host", 0, 1 << 20,
          .dflt = "0"},
         {"--steps", OPT_INT, "N", "measured steps, after one that is not", 1, 1 << 20,
          .dflt = "10"},
         {"--tokens", OPT_INT, "N", "zeropp: tokens of a rank's micro-batch", 2, 1 << 24,
          .dflt = "256"},
         {"--seqs", OPT_INT, "N", "train, kernels: sequences of a rank's micro-batch", 1, 1 << 20,
          .dflt = "8"},
         {"--length", OPT_INT, "N", "train, kernels: tokens of a sequence", 2, 1 << 20,
          .dflt = "2048"},
         {"--micro-batches", OPT_INT, "N", "zeropp, train: micro-batches of a step", 1, 1 << 16,
          .dflt = "1"},
         {"--prompts", OPT_INT, "N", "ppo, rollout: prompts of all ranks", 1, 1 << 20,
          .dflt = "64"},
         {"--prompt-length", OPT_INT, "N", "ppo, rollout: tokens", 1, 1 << 20, .dflt = "256"},
         {"--answer-length", OPT_INT, "N", "ppo: tokens", 1, 1 << 20, .dflt = "256"},
         {"--response", OPT_INT, "N", "rollout: tokens of every answer", 1, 1 << 20, .dflt = "256"},
         {"--lengths", OPT_TEXT, "HOW",
          "rollout: fixed; eos: every answer ends at its own length, at random from 16 to 1024; "
          "compare: so, and then fixed with as many sequences in flight",
          .dflt = "fixed"},
         {"--rows", OPT_INT, "N", "rollout: sequences of a rank together; 0: all, 256 at most", 0,
          1 << 16, .dflt = "0"},
         {"--look", OPT_INT, "N", "rollout: steps from one look of the host to the next; 0: auto",
          0, 1 << 16, .dflt = "0"},
         WEIGHTS_OPTIONS,
         {"--micro-tokens", OPT_INT, "N", "ppo: tokens of a forward and backward", 1, 1 << 30,
          .dflt = "16384"},
         {"--largest", OPT_INT, "N", "comm: bytes from each rank to each other", 1, 1 << 30,
          .dflt = "67108864"},
         {"--recompute", OPT_TEXT, "HOW",
          "train, ppo: none, selective, full; train: auto, by memory", .dflt = "none"},
         {"--stage", OPT_INT, "N", "train: what is sharded, 0 to 3", 0, 3, .dflt = "3"},
         {"--lr", OPT_FLOAT, "X", "zeropp, train: learning rate; PPO's are near 1e-6", 0, 1,
          .dflt = "1e-3"},
         {"--gradients", OPT_TEXT, "NAME", "train: of the owners' sums, float32 or bfloat16",
          .dflt = "float32"},
         {"--offload", OPT_TEXT, "WHAT", "train: off, or optimizer: its state lies in the host",
          .dflt = "off"},
         {"--prefetch", OPT_INT, "N", "zeropp, train: units gathered ahead; 0: no overlap", 0, 64,
          .dflt = "1"},
         {"--threads", OPT_INT, "N", "threads of a rank; 0: its share of the cores", 0, 1024,
          .dflt = "0"},
         DEVICE_OPTIONS,
         {"--json", OPT_FLAG, NULL, "zeropp, train, comm: one JSON object per line", .dflt = NULL}},
    .run = run_bench};
