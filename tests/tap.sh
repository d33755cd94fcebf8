# What the tests of the command line share; sourced by them. Commands run in a fresh folder.
#   run ARGUMENT...                 runs rlhf: standard output in ./out, error in ./err, status in $rc
#   ok NAME COMMAND...              one TAP line by the command's exit status
#   is NAME FOUND EXPECTED          one TAP line by their being the same
#   refuses STATUS TEXT ARGUMENT... rlhf must fail so: TEXT in its message, nothing on standard output
#   need_shared                     skips the rest of the script where the shared data is absent
set -u
rlhf=$RLHF_BIN
shared=$(cd "${RLHF_SHARED:-../shared}" 2>/dev/null && pwd)
root=$PWD
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
number=0
rc=0
export OMP_NUM_THREADS=1 # the models are tiny, and other tests may run beside
export CUDA_VISIBLE_DEVICES= # device auto: the CPU, everywhere; GPUs have tests of their own

run() {
  "$rlhf" "$@" >out 2>err
  rc=$?
}

ok() {
  local name=$1
  shift
  number=$((number + 1))
  if "$@"; then
    echo "ok $number - $name"
  else
    echo "not ok $number - $name"
    sed 's/^/# /' err 2>/dev/null | tail -n 15
  fi
}

is() {
  number=$((number + 1))
  if [ "$2" = "$3" ]; then
    echo "ok $number - $1"
  else
    echo "not ok $number - $1"
    printf '# found:    %.400s\n# expected: %.400s\n' "$2" "$3"
  fi
}

refuses() {
  local status=$1 text=$2
  shift 2
  run "$@"
  number=$((number + 1))
  if [ "$rc" = "$status" ] && grep -qF -- "$text" err && [ ! -s out ] && ! grep -qv '^rlhf: ' err; then
    echo "ok $number - refuses $*: $text"
  else
    echo "not ok $number - refuses $*"
    printf '# status %s, expected %s with: %s\n' "$rc" "$status" "$text"
    sed 's/^/# /' out err | head -n 8
  fi
}

need_shared() {
  [ -n "$shared" ] && return
  echo "ok $((number + 1)) - the rest # SKIP no shared data"
  exit 0
}

mpi() { # RANKS ARGUMENT...
  local n=$1
  shift
  mpirun -n "$n" --bind-to none "$rlhf" "$@" >out 2>err
  rc=$?
}
