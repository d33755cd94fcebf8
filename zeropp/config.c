/* config: the recipe's section as the engine takes it. */
#include <string.h>

#include "zeropp/internal.h"

static WireKind wire_kind(const char *word) {
  static const struct {
    const char *word;
    WireKind kind;
  } known[] = {{"off", WIRE_F32},   {"float32", WIRE_F32}, {"bfloat16", WIRE_BF16},
               {"int8", WIRE_INT8}, {"int4", WIRE_INT4},   {"fp8", WIRE_FP8}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (strcmp(word, known[i].word) == 0) return known[i].kind;
  die("wire format %s", word);
}

int zeropp_check(const ZeroPPConfig *c, DeviceKind device, int world, Error *err) {
  bool half = c->gradients == DT_BF16;
  if (device == DEVICE_CPU && c->compute != DT_F32)
    return error_set(err, "run.precision: the CPU computes in float32; expected float32");
  if (half && device == DEVICE_CPU)
    return error_set(err,
                     "zeropp.gradients: found bfloat16 on the CPU, which sums in float32; expected "
                     "float32, or run.device: cuda");
  if (half && (c->stage == 0 || (world == 1 && c->compute != DT_BF16)))
    return error_set(err,
                     "zeropp.gradients: found bfloat16 with %s, where GEMMs add to the sums "
                     "themselves; expected float32",
                     c->stage == 0 ? "stage 0" : "one rank that computes in float32");
  if (c->refresh != REFRESH_DENSE && c->wire == WIRE_F32 && c->compute == DT_F32)
    return error_set(err,
                     "zeropp.refresh: found %s with weights in float32, nearly all of which "
                     "change; expected dense, or zeropp.wire or run.precision bfloat16",
                     c->refresh == REFRESH_DELTA ? "delta" : "auto");
  if (c->offload && device == DEVICE_CPU)
    return error_set(err,
                     "zeropp.offload: found optimizer on the CPU, whose memory is the host's "
                     "already; expected off");
  return 0;
}

static RefreshMode refresh_mode(const char *word) {
  if (strcmp(word, "auto") == 0) return REFRESH_AUTO;
  return strcmp(word, "delta") == 0 ? REFRESH_DELTA : REFRESH_DENSE;
}

ZeroPPConfig zeropp_config(const Recipe *r) {
  HpzMode hpz = HPZ_OFF;
  if (strcmp(r->zeropp.hpz, "on") == 0) hpz = HPZ_ON;
  if (strcmp(r->zeropp.hpz, "quantized") == 0) hpz = HPZ_QUANTIZED;
  return (ZeroPPConfig){
      .stage = (int)r->zeropp.stage,
      .wire = wire_kind(r->zeropp.wire),
      .qwz = wire_kind(r->zeropp.qwz),
      .hpz = hpz,
      .qgz = wire_kind(r->zeropp.qgz),
      .block = (int)r->zeropp.block,
      .scale = strcmp(r->zeropp.scale, "bfloat16") == 0 ? DT_BF16 : DT_F32,
      .refresh = refresh_mode(r->zeropp.refresh),
      .refresh_check = r->zeropp.refresh_check,
      .error_feedback = r->zeropp.error_feedback,
      .error_decay = r->zeropp.error_decay,
      .error_reset = r->zeropp.error_reset,
      .accumulate_node = strcmp(r->zeropp.accumulate, "node") == 0,
      .gradients = strcmp(r->zeropp.gradients, "bfloat16") == 0 ? DT_BF16 : DT_F32,
      .offload = strcmp(r->zeropp.offload, "optimizer") == 0,
      .prefetch = (int)r->zeropp.prefetch};
}
