#!/usr/bin/env bash
# rlhf bench zeropp from the outside: what it counts is what the modes promise, also over bench/slow_network.sh, which
# leaves nothing behind. Of times it has lower bounds only: other tests may run beside it.
. tests/tap.sh
cat >tiny.json <<END
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 64,
 "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
 "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
 "tie_word_embeddings": true}
END
bench() { # RANKS ARGUMENT...
  local n=$1
  shift
  mpi "$n" bench zeropp --model tiny.json --steps 2 --tokens 32 "$@"
}
value() { grep "\"mode\":\"$1\"" json | grep -oE "\"$2\":[^,}]*" | cut -d: -f2; } # MODE KEY, from ./json
holds() { awk "BEGIN { exit !($1) }"; }
between() { holds "$1 >= $2 && $1 <= $3"; }

refuses 2 'did you mean "zero3"' bench zeropp --modes zero
refuses 2 'expected zeropp' bench nothing
refuses 1 '/nowhere' bench zeropp --model /nowhere
refuses 1 'tiny.json' bench zeropp --model "$PWD/tiny.json/x"
run bench --help
ok "help names the modes and gives an example" eval "grep -q 'all-ef' out && grep -q 'mpirun' out"

# The other benchmarks: they run, and their figures hang together.
refuses 2 'expected none, selective, full or auto' bench train --recompute some
refuses 2 'found for zeropp, which takes' bench zeropp --stage 3
refuses 2 'expected one of them' bench train --stage 1 --modes all
refuses 1 'takes at most 64 positions' bench train --model tiny.json --length 65
refuses 1 'bfloat16 on the CPU' bench train --model tiny.json --length 64 --device cpu --precision bfloat16
for how in none selective full; do
  run bench train --model tiny.json --seqs 2 --length 32 --steps 2 --device cpu --recompute $how --json
  cp out json
  eval "loss_$how=$(grep -oE '"loss":[^,}]*' json | cut -d: -f2) peak_$how=$(grep -oE '"peak_bytes":[0-9]*' json | cut -d: -f2)"
done
ok "recomputation changes no bit of the loss" test -n "$loss_none" -a "$loss_none $loss_none" = "$loss_selective $loss_full"
ok "and saves memory: $peak_none, $peak_selective, $peak_full" holds "$peak_none > $peak_selective && $peak_selective > $peak_full"
mpi 2 bench train --model tiny.json --seqs 2 --length 32 --steps 2 --device cpu --modes zero3,all --ranks-per-node 1
ok "two modes on two nodes" test "$rc" = 0 -a "$(grep -cE '^(zero3|all) ' out)" = 2
run bench kernels --model tiny.json --seqs 2 --length 32 --device cpu
ok "kernels against the CPU's: themselves" test "$rc" = 0 -a "$(grep -c ' 0.0e+00$' out)" -gt 25 -a "$(grep -cE '(nan|inf|e-[0-9]+|e\+0[1-9])$' out)" = 0
mpi 4 bench comm --device cpu --ranks-per-node 2 --largest 100000
ok "collectives within a node and between nodes, by size" eval \
  '[ $(grep -cE "^host +(intra|inter) +2 +all-(gather|to-all) +(4096|32768|100000) " out) = 12 ]'
mpi 2 bench comm --device cpu --largest 100 --json
ok "and as JSON" eval '[ $(grep -c "\"block\":100,\"seconds\":[0-9.e-]*,\"gigabytes_per_second\":[0-9.e-]*}" out) = 2 ]'
run bench ppo --model tiny.json --prompts 3 --prompt-length 9 --answer-length 7 --steps 1 --device cpu
ok "an iteration of PPO, phase by phase" eval "grep -q '^critic update ' out && grep -q '^iteration ' out"
refuses 2 'expected fixed, eos or compare' bench rollout --lengths short
refuses 1 'takes 64 positions' bench rollout --model tiny.json --prompt-length 33 --response 32
run bench rollout --model tiny.json --prompts 5 --prompt-length 9 --response 7 --look 3 --device cpu
ok "a rollout of fixed lengths: 5 x 6 tokens by decoding in 6 steps of 8 rows" test "$rc" = 0 -a \
  "$(awk '$1 == "prefill" || $1 == "decode" { print $3 }' out | paste -sd' ')" = "45 30"
