/* JSON through Jansson, with our errors and a reader for data files. json_t and the json_* calls of
 * Jansson are used directly by all folders; this adds what they need on top. Strict RFC 8259. */
#ifndef CORE_JSON_H
#define CORE_JSON_H

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

#include "core/error.h"

/* Parses one document. The error is "FILE:LINE:COLUMN: ..." and quotes what was found. The caller
 * json_decref()s. Any value may be at the top. A NUL (\u0000) is kept in strings; in names of
 * members, where Jansson cannot hold one, it reads as U+FFFD. NULL on error. */
json_t *json_parse(const char *text, size_t len, const char *name, Error *err);
json_t *json_read(const char *path, Error *err);
/* As json_parse, and a name that occurs twice in one object is an error. */
json_t *json_parse_unique(const char *text, size_t len, const char *name, Error *err);
/* As json_parse for text that stands at a line of a larger file. */
json_t *json_parse_at(const char *text, size_t len, const char *name, int64_t line, Error *err);

/* "a string", "an object", ...; "nothing" for NULL. */
const char *json_type_name(const json_t *v);

/* Typed access with errors that name the file and the key. *_or take a default when the key is
 * absent or null; a wrong type or a value out of [lo, hi] is an error in both. */
int json_get_i64(const json_t *obj, const char *key, const char *file, int64_t lo, int64_t hi,
                 int64_t *out, Error *err);
int json_get_i64_or(const json_t *obj, const char *key, const char *file, int64_t lo, int64_t hi,
                    int64_t dflt, int64_t *out, Error *err);
int json_get_f64_or(const json_t *obj, const char *key, const char *file, double dflt, double *out,
                    Error *err);
int json_get_bool_or(const json_t *obj, const char *key, const char *file, bool dflt, bool *out,
                     Error *err);
/* Borrowed string; NULL when absent or null. */
int json_get_str_or(const json_t *obj, const char *key, const char *file, const char *dflt,
                    const char **out, Error *err);

/* Writing. Floats with the fewest of up to 9 digits that read back to the same float; non-finite
 * values as null (JSON has no other word for them). Strings are escaped; invalid UTF-8 bytes are
 * written as U+FFFD. */
void json_put_f32(FILE *f, float x);
void json_put_f64(FILE *f, double x); /* up to 17 digits */
void json_put_str(FILE *f, const char *s, size_t len);
void json_put_i32_array(FILE *f, const int32_t *v, size_t n);
void json_put_f32_array(FILE *f, const float *v, size_t n);

/* Records of a data file: JSON Lines, or one JSON array of objects; gzip or plain; told apart by
 * the first non-blank byte. Blank lines are passed over. Each record must be an object. */
typedef struct RecordReader RecordReader;
RecordReader *records_open(const char *path, Error *err);
/* 1: *rec is the next record (borrowed, valid until the next call); 0: end; -1: error. */
int records_next(RecordReader *r, json_t **rec, Error *err);
/* "FILE:LINE" (JSON Lines) or "FILE: record N" (array) of the record last read; borrowed. */
const char *records_place(const RecordReader *r);
void records_close(RecordReader *r);

#endif
