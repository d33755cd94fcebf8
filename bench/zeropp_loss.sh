#!/usr/bin/env bash
# What quantized communication costs in loss: a model of stories260K's shape from random weights on TinyStories text,
# 4 ranks as 2 nodes x 2, once per mode, the same data and seed. Prints held-out loss by step and the distance from
# ZeRO-3. usage: bench/zeropp_loss.sh [STEPS [SEED [MODE]...]]; RLHF: the program, SHARED: the data's folder
cd "$(dirname "$0")/.." || exit 1
. bench/modes.sh
steps=${1:-600} seed=${2:-1}
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- zero3 qwz+hpz all-ef all float32
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

cat >"$dir/loss.yaml" <<END
run: {seed: $seed, threads: 1}
tokenizer: {path: $shared/stories260K/tokenizer.model}
models:
  actor:
    init: {hidden_size: 64, layers: 5, heads: 8, kv_heads: 4, ffn: 172, max_positions: 512, tied_head: true}
data:
  sft:
    {path: $shared/tinystories/tinystories_sample.txt, separator: <|endoftext|>, held_out: 0.1, max_tokens: 128,
     overlong: truncate}
stages: [sft]
sft: {steps: $steps, eval_every: 100, loss_on: all}
batch: {sft: 32, micro_tokens: 2048}
optimizer: {sft: {lr: 1.0e-3, schedule: cosine, warmup_steps: 30}}
checkpoint: {every: 0}
report: {measure_peak: false, progress: "off"}
zeropp: {ranks_per_node: 2, wire: bfloat16}
END

for mode; do
  rank_run 4 train "$dir/loss.yaml" --set "run.directory=$dir/$mode" $(mode_sets "$mode") >/dev/null 2>"$dir/err" ||
    { cat "$dir/err" >&2; exit 1; }
  field "$dir/$mode/metrics.jsonl" step eval_loss >"$dir/$mode.curve"
done
echo "held-out loss, seed $seed, by step"
table "$dir" curve "$@"
first=$(tail -n 1 "$dir/$1.curve" | cut -d' ' -f2)
for mode; do
  tail -n 1 "$dir/$mode.curve" |
    awk -v m="$mode" -v z="$first" -v n="$1" '{ printf "%-9s %.5f  %+.3f %% of %s\n", m, $2, 100 * ($2 - z) / z, n }'
done
