/* Totals of a run: names of phases, and the JSON of report.json and of a checkpoint's state. */
#include <string.h>

#include "orchestrator/report.h"

static const struct {
  const char *name, *title;
} phases[PH_COUNT] = {
    [PH_ROLLOUT] = {"rollout", "rollout"},
    [PH_ACTOR_LOGPROBS] = {"actor_logprobs", "actor log-probs"},
    [PH_REFERENCE] = {"reference", "reference"},
    [PH_VALUES] = {"values", "values"},
    [PH_REWARDS] = {"rewards", "rewards"},
    [PH_ADVANTAGES] = {"advantages", "advantages"},
    [PH_ACTOR_UPDATE] = {"actor_update", "actor update"},
    [PH_CRITIC_UPDATE] = {"critic_update", "critic update"},
    [PH_REFRESH] = {"refresh", "weight refresh"},
    [PH_CHECKPOINT] = {"checkpoint", "checkpoint"},
    [PH_SFT] = {"sft", "sft"},
    [PH_REWARD_TRAIN] = {"reward_training", "reward training"},
    [PH_EVAL] = {"evaluation", "evaluation"},
    [PH_OTHER] = {"other", "other"},
};

const char *phase_name(Phase p) { return phases[p].name; }
const char *phase_title(Phase p) { return phases[p].title; }

static json_t *traffic_json(const Traffic *t) {
  json_t *obj = json_object();
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    const TrafficCount *c = &t->of[k];
    if (c->calls == 0) continue;
    json_object_set_new(
        obj, coll_name(k),
        json_pack("{s:I, s:I, s:I, s:f, s:f}", "calls", (json_int_t)c->calls, "intra_bytes",
                  (json_int_t)c->intra_bytes, "inter_bytes", (json_int_t)c->inter_bytes, "seconds",
                  c->seconds, "hidden_seconds", c->hidden_seconds));
  }
  return obj;
}

static json_t *phase_json(const PhaseTotals *p) {
  return json_pack("{s:f, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:I, s:o}", "seconds", p->seconds,
                   "calls", (json_int_t)p->calls, "sequences", (json_int_t)p->sequences,
                   "prompt_tokens", (json_int_t)p->prompt_tokens, "generated_tokens",
                   (json_int_t)p->generated_tokens, "model_flops", p->flops, "comm_seconds",
                   p->comm_seconds, "comm_hidden_seconds", p->hidden_seconds, "peak_bytes",
                   (json_int_t)p->peak_bytes, "traffic", traffic_json(&p->traffic));
}

static json_t *refresh_json(const ZeroPPRefresh *x) {
  return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "weights", (json_int_t)x->weights,
                   "changed", (json_int_t)x->changed, "bytes", (json_int_t)x->bytes,
                   "bfloat16_bytes", (json_int_t)x->dense_bytes, "int8_bytes",
                   (json_int_t)x->int8_bytes, "delta_units", (json_int_t)x->delta_units,
                   "dense_units", (json_int_t)x->dense_units);
}

static json_t *gap_json(const RolloutGap *x) {
  return json_pack("{s:I, s:f, s:f, s:f, s:I, s:f, s:I}", "tokens", (json_int_t)x->tokens, "sum",
                   x->sum, "exp_sum", x->exp_sum, "max", x->max, "weighed", (json_int_t)x->weighed,
                   "weight_sum", x->weight_sum, "capped", (json_int_t)x->capped);
}

json_t *report_totals_json(const ReportTotals *t) {
  json_t *all = json_object();
  for (Phase p = 0; p < PH_COUNT; p++)
    json_object_set_new(all, phases[p].name, phase_json(&t->phase[p]));
  return json_pack("{s:i, s:I, s:s, s:f, s:o, s:o, s:o}", "ranks", t->ranks, "steps",
                   (json_int_t)t->steps, "device", t->device, "peak_flops_per_second",
                   t->peak_flops, "phases", all, "refresh", refresh_json(&t->refresh), "gap",
                   gap_json(&t->gap));
}

static int count_parse(const json_t *obj, const char *key, const char *file, int64_t *out,
                       Error *err) {
  return json_get_i64(obj, key, file, 0, INT64_MAX, out, err);
}

