/* Looks through the bytes of a SentencePiece .model file before the library sees them.
 *
 * The file is a protobuf message (sentencepiece_model.proto): pieces, then a trainer_spec, then a
 * normalizer_spec. A file cut between two fields is still a valid message, and the library walks
 * the normalizer's trie without looking at bounds; so what the library takes on trust is checked
 * here. What it checks itself (pieces, kinds, ids) is left to it. */
#ifndef GENERATION_SPM_FILE_H
#define GENERATION_SPM_FILE_H

#include <stdint.h>

#include "core/error.h"

typedef struct SpmTraits {
  int64_t n_pieces;
  bool dummy_prefix;    /* a space is put before every text */
  bool squeezes_spaces; /* leading, trailing and doubled spaces are dropped when encoding */
} SpmTraits;

/* -1 with "FILE: byte N: ..." for what is not a whole model, or uses what decode does not undo. */
int spm_file_check(const uint8_t *data, size_t len, const char *file, SpmTraits *out, Error *err);

#endif
