/* Inside of Bpe, shared by bpe.c (words to ids) and bpe_vocab.c (the tables). */
#ifndef GENERATION_BPE_INTERNAL_H
#define GENERATION_BPE_INTERNAL_H

#include "generation/bpe.h"

typedef struct BpeToken {
  uint32_t start, len; /* its bytes in the pool */
  uint32_t hash;
  bool there;     /* false: a hole in the ids */
  bool literal;   /* the key is not spelled in the byte alphabet */
  bool forbidden; /* no text becomes it */
  bool merged;    /* some merge makes it */
  bool whole;     /* a word that has its bytes is this token */
} BpeToken;

typedef struct BpeMerge {
  int32_t left, right, result;
} BpeMerge;

/* Both hash tables are open: a slot holds an id or a rank, -1 when it is free; the number of slots
 * is a power of two and at least twice that of the entries. */
struct Bpe {
  BpeToken *tokens; /* by id */
  int n_tokens, cap_tokens;
  char *pool;
  size_t n_pool, cap_pool;
  int32_t *token_slots;
  uint32_t n_token_slots, n_used; /* used: slots that are not free */
  BpeMerge *merges;               /* by rank */
  int n_merges, cap_merges;
  int32_t *merge_slots;
  uint32_t n_merge_slots;
  int32_t byte_id[256]; /* -1: no such token */
  size_t longest;       /* bytes of the longest token */
};

/* The token with these bytes, -1: none. */
int bpe_lookup(const Bpe *b, const char *bytes, size_t len, bool literal);
/* The rank of the merge of two tokens, -1: none. */
int bpe_rank(const Bpe *b, int32_t left, int32_t right);

#endif
