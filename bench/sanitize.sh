#!/usr/bin/env bash
# The GPU tests under NVIDIA's compute-sanitizer. From the repository's root, on a machine with a GPU:
#   bench/sanitize.sh [TEST]...      default: every tests/test_cuda_*.c that needs one GPU and one process
# TOOLS ("racecheck memcheck initcheck"), BUILD (build), GPUS (all that are there), JOBS at once (8 for each of them), LIMIT in
# seconds for each (300), OUT for the logs. Of programs that take long each test is a process of its own. RLHF_NO_RATES makes
# tests leave timings and most of their shapes out; racecheck, a thousand times slower than the kernels, has the fewest.
#
# racecheck looks at our own kernels: it does not follow the barriers of NVIDIA's products and attention, and reports or breaks
# them. Ours it knows by their names; one that it would pass over is an error. memcheck looks neither at the children that a test
# makes in order to see them die nor at calls that a test means to fail (memory that is not there).
# The last line is `N passed, N failed`.
set -u
cd "$(dirname "$0")/.." || exit 1
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH (part of the CUDA toolkit)" >&2; exit 2; }
BUILD=${BUILD:-build} GPUS=${GPUS:-$(nvidia-smi -L | wc -l)} LIMIT=${LIMIT:-300} OUT=${OUT:-$(mktemp -d /tmp/rlhf-sanitize-XXXXXX)}
JOBS=${JOBS:-$((8 * GPUS))}
OWN='_cu_|^_Z[0-9]+([a-z0-9_]+_kernel|place_sequences|stats_by_head|compare)' # in an unnamed namespace of a .cu, or by name
export BUILD GPUS LIMIT OUT OWN OMP_NUM_THREADS=2
mkdir -p "$OUT"
strange=$(nm "$BUILD"/libkernels.a 2>/dev/null | grep -oP '__device_stub_+\K_Z\w+' | grep -vE "$OWN" | sort -u | head -3)
[ -z "$strange" ] || { echo "racecheck would pass over $strange" >&2; exit 2; }

LONG="generation model own_attention attention decode rows sample zeropp weights"
all() { ls tests/test_cuda_*.c | grep -v _comm | sed 's/.*test_cuda_\(.*\)\.c/\1/'; }
[ $# = 0 ] && set -- $LONG $(all | grep -vxE "${LONG// /|}")

jobs_of() { # TOOL PROGRAM: lines of TOOL PROGRAM PATTERN
  case " $LONG " in
    *" $2 "*) grep -oE 'cmocka_unit_test[a-z_]*\(\w+' "tests/test_cuda_$2.c" | sed "s/.*(/$1 $2 /" | grep -vE ' (rates|speed|how_long_it_takes|report)$' ;;
    *) echo "$1 $2 *" ;;
  esac
}

check() { # TOOL PROGRAM PATTERN
  local name="$1 $2" options=(--target-processes application-only --launch-timeout 0) start=$SECONDS verdict
  [ "$3" = "*" ] || name+=" $3"
  local log=$OUT/${name// /-}.log
  export RLHF_NO_RATES=1 CUDA_VISIBLE_DEVICES=$((SLOT % GPUS))
  [ "$1" = memcheck ] && options+=(--report-api-errors no)
  [ "$1" = racecheck ] && RLHF_NO_RATES=2 && options+=(--kernel-name "regex=$OWN")
  timeout "$LIMIT" compute-sanitizer --tool "$1" --error-exitcode 9 "${options[@]}" "$BUILD/tests/test_cuda_$2" "$3" >"$log" 2>&1
  case $? in
    0) verdict=ok ;;
    124) verdict="FAILED not done in $LIMIT s" ;;
    *) verdict="FAILED $(grep -cE '^========= (Error|Invalid|Uninitialized)' "$log") reports" ;;
  esac
  echo "$name: $verdict ($((SECONDS - start)) s)" | tee -a "$OUT/verdicts"
}
export -f check
for tool in ${TOOLS:-racecheck memcheck initcheck}; do
  for program in "$@"; do jobs_of "$tool" "$program"; done
done | xargs -P "$JOBS" -L1 --process-slot-var=SLOT bash -c 'set -f; check "$1" "$2" "$3"' check
echo "logs in $OUT"
failed=$(grep -c FAILED "$OUT/verdicts")
echo "$(grep -c ': ok' "$OUT/verdicts") passed, $failed failed"
[ "$failed" = 0 ]
