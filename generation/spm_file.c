/* The .model file's checks; see spm_file.h. Field numbers are those of sentencepiece_model.proto.
 */
#include "generation/spm_file.h"

#include <string.h>

/* A cursor over one protobuf message. base: offset of the message in the file, for errors. */
typedef struct Wire {
  const uint8_t *at, *end, *file_start;
} Wire;

typedef struct Field {
  uint64_t number;
  unsigned type;        /* 0 varint, 1 fixed 64, 2 bytes, 5 fixed 32 */
  uint64_t value;       /* of a varint */
  const uint8_t *bytes; /* of type 2 */
  size_t len;
} Field;

enum { WIRE_VARINT = 0, WIRE_FIXED64 = 1, WIRE_BYTES = 2, WIRE_FIXED32 = 5 };
enum { MODEL_PIECES = 1, MODEL_TRAINER = 2, MODEL_NORMALIZER = 3, MODEL_DENORMALIZER = 5 };
enum { TRAINER_SPACE_AS_SUFFIX = 24 };
enum { NORMALIZER_CHARSMAP = 2, NORMALIZER_DUMMY_PREFIX = 3, NORMALIZER_SQUEEZES_SPACES = 4 };

static int wire_varint(Wire *w, uint64_t *out) {
  *out = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    if (w->at == w->end) return -1;
    uint8_t b = *w->at++;
    *out |= (uint64_t)(b & 0x7f) << shift;
    if (b < 0x80) return 0;
  }
  return -1;
}

/* 1: *f is the next field; 0: the message ends here; -1: it is cut or not a message. */
static int wire_next(Wire *w, Field *f) {
  if (w->at == w->end) return 0;
  uint64_t tag, len = 0;
  if (wire_varint(w, &tag)) return -1;
  *f = (Field){.number = tag >> 3, .type = (unsigned)(tag & 7)};
  if (f->number == 0) return -1;
  switch (f->type) {
    case WIRE_VARINT:
      return wire_varint(w, &f->value) ? -1 : 1;
    case WIRE_FIXED64:
      len = 8;
      break;
    case WIRE_FIXED32:
      len = 4;
      break;
    case WIRE_BYTES:
      if (wire_varint(w, &len)) return -1;
      break;
    default:
      return -1;
  }
  if (len > (uint64_t)(w->end - w->at)) return -1;
  f->bytes = w->at;
  f->len = (size_t)len;
  w->at += len;
  return 1;
}

static int not_a_model(const Wire *w, const char *file, Error *err) {
  return error_set(err,
                   "%s: byte %zu: not a SentencePiece model, or a damaged one (expected a whole "
                   "protobuf message)",
                   file, (size_t)(w->at - w->file_start));
}

/* The normalizer's table: u32 size of a double-array trie (Darts-clone, u32 units), the trie, then
 * NUL-terminated replacements. The library follows the trie without bounds, so the children of
 * every unit must lie inside it, and every value must point at a replacement. A unit with bit 31 is
 * a value; bit 8 says that a unit has one, as its child 0. */
static uint32_t trie_unit(const uint8_t *trie, size_t i) {
  uint32_t unit;
  memcpy(&unit, trie + i * sizeof unit, sizeof unit);
  return unit;
}

static bool charsmap_is_sound(const uint8_t *blob, size_t len) {
  enum { VALUE_MASK = 0x7fffffff, HAS_VALUE = 0x100 };
  if (len == 0) return true;
  if (len < 2 * sizeof(uint32_t) || blob[len - 1] != 0) return false;
  size_t trie_bytes = trie_unit(blob, 0), n_units = trie_bytes / sizeof(uint32_t);
  size_t body = len - sizeof(uint32_t);
  if (trie_bytes % sizeof(uint32_t) || n_units == 0 || trie_bytes >= body) return false;
  const uint8_t *trie = blob + sizeof(uint32_t);
  size_t texts = body - trie_bytes;
  if (trie_unit(trie, 0) > VALUE_MASK) return false; /* the root has children */
  for (size_t i = 0; i < n_units; i++) {
    uint32_t unit = trie_unit(trie, i);
    if (unit > VALUE_MASK) continue;
    size_t children = i ^ ((size_t)(unit >> 10) << ((unit & 0x200) >> 6));
    if ((children | 0xff) >= n_units) return false;
    if (unit & HAS_VALUE && (trie_unit(trie, children) & VALUE_MASK) >= texts) return false;
  }
  return true;
}

