/* The checks before a run, one file per subject. Each looks at what the ones before it filled in
 * and adds every problem it finds as a line of err; they return how many they added. Every rank
 * finds the same. */
#ifndef ORCHESTRATOR_CHECK_H
#define ORCHESTRATOR_CHECK_H

#include "orchestrator/train_session.h"

/* Adds one problem, as a line of its own; returns 1. */
int check_note(Error *all, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Configs of all roles that some stage needs; heads; tokenizer against vocabulary. */
int check_run_models(Session *s, Error *err);
/* The stages' data sets: read, tokenized, long enough, short enough for the models. */
int check_run_data(Session *s, Error *err);
/* Reward terms and the normalization of scores. */
int check_run_rewards(Session *s, Error *err);
/* The memory plan: printed on rank 0, refused when it does not fit. */
int check_run_memory(Session *s, Error *err);

#endif
