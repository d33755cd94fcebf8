/* What the command line asks of a training run. All three return 0, or -1 with one message.
 *
 * train_run and check_run are collective: every rank that launch_init started calls them with the
 * same recipe, and an error of one rank (a full disk, a missing file) is every rank's error, so
 * that rank 0 prints it once. The caller calls launch_init before and launch_finish after; grid,
 * device and everything else are opened and closed inside. */
#ifndef ORCHESTRATOR_TRAIN_H
#define ORCHESTRATOR_TRAIN_H

#include <stdbool.h>
#include <stdio.h>

#include "core/recipe.h"

/* Runs the checks, then the recipe's stages in order, each handing its result to the next through a
 * Hugging Face folder in run.directory (sft, reward, critic, actor). resume: continues from the
 * newest whole checkpoint there, with any number of ranks. */
int train_run(const Recipe *r, bool resume, Error *err);

/* Everything that can be known without training: files, heads, tokenizer against vocabulary,
 * sequence lengths, the memory plan. Rank 0 prints the resolved recipe as YAML to out; the plan and
 * notes go to stderr. All problems found are in err, one per line. */
int check_run(const Recipe *r, FILE *out, Error *err);

/* The per-phase table of a run again, from the files in its directory. Not collective. */
int report_print_run(const char *run_dir, FILE *out, Error *err);

#endif
