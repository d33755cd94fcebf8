/* rlhf train, check, report. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "orchestrator/cli.h"
#include "orchestrator/train.h"

/* Rank 0 reads (standard input is its alone), all ranks parse the same text and so agree. */
static char *read_recipe(Comm *c, const char *path, size_t *len, Error *err) {
  bool root = comm_rank(c) == 0;
  char *text = root ? fs_read(path, len, err) : NULL;
  if (comm_agree(c, root && !text ? -1 : 0, err)) return NULL;
  uint64_t n = root ? *len : 0;
  comm_broadcast(c, &n, sizeof n, 0);
  if (!root) text = mem_alloc((size_t)n + 1, 1);
  comm_broadcast(c, text, (size_t)n + 1, 0);
  *len = (size_t)n;
  return text;
}

static Recipe *load_recipe(const Args *a, Error *err) {
  Grid *g = grid_create(0, err);
  if (!g) return NULL;
  size_t len;
  const char *path = a->operand[0];
  char *text = read_recipe(g->all, path, &len, err);
  Recipe *r = NULL;
  if (text)
    r = recipe_parse(text, len, strcmp(path, "-") ? path : "stdin", a->list, a->n_list, err);
  free(text);
  if (comm_agree(g->all, r ? 0 : -1, err)) {
    recipe_free(r);
    r = NULL;
  }
  grid_free(g);
  return r;
}

static CliResult run_train(const Args *a, Error *err) {
  Recipe *r = load_recipe(a, err);
  if (!r) return CLI_FAILED;
  int rc = train_run(r, args_given(a, "--resume"), err);
  recipe_free(r);
  return rc ? CLI_FAILED : CLI_OK;
}

static CliResult run_check(const Args *a, Error *err) {
  Recipe *r = load_recipe(a, err);
  if (!r) return CLI_FAILED;
  int rc = check_run(r, stdout, err);
  recipe_free(r);
  return rc ? CLI_FAILED : CLI_OK;
}

static CliResult run_report(const Args *a, Error *err) {
  if (launch_rank() > 0) return CLI_OK;
  return report_print_run(a->operand[0], stdout, err) ? CLI_FAILED : CLI_OK;
}

#define SET_OPTION \
  { "--set", OPT_LIST, "KEY=VALUE", "change a key of the recipe; may be repeated", .dflt = NULL }

const Command command_train = {
    .name = "train",
    .operands = "RECIPE",
    .help =
        "run the stages of a recipe\n"
        "Stages run in order, each handing its result to the next; models, metrics and the report "
        "are\nwritten to the recipe's run directory. The per-phase table goes to standard output.",
    .example = "mpirun -n 2 rlhf train recipes/demo.yaml --set ppo.steps=20",
    .min_operands = 1,
    .max_operands = 1,
    .options = {SET_OPTION,
                {"--resume", OPT_FLAG, NULL,
                 "go on from the newest checkpoint of the run directory", .dflt = NULL}},
    .run = run_train};

const Command command_check = {
    .name = "check",
    .operands = "RECIPE",
    .help =
        "validate a recipe without training, and print it resolved\n"
        "Keys, files, heads, tokenizer against vocabulary, divisions of batches and the memory "
        "plan. The\nrecipe with every default filled in goes to standard output as YAML.",
    .example = "rlhf check recipes/demo.yaml",
    .min_operands = 1,
    .max_operands = 1,
    .options = {SET_OPTION},
    .run = run_check};

const Command command_report = {.name = "report",
                                .operands = "RUN_DIR",
                                .help = "print the per-phase table of a run again",
                                .example = "rlhf report runs/demo",
                                .min_operands = 1,
                                .max_operands = 1,
                                .run = run_report};
