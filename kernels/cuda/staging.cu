/* Uploads go through a ring of pinned slots. Small ones share a slot until it is full; then an
 * event behind its last copy says when it may be used again. Downloads use two slots of their own:
 * while one is copied to the caller the next is on its way. */
#include "kernels/cuda/staging.h"

#include <stdlib.h>

enum { SLOTS = 16, DOWN = 2, ALIGN = 64 };
static const size_t SLOT_BYTES = 2u << 20;

struct Slot {
  char *data; /* pinned */
  size_t used;
  cudaStream_t stream; /* of its copies */
  cudaEvent_t done;    /* behind the last of them; recorded when the slot is closed */
};

struct CudaStaging {
  char *pinned;
  Slot up[SLOTS], down[DOWN];
  int turn; /* of up: the slot being filled */
  int threads;
};

CudaStaging *staging_create(int threads) {
  CudaStaging *s = static_cast<CudaStaging *>(mem_zalloc(1, sizeof *s));
  s->threads = threads;
  void *pinned = nullptr;
  CUDA_CHECK(cudaHostAlloc(&pinned, SLOT_BYTES * (SLOTS + DOWN), cudaHostAllocDefault));
  s->pinned = static_cast<char *>(pinned);
  for (int i = 0; i < SLOTS + DOWN; i++) {
    Slot *slot = i < SLOTS ? &s->up[i] : &s->down[i - SLOTS];
    slot->data = s->pinned + SLOT_BYTES * static_cast<size_t>(i);
    CUDA_CHECK(cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming));
  }
  return s;
}

void staging_free(CudaStaging *s) {
  if (!s) return;
  for (int i = 0; i < SLOTS + DOWN; i++)
    CUDA_CHECK(cudaEventDestroy((i < SLOTS ? &s->up[i] : &s->down[i - SLOTS])->done));
  CUDA_CHECK(cudaFreeHost(s->pinned));
  free(s);
}

/* The slot being filled if `bytes` fit and it is this stream's, else the next. */
static Slot *slot_for(CudaStaging *s, cudaStream_t stream, size_t bytes) {
  Slot *slot = &s->up[s->turn];
  if (slot->used == 0 || (slot->stream == stream && slot->used + bytes <= SLOT_BYTES)) {
    slot->stream = stream;
    return slot;
  }
  CUDA_CHECK(cudaEventRecord(slot->done, slot->stream));
  s->turn = (s->turn + 1) % SLOTS;
  slot = &s->up[s->turn];
  CUDA_CHECK(cudaEventSynchronize(slot->done)); /* returns at once for one never recorded */
  slot->used = 0;
  slot->stream = stream;
  return slot;
}

void staging_upload(CudaStaging *s, cudaStream_t stream, void *dst, const void *src, size_t bytes) {
  for (size_t at = 0, n; at < bytes; at += n) {
    n = bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES;
    Slot *slot = slot_for(s, stream, n);
    char *from = slot->data + slot->used;
    host_copy(s->threads, from, static_cast<const char *>(src) + at, n);
    CUDA_CHECK(
        cudaMemcpyAsync(static_cast<char *>(dst) + at, from, n, cudaMemcpyHostToDevice, stream));
    slot->used = (slot->used + n + ALIGN - 1) / ALIGN * ALIGN;
  }
}

static size_t piece_at(size_t at, size_t bytes) {
  return bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES;
}

static void start_down(Slot *slot, cudaStream_t stream, const void *src, size_t at, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(slot->data, static_cast<const char *>(src) + at, piece_at(at, bytes),
                             cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaEventRecord(slot->done, stream));
}

void staging_download(CudaStaging *s, cudaStream_t stream, void *dst, const void *src,
                      size_t bytes) {
  int turn = 0;
  if (bytes > 0) start_down(&s->down[0], stream, src, 0, bytes);
  for (size_t at = 0, next; at < bytes; at = next, turn = 1 - turn) {
    next = at + piece_at(at, bytes);
    if (next < bytes) start_down(&s->down[1 - turn], stream, src, next, bytes);
    CUDA_CHECK(cudaEventSynchronize(s->down[turn].done));
    host_copy(s->threads, static_cast<char *>(dst) + at, s->down[turn].data, next - at);
  }
}
