#!/usr/bin/env bash
# What refreshes by delta buy in PPO over a slow network: a whole run of rlhf train on two hosts (bench/slow_network.sh) of
# one rank, with int4 gradients and the weights as int8, by delta, and whichever is shorter; actor and critic of 5
# million parameters from random weights. By rate and mode: seconds of a step's update phases (actor and critic;
# without the first step), bytes that enter a host in them, and what these predict: the seconds without a limit plus
# the bytes over the rate, nothing hidden.
# usage: bench/zeropp_delta_ppo.sh [MODE...]; MODE: all, delta, auto; the first is what others are compared to
# RATES: in Mbit/s; STEPS: of a run; LR: of both models; RLHF: the program; SHARED: the data's folder
# DEVICE=cuda: two GPUs of this machine as two nodes, models of half a billion parameters; without a limit they use NVLink,
# else NCCL's sockets over the loopback, whose rate nobody sets: RATES is then what they reach (9 GB/s: 72000)
cd "$(dirname "$0")/.." || exit 1
. bench/modes.sh
[ $# -gt 0 ] || set -- all delta
device=${DEVICE:-cpu} steps=${STEPS:-4} lr=$(printf %.1e "${LR:-1e-6}")
if [ "$device" = cuda ]; then
  rates=${RATES:-72000} shape="{hidden_size: 2048, layers: 11, heads: 32, kv_heads: 4, ffn: 5632, max_positions: 256}"
  prompts=128 prompt_tokens=128 new_tokens=128 micro=16384 precision=bfloat16
else
  rates=${RATES:-120 50} shape="{hidden_size: 256, layers: 6, heads: 8, ffn: 688, max_positions: 128}"
  prompts=32 prompt_tokens=16 new_tokens=64 micro=2048 precision=float32
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

cat >"$dir/recipe.yaml" <<END
run: {directory: $dir/run, seed: 1, threads: $([ "$device" = cuda ] && echo 0 || echo 1), overwrite: true, device: $device, precision: $precision}
tokenizer: {path: $shared/stories260K}
models:
  actor: {init: $shape}
  critic: {from: actor, init_head: true}
data:
  prompts: {path: $shared/tinystories/tinystories_sample.txt, separator: <|endoftext|>, overlong: truncate, max_records: 500}
stages: [ppo]
batch: {micro_tokens: $micro}
rollout: {prompts_per_step: $prompts, max_prompt_tokens: $prompt_tokens, max_new_tokens: $new_tokens}
ppo: {steps: $steps, epochs: 2, minibatches: 4, eval_every: 0}
rewards: [{kind: words, words: [the, a, and]}]
optimizer: {actor: {lr: $lr, schedule: constant}, critic: {lr: $lr, schedule: constant}}
checkpoint: {every: 0, dtype: bfloat16}
report: {measure_peak: false, progress: "off"}
zeropp: {ranks_per_node: 1, wire: bfloat16, hpz: on, qgz: int4, accumulate: node}
END

sets() { # MODE
  case $1 in
    all) echo "--set zeropp.qwz=int8" ;;
    delta) echo "--set zeropp.refresh=delta" ;;
    auto) echo "--set zeropp.qwz=int8 --set zeropp.refresh=auto" ;;
    *) echo "no such mode: $1; expected all, delta or auto" >&2; exit 2 ;;
  esac
}

# "SECONDS BYTES": of a step's updates, and into a host in them.
update_figures() {
  local seconds
  seconds=$(sed -n 's/.*"actor_update":\([-0-9.e]*\),"critic_update":\([-0-9.e]*\).*/\1 \2/p' "$dir/run/metrics.jsonl" |
    awk 'NR > 1 { sum += $1 + $2 } END { print sum / (NR - 1) }')
  awk -v steps="$steps" -v seconds="$seconds" '
    /"[a-z_]*": {/ && /_update/ { on = 1 }
    /"refresh": {/ { on = 0 }
    on && /"inter_bytes"/ { gsub(/[^0-9]/, ""); sum += $0 }
    END { print seconds, sum / 2 / steps }' "$dir/run/report.json"
}

train() { # RATE-AS-TC-SPELLS-IT ARGUMENT...
  local rate=$1 sockets
  shift
  if [ "$device" = cuda ]; then
    sockets="NCCL_SOCKET_IFNAME=lo NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 NCCL_BUFFSIZE=8388608
      NCCL_P2P_NET_CHUNKSIZE=1048576 NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"
    [ "$rate" = max ] && sockets=
    # shellcheck disable=SC2086
    env -u OMP_NUM_THREADS $sockets mpirun -n 2 --bind-to none "$rlhf" train "$@"
  else
    RANKS=1 bench/slow_network.sh 2 "$rate" train "$@"
  fi
}

measure() { # RATE-AS-TC-SPELLS-IT MODE...: "MODE SECONDS BYTES" a line
  local rate=$1 mode
  shift
  for mode; do
    # shellcheck disable=SC2046
    train "$rate" "$dir/recipe.yaml" $(sets "$mode") >/dev/null 2>"$dir/err" ||
      { cat "$dir/err" >&2; exit 1; }
    echo "$mode $(update_figures)"
  done
}

print_rate() { # RATE FILE
  awk -v rate="$1" '
    NR == FNR { free[$1] = $2; next }
    {
      predicted = free[$1] + (rate == "max" ? 0 : $3 * 8 / (rate * 1e6))
      if (first == "") { first = $2; first_predicted = predicted }
      printf "%9s %-8s %9.3f %7.2fx %9.3f %9.3f %7.2fx\n", rate, $1, $2, first / $2, $3 / 1e6, predicted,
        first_predicted / predicted
    }' "$dir/free" "$2"
}

for mode; do sets "$mode" >/dev/null || exit 2; done
measure max "$@" >"$dir/free" || exit 1
printf '%9s %-8s %9s %8s %9s %9s %8s\n' Mbit/s mode 'update s' faster MB/host predicts faster
print_rate max "$dir/free"
for rate in $rates; do
  measure "${rate}mbit" "$@" >"$dir/at" || exit 1
  print_rate "$rate" "$dir/at"
done
