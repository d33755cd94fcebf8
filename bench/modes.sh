# shellcheck shell=bash
# What the experiments with ZeRO++ share; sourced by them, in the repository's folder.
#   mode_sets MODE                the --set arguments that switch a mode on
#   rank_run RANKS ARGUMENT...    rlhf under mpirun
#   field FILE X Y                "X Y" of each line of a metrics file that has both
#   table DIRECTORY SUFFIX MODE...   the files DIRECTORY/MODE.SUFFIX ("X Y" a line) side by side
shared=$(cd "${SHARED:-../shared/data}" && pwd) || exit 1
rlhf=$(realpath "${RLHF:-./rlhf}")
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1

mode_sets() {
  local keys
  case $1 in
    zero3) keys= ;;
    qwz) keys="qwz=int8" ;;
    hpz) keys="hpz=on" ;;
    qgz) keys="qgz=int4" ;;
    qwz+hpz) keys="qwz=int8 hpz=on" ;;
    all) keys="qwz=int8 hpz=on qgz=int4" ;;
    all-ef) keys="qwz=int8 hpz=on qgz=int4 error_feedback=true" ;;
    all8) keys="qwz=int8 hpz=on qgz=int8" ;;
    float32) keys="wire=float32" ;;
    rollout-*) echo "--set zeropp.wire=float32 --set rollout.format=${1#rollout-}"; return ;; # and update in float32
    *) echo "no such mode: $1" >&2; exit 2 ;;
  esac
  for key in $keys; do echo "--set zeropp.$key"; done
}

rank_run() {
  local n=$1
  shift
  mpirun -n "$n" --bind-to none "$rlhf" "$@"
}

field() {
  sed -n "s/.*\"$2\":\([-0-9.e+]*\).*\"$3\":\([-0-9.e+]*\).*/\1 \2/p" "$1"
}

table() {
  local dir=$1 suffix=$2 mode
  shift 2
  printf '%6s' step
  for mode; do printf ' %10s' "$mode"; done
  echo
  for mode; do sed "s/^/$mode /" "$dir/$mode.$suffix"; done | awk '
    !($1 in column) { column[$1] = ++n }
    { if (!($2 in row)) { row[$2] = ++rows; at[rows] = $2 } cell[$2, column[$1]] = $3 }
    END { for (i = 1; i <= rows; i++) { printf "%6d", at[i]; for (k = 1; k <= n; k++) printf " %10.5f", cell[at[i], k]; print "" } }'
}
