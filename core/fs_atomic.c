/* Files and folders that appear whole or not at all: written under NAME.tmp, flushed, renamed. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fs.h"

static int sync_path(const char *path, Error *err) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return error_set(err, "%s: cannot open: %s", path, strerror(errno));
  int bad = 0;
  /* EINVAL: a file system that cannot sync folders. */
  if (fsync(fd) != 0 && errno != EINVAL)
    bad = error_set(err, "%s: cannot flush to disk: %s", path, strerror(errno));
  close(fd);
  return bad;
}

static int sync_parent(const char *path, Error *err) {
  char *dir = fs_dirname(path);
  int bad = sync_path(dir, err);
  free(dir);
  return bad;
}

static int write_all(int fd, const char *path, const char *data, size_t len, Error *err) {
  for (size_t done = 0; done < len;) {
    ssize_t n = write(fd, data + done, len - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return error_set(err, "%s: cannot write: %s", path, strerror(errno));
    done += (size_t)n;
  }
  if (fsync(fd) != 0 && errno != EINVAL)
    return error_set(err, "%s: cannot flush to disk: %s", path, strerror(errno));
  return 0;
}

int fs_write_atomic(const char *path, const void *data, size_t len, Error *err) {
  char *tmp = mem_printf("%s.tmp", path);
  int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), bad;
  if (fd < 0) {
    bad = error_set(err, "%s: cannot create: %s", tmp, strerror(errno));
  } else {
    bad = write_all(fd, tmp, data, len, err);
    if (close(fd) != 0 && !bad) bad = error_set(err, "%s: cannot write: %s", tmp, strerror(errno));
    if (!bad && rename(tmp, path) != 0)
      bad = error_set(err, "%s: cannot rename %s to it: %s", path, tmp, strerror(errno));
    if (bad) unlink(tmp);
    if (!bad) bad = sync_parent(path, err);
  }
  free(tmp);
  return bad;
}

/* "DIR<suffix>" for a DIR that may end in slashes. */
static char *beside(const char *dir, const char *suffix) {
  size_t n = strlen(dir);
  while (n > 1 && dir[n - 1] == '/') n--;
  return mem_printf("%.*s%s", (int)n, dir, suffix);
}

char *fs_dir_begin(const char *dir, Error *err) {
  char *tmp = beside(dir, ".tmp");
  if (fs_remove_tree(tmp, err) || fs_make_dirs(tmp, err)) {
    free(tmp);
    return NULL;
  }
  return tmp;
}

static int sync_tree(const char *path, Error *err) {
  if (!fs_is_dir(path)) return sync_path(path, err);
  return fs_each(path, sync_tree, err) ? -1 : sync_path(path, err);
}

/* For file systems that cannot exchange two names: an instant without DIR, but never without one
 * whole copy of either the old or the new. */
static int replace_in_steps(const char *tmp, const char *dir, Error *err) {
  char *old = beside(dir, ".old");
  int bad = fs_remove_tree(old, err);
  if (!bad && rename(dir, old) != 0)
    bad = error_set(err, "%s: cannot move it to %s: %s", dir, old, strerror(errno));
  if (!bad && rename(tmp, dir) != 0) {
    bad = error_set(err, "%s: cannot rename %s to it: %s", dir, tmp, strerror(errno));
    if (rename(old, dir) != 0) error_prefix(err, "the old folder is now %s", old);
  }
  if (!bad) bad = fs_remove_tree(old, err);
  free(old);
  return bad;
}

static int replace(const char *tmp, const char *dir, Error *err) {
  if (!fs_is_dir(dir)) return error_set(err, "%s: is there and is not a folder", dir);
  if (renameat2(AT_FDCWD, tmp, AT_FDCWD, dir, RENAME_EXCHANGE) == 0)
    return fs_remove_tree(tmp, err); /* which is the old one now */
  if (errno == EINVAL || errno == ENOSYS) return replace_in_steps(tmp, dir, err);
  return error_set(err, "%s: cannot exchange %s with it: %s", dir, tmp, strerror(errno));
}

int fs_dir_commit(const char *tmp, const char *dir, Error *err) {
  if (sync_tree(tmp, err)) return -1;
  char *to = beside(dir, "");
  int bad;
  if (fs_exists(to))
    bad = replace(tmp, to, err);
  else
    bad = rename(tmp, to) == 0
              ? 0
              : error_set(err, "%s: cannot rename %s to it: %s", dir, tmp, strerror(errno));
  if (!bad) bad = sync_parent(to, err);
  free(to);
  return bad;
}

void fs_dir_abandon(const char *tmp) {
  Error err = {""};
  if (fs_remove_tree(tmp, &err)) log_warn("%s", err.msg);
}
