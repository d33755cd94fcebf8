#!/usr/bin/env bash
# Runs test programs and scripts, sums their TAP lines, and ends with "N passed, N failed, N skipped".
# usage: tests/run.sh BUILD NAME...   NAME: a program in BUILD/tests or a script tests/NAME.sh
# A C test says `ranks: 1 2 3` in a comment to run under mpirun once for each count. Three tests run at a time (AT_ONCE), since
# many wait more than they compute; then, one after the other, those that use a GPU or say `alone:` in a comment.
set -u
export build=$1
shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 # more ranks than cores: waiting ranks give way
export OMPI_MCA_btl_vader_single_copy_mechanism=none RLHF_BIN=${RLHF_BIN:-$PWD/rlhf}
export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0 ASAN_OPTIONS=fast_unwind_on_malloc=0
# Under TSAN=1: what happens inside libraries that know nothing of it (MPI, libgomp) is theirs.
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1
counts=$(mktemp)
export counts
trap 'rm -f "$counts"' EXIT

count() { # name status log
  local ok bad skip
  skip=$(grep -cE '^(not )?ok .*# SKIP' "$3") # cmocka writes a skip as "not ok N # SKIP name"
  ok=$(grep -E '^ok ' "$3" | grep -vc '# SKIP')
  bad=$(grep -E '^not ok ' "$3" | grep -vc '# SKIP')
  if [ "$2" -ne 0 ] && [ "$bad" -eq 0 ]; then bad=1; fi
  if [ "$2" -eq 0 ] && [ $((ok + bad + skip)) -eq 0 ]; then bad=1; fi # said nothing: not a pass
  echo "$ok $bad $skip" >>"$counts"
  if [ "$bad" -gt 0 ]; then
    printf 'FAILED %s (exit status %s)\n%s\n' "$1" "$2" "$({ grep -A 6 '^not ok' "$3" | grep -v '# SKIP'; tail -60 "$3"; } | sed 's/^/  | /')"
  else
    printf '%-44s %3d passed %3d skipped %4d s\n' "$1" "$ok" "$skip" $((SECONDS - start))
  fi
}

one() { # NAME
  local t=$1 log ranks n start=$SECONDS
  log=$(mktemp)
  if [ -f "tests/$t.sh" ]; then
    timeout 600 bash "tests/$t.sh" >"$log" 2>&1
    count "$t" $? "$log"
  else
    ranks=$(grep -oE 'ranks: [0-9 ]+' "tests/$t.c" | head -1 | cut -d: -f2)
    for n in ${ranks:-0}; do
      start=$SECONDS
      if [ "$n" = 0 ]; then
        timeout 600 "$build/tests/$t" >"$log" 2>&1
      else
        OMP_NUM_THREADS=1 timeout 600 mpirun -n "$n" --bind-to none "$build/tests/$t" >"$log" 2>&1
      fi
      count "$t${ranks:+ on $n}" $? "$log"
    done
  fi
  rm -f "$log"
}
export -f count one

alone() { # NAME
  case $1 in test_cuda_*) return 0 ;; esac
  grep -qs '^[#/ ]*\*\? *alone:' "tests/$1.sh" "tests/$1.c"
}
together=() apart=()
for t in "$@"; do
  if alone "$t"; then apart+=("$t"); else together+=("$t"); fi
done
[ ${#together[@]} = 0 ] || printf '%s\n' "${together[@]}" | xargs -P "${AT_ONCE:-3}" -I{} bash -c 'one {}'
[ ${#apart[@]} = 0 ] || for t in "${apart[@]}"; do one "$t"; done
awk -v names=$# '{ ok += $1; bad += $2; skip += $3 }
  END {
    if (NR < names) print "FAILED: only " NR " of " names " tests came to an end"
    printf "%d passed, %d failed, %d skipped\n", ok, bad, skip
    exit bad > 0 || NR < names
  }' "$counts"
