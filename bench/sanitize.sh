#!/usr/bin/env bash
# The GPU tests under NVIDIA's compute-sanitizer. From the repository's root, on a machine with a GPU:
#   bench/sanitize.sh [TEST]...      default: every tests/test_cuda_*.c that needs one GPU and one process
# TOOLS ("memcheck racecheck initcheck"), BUILD (build), JOBS at once (4), LIMIT in seconds for each (300), OUT for the logs.
# RLHF_NO_RATES makes the tests leave timings and most of their random shapes out; every kernel runs at least once.
#
# racecheck looks at our own kernels. It does not follow barriers in shared memory (mbarrier) that end with a copy of the
# copy engine, and so reports most of NVIDIA's own products and attention: those of cuBLASLt (nvjet, cutlass, gemm) and cuDNN are
# left out by name. Of ours it reports the columns that the copy engine brings to attention_hopper_keys.cu, which are ordered the same
# way. memcheck looks neither at the children that a test makes in order to see them die nor at calls that a test means
# to fail (memory that is not there).
# The last line is `N passed, N failed`.
set -u
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build} JOBS=${JOBS:-4} LIMIT=${LIMIT:-300} OUT=${OUT:-$(mktemp -d /tmp/rlhf-sanitize-XXXXXX)}
export BUILD LIMIT OUT RLHF_NO_RATES=1 OMP_NUM_THREADS=2
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH (part of the CUDA toolkit)" >&2; exit 2; }
mkdir -p "$OUT"
if [ $# = 0 ]; then
  for file in tests/test_cuda_*.c; do
    name=$(basename "$file" .c)
    case $name in *_comm*) ;; *) set -- "$@" "${name#test_cuda_}" ;; esac
  done
fi

check() { # TOOL TEST
  local log=$OUT/$1-$2.log options=(--target-processes application-only) start=$SECONDS verdict
  [ "$1" = memcheck ] && options+=(--report-api-errors no)
  [ "$1" = racecheck ] && for name in nvjet cudnn cutlass cublas splitK; do options+=(--kernel-name-exclude "kns=$name"); done
  timeout "$LIMIT" compute-sanitizer --tool "$1" --error-exitcode 9 "${options[@]}" "$BUILD/tests/test_cuda_$2" >"$log" 2>&1
  case $? in
    0) verdict=ok ;;
    124) verdict="FAILED not done in $LIMIT s" ;;
    *) verdict="FAILED $(grep -cE '^========= (Error|Invalid|Uninitialized)' "$log") reports" ;;
  esac
  echo "$1 $2: $verdict ($((SECONDS - start)) s)" | tee -a "$OUT/verdicts"
}
export -f check
for tool in ${TOOLS:-memcheck racecheck initcheck}; do
  for test in "$@"; do echo "$tool $test"; done
done | xargs -P "$JOBS" -L1 bash -c 'check "$1" "$2"' check
echo "logs in $OUT"
failed=$(grep -c FAILED "$OUT/verdicts")
echo "$(grep -c ': ok' "$OUT/verdicts") passed, $failed failed"
[ "$failed" = 0 ]
