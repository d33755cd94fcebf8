/* A kernel as `rlhf bench kernels` sees it: operands, a call, and what bounds it. */
#ifndef ORCHESTRATOR_CLI_BENCH_KERNELS_H
#define ORCHESTRATOR_CLI_BENCH_KERNELS_H

#include "orchestrator/cli_bench.h"

/* What a step of the model works on: n tokens in sequences of equal lengths; attention's others. */
typedef struct KernelShape {
  const ModelConfig *config;
  DType act; /* of weights and activations */
  int64_t n, length, vocab_rows;
  int64_t flat; /* elements of what has no rows: the optimizer, the wire */
  AttnShape attn;
  int64_t qkv, heads_out, up; /* widths of rows */
  Segments seg;
} KernelShape;

typedef enum Fill {
  FILL_NORMAL,
  FILL_ONES,
  FILL_ZERO,
  FILL_SMALL,
  FILL_WEIGHTS,
  FILL_IDS,
  FILL_PLACES,
  FILL_CODES,  /* words of codes that are numbers in all formats */
  FILL_SENT,   /* weights, the same in every operand */
  FILL_CHANGED /* these, of which one in 50 has changed */
} Fill;
enum { MOST_OPERANDS = 8 };
typedef struct Operand {
  DType type;
  int ndim;
  int64_t dim[4],
      limit; /* limit: of FILL_IDS, ids are below; -1: offsets of the sequences, -2: lengths */
  Fill fill;
  bool out;  /* compared with the CPU's */
  bool bits; /* BF16 on the CPU, too */
} Operand;
typedef struct Kernel {
  char name[48];
  int which; /* of several that share run */
  int n_operands;
  Operand operand[MOST_OPERANDS];
  double bytes, flops; /* that the call has to move and to compute */
  double calls;        /* in a training step */
  void (*run)(const struct Kernel *k, const KernelShape *s, Device *d, const Tensor *t);
} Kernel;

/* The kernels of a shape; fills k, which has room for MOST_KERNELS. */
enum { MOST_KERNELS = 96 };
int kernels_list(const KernelShape *s, Kernel *k);

/* ---- building the list ---- */

typedef struct KernelList {
  const KernelShape *s;
  Kernel *k;
  int n;
} KernelList;
typedef void (*KernelRun)(const Kernel *, const KernelShape *, Device *, const Tensor *);
Kernel *kernel_add(KernelList *l, KernelRun run, double flops, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* cols 0: a vector. passes: how often the call has to read or write it. */
Operand *kernel_operand(Kernel *k, DType type, Fill fill, double passes, int64_t rows,
                        int64_t cols);
void kernel_output(Kernel *k, DType type, double passes, int64_t rows, int64_t cols);
double operand_bytes(const Operand *o);

/* cli_bench_kernels_more.c */
void kernels_add_loss(KernelList *l);
void kernels_add_flat(KernelList *l);
void kernels_add_biases(KernelList *l);
void kernels_add_deltas(KernelList *l);
void kernels_add_cache(KernelList *l);
/* cli_bench_kernels_wire.c */
void kernels_add_wire(KernelList *l);

#endif
