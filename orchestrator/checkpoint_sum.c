/* The checksum of a checkpoint's file: disks and copies flip bits, and training would go on from
 * them without a word. The ranks read alternate pieces; CRCs of pieces combine to that of the
 * whole.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "orchestrator/checkpoint_files.h"

static const int64_t piece = INT64_C(8) << 20;

static int64_t piece_bytes(int64_t size, int64_t i) {
  return size - i * piece < piece ? size - i * piece : piece;
}

static int sum_piece(int fd, const char *path, int64_t at, int64_t bytes, uint8_t *buf, double *sum,
                     Error *err) {
  for (int64_t done = 0; done < bytes;) {
    ssize_t n = pread(fd, buf + done, (size_t)(bytes - done), (off_t)(at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      return error_set(err, "%s: cannot read: %s", path, n < 0 ? strerror(errno) : "it shrank");
    done += n;
  }
  *sum = (double)crc32_z(0, buf, (size_t)bytes); /* a double holds 32 bits exactly */
  return 0;
}

/* This rank's pieces; the others' stay 0. */
static int own_sums(const Comm *c, const char *path, int64_t size, double *sums, Error *err) {
  int fd = open(path, O_RDONLY | O_CLOEXEC), rc = 0;
  if (fd < 0) return error_set(err, "%s: cannot open: %s", path, strerror(errno));
  uint8_t *buf = mem_alloc((size_t)piece, 1);
  for (int64_t i = comm_rank(c); i * piece < size && rc == 0; i += comm_size(c))
    rc = sum_piece(fd, path, i * piece, piece_bytes(size, i), buf, &sums[i], err);
  free(buf);
  close(fd);
  return rc;
}

int checkpoint_sum(Comm *c, const char *path, uint32_t *out, Error *err) {
  struct stat st;
  double size = comm_rank(c) == 0 && stat(path, &st) == 0 ? (double)st.st_size : 0;
  comm_all_reduce_f64(c, &size, 1, false);
  int64_t bytes = (int64_t)size;
  int n = (int)((bytes + piece - 1) / piece);
  double *sums = mem_zalloc((size_t)n + 1, sizeof *sums);
  int rc = comm_agree(c, own_sums(c, path, bytes, sums, err), err);
  if (rc == 0) comm_all_reduce_f64(c, sums, n, false);
  uLong whole = 0;
  for (int i = 0; i < n; i++)
    whole = crc32_combine(whole, (uLong)sums[i], (z_off_t)piece_bytes(bytes, i));
  *out = (uint32_t)whole;
  free(sums);
  return rc;
}
