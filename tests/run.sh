#!/usr/bin/env bash
# Runs test programs and scripts, sums their TAP lines, and ends with "N passed, N failed, N skipped".
# usage: tests/run.sh BUILD NAME...   NAME: a program in BUILD/tests or a script tests/NAME.sh
# A C test says `ranks: 1 2 3` in a comment to run under mpirun once for each count.
set -u
build=$1
shift
passed=0 failed=0 skipped=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 # more ranks than cores: waiting ranks give way
export OMPI_MCA_btl_vader_single_copy_mechanism=none RLHF_BIN=${RLHF_BIN:-$PWD/rlhf}
export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0 ASAN_OPTIONS=fast_unwind_on_malloc=0
# Under TSAN=1: what happens inside libraries that know nothing of it (MPI, libgomp) is theirs.
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT

count() { # name status
  local ok bad skip
  skip=$(grep -cE '^(not )?ok .*# SKIP' "$log") # cmocka writes a skip as "not ok N # SKIP name"
  ok=$(grep -E '^ok ' "$log" | grep -vc '# SKIP')
  bad=$(grep -E '^not ok ' "$log" | grep -vc '# SKIP')
  if [ "$2" -ne 0 ] && [ "$bad" -eq 0 ]; then bad=1; fi
  if [ "$2" -eq 0 ] && [ $((ok + bad + skip)) -eq 0 ]; then bad=1; fi # said nothing: not a pass
  passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
  if [ "$bad" -gt 0 ]; then
    echo "FAILED $1 (exit status $2)"
    sed 's/^/  | /' "$log" | tail -60
  else
    printf '%-44s %3d passed %3d skipped %4d s\n' "$1" "$ok" "$skip" $((SECONDS - start))
  fi
}

for t in "$@"; do
  if [ -f "tests/$t.sh" ]; then
    start=$SECONDS
    timeout 600 bash "tests/$t.sh" >"$log" 2>&1
    count "$t" $?
    continue
  fi
  ranks=$(grep -oE 'ranks: [0-9 ]+' "tests/$t.c" | head -1 | cut -d: -f2)
  for n in ${ranks:-0}; do
    start=$SECONDS
    if [ "$n" = 0 ]; then
      timeout 600 "$build/tests/$t" >"$log" 2>&1
    else
      OMP_NUM_THREADS=1 timeout 600 mpirun -n "$n" --bind-to none "$build/tests/$t" >"$log" 2>&1
    fi
    count "$t${ranks:+ on $n}" $?
  done
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
