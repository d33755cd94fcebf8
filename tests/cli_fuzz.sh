#!/usr/bin/env bash
# Runs every fuzz target for a fixed number of mutations. On a failure the input is kept.
# More: `make fuzz TIME=600` hunts with libFuzzer.
build=$(dirname "$RLHF_BIN")/tests
shared=${RLHF_SHARED:-../shared}
n=0
for source in tests/fuzz_*.c; do
  target=$(basename "$source" .c)
  n=$((n + 1))
  last=$(mktemp -t "$target.XXXXXX")
  corpus=()
  for c in $(sed -n 's/.*corpus: \([^*]*\).*/\1/p' "$source"); do
    [ -e "$shared/$c" ] && corpus+=("$shared/$c")
  done
  if out=$(timeout 120 "$build/$target" "${FUZZ_ITERATIONS:-20000}" 1 "$last" "${corpus[@]}" 2>&1); then
    echo "ok $n - $target: $out"
  else
    echo "not ok $n - $target: status $?, input kept in $last"
    printf '%s\n' "$out" | tail -20 | sed 's/^/# /'
  fi
done
echo "1..$n"
