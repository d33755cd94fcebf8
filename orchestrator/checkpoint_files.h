/* The files of checkpoints, as one rank sees them: names, state.json, choice and removal. */
#ifndef ORCHESTRATOR_CHECKPOINT_FILES_H
#define ORCHESTRATOR_CHECKPOINT_FILES_H

#include "orchestrator/checkpoint.h"

char *checkpoint_dir(const char *run_dir, int64_t run_step); /* the caller frees */
/* CRC-32 of a file that all ranks can read. Collective. */
int checkpoint_sum(Comm *c, const char *path, uint32_t *sum, Error *err);
/* state.json of a folder that already holds the named models' files; their sizes and checksums are
 * noted in it, so that a cut or damaged file is seen later. */
int checkpoint_write_state(const char *dir, const TrainState *state, const char *const *names,
                           const uint32_t *sums, int n_names, Error *err);
/* The checksum that state.json notes for a model. */
int checkpoint_noted_sum(const char *dir, const char *name, uint32_t *sum, Error *err);
/* -1 with the reason when the folder is not a whole checkpoint. */
int checkpoint_read_state(const char *dir, TrainState *state, Error *err);
/* Removes all checkpoints before run_step but the newest keep - 1, and half-written ones. */
int checkpoint_prune(const char *run_dir, int64_t run_step, int64_t keep, Error *err);

#endif
