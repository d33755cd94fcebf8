#!/usr/bin/env bash
# The GPU tests under NVIDIA's compute-sanitizer. From the repository's root, on a machine with a GPU:
#   bench/sanitize.sh [TEST[:PATTERN]]...     default: every tests/test_cuda_*.c that needs one GPU and one process
# TOOLS ("racecheck memcheck initcheck"), BUILD (build), JOBS at once (5 for each GPU in CUDA_VISIBLE_DEVICES: they take turns on
# it, a few milliseconds each), LIMIT in seconds for each (300), OUT for the logs. RLHF_NO_RATES makes tests leave timings and most
# of their shapes out; racecheck, a thousand times slower than the kernels, has the fewest, and whole models have them everywhere.
# Of whole models racecheck has two tests: what it looks at lies within a kernel, and all kernels have tests of their own.
#
# What NVIDIA's own kernels do is not ours. racecheck does not follow their barriers: reports of them are counted and left at
# that. initcheck does not see what the copy engine writes: of what reads that alone, the kernels that add up parts in cuDNN and
# cuBLASLt and the one that compares products when they are tuned are left out, and memory of whole models begins full of NaN.
# Between the parameters of a message lie bytes that travel with it and that nobody reads: for test_cuda_zeropp initcheck looks at
# kernels, not at copies. Tests whose children die are left out, and so, by memcheck, are calls that a test means to fail (memory
# that is not there). The last line is `N passed, N failed`.
set -u
cd "$(dirname "$0")/.." || exit 1
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH (part of the CUDA toolkit)" >&2; exit 2; }
BUILD=${BUILD:-build} LIMIT=${LIMIT:-300} OUT=${OUT:-$(mktemp -d /tmp/rlhf-sanitize-XXXXXX)}
DEVICES=(${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader)})
DEVICES=(${DEVICES[*]//,/ }) JOBS=${JOBS:-$((5 * ${#DEVICES[@]}))}
export BUILD LIMIT OUT OMP_NUM_THREADS=2
mkdir -p "$OUT"
WHOLE="generation model weights zeropp" LONG="decode attention own_attention sample gemm embedding kv rows"
all=$(ls tests/test_cuda_*.c | grep -v _comm | sed 's/.*test_cuda_\(.*\)\.c/\1/')
rest=$(grep -vxE "$(tr ' ' '|' <<<"$WHOLE $LONG")" <<<"$all")

jobs_of() { # TOOL TEST...
  for test in "${@:2}"; do echo "$1 $test ${DEVICES[*]}"; done
}
all_jobs() { # those that take long first
  local tools=${TOOLS:-racecheck memcheck initcheck}
  for tool in $tools; do
    [ "$tool" = racecheck ] && jobs_of "$tool" model:lm_bf16 generation:tokens_are_the_cpus || jobs_of "$tool" $WHOLE
  done
  for tool in $tools; do jobs_of "$tool" $LONG; done
  for tool in $tools; do jobs_of "$tool" $rest; done
}

check() { # TOOL TEST[:PATTERN] DEVICE...
  local devices=("${@:3}") program=${2%%:*} pattern="*" log=$OUT/$1-${2/:/-}.log start=$SECONDS rc options theirs=0
  [ "$program" = "$2" ] || pattern=${2#*:}
  options=(--target-processes application-only --launch-timeout 0)
  export RLHF_NO_RATES=1 CUDA_VISIBLE_DEVICES=${devices[SLOT % ${#devices[@]}]}
  case $1-$program in racecheck-* | *-generation | *-model | *-weights | *-zeropp) RLHF_NO_RATES=2 ;; esac
  case $1 in
    racecheck) options+=(--print-limit 0) && for name in cudnn cutlass splitKreduce; do options+=(--kernel-name-exclude "kns=$name"); done ;;
    memcheck) options+=(--report-api-errors no) ;;
    initcheck) for name in fmha_reduce_head_ragged splitKreduce 7comparePKtS0_mPi; do options+=(--kernel-name-exclude "kns=$name"); done ;;
  esac
  [ "$1-$program" = initcheck-zeropp ] && options+=(--check-api-memory-access no)
  timeout "$LIMIT" compute-sanitizer --tool "$1" --error-exitcode 9 "${options[@]}" "$BUILD/tests/test_cuda_$program" "$pattern" >"$log" 2>&1
  rc=$?
  reports=$(grep -cE '^========= (Internal|Error|Invalid|Uninitialized|Host API)' "$log")
  theirs=$(grep -cE '^========= Error: Race reported between \w+ access at (void )?nvjet' "$log")
  [ "$rc" = 9 ] && [ "$reports" = "$theirs" ] && rc=0
  case $rc in
    0) verdict=ok ;;
    124) verdict="FAILED not done in $LIMIT s" ;;
    *) verdict="FAILED $((reports - theirs)) reports" ;;
  esac
  [ "$theirs" = 0 ] || verdict+=", $theirs of NVIDIA's products"
  echo "$1 $2: $verdict ($((SECONDS - start)) s)" | tee -a "$OUT/verdicts"
}
export -f check
if [ $# = 0 ]; then
  all_jobs
else
  for tool in ${TOOLS:-racecheck memcheck initcheck}; do jobs_of "$tool" "$@"; done
fi | xargs -P "$JOBS" -L1 --process-slot-var=SLOT bash -c 'set -f; check "$@"' check
echo "logs in $OUT"
failed=$(grep -c FAILED "$OUT/verdicts")
echo "$(grep -c ': ok' "$OUT/verdicts") passed, $failed failed"
[ "$failed" = 0 ]
