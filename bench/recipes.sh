#!/usr/bin/env bash
# Recipes at random on 2 to 4 ranks: none hangs or crashes, a run that is taken up again at a checkpoint ends bit for
# bit alike, and where nothing is rounded the figures are those of one rank. What recipes must not be is refused with
# status 1 and counts as such. usage: bench/recipes.sh [RECIPES] [SEED]; about two seconds a recipe
cd "$(dirname "$0")/.." || exit 1
rlhf=${RLHF_BIN:-$PWD/rlhf} recipes=${1:-30} demo=$PWD/recipes/demo
RANDOM=${2:-$$}
echo "# SEED=${2:-$$}"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
cat >base.yaml <<EOF
run: {threads: 1}
tokenizer: {path: $demo/tokenizer.model}
models: {actor: {init: {hidden_size: 64, layers: 2, heads: 4, ffn: 96, max_positions: 96, init_std: 0.1}}}
data:
  sft: {path: $demo/sft.jsonl, max_records: 60, max_tokens: 80, held_out: 0.1}
  preference: {path: $demo/pairs.jsonl, max_records: 30, max_tokens: 80, held_out: 0.1}
  prompts: {path: $demo/prompts.jsonl, max_records: 60, held_out: 0.15}
stages: [reward, ppo]
reward: {steps: 1}
ppo: {steps: 2, minibatches: 1}
rollout: {max_prompt_tokens: 60}
optimizer: {actor: {eps: 1.0e-4}, critic: {eps: 1.0e-4}, reward: {eps: 1.0e-4}, sft: {eps: 1.0e-4}}
checkpoint: {every: 1, keep: 99}
report: {measure_peak: false}
EOF
# A key and its values, each as likely as it is often there.
keys='stages [ppo]|[reward, ppo]|[sft, ppo]|[sft, reward, ppo]
models.actor.init.hidden_size 64|80
models.actor.init.kv_heads 1|2|4
models.actor.init.layers 1|2|3
models.actor.init.ffn 17|96
models.actor.init.tied_head true|false
sft.steps 1|3
ppo.epochs 1|3
ppo.kl_in reward|loss
ppo.mean token|sequence
ppo.ema_decay 0|0.5
ppo.eval_every 0|1|2
rewards [{kind: length, target: 6}]|[{kind: words, words: [the]}]
rollout.prompts_per_step 1|2|5|9
rollout.samples_per_prompt 1|1|3
rollout.max_new_tokens 1|2|7|30
rollout.temperature 1|0.7
rollout.page_size 1|16
rollout.max_batch 0|0|3
rollout.weights auto|replica|tensor_parallel|stream
rollout.format auto|auto|auto|int8|fp8
batch.sft 1|8
batch.reward 1|5
batch.micro_tokens 1|150|4000
zeropp {stage: 0}|{stage: 1}|{stage: 1, qwz: int8, block: 64}|{stage: 2, accumulate: node}|{stage: 2, qgz: int4, block: 64}|{stage: 3}|{stage: 3, hpz: on}|{stage: 3, accumulate: node}|{stage: 3, hpz: on, wire: bfloat16, refresh: delta}|{stage: 3, hpz: on, wire: bfloat16, qwz: int8, refresh: auto, block: 64}|{stage: 3, hpz: quantized, qwz: int8, qgz: int4, block: 64, error_feedback: true}
zeropp.timeout_seconds 30
zeropp.recompute none|selective|full|auto
zeropp.prefetch 0|1|3'
pick() { # sets the array `set`
  local key line
  set=()
  while IFS= read -r line; do
    key=${line%% *}
    IFS='|' read -ra values <<<"${line#* }"
    set+=(--set "$key=${values[RANDOM % ${#values[@]}]}")
  done <<<"$keys"
}
run() { # RANKS RANKS-PER-NODE DIRECTORY ARGUMENT...
  local n=$1 local=$2 dir=$3
  shift 3
  timeout 300 mpirun -n "$n" --bind-to none "$rlhf" train base.yaml "${set[@]}" --set run.directory="$dir" \
    --set zeropp.ranks_per_node="$local" "$@" >out 2>err
}
figures() { sed 's/,"seconds":.*/}/' "$1/metrics.jsonl"; }
close() { # DIRECTORY DIRECTORY: figures equal to 1e-3, but one that divides by what may be rounding alone
  paste -d '\n' <(figures "$1" | tr -d '{}"') <(figures "$2" | tr -d '{}"') | awk -F, '
    NR % 2 { n = split($0, first, ","); next }
    {
      if (NF != n) bad = 1
      for (i = 1; i <= n; i++) {
        split(first[i], a, ":"); split($i, b, ":")
        if (a[1] == "explained_variance") continue
        d = a[2] - b[2]; size = a[2] < 0 ? -a[2] : a[2]
        if (a[1] != b[1] || (d < 0 ? -d : d) > 1e-3 * (size < 1 ? 1 : size)) { print "# " first[i] " and " $i; bad = 1 }
      }
    }
    END { exit bad || NR == 0 }'
}
rounds() { # whether some choice rounds what another number of ranks would not
  [[ " ${set[*]} " =~ bfloat16|int8|int4|fp8 ]]
}
resumed() { # RANKS RANKS-PER-NODE: from any of the checkpoints of `whole`
  local all=(whole/checkpoints/step_*) keep
  keep=$((RANDOM % ${#all[@]}))
  cp -r whole again && rm -rf "${all[@]/#whole/again}" && cp -r "${all[@]:0:keep+1}" again/checkpoints &&
    run "$1" "$2" again --resume && cmp <(figures whole) <(figures again) &&
    cmp whole/actor/model.safetensors again/actor/model.safetensors
}
good=0 refused=0 bad=0 compared=0
for ((i = 0; i < recipes; i++)); do
  rm -rf whole again alone
  pick
  n=$((2 + RANDOM % 3)) local=1
  [ $n = 4 ] && local=$((1 << RANDOM % 3))
  [ $n = 4 ] || [ $((RANDOM % 2)) = 0 ] || local=$n
  why=
  run $n $local whole
  status=$?
  if [ $status = 1 ] && ! grep -q '^rlhf: rank' err; then
    refused=$((refused + 1))
    continue
  fi
  [ $status = 0 ] || why="exit status $status"
  [ "$why" ] || resumed $n $local || why='resumed, it ends elsewhere'
  if [ ! "$why" ] && ! rounds; then
    compared=$((compared + 1))
    run 1 1 alone && close alone whole || why='one rank ends elsewhere'
  fi
  if [ "$why" ]; then
    bad=$((bad + 1))
    echo "not ok: $why; $n ranks, $local a node: ${set[*]@Q}"
    tail -n 5 err | sed 's/^/# /'
  else
    good=$((good + 1))
  fi
done
echo "$good passed ($compared compared with one rank), $bad failed, $refused refused"
[ $bad = 0 ] && [ $good -gt 0 ]
