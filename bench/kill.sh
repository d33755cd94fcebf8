#!/usr/bin/env bash
# kill -9 of any rank at 30 random moments of a PPO run, and 10 full disks: every resumed run must end bit for bit
# where the undisturbed one ends. About five minutes. usage: bench/kill.sh [SEED]
cd "$(dirname "$0")/.." || exit 1
export RLHF_BIN=${RLHF_BIN:-$PWD/rlhf} KILLS=${KILLS:-30} FULL=${FULL:-10} SEED=${1:-$$}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1
echo "# SEED=$SEED"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
bash tests/cli_kill.sh | tee "$log"
bad=$(grep -c '^not ok' "$log") good=$(grep -c '^ok' "$log")
echo "$good passed, $bad failed"
[ "$bad" = 0 ] && [ "$good" -gt 0 ]
