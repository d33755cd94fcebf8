/* Files: whole-file reads, atomic folders and files, gzip-transparent line reading.
 * Every error names the path and the cause (errno text); nothing half-written stays behind. */
#ifndef CORE_FS_H
#define CORE_FS_H

#include <stdint.h>
#include <stdio.h>

#include "core/error.h"

/* Whole file (gzip is unpacked), NUL-terminated; *len excludes the NUL. "-" is standard input.
 * The caller frees. Refuses folders and files over 2 GiB. NULL on error. */
char *fs_read(const char *path, size_t *len, Error *err);

bool fs_exists(const char *path);
bool fs_is_dir(const char *path);
char *fs_join(const char *dir, const char *name); /* "dir/name"; name alone when it is absolute */
char *fs_dirname(const char *path);               /* "." for a bare name */
int fs_make_dirs(const char *path, Error *err);   /* mkdir -p */
int fs_remove_tree(const char *path, Error *err); /* rm -r; fine when absent */
/* Calls use for every entry of a folder, by its path, until one does not return 0; returns that. */
int fs_each(const char *dir, int (*use)(const char *path, Error *err), Error *err);
int fs_copy(const char *from, const char *to, Error *err);

/* Writes path through path.tmp, fsync and rename: the file is either the old one or whole. */
int fs_write_atomic(const char *path, const void *data, size_t len, Error *err);

/* An atomic folder: begin makes "DIR.tmp" (removing a stale one, making parents) and returns its
 * name (caller frees); commit fsyncs every file in it and renames it to DIR (an existing DIR is
 * exchanged with it, or moved aside where the file system cannot, and removed only afterwards);
 * abandon removes it. */
char *fs_dir_begin(const char *dir, Error *err);
int fs_dir_commit(const char *tmp, const char *dir, Error *err);
void fs_dir_abandon(const char *tmp);

/* Lines of a text file, gzip or plain, "-" is standard input. A line is without its newline (LF or
 * CRLF), NUL-terminated, valid until the next call. A byte order mark is passed over. */
typedef struct LineReader LineReader;
LineReader *lines_open(const char *path, Error *err);
/* 1: a line; 0: end; -1: error (I/O, a corrupt gzip stream, a line over 64 MiB). */
int lines_next(LineReader *r, const char **line, size_t *len, Error *err);
/* First byte from here on that is no blank (space, tab, CR, LF), which stays unread; -1 when there
 * is none, or on error, which the next call reports. */
int lines_peek(LineReader *r);
/* All that has not been read yet as one text, like fs_read (2 GiB at most). */
char *lines_rest(LineReader *r, size_t *len, Error *err);
int64_t lines_number(const LineReader *r); /* 1-based number of the line last read */
void lines_close(LineReader *r);

#endif
