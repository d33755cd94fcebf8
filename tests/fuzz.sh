#!/usr/bin/env bash
# Hunts with libFuzzer: every target for SECONDS, from its own seeds, the shared ones, and what earlier
# hunts in the same build folder found. Inputs that fail are kept there too.
# usage: tests/fuzz.sh BUILD SECONDS TARGET...   (`make fuzz TIME=600`)
set -eu
build=$1 seconds=$2
shift 2
for target in "$@"; do
  corpus=$build/libfuzzer/$target.corpus
  mkdir -p "$corpus"
  "$build/tests/$target" --seeds "$corpus"
  seeds=()
  for c in $(sed -n 's/.*corpus: \([^*]*\).*/\1/p' "tests/$target.c"); do
    c=${RLHF_SHARED:-../shared}/$c
    if [ -d "$c" ]; then seeds+=("$c"); fi
  done
  "$build/libfuzzer/$target" -max_total_time="$seconds" -max_len=65536 -print_final_stats=1 \
    -artifact_prefix="$build/libfuzzer/" "$corpus" "${seeds[@]}"
done
