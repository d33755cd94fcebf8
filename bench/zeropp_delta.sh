#!/usr/bin/env bash
# What refreshes by delta send, by learning rate: SFT of real weights on TinyStories text, ranks as nodes. Per
# model and rate: the share of bf16 weights that changed in a step; what refreshing them crossed nodes by delta and as
# int8 (qwZ), and the whole step's traffic between nodes with int4 gradients (qgZ), in units of M = 2 bytes x
# parameters; then the first rate where int8 is cheaper. Two steps are run before: the first refreshes densely, the second
# sends the first update of AdamW, which moves every weight by the whole rate.
# usage: bench/zeropp_delta.sh MODEL-FOLDER...; RATES; STEPS: counted; BATCH: sequences a step; TOKENS: of each; RANKS,
# LOCAL: of a node; REFRESH: delta, or auto with int8 (auto); RLHF: the program; SHARED: the data's folder
[ $# -gt 0 ] || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
folders=()
for folder; do folders+=("$(realpath "$folder")"); done
cd "$(dirname "$0")/.." || exit 1
. bench/modes.sh
set -o pipefail
steps=${STEPS:-5} skip=2 ranks=${RANKS:-2} local=${LOCAL:-1}
nodes=$((ranks / local)) refresh=${REFRESH:-delta} qwz=off
[ "$refresh" = auto ] && qwz=int8
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

train() { # FOLDER RATE
  cat >"$dir/delta.yaml" <<END
run: {directory: $dir/run, seed: 1, threads: 1, overwrite: true}
models: {actor: $1}
data:
  sft: {path: $shared/tinystories/tinystories_sample.txt, separator: <|endoftext|>, max_tokens: ${TOKENS:-128}, overlong: truncate}
stages: [sft]
sft: {steps: $((steps + skip)), eval_every: 0, loss_on: all}
batch: {sft: ${BATCH:-8}, micro_tokens: 1024}
optimizer: {sft: {lr: $2, schedule: constant}}
checkpoint: {every: 0}
report: {measure_peak: false, progress: "off"}
zeropp: {ranks_per_node: $local, wire: bfloat16, hpz: on, refresh: $refresh, qwz: $qwz, qgz: int4}
END
  rank_run "$ranks" train "$dir/delta.yaml" >"$dir/out" 2>"$dir/err" || { cat "$dir/err" >&2; exit 1; }
}

# "CHANGED BYTES BF16 INT8 UNITS-BY-DELTA UNITS-DENSE" of every step
figures() {
  sed -n 's/.*_refresh":{"changed":\([-0-9.e]*\),"bytes":\([0-9]*\),"bfloat16_bytes":\([0-9]*\),"int8_bytes":\([0-9]*\),"delta_units":\([0-9]*\),"dense_units":\([0-9]*\)}.*/\1 \2 \3 \4 \5 \6/p' \
    "$dir/run/metrics.jsonl"
}

# Bytes between nodes of all steps, without what the report itself sums up.
crossed() {
  awk '/"sft": {/ { on = 1 } /"reward_training": {/ { on = 0 } on && /"inter_bytes"/ { gsub(/[^0-9]/, ""); sum += $0 }
       END { print sum }' "$dir/run/report.json"
}

for folder in "${folders[@]}"; do
  echo "$(basename "$folder"), $nodes nodes, $ranks ranks, $steps steps"
  printf '%8s %10s %9s %9s %11s %12s\n' lr changed "$refresh, M" 'int8, M' 'step, M' 'units dense'
  for rate in ${RATES:-1e-7 1e-6 1e-5 1e-4 1e-3}; do
    train "$folder" "$(printf %.1e "$rate")"
    figures | awk -v rate="$rate" -v nodes="$nodes" -v skip="$skip" -v crossed="$(crossed)" '
      { all++; all_sent += $2 }
      all > skip { n++; changed += $1; sent += $2 / $3; int8 += $4 / $3; m = $3; units += $5 + $6; dense += $6 }
      END {
        if (n == 0) exit 1
        rest = (crossed / (nodes - 1) - all_sent) / all / m # gradients, norms and sizes: the same in every step
        printf "%8s %8.3f %% %9.4f %9.4f %11.4f %10.0f %%\n", rate, 100 * changed / n, sent / n, int8 / n, sent / n + rest,
          100 * dense / units
      }' || exit 1
  done | tee "$dir/table" || exit 1
  awk '$2 + 0 > 0 && $4 > $5 && !found { found = $1 } END { print found ? "int8 is cheaper from " found " on" : "int8 is never cheaper" }' \
    "$dir/table"
  rm -rf "$dir/run"
done
