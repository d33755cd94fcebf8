#!/usr/bin/env bash
# The demo does what its recipe promises: two ranks, all stages, and held-out answers that the reward model and an
# independent count of kind words both like better, at a bounded KL to where it started.
# alone: it compares with the machine's own rate.
. tests/tap.sh
holds() { awk "BEGIN { exit !($1) }"; }
# field LINE KEY: the number under the first "KEY"
field() { echo "$1" | grep -oE "\"$2\":-?[0-9.e+-]+" | head -1 | cut -d: -f2; }

mpirun --oversubscribe --bind-to none -n 2 "$rlhf" train "$root/recipes/demo.yaml" --set run.directory=demo >out 2>err
ok "the demo runs" test $? = 0
first=$(grep '"stage":"ppo"' demo/metrics.jsonl | head -1)
last=$(grep '"stage":"ppo"' demo/metrics.jsonl | tail -1)
before=$(field "$first" eval_reward_mean) spread=$(field "$first" eval_reward_std)
after=$(field "$last" eval_reward_mean)
ok "held-out reward $before -> $after, up by a standard deviation ($spread) at least" holds "$after - $before >= $spread"
before=$(field "$first" eval_score_words) after=$(field "$last" eval_score_words)
ok "kind words, which no reward counted, $before -> $after an answer" holds "$after > 2 * $before"
kl=$(field "$last" kl)
# Nats per answer of about 15 tokens; with kl_coef 0.02 instead the same run goes to 8 and beyond.
ok "KL to the start $kl stays bounded" holds "$kl < 6"
ok "answers before and after are shown" eval "cat out err | grep -q '^  before' && cat out err | grep -q '^  after'"
printf '{"text": "Q: What does the owl eat?\\nA:"}\n' >prompt.jsonl
run generate --model demo/actor --greedy --max-new-tokens 32 --text prompt.jsonl
ok "the saved actor answers to the end" grep -q '"finish":"eos"' out
run report demo
ok "the report is there again" grep -q '^rollout' out
most=$(grep -oE '"utilisation":[0-9.e+-]+' demo/metrics.jsonl | cut -d: -f2 | sort -g | tail -1)
ok "no step used more than the whole machine: $most" holds "$most > 0 && $most <= 1"
over=$(awk '/^[a-z].*%.*%/ { for (i = 1; i <= NF; i++) if ($i ~ /%$/ && $i + 0 > 100) print $1 }' out)
is "and no phase of the report did" "$over" ""
