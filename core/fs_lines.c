/* Reading of text, gzip or plain: line by line, or the whole. zlib tells the two apart and passes
 * plain files through. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "core/fs.h"

static const size_t max_line = (size_t)64 << 20, max_text = (size_t)2 << 30, chunk = 1 << 16;

/* buf[start..end) is read from the file but not yet handed out. */
struct LineReader {
  gzFile gz;
  char *path;
  char *buf;
  size_t start, end, cap;
  bool at_end;
  int64_t number;
};

/* patient: waits for somebody to write into a named pipe. Else one that nobody writes is empty. */
static int open_input(const char *path, bool patient, Error *err) {
  bool std = !strcmp(path, "-");
  int fd = std ? dup(STDIN_FILENO) : open(path, O_RDONLY | O_CLOEXEC | (patient ? 0 : O_NONBLOCK));
  if (fd < 0) return error_set(err, "%s: cannot open: %s", path, strerror(errno));
  struct stat st;
  if (fstat(fd, &st) != 0 || S_ISDIR(st.st_mode)) {
    int bad = error_set(err, "%s: is a folder; expected a file", path);
    close(fd);
    return bad;
  }
  if (!patient && !std) fcntl(fd, F_SETFL, 0); /* a pipe that is being written is waited for */
  return fd;
}

static LineReader *open_reader(const char *path, bool patient, Error *err) {
  int fd = open_input(path, patient, err);
  if (fd < 0) return NULL;
  gzFile gz = gzdopen(fd, "rb");
  if (!gz) die("out of memory: gzip reader");
  LineReader *r = mem_zalloc(1, sizeof *r);
  r->gz = gz;
  r->path = mem_strdup(!strcmp(path, "-") ? "(standard input)" : path);
  return r;
}

static int read_error(LineReader *r, Error *err) {
  int code;
  const char *text = gzerror(r->gz, &code);
  if (code == Z_ERRNO) return error_set(err, "%s: cannot read: %s", r->path, strerror(errno));
  if (code == Z_BUF_ERROR)
    return error_set(err, "%s: the gzip stream ends early: the file is cut short", r->path);
  const char *colon = strstr(text, ": "); /* zlib puts a made-up file name before it */
  return error_set(err, "%s:%lld: corrupt gzip stream: %s", r->path, (long long)r->number + 1,
                   colon ? colon + 2 : text);
}

/* Reads one more chunk behind buf[end]; at_end when there is none. Keeps room for a NUL. */
static int fill(LineReader *r, Error *err) {
  if (r->start > 0) {
    memmove(r->buf, r->buf + r->start, r->end - r->start);
    r->end -= r->start;
    r->start = 0;
  }
  if (r->cap < r->end + chunk + 1) {
    r->cap = (r->end + chunk + 1) * 2;
    r->buf = mem_grow(r->buf, r->cap, 1);
  }
  int n = gzread(r->gz, r->buf + r->end, (unsigned)chunk);
  if (n < 0) return read_error(r, err);
  if (n == 0) {
    int code;
    gzerror(r->gz, &code); /* a stream that is cut short only shows here */
    if (code != Z_OK && code != Z_STREAM_END) return read_error(r, err);
    r->at_end = true;
  }
  r->end += (size_t)n;
  return 0;
}

LineReader *lines_open(const char *path, Error *err) {
  LineReader *r = open_reader(path, true, err);
  if (r && fill(r, err)) {
    lines_close(r);
    return NULL;
  }
  /* A byte order mark is no part of the first line. */
  if (r && r->end >= 3 && !memcmp(r->buf, "\xEF\xBB\xBF", 3)) r->start = 3;
  return r;
}

int lines_next(LineReader *r, const char **line, size_t *len, Error *err) {
  char *newline = NULL;
  for (size_t seen = 0;;) {
    size_t have = r->end - r->start;
    if (have > seen) newline = memchr(r->buf + r->start + seen, '\n', have - seen);
    if (newline || r->at_end) break;
    seen = have;
    if (seen > max_line)
      return error_set(err, "%s:%lld: the line is longer than 64 MiB", r->path,
                       (long long)r->number + 1);
    if (fill(r, err)) return -1;
  }
  if (r->start == r->end) return 0;
  char *text = r->buf + r->start;
  size_t n = newline ? (size_t)(newline - text) : r->end - r->start;
  r->start += n + (newline ? 1 : 0);
  if (n > 0 && text[n - 1] == '\r') n--;
  text[n] = '\0';
  r->number++;
  *line = text;
  *len = n;
  return 1;
}

int lines_peek(LineReader *r) {
  for (size_t i = 0;;) {
    for (; r->start + i < r->end; i++) {
      unsigned char c = (unsigned char)r->buf[r->start + i];
      if (c != ' ' && c != '\t' && c != '\r' && c != '\n') return c;
    }
    if (r->at_end || i > max_line || fill(r, NULL)) return -1;
  }
}

char *lines_rest(LineReader *r, size_t *len, Error *err) {
  while (!r->at_end) {
    if (fill(r, err)) return NULL;
    if (r->end - r->start > max_text) {
      error_set(err, "%s: larger than 2 GiB", r->path);
      return NULL;
    }
  }
  *len = r->end - r->start;
  char *text = mem_alloc(*len + 1, 1);
  if (*len) memcpy(text, r->buf + r->start, *len);
  text[*len] = '\0';
  r->start = r->end;
  return text;
}

int64_t lines_number(const LineReader *r) { return r->number; }

void lines_close(LineReader *r) {
  if (!r) return;
  gzclose_r(r->gz);
  free(r->path);
  free(r->buf);
  free(r);
}

char *fs_read(const char *path, size_t *len, Error *err) {
  LineReader *r = open_reader(path, false, err);
  if (!r) return NULL;
  char *text = lines_rest(r, len, err);
  lines_close(r);
  return text;
}
