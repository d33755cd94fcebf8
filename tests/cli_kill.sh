#!/usr/bin/env bash
# Runs of PPO on 2 nodes x 2 ranks, all of ZeRO++ on, that are cut short: any rank is killed with -9 at a random
# moment, or the disk fills up. Resumed, they must end bit for bit where the undisturbed run ends.
#
# KILLS, FULL: how many of each (3, 2); SEED: of the moments (1). bench/kill.sh runs it for long.
# The disk is a small tmpfs in a mount namespace of this script's own, where that is allowed.
if [ -z "${KILL_OWN_MOUNTS:-}" ]; then
  export KILL_OWN_MOUNTS=no
  if unshare --mount true 2>/dev/null; then KILL_OWN_MOUNTS=yes exec unshare --mount bash "$0" "$@"; fi
fi
. tests/tap.sh
RANDOM=${SEED:-1}
trap 'cd / && { umount "$tmp/disk" 2>/dev/null; rm -rf "$tmp"; }' EXIT
demo=$root/recipes/demo

cat >kill.yaml <<END
run: {seed: 3, threads: 1}
tokenizer: {path: $demo/tokenizer.model}
models:
  actor: {init: {hidden_size: 48, layers: 2, heads: 4, kv_heads: 2, ffn: 80, max_positions: 96}}
data:
  prompts: {path: $demo/prompts.jsonl, max_records: 60, held_out: 0.15}
stages: [ppo]
batch: {micro_tokens: 150}
rollout: {prompts_per_step: 10, max_new_tokens: 16, max_prompt_tokens: 40}
ppo:
  {steps: 12, epochs: 2, minibatches: 2, kl_controller: adaptive, eval_every: 3, eval_prompts: 5, ema_decay: 0.9}
rewards:
  - {kind: length, weight: 0.5, target: 6}
  - {kind: regex, pattern: "[aeiou]"}
optimizer: {actor: {lr: 1.0e-3}, critic: {lr: 3.0e-3}}
checkpoint: {every: 1}
report: {measure_peak: false}
zeropp:
  {ranks_per_node: 2, wire: bfloat16, qwz: int8, hpz: on, qgz: int4, error_feedback: true, error_reset: 7, accumulate: node}
END

train() { # DIRECTORY ARGUMENT...
  local dir=$1
  shift
  mpirun -n 4 --bind-to none "$rlhf" train kill.yaml --set "run.directory=$dir" "$@" >out 2>err
}

figures() { sed 's/,"seconds":.*/}/' "$1/metrics.jsonl"; }
same_run() { # Bit for bit: figures, samples and weights.
  cmp <(figures "$1") <(figures "$2") && diff -r "$1/samples" "$2/samples" &&
    cmp "$1/actor/model.safetensors" "$2/actor/model.safetensors" &&
    cmp "$1/critic/model.safetensors" "$2/critic/model.safetensors"
}

# The processes that run rlhf itself for a directory, with their ranks: "PID RANK" a line.
ranks_of() {
  local p
  for p in $(grep -lazx "run.directory=$1" /proc/[0-9]*/cmdline 2>/dev/null); do
    p=${p%/cmdline}
    [ "$p/exe" -ef "$rlhf" ] &&
      echo "${p#/proc/} $(tr '\0' '\n' <"$p/environ" 2>/dev/null | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')"
  done
}
# Until a checkpoint of this step or a later one is there; false when the process ends first. Step 0: until the run
# has begun.
wait_for() { # DIRECTORY STEP PROCESS
  local newest
  while kill -0 "$3" 2>/dev/null; do
    newest=$(ls "$1/checkpoints" 2>/dev/null | grep -x 'step_[0-9]*' | tail -n 1)
    [ "$2" = 0 ] && [ -e "$1/recipe.yaml" ] && return 0
    [[ $newest > $(printf 'step_%06d' $(($2 - 1))) ]] && [ "$2" -gt 0 ] && return 0
    sleep 0.01
  done
  return 1
}
steps=12
seconds() { date +%s.%N; }

start=$(seconds)
ok "undisturbed" train plain
step=$(awk "BEGIN { print ($(seconds) - $start) / $steps }") # seconds, more or less

# One of four ranks, at any moment of the run: some time after any of its steps. 2: it was over by then.
kill_once() { # DIRECTORY
  local dir=$1 victim=$((RANDOM % 4)) after=$((RANDOM % steps)) moment job pid
  moment=$(awk "BEGIN { print $step * $RANDOM / 32768 }")
  train "$dir" &
  job=$!
  wait_for "$dir" $after $job || return 2
  sleep "$moment"
  pid=$(ranks_of "$dir" | awk -v r=$victim '$2 == r { print $1 }')
  [ -n "$pid" ] && kill -9 "$pid"
  wait $job 2>/dev/null
  grep -q '"done"' "$dir"/checkpoints/*/state.json 2>/dev/null && return 2
  what="rank $victim $moment s after step $after, at $(ls "$dir/checkpoints" 2>/dev/null | tail -n 1)"
  for _ in $(seq 50); do # the others have ended with it
    [ -z "$(ranks_of "$dir")" ] && return 0
    sleep 0.1
  done
  echo "# still running 5 s later: $(ranks_of "$dir" | tr '\n' ';')"
  return 1
}
kills=0 late=0
while [ $kills -lt "${KILLS:-3}" ] && [ $late -lt 100 ]; do
  dir=cut$kills.$late
  kill_once $dir
  status=$?
  if [ $status = 2 ]; then
    late=$((late + 1))
    rm -rf "$dir"
    continue
  fi
  kills=$((kills + 1))
  resumed() { [ $status = 0 ] && train "$dir" --resume && same_run plain "$dir"; }
  ok "kill -9 of $what: resumed bit for bit" resumed
  rm -rf "$dir"
done
is "runs that were killed in time" "$kills" "${KILLS:-3}"

# ---- a full disk ----

if [ $KILL_OWN_MOUNTS = no ] || ! { mkdir disk && mount -t tmpfs -o size=64m tmpfs disk; } 2>/dev/null; then
  echo "ok $((number + 1)) - a full disk # SKIP no mounts of our own"
  echo "1..$((number + 1))"
  exit 0
fi
state=$(du -sk plain/checkpoints | cut -f1) # the newest two

# The disk is filled while the run goes on, to a random room of less than one checkpoint (of nine tenths: where `state` was
# counted, files and folders may take more blocks than on the small disk).
fill_up() { # DIRECTORY
  local job room=$((RANDOM % (state * 9 / 20)))
  train "$1" &
  job=$!
  wait_for "$1" 2 $job || return 1
  until fallocate -l $(($(df --output=avail -k disk | tail -n 1) - room))k disk/filler 2>/dev/null; do
    : # the run wrote in between
  done
  what="$room KiB left"
  wait $job
  job=$?
  [ $job = 0 ] && return 2
  [ $job = 1 ] && grep -q 'No space left on device' err
}
for _ in $(seq "${FULL:-2}"); do
  for _ in 1 2 3 4 5; do # filled while a checkpoint was half-written, what that one frees may do for the rest
    fill_up disk/full
    status=$?
    [ $status = 2 ] || break
    rm -rf disk/full disk/filler
  done
  cp err err.full
  rm -f disk/filler
  emptied() {
    [ $status = 0 ] && [ "$(grep -c 'No space' err.full)" = 1 ] && train disk/full --resume && same_run plain disk/full
  }
  ok "full disk, $what: one error; resumed bit for bit" emptied
  rm -rf disk/full
done
umount disk
echo "1..$number"
