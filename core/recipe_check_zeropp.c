/* The zeropp section: switches that need others, and stages that have no use for them. */
#include <inttypes.h>
#include <string.h>

#include "core/recipe_read.h"

static bool is_off(const char *word) { return !strcmp(word, "off"); }

static void need_stage(Reading *rd, const char *key, const char *found, int64_t least) {
  const Recipe *r = &rd->box->r;
  if (r->zeropp.stage >= least || !check_sound(rd, "zeropp.stage") || !check_sound(rd, key)) return;
  check_fail(rd, key, "found %s with zeropp.stage %" PRId64 "; expected stage %" PRId64 "%s", found,
             r->zeropp.stage, least, least < 3 ? " or above" : "");
}

static void check_needs(Reading *rd) {
  const Recipe *r = &rd->box->r;
  if (!strcmp(r->zeropp.hpz, "quantized") && is_off(r->zeropp.qwz) &&
      check_sound(rd, "zeropp.hpz zeropp.qwz"))
    check_fail(rd, "zeropp.hpz", "found quantized with zeropp.qwz off; expected on, or qwz");
  if (strcmp(r->zeropp.refresh, "dense") != 0 && strcmp(r->zeropp.hpz, "on") != 0 &&
      check_sound(rd, "zeropp.refresh zeropp.hpz"))
    check_fail(rd, "zeropp.refresh", "found %s with zeropp.hpz %s; expected dense, or hpz on",
               r->zeropp.refresh, r->zeropp.hpz);
  if (!strcmp(r->zeropp.refresh, "delta") && !is_off(r->zeropp.qwz) &&
      check_sound(rd, "zeropp.refresh zeropp.qwz"))
    check_fail(rd, "zeropp.refresh", "found delta with zeropp.qwz %s; expected dense, or qwz off",
               r->zeropp.qwz);
  if (r->zeropp.error_feedback && is_off(r->zeropp.qgz) &&
      check_sound(rd, "zeropp.error_feedback zeropp.qgz"))
    check_fail(rd, "zeropp.error_feedback",
               "found true with zeropp.qgz off, which loses nothing; expected false, or qgz");
  if (r->zeropp.block % 2 != 0 && check_sound(rd, "zeropp.block"))
    check_fail(rd, "zeropp.block", "found %" PRId64 "; expected an even number", r->zeropp.block);
}

void check_zeropp(Reading *rd) {
  const Recipe *r = &rd->box->r;
  if (!is_off(r->zeropp.qwz)) need_stage(rd, "zeropp.qwz", r->zeropp.qwz, 1);
  if (!is_off(r->zeropp.qgz)) need_stage(rd, "zeropp.qgz", r->zeropp.qgz, 1);
  if (!is_off(r->zeropp.hpz)) need_stage(rd, "zeropp.hpz", r->zeropp.hpz, 3);
  if (!strcmp(r->zeropp.accumulate, "node")) need_stage(rd, "zeropp.accumulate", "node", 2);
  check_needs(rd);
}
