/* SentencePiece behind a C interface. Nothing of C++ passes through: no exception, no type.
 * Strings of pieces are SentencePiece's own spelling, with U+2581 for a space. */
#ifndef GENERATION_SENTENCEPIECE_H
#define GENERATION_SENTENCEPIECE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Spm Spm;
typedef enum SpmKind { SPM_TEXT, SPM_UNKNOWN, SPM_CONTROL, SPM_BYTE } SpmKind;

/* From the bytes of a .model file (copied). NULL with a message in msg[cap] when it is refused. */
Spm *spm_open(const void *model, size_t len, char *msg, size_t cap);
void spm_close(Spm *s);

int spm_size(const Spm *s);
SpmKind spm_kind(const Spm *s, int id);                    /* id in [0, size) */
const char *spm_piece(const Spm *s, int id, size_t *len);  /* borrowed; id in [0, size) */
int spm_find(const Spm *s, const char *piece, size_t len); /* -1: no such piece */
int spm_bos(const Spm *s);                                 /* -1: none */
int spm_eos(const Spm *s);
/* What an unknown token reads as, " \342\201\207 " unless the model says otherwise; borrowed. */
const char *spm_unknown_text(const Spm *s, size_t *len);

/* Encodes valid UTF-8 (NUL bytes included) and calls push for every id in order. prefix false:
 * without the space that most models put before a text. -1 with a message on failure. */
typedef void (*SpmPush)(void *ctx, int32_t id);
int spm_encode(const Spm *s, const char *text, size_t len, bool prefix, SpmPush push, void *ctx,
               char *msg, size_t cap);

#ifdef __cplusplus
}
#endif
#endif