static int check_normalizer(Field spec, const uint8_t *start, const char *file, SpmTraits *out,
                            Error *err) {
  Wire w = {spec.bytes, spec.bytes + spec.len, start};
  Field f;
  int rc;
  while ((rc = wire_next(&w, &f)) > 0) {
    if (f.number == NORMALIZER_DUMMY_PREFIX && f.type == WIRE_VARINT)
      out->dummy_prefix = f.value != 0;
    if (f.number == NORMALIZER_SQUEEZES_SPACES && f.type == WIRE_VARINT)
      out->squeezes_spaces = f.value != 0;
    if (f.number == NORMALIZER_CHARSMAP && f.type == WIRE_BYTES &&
        !charsmap_is_sound(f.bytes, f.len))
      return error_set(err, "%s: byte %zu: the normalizer's table is damaged", file,
                       (size_t)(f.bytes - start));
  }
  return rc < 0 ? not_a_model(&w, file, err) : 0;
}

static int check_trainer(Field spec, const uint8_t *start, const char *file, Error *err) {
  Wire w = {spec.bytes, spec.bytes + spec.len, start};
  Field f;
  int rc;
  while ((rc = wire_next(&w, &f)) > 0)
    if (f.number == TRAINER_SPACE_AS_SUFFIX && f.type == WIRE_VARINT && f.value)
      return error_set(err, "%s: treat_whitespace_as_suffix is not supported", file);
  return rc < 0 ? not_a_model(&w, file, err) : 0;
}

static int check_denormalizer(Field spec, const uint8_t *start, const char *file, Error *err) {
  Wire w = {spec.bytes, spec.bytes + spec.len, start};
  Field f;
  int rc;
  while ((rc = wire_next(&w, &f)) > 0)
    if (f.number == NORMALIZER_CHARSMAP && f.len > 0)
      return error_set(err, "%s: a model with a denormalizer is not supported", file);
  return rc < 0 ? not_a_model(&w, file, err) : 0;
}

int spm_file_check(const uint8_t *data, size_t len, const char *file, SpmTraits *out, Error *err) {
  if (len == 0) return error_set(err, "%s: empty file; expected a SentencePiece model", file);
  *out = (SpmTraits){.dummy_prefix = true, .squeezes_spaces = true}; /* the format's defaults */
  Wire w = {data, data + len, data};
  Field f;
  bool trainer = false, normalizer = false;
  int rc;
  while ((rc = wire_next(&w, &f)) > 0) {
    if (f.type != WIRE_BYTES) continue;
    if (f.number == MODEL_PIECES) out->n_pieces++;
    if (f.number == MODEL_TRAINER) {
      trainer = true;
      if (check_trainer(f, data, file, err)) return -1;
    }
    if (f.number == MODEL_NORMALIZER) {
      normalizer = true;
      if (check_normalizer(f, data, file, out, err)) return -1;
    }
    if (f.number == MODEL_DENORMALIZER && check_denormalizer(f, data, file, err)) return -1;
  }
  if (rc < 0) return not_a_model(&w, file, err);
  if (out->n_pieces == 0 || !trainer || !normalizer)
    return error_set(err,
                     "%s: cut short or not a SentencePiece model: %lld pieces, %s trainer_spec, %s "
                     "normalizer_spec",
                     file, (long long)out->n_pieces, trainer ? "a" : "no", normalizer ? "a" : "no");
  return 0;
}