ok "of 8 rows 5 draw" eval "grep -q ' 6 steps of 8.0 rows, 62.5 % of which draw' out"
mpi 2 bench rollout --model tiny.json --prompts 9 --prompt-length 9 --rows 3 --lengths compare --device cpu
ok "of random lengths, on two ranks, beside fixed ones" eval "grep -q '^lengths at random have [0-9.]* % of the tokens/s' out"
is "with as many sequences in flight all the time" \
  "$(sed -n 's/.*draw: \([0-9.]*\) sequences in flight.*/\1/p' out | awk 'NR == 1 { r = int($1 + 0.5) } NR == 2 { print $1 - r }')" 0
mpi 4 bench rollout --model tiny.json --prompts 5 --prompt-length 9 --response 7 --device cpu \
  --ranks-per-node 2 --modes hpz --weights tensor_parallel
ok "of slices, on two nodes: no bytes between them" eval \
  "grep -q '^decode ' out && grep -q '^0 bytes from other nodes' out"
refuses 2 'rollout expects one' bench rollout --model tiny.json --modes hpz,all

bench 4 --ranks-per-node 2
ok "a table with a row per mode" test "$rc" = 0 -a "$(grep -cE '^(zero3|qwz|hpz|qgz|all|all-ef|delta|auto) ' out)" = 8
bench 4 --ranks-per-node 2 --json
cp out json
is "one object per mode" "$(grep -oE '"mode":"[^"]*"' json | cut -d'"' -f4 | paste -sd' ')" "zero3 qwz hpz qgz all all-ef delta auto"

# Of the units, the embedding (1 % here) is gathered once less than the blocks; small sums add a little.
ok "stage 3 moves 3 M between nodes: $(value zero3 inter_units)" between "$(value zero3 inter_units)" 2.95 3.02
ok "qwZ saves half of each gather: $(value qwz inter_units)" between "$(value qwz inter_units)" 1.95 2.1
ok "hpZ leaves one gather: $(value hpz inter_units)" between "$(value hpz inter_units)" 1.98 2.02
ok "qgZ leaves a quarter of the gradients: $(value qgz inter_units)" between "$(value qgz inter_units)" 2.2 2.3
ok "all: 0.78 M at most: $(value all inter_units)" between "$(value all inter_units)" 0.75 0.78
is "hpZ changes no bit of the loss" "$(value hpz loss)" "$(value zero3 loss)"
ok "quantization does change it" test "$(value all loss)" != "$(value zero3 loss)"

bench 4 --ranks-per-node 2 --json --micro-batches 3 --modes zero3,all
cp out json
ok "three micro-batches: stage 3 moves 9 M: $(value zero3 inter_units)" between "$(value zero3 inter_units)" 8.85 9.05
ok "all moves no more than with one: $(value all inter_units)" between "$(value all inter_units)" 0.75 0.78

bench 3 --ranks-per-node 1 --json --modes all
cp out json
ok "three nodes of one: $(value all inter_units) M" between "$(value all inter_units)" 0.75 0.78
bench 2 --json --modes zero3
cp out json
is "one node: nothing between nodes" "$(value zero3 inter_bytes)" 0.0

# ---- the network of namespaces ----

network() { # in the background: job names what it makes
  RLHF=$rlhf "$root/bench/slow_network.sh" "$@" >out 2>err &
  job=$!
}
left() { ip netns list | grep -E "^rlhf$job-"; ls -d "/dev/shm/rlhf$job"* 2>/dev/null; }
if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null || ! { ip netns add "rlhf$$" && ip netns del "rlhf$$"; } 2>/dev/null; then
  echo "ok $((number + 1)) - a slow network # SKIP no network namespaces"
  echo "1..$((number + 1))"
  exit 0
fi
network 2 200mbit --model tiny.json --steps 2 --tokens 32 --modes zero3,all --json
wait $job
cp out json
ok "hosts are nodes" test "$(value all nodes)" = 2 -a "$(value all local)" = 2
# Bytes that enter a host over 25 MB/s; a burst of 32 KiB, one at either end, goes through at once.
least=$(awk "BEGIN { print ($(value zero3 inter_bytes) * 2 - 65536) / 25e6 }")
ok "the link has its rate: $(value zero3 step_seconds) s, $least at least" holds "$(value zero3 step_seconds) >= $least"
is "nothing is left behind" "$(left)" ""
network 2 1mbit --model tiny.json
for _ in $(seq 100); do
  ip netns pids "rlhf$job-h2" 2>/dev/null | xargs -r ps -o comm= -p 2>/dev/null | grep -q rlhf && break
  sleep 0.1
done
ok "while it runs there are namespaces of its own" test -n "$(left)"
kill -TERM $job
wait $job
is "it can be interrupted" $? 143
is "nothing is left behind then" "$(left)" ""
echo "1..$number"
