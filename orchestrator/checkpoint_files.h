/* The files of checkpoints, as one rank sees them: names, state.json, choice and removal. */
#ifndef ORCHESTRATOR_CHECKPOINT_FILES_H
#define ORCHESTRATOR_CHECKPOINT_FILES_H

#include "orchestrator/checkpoint.h"

char *checkpoint_dir(const char *run_dir, int64_t run_step); /* the caller frees */
/* state.json of a folder that already holds the named models' files; their sizes are noted in it,
 * so that a cut file is seen later. */
int checkpoint_write_state(const char *dir, const TrainState *state, const char *const *names,
                           int n_names, Error *err);
/* -1 with the reason when the folder is not a whole checkpoint. */
int checkpoint_read_state(const char *dir, TrainState *state, Error *err);
/* Removes all checkpoints before run_step but the newest keep - 1, and half-written ones. */
int checkpoint_prune(const char *run_dir, int64_t run_step, int64_t keep, Error *err);

#endif