static int coll_parse(const json_t *obj, const char *file, TrafficCount *out, Error *err) {
  int64_t calls, intra, inter;
  if (count_parse(obj, "calls", file, &calls, err) ||
      count_parse(obj, "intra_bytes", file, &intra, err) ||
      count_parse(obj, "inter_bytes", file, &inter, err) ||
      json_get_f64_or(obj, "seconds", file, 0, &out->seconds, err) ||
      json_get_f64_or(obj, "hidden_seconds", file, 0, &out->hidden_seconds, err))
    return -1;
  out->calls = (uint64_t)calls;
  out->intra_bytes = (uint64_t)intra;
  out->inter_bytes = (uint64_t)inter;
  return 0;
}

static int phase_parse(const json_t *obj, const char *file, PhaseTotals *out, Error *err) {
  int64_t peak;
  if (json_get_f64_or(obj, "seconds", file, 0, &out->seconds, err) ||
      count_parse(obj, "calls", file, &out->calls, err) ||
      count_parse(obj, "sequences", file, &out->sequences, err) ||
      count_parse(obj, "prompt_tokens", file, &out->prompt_tokens, err) ||
      count_parse(obj, "generated_tokens", file, &out->generated_tokens, err) ||
      json_get_f64_or(obj, "model_flops", file, 0, &out->flops, err) ||
      json_get_f64_or(obj, "comm_seconds", file, 0, &out->comm_seconds, err) ||
      json_get_f64_or(obj, "comm_hidden_seconds", file, 0, &out->hidden_seconds, err) ||
      count_parse(obj, "peak_bytes", file, &peak, err))
    return -1;
  out->peak_bytes = (size_t)peak;
  const json_t *traffic = json_object_get(obj, "traffic");
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    const json_t *c = json_object_get(traffic, coll_name(k));
    if (c && coll_parse(c, file, &out->traffic.of[k], err)) return -1;
  }
  return 0;
}

/* Absent in files of before, or some of it. */
static int refresh_parse(const json_t *obj, const char *file, ZeroPPRefresh *out, Error *err) {
  if (!obj) return 0;
  const struct {
    const char *key;
    uint64_t *to;
  } counts[] = {{"weights", &out->weights},
                {"changed", &out->changed},
                {"bytes", &out->bytes},
                {"bfloat16_bytes", &out->dense_bytes},
                {"int8_bytes", &out->int8_bytes},
                {"delta_units", &out->delta_units},
                {"dense_units", &out->dense_units}};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    int64_t n;
    if (json_get_i64_or(obj, counts[i].key, file, 0, INT64_MAX, 0, &n, err)) return -1;
    *counts[i].to = (uint64_t)n;
  }
  return 0;
}

/* Absent in files of before. */
static int gap_parse(const json_t *obj, const char *file, RolloutGap *out, Error *err) {
  if (!obj) return 0;
  return count_parse(obj, "tokens", file, &out->tokens, err) ||
                 count_parse(obj, "weighed", file, &out->weighed, err) ||
                 count_parse(obj, "capped", file, &out->capped, err) ||
                 json_get_f64_or(obj, "sum", file, 0, &out->sum, err) ||
                 json_get_f64_or(obj, "exp_sum", file, 0, &out->exp_sum, err) ||
                 json_get_f64_or(obj, "max", file, 0, &out->max, err) ||
                 json_get_f64_or(obj, "weight_sum", file, 0, &out->weight_sum, err)
             ? -1
             : 0;
}

int report_totals_parse(const json_t *obj, const char *file, ReportTotals *out, Error *err) {
  memset(out, 0, sizeof *out);
  int64_t ranks;
  const char *device;
  if (json_get_i64(obj, "ranks", file, 1, INT32_MAX, &ranks, err) ||
      count_parse(obj, "steps", file, &out->steps, err) ||
      json_get_str_or(obj, "device", file, "", &device, err) ||
      json_get_f64_or(obj, "peak_flops_per_second", file, 0, &out->peak_flops, err))
    return -1;
  if (refresh_parse(json_object_get(obj, "refresh"), file, &out->refresh, err)) return -1;
  if (gap_parse(json_object_get(obj, "gap"), file, &out->gap, err)) return -1;
  out->ranks = (int)ranks;
  snprintf(out->device, sizeof out->device, "%s", device);
  const json_t *all = json_object_get(obj, "phases");
  if (!json_is_object(all)) return error_set(err, "%s: \"phases\": expected an object", file);
  for (Phase p = 0; p < PH_COUNT; p++) {
    const json_t *one = json_object_get(all, phases[p].name);
    if (!json_is_object(one))
      return error_set(err, "%s: \"phases\": no object for \"%s\"", file, phases[p].name);
    if (phase_parse(one, file, &out->phase[p], err)) return -1;
  }
  return 0;
}
