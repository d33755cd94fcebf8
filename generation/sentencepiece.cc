// The only C++ of the program: SentencePiece's processor as plain functions. Every entry that can
// fail catches what is thrown and hands back its text.
#include "generation/sentencepiece.h"

#include <sentencepiece_processor.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using sentencepiece::SentencePieceProcessor;

struct Spm {
  SentencePieceProcessor first;  // as the model says
  SentencePieceProcessor rest;   // the same without the dummy prefix
  std::string unknown_text;
};

// A field that comes twice in a protobuf message is merged, the last one wins: these bytes are
// ModelProto.normalizer_spec { add_dummy_prefix: false }.
static const std::string kNoDummyPrefix("\x1a\x02\x18\x00", 4);

static void say(char *msg, size_t cap, const char *what) { std::snprintf(msg, cap, "%s", what); }

static void open_or_throw(SentencePieceProcessor &p, const std::string &model) {
  const auto status = p.LoadFromSerializedProto(model);
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

Spm *spm_open(const void *model, size_t len, char *msg, size_t cap) try {
  const std::string bytes(static_cast<const char *>(model), len);
  auto s = std::make_unique<Spm>();
  open_or_throw(s->first, bytes);
  open_or_throw(s->rest, bytes + kNoDummyPrefix);
  const auto status = s->first.Decode(std::vector<int>{s->first.unk_id()}, &s->unknown_text);
  if (!status.ok()) throw std::runtime_error(status.error_message());
  return s.release();
} catch (const std::exception &e) {
  say(msg, cap, e.what());
  return nullptr;
} catch (...) {
  say(msg, cap, "unknown exception");
  return nullptr;
}

void spm_close(Spm *s) { delete s; }

int spm_size(const Spm *s) { return s->first.GetPieceSize(); }

SpmKind spm_kind(const Spm *s, int id) {
  if (s->first.IsControl(id)) return SPM_CONTROL;
  if (s->first.IsUnknown(id)) return SPM_UNKNOWN;
  return s->first.IsByte(id) ? SPM_BYTE : SPM_TEXT;
}

const char *spm_piece(const Spm *s, int id, size_t *len) {
  const std::string &piece = s->first.IdToPiece(id);
  *len = piece.size();
  return piece.data();
}

int spm_find(const Spm *s, const char *piece, size_t len) {
  const std::string_view name(piece, len);
  const int id = s->first.PieceToId(name);  // the unknown id when there is none
  return id >= 0 && id < spm_size(s) && s->first.IdToPiece(id) == name ? id : -1;
}

int spm_bos(const Spm *s) { return s->first.bos_id(); }
int spm_eos(const Spm *s) { return s->first.eos_id(); }

const char *spm_unknown_text(const Spm *s, size_t *len) {
  *len = s->unknown_text.size();
  return s->unknown_text.data();
}

int spm_encode(const Spm *s, const char *text, size_t len, bool prefix, SpmPush push, void *ctx,
               char *msg, size_t cap) try {
  std::vector<int> ids;
  const auto status = (prefix ? s->first : s->rest).Encode(std::string_view(text, len), &ids);
  if (!status.ok()) {
    say(msg, cap, status.error_message());
    return -1;
  }
  for (const int id : ids) push(ctx, id);
  return 0;
} catch (const std::exception &e) {
  say(msg, cap, e.what());
  return -1;
} catch (...) {
  say(msg, cap, "unknown exception");
  return -1;
}
