/* Paths, folders and whole-file copies. */
#include "core/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool fs_exists(const char *path) {
  struct stat st;
  return stat(path, &st) == 0;
}

bool fs_is_dir(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

char *fs_join(const char *dir, const char *name) {
  if (name[0] == '/' || dir[0] == '\0') return mem_strdup(name);
  size_t n = strlen(dir);
  return mem_printf("%s%s%s", dir, dir[n - 1] == '/' ? "" : "/", name);
}

char *fs_dirname(const char *path) {
  const char *end = path + strlen(path);
  while (end > path + 1 && end[-1] == '/') end--; /* "a/b/" is in "a" */
  while (end > path && end[-1] != '/') end--;
  if (end == path) return mem_strdup(".");
  while (end > path + 1 && end[-1] == '/') end--;
  return mem_printf("%.*s", (int)(end - path), path);
}

int fs_make_dirs(const char *path, Error *err) {
  char *p = mem_strdup(path);
  int bad = 0;
  for (char *c = p + 1; !bad && p[0]; c++) {
    char here = *c;
    if (here != '/' && here != '\0') continue;
    *c = '\0';
    if (mkdir(p, 0777) != 0) {
      if (errno == EEXIST && !fs_is_dir(p))
        bad = error_set(err, "%s: cannot make the folder: %s is not a folder", path, p);
      else if (errno != EEXIST)
        bad = error_set(err, "%s: cannot make the folder %s: %s", path, p, strerror(errno));
    }
    *c = here;
    if (here == '\0') break;
  }
  free(p);
  return bad;
}

int fs_each(const char *dir, int (*use)(const char *path, Error *err), Error *err) {
  DIR *d = opendir(dir);
  if (!d) return error_set(err, "%s: cannot open the folder: %s", dir, strerror(errno));
  int rc = 0;
  for (struct dirent *e; rc == 0 && (e = readdir(d));) {
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    char *path = fs_join(dir, e->d_name);
    rc = use(path, err);
    free(path);
  }
  closedir(d);
  return rc;
}

int fs_remove_tree(const char *path, Error *err) {
  struct stat st;
  if (lstat(path, &st) != 0) {
    if (errno == ENOENT) return 0;
    return error_set(err, "%s: cannot remove: %s", path, strerror(errno));
  }
  bool dir = S_ISDIR(st.st_mode); /* a link to a folder is removed, not followed */
  if (dir && fs_each(path, fs_remove_tree, err)) return -1;
  if ((dir ? rmdir(path) : unlink(path)) != 0 && errno != ENOENT)
    return error_set(err, "%s: cannot remove: %s", path, strerror(errno));
  return 0;
}

static int copy_bytes(int in, int out, const char *from, const char *to, Error *err) {
  char buf[1 << 16];
  for (;;) {
    ssize_t n = read(in, buf, sizeof buf);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return error_set(err, "%s: cannot read: %s", from, strerror(errno));
    if (n == 0) return 0;
    for (ssize_t done = 0; done < n;) {
      ssize_t w = write(out, buf + done, (size_t)(n - done));
      if (w < 0 && errno == EINTR) continue;
      if (w < 0) return error_set(err, "%s: cannot write: %s", to, strerror(errno));
      done += w;
    }
  }
}

int fs_copy(const char *from, const char *to, Error *err) {
  int in = open(from, O_RDONLY | O_CLOEXEC);
  if (in < 0) return error_set(err, "%s: cannot open: %s", from, strerror(errno));
  int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (out < 0) {
    int bad = error_set(err, "%s: cannot create: %s", to, strerror(errno));
    close(in);
    return bad;
  }
  int bad = copy_bytes(in, out, from, to, err);
  close(in);
  if (close(out) != 0 && !bad) bad = error_set(err, "%s: cannot write: %s", to, strerror(errno));
  if (bad) unlink(to);
  return bad;
}
