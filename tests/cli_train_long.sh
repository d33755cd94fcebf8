#!/usr/bin/env bash
# 200 steps of PPO: memory stays where it was, and (built with SAN=1) nothing leaks.
set -u
rlhf=$RLHF_BIN
demo=$PWD/recipes/demo
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1

cat >long.yaml <<EOF
run: {directory: run, threads: 1}
tokenizer: {path: $demo/tokenizer.model}
models:
  actor: {init: {hidden_size: 16, layers: 1, heads: 2, ffn: 24, max_positions: 64}}
data:
  prompts: {path: $demo/prompts.jsonl, max_records: 40, held_out: 0.2}
stages: [ppo]
rollout: {prompts_per_step: 4, max_new_tokens: 8, max_prompt_tokens: 40}
ppo: {steps: 200, epochs: 1, minibatches: 2, eval_every: 20, eval_prompts: 4, ema_decay: 0.99}
rewards: [{kind: length, target: 4}, {kind: regex, pattern: "[aeiou]"}]
optimizer: {actor: {lr: 1.0e-3}, critic: {lr: 1.0e-3}}
checkpoint: {every: 50}
report: {measure_peak: false}
EOF

if "$rlhf" train long.yaml >out 2>err; then
  echo "ok 1 - 200 steps without an error or a leak"
else
  echo "not ok 1 - 200 steps without an error or a leak"
  tail -n 40 err | sed 's/^/# /'
fi
# Device bytes at the peak of a step: the largest of steps 20 to 60 is not passed later.
if sed -n 's/.*"step":\([0-9]*\),"run_step".*"peak_bytes":\([0-9]*\).*/\1 \2/p' run/metrics.jsonl | awk '
  $1 >= 20 && $1 <= 60 && $2 > early { early = $2 }
  $1 > 60 && $2 > late { late = $2 }
  END { exit !(NR == 201 && early > 0 && late > 0 && late <= early * 1.01) }'; then
  echo "ok 2 - device memory does not grow"
else
  echo "not ok 2 - device memory does not grow"
fi
echo 1..2
