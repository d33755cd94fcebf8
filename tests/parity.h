/* Parity with PyTorch: what the parts of `make parity` share.
 *
 * A fixture folder holds a checkpoint and reference.safetensors, what PyTorch computed with it. A
 * figure is the largest relative error of one quantity over a folder: |ours - theirs| over the
 * largest magnitude of the reference tensor. float32 sums of a few hundred terms in another order
 * differ by about 1e-6 of the largest; 2e-5 leaves room for three to five layers of them, 1e-4 for
 * gradients and ten optimizer steps, and a wrong formula is far outside both.
 *
 * A GPU's float32 adds in yet another order, and its exponentials differ in the last bits: 1e-4 for
 * all. In bfloat16 every weight, activation and gradient of one has an error of up to 2^-9 of
 * itself. Some 50 of them lie between a token and a logit of these models, and sqrt(50) 2^-9 = 1.4
 * % is the usual error of a number; the bound is for the worst of thousands. Gradients pass twice
 * as many, and are sums of terms of both signs: three times the bound. ReLU has a kink: rounding
 * opens or closes some of its gates that are near 0, and with each comes or goes a whole term of a
 * gradient: six times. Greedy decoding then meets ties that fall the other way, and is not
 * compared.
 *
 * Some numbers have no magnitude of their own to be measured by, since they are what is
 * left when larger ones cancel (PyTorch differs from itself by as much, with other threads):
 * - a score, or the values of a one-token answer: measured as part of its quantity over all
 *   sequences of the folder, which the reference stores sequence by sequence;
 * - a mean of terms of both signs (policy loss, k1): measured by its largest term;
 * - the gradient of key biases without rotary positions, 0 in exact arithmetic: by the queries'. */
#ifndef PARITY_H
#define PARITY_H

#include "core/fs.h"
#include "core/json.h"
#include "model/model.h"

#define PARITY_VALUE 2e-5
#define PARITY_GRADIENT 1e-4
#define PARITY_GPU 1e-4
#define PARITY_BF16_VALUE 5e-2
#define PARITY_BF16_GRADIENT 1.5e-1
#define PARITY_BF16_KINKS 3e-1

typedef struct Figure {
  char name[32], worst[128];
  double error, limit;
  double diff, scale; /* of a quantity pooled over sequences: error is their quotient */
} Figure;

typedef struct Parity {
  Device *device;
  DType compute; /* F32 or BF16 */
  bool kinks;    /* of the model whose gradients are compared */
  Grid *grid;
  Arena *arena;
  const char *root; /* folder of folders */
  char *dir;        /* the folder at hand */
  StSet *reference;
  Figure figure[40];
  int n_figures;
} Parity;

/* Both die, naming the file, where the tensor is absent or has another count (n >= 0). */
float *parity_f32(const Parity *p, const char *name, int64_t n);
int32_t *parity_i32(const Parity *p, const char *name, int64_t *n);
bool parity_has(const Parity *p, const char *name);

/* Records the error of `got` against the reference tensor, or against numbers. limit: PARITY_VALUE
 * or PARITY_GRADIENT, which the device and the precision may widen. */
void parity_check(Parity *p, const char *figure, double limit, const float *got, const char *tensor,
                  int64_t n);
void parity_compare(Parity *p, const char *figure, double limit, const float *got,
                    const float *want, int64_t n, const char *what);
/* A sequence's part of a quantity that is measured over all sequences. */
void parity_pool(Parity *p, const char *figure, const float *got, const char *tensor, int64_t n);
/* A mean of terms that cancel, against the reference's. */
void parity_mean(Parity *p, const char *figure, double got, double largest_term);
/* The shards of `kind` (gradients, or masters as whole vectors) against the tensors PREFIX +
 * Hugging Face name; all parameters. Collective.
 */
void parity_params(Parity *p, const char *figure, Model *m, StateKind kind, const char *prefix);
/* Yes or no as a figure: error 0 or infinite. Not in bfloat16. */
void parity_agree(Parity *p, const char *figure, bool same);

/* A trainable model of a folder; NULL with the message. Collective. */
Model *parity_load(Parity *p, const char *dir, HeadKind head, Error *err);
/* A folder with this config and these weights, for parity_load; the caller frees the name.
 * Collective. */
char *parity_folder(Parity *p, const char *config, const char *weights);

/* Sequences "seqI.input_ids" of the reference, packed. */
typedef struct Sequences {
  int n;
  int32_t *offsets, *tokens;
} Sequences;
Sequences parity_sequences(const Parity *p);
void sequences_free(Sequences *s);
Batch sequences_batch(const Sequences *s);

/* 0 or -1 with a message (the folder could not be loaded). Collective. */
int parity_causal(Parity *p, Error *err);
int parity_reward(Parity *p, Error *err);
int parity_ppo(Parity *p, Error *err);
int parity_adamw(Parity *p, Error *err);

#endif
