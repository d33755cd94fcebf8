#!/usr/bin/env bash
# PPO with quantized communication against ZeRO-3, or (modes float32, rollout-int8, rollout-fp8) with a quantized rollout
# against float32: recipes/stories260k.yaml shortened, 4 ranks (RANKS) as nodes x 2, three seeds each. Prints the held-out reward at the end of each run; fails when the means of two modes are further apart
# than the seeds of the first are. usage: bench/zeropp_ppo.sh [STEPS [MODE]...]; RLHF: the program, SEEDS: the seeds
cd "$(dirname "$0")/.." || exit 1
. bench/modes.sh
steps=${1:-24}
shift $(($# < 1 ? $# : 1))
[ $# -gt 0 ] || set -- zero3 all all-ef
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

echo "held-out reward before and after $steps steps of PPO, and the KL to the start of the last step"
for mode; do
  for seed in ${SEEDS:-1 2 3}; do
    run=$dir/$mode.$seed
    rank_run "${RANKS:-4}" train recipes/stories260k.yaml --set "run.directory=$run" --set "run.seed=$seed" --set run.threads=1 \
      --set "ppo.steps=$steps" --set "ppo.eval_every=$steps" --set checkpoint.every=0 --set report.measure_peak=false \
      --set report.progress=off --set "zeropp.ranks_per_node=$(((${RANKS:-4} + 1) / 2))" --set zeropp.wire=bfloat16 $(mode_sets "$mode") \
      >/dev/null 2>"$dir/err" || { cat "$dir/err" >&2; exit 1; }
    rewards=$(sed -n 's/.*"eval_reward_mean":\([-0-9.e+]*\).*/\1/p' "$run/metrics.jsonl" | sed -n '1p;$p' | paste -sd' ')
    kl=$(tail -n 1 "$run/metrics.jsonl" | grep -oE '"kl":[-0-9.e+]+' | head -n 1 | cut -d: -f2)
    echo "$mode $seed $rewards $kl"
    rm -rf "$run"
  done
done | tee "$dir/rewards" | awk '{ printf "%-8s seed %d: %.3f -> %.3f, KL %.2f\n", $1, $2, $3, $4, $5; fflush() }'
awk -v first="$1" '
  !($1 in n) { names[++modes] = $1; lo[$1] = hi[$1] = $4 }
  { n[$1]++; sum[$1] += $4; if ($4 < lo[$1]) lo[$1] = $4; if ($4 > hi[$1]) hi[$1] = $4 }
  END {
    spread = hi[first] - lo[first]
    for (i = 1; i <= modes; i++) {
      m = names[i]; d = sum[m] / n[m] - sum[first] / n[first]
      printf "%-8s mean %.3f, seeds from %.3f to %.3f, %+.3f from %s\n", m, sum[m] / n[m], lo[m], hi[m], d, first
      if (d > spread || d < -spread) bad = 1
    }
    printf "seed-to-seed spread of %s: %.3f\n", first, spread
    exit bad
  }' "$dir/rewards"
