#!/usr/bin/env bash
# The GPU tests under NVIDIA's compute-sanitizer. From the repository's root, on a machine with a GPU:
#   bench/sanitize.sh [TEST]...      default: every tests/test_cuda_*.c that needs one GPU and one process
# TOOLS ("racecheck memcheck initcheck"), BUILD (build), JOBS at once (10), LIMIT in seconds for each (300), OUT for the logs.
# RLHF_NO_RATES makes the tests leave timings and most of their shapes out; every kernel runs at least once. Programs that
# take long have their tests side by side, each in a process of its own.
#
# racecheck looks at our own kernels. It does not follow barriers in shared memory (mbarrier) that end with a copy of the
# copy engine, and so reports most of NVIDIA's own products and attention: those of cuBLASLt (nvjet, cutlass, gemm) and cuDNN are
# left out by name. Of ours it reports the columns that the copy engine brings to attention_hopper_keys.cu, which are ordered the same
# way. memcheck looks neither at the children that a test makes in order to see them die nor at calls that a test means
# to fail (memory that is not there).
# The last line is `N passed, N failed`.
set -u
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build} JOBS=${JOBS:-10} LIMIT=${LIMIT:-300} OUT=${OUT:-$(mktemp -d /tmp/rlhf-sanitize-XXXXXX)}
export BUILD LIMIT OUT RLHF_NO_RATES=1 OMP_NUM_THREADS=2
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH (part of the CUDA toolkit)" >&2; exit 2; }
mkdir -p "$OUT"
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
  local name="$1 $2" options=(--target-processes application-only) start=$SECONDS verdict
  [ "$3" = "*" ] || name+=" $3"
  local log=$OUT/${name// /-}.log
  [ "$1" = memcheck ] && options+=(--report-api-errors no)
  [ "$1" = racecheck ] && for kernels in nvjet cudnn cutlass cublas splitK; do options+=(--kernel-name-exclude "kns=$kernels"); done
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
done | xargs -P "$JOBS" -L1 bash -c 'set -f; check "$1" "$2" "$3"' check
echo "logs in $OUT"
failed=$(grep -c FAILED "$OUT/verdicts")
echo "$(grep -c ': ok' "$OUT/verdicts") passed, $failed failed"
[ "$failed" = 0 ]
