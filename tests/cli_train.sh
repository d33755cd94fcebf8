#!/usr/bin/env bash
# rlhf train, check and report from the outside: a tiny random model through all three stages; the
# same on 1, 2, 3 and 4 ranks; killed and resumed; and everything that must be refused.
. tests/tap.sh
demo=$root/recipes/demo

cat >tiny.yaml <<EOF
run: {directory: run, seed: 3, threads: 1}
tokenizer: {path: $demo/tokenizer.model}
models:
  actor:
    init: {hidden_size: 36, layers: 2, heads: 3, ffn: 50, max_positions: 96, init_std: 0.1}
data:
  sft: {path: $demo/sft.jsonl, max_records: 60, max_tokens: 80}
  preference: {path: $demo/pairs.jsonl, max_records: 30, max_tokens: 80}
  prompts: {path: $demo/prompts.jsonl, max_records: 60, held_out: 0.15}
stages: [sft, reward, ppo]
sft: {steps: 5, eval_every: 3}
reward: {steps: 5, eval_every: 3}
batch: {sft: 7, reward: 5, micro_tokens: 150}
rollout: {prompts_per_step: 9, max_new_tokens: 12, max_prompt_tokens: 60}
ppo:
  {steps: 4, epochs: 2, minibatches: 3, kl_controller: adaptive, kl_target: 0.6, missing_eos_penalty: 0.5,
   normalize_scores: true, eval_every: 2, eval_prompts: 5, ema_decay: 0.9, critic_warmup_steps: 1}
rewards:
  - {kind: model, weight: 1}
  - {kind: length, weight: 0.5, target: 6}
  - {kind: words, weight: 0, words: [the, fox]}
# eps: where a gradient is all but zero, AdamW's first steps would blow its rounding up to lr.
optimizer:
  sft: {lr: 3.0e-3, warmup_steps: 2, eps: 1.0e-4}
  reward: {lr: 3.0e-3, eps: 1.0e-4}
  actor: {lr: 1.0e-3, eps: 1.0e-4}
  critic: {lr: 3.0e-3, eps: 1.0e-4}
checkpoint: {every: 2}
report: {measure_peak: false}
EOF

# train RANKS DIRECTORY ARGUMENT...: output in out and err
train() {
  local ranks=$1 dir=$2
  shift 2
  if [ "$ranks" = 1 ]; then
    "$rlhf" train tiny.yaml --set "run.directory=$dir" "$@" >out 2>err
  else
    mpirun -n "$ranks" --bind-to none "$rlhf" train tiny.yaml --set "run.directory=$dir" "$@" >out 2>err
  fi
}

# The part of each line that two equal runs must share: what follows is time and machine.
figures() { sed 's/,"seconds":.*/}/' "$1/metrics.jsonl"; }

# same_to TOLERANCE A B: equal lines, numbers equal to tolerance * max(1, |a|)
same_to() {
  paste -d '\n' <(figures "$2" | tr -d '{}"') <(figures "$3" | tr -d '{}"') | awk -F, -v tol="$1" '
    NR % 2 { n = split($0, first, ","); next }
    {
      if (NF != n) { print "# fields differ: " $0; bad++; exit }
      for (i = 1; i <= n; i++) {
        split(first[i], a, ":"); split($i, b, ":")
        d = a[2] - b[2]; if (d < 0) d = -d
        size = a[2] < 0 ? -a[2] : a[2]; if (size < 1) size = 1
        numeric = a[2] ~ /^[-+0-9.eE]+$/
        if (a[1] != b[1] || (numeric && !(d <= tol * size)) || (!numeric && a[2] != b[2])) {
          if (bad++ < 5) print "# " first[i] " and " $i
        }
      }
      lines++
    }
    END { exit bad > 0 || lines == 0 }'
}

# Bit for bit: figures, samples and weights.
same_run() {
  cmp <(figures "$1") <(figures "$2") && diff -r "$1/samples" "$2/samples" &&
    for model in sft reward actor critic; do
      [ -e "$1/$model" ] || continue
      cmp "$1/$model/model.safetensors" "$2/$model/model.safetensors" || return 1
    done
}

# fails TEXT COMMAND...: exit status 1, the text in exactly one line of err, no crash
fails() {
  local text=$1 status
  shift
  "$@"
  status=$?
  [ "$status" = 1 ] || { echo "# exit status $status"; return 1; }
  [ "$(grep -c -- "$text" err)" = 1 ] || { echo "# not once: $text"; return 1; }
  ! grep -qE 'Sanitizer|broken contract|signal' err
}

wait_for() { # FILE
  for _ in $(seq 1200); do
    [ -e "$1" ] && return 0
    sleep 0.02
  done
  return 1
}

# ---- all three stages ----

whole_run() {
  train 1 one || return 1
  for f in recipe.yaml metrics.jsonl report.json sft/model.safetensors reward/config.json \
    actor/tokenizer.model critic/model.safetensors samples/step_000004.jsonl; do
    [ -s "one/$f" ] || { echo "# no $f"; return 1; }
  done
  [ "$(wc -l <one/metrics.jsonl)" = 17 ] # 14 steps, and one line before the first of each stage
}
ok "sft, reward and ppo on one rank" whole_run

averaged() { ! cmp -s one/sft/model.safetensors one/actor/model.safetensors; } # ppo.ema_decay: the average is what is saved
ok "the averaged actor has moved from where it started" averaged
others() { [ "$(grep '"stage":"ppo"' one/metrics.jsonl | grep -o '"prompt_tokens":[0-9]*' | sort -u | wc -l)" -gt 2 ]; }
ok "each step has prompts of its own" others
before_and_after() { [ "$(grep -c '^  before ' out)" = 4 ] && [ "$(grep -c '^  after ' out)" = 4 ]; }
ok "held-out answers are shown before and after" before_and_after

numbers_make_sense() { # DIRECTORY
  figures "$1" | awk '
    /"stage":"ppo"/ && !/"step":0,/ {
      n++
      split($0, x, "\"first_ratio_deviation\":"); split(x[2], y, ",")
      if (y[1] != "null" && !(y[1] <= 1e-5)) bad = 1   # the update starts from the rollout policy
      split($0, x, "\"gap_max\":"); split(x[2], y, ",")
      if (!(y[1] <= 1e-5)) bad = 1                     # sampled and recomputed log-probs agree
    }
    END { exit bad || n != 4 }' &&
    grep -q '"step":1,.*"actor_updates":0,.*"critic_updates":6' "$1/metrics.jsonl" # warm-up
}
ok "ratios start at 1, rollout and update agree, the critic warms up alone" numbers_make_sense one
controller() { # the factor of a step follows from the KL that the step before logged (horizon 10000); once by no more than its bounds
  figures one | awk '
    function of(key,  x, y) { split($0, x, "\"" key "\":"); split(x[2], y, ","); return y[1] }
    /"stage":"ppo"/ && !/"step":0,/ {
      n++
      if (n > 1) { d = of("kl_coef") / want - 1; if (d < -1e-12 || d > 1e-12) bad = 1 }
      e = of("kl") / 0.6 - 1
      within += e > -0.2 && e < 0.2
      if (e < -0.2) e = -0.2
      if (e > 0.2) e = 0.2
      want = of("kl_coef") * (1 + e * of("sequences") / 10000)
    }
    END { exit bad || n != 4 || !within }'
}
ok "the controller is fed the KL that is logged" controller

phases_add_up() {
  sed 's/.*"seconds":{//; s/}.*//; s/"//g' one/metrics.jsonl | awk -F, '
    {
      sum = 0
      for (i = 1; i <= NF; i++) { split($i, x, ":"); if (x[1] == "step") step = x[2]; else sum += x[2] }
      if (!(sum > 0.98 * step && sum < 1.02 * step)) bad = 1
    }
    END { exit bad || NR == 0 }'
}
ok "the phases of a step add up to it" phases_add_up

report_again() { "$rlhf" report one | cmp - <(sed -n '/ steps on /,$p' out); }
ok "rlhf report prints the table again" report_again
gap_line() { grep -qE '^log-probabilities of rollout and update: \|difference\| [0-9.]+e-0[6-9] in the mean, .*mean exp\|difference\| 1\.00000' out; }
ok "and how far rollout and update are apart" gap_line

within_plan() {
  awk '/^memory plan/ { on = 1 } on && $1 ~ /^(sft|reward|ppo)$/ && NF == 9 { if ($NF > most) most = $NF }
       /^total / { peak = $NF } END { exit !(peak > 0 && most > 0 && peak <= most + 0.1) }' err out
}
ok "peak memory stays within the plan" within_plan
hotter() { train 1 hot --set 'stages=[ppo]' --set ppo.normalize_scores=false \
  --set 'rewards=[{kind: length, target: 6}]' --set rollout.temperature=0.6 --set optimizer.actor.schedule=linear && numbers_make_sense hot; }
ok "and at another temperature than 1" hotter
# One step of four is the critic's alone; the rate falls to a tenth.
is "the actor's rate falls over the steps that it makes" "$(grep -o '"actor_lr":[^,]*' hot/metrics.jsonl | cut -d: -f2 | paste -sd' ')" "0 0.001 0.00055 0.0001"

for n in 2 3 4; do
  ranks() { train "$n" "ranks$n" && same_to 1e-5 one "ranks$n"; }
  ok "the same on $n ranks to 1e-5" ranks
done
nodes() { train 4 nodes --set zeropp.ranks_per_node=2 && same_to 1e-5 one nodes && grep -q inter out; }
ok "the same on 2 nodes of 2 ranks" nodes

# What a rank holds of the actor in a rollout changes nothing but memory and what travels in a node.
for weights in tensor_parallel stream; do
  held() {
    train 4 "$weights" --set zeropp.ranks_per_node=2 --set zeropp.hpz=on --set rollout.weights="$weights" --set zeropp.accumulate=node &&
      same_to 1e-5 one "$weights"
  }
  ok "the same with a rollout's weights as $weights, and gradients that cross nodes once a step" held
done

# Codes: refused where none of the matrices takes them, as here with rows of 36 and 50; else a gap, which is corrected.
ok "codes that no matrix takes are refused" fails 'none of the .* matrices' train 1 codes --set rollout.format=int8
codes() {
  train 2 codes --set stages='[ppo]' --set ppo.normalize_scores=false --set 'rewards=[{kind: length, target: 6}]' \
    --set models.actor.init.hidden_size=48 --set models.actor.init.ffn=64 --set rollout.format=int8 &&
    tail -n 1 codes/metrics.jsonl | sed 's/.*"gap_mean"://; s/,.*//' | awk '{ exit !($1 > 1e-5 && $1 < 0.1) }' &&
    tail -n 1 codes/metrics.jsonl | grep -q '"importance_mean":[01]\.'
}
ok "a rollout in codes is apart from the update, and corrected" codes

# What zeropp.refresh changes is bytes: dense and by delta are bit for bit the same run, and a step says what it sent.
delta() { # RANKS RANKS-PER-NODE
  local sets="--set zeropp.ranks_per_node=$2 --set zeropp.wire=bfloat16 --set zeropp.hpz=on --set run.overwrite=true" key
  train "$1" dense $sets && train "$1" delta $sets --set zeropp.refresh=delta && same_run dense delta &&
    grep -q '^refresh: .* of weights changed' out && ! grep -q _refresh dense/metrics.jsonl &&
    for key in '"sft","step":2,.*"model' '"reward","step":2,.*"model' '"ppo","step":3,.*"actor' '"ppo","step":3,.*"critic'; do
      grep -qE "$key"'_refresh":\{"changed":0?\.[0-9]+,"bytes":[0-9]+,"bfloat16_bytes":[0-9]+,"int8_bytes":[0-9]+,"delta_units":[0-9]+,"dense_units":[0-9]+\}' \
        delta/metrics.jsonl || { echo "# no $key"; return 1; }
    done
}
for grid in "2 1" "4 2" "6 3" "8 2"; do
  # shellcheck disable=SC2086
  ok "refreshes by delta on ranks and ranks per node $grid: the same bits in all stages, and what they sent" delta $grid
done

# Rates that rise from where deltas are shorter to where int8 is: both forms, and a run that is taken up again from a
# checkpoint in the middle refreshes in the same ones.
automatic() {
  local sets="--set zeropp.ranks_per_node=1 --set zeropp.wire=bfloat16 --set zeropp.hpz=on --set zeropp.qwz=int8"
  sets="$sets --set zeropp.refresh=auto --set stages=[sft] --set sft.steps=10 --set sft.eval_every=0"
  sets="$sets --set checkpoint.keep=9 --set optimizer.sft.lr=6e-3 --set optimizer.sft.warmup_steps=10"
  # shellcheck disable=SC2086
  train 2 auto $sets && cp -r auto again && rm -r again/checkpoints/step_0000{08,10} &&
    train 2 again $sets --resume && same_run auto again || return 1
  grep -q '"step":4,.*"delta_units":4,"dense_units":0' auto/metrics.jsonl &&
    grep -q '"step":7,.*"delta_units":[01],"dense_units":[34]' auto/metrics.jsonl
}
ok "refreshes whose form is chosen: both of them, and the same after a resume" automatic

micro() { train 1 micro --set batch.micro_tokens=40 --set zeropp.recompute=full && same_to 1e-5 one micro; }
ok "the same with other micro-batches and recomputation" micro

stops() {
  train 1 stops --set ppo.max_kl=1e-9 --set ppo.normalize_scores=false && # the first update of a step starts at KL 0
    [ "$(grep -c '"actor_updates":2,.*"epochs":1,.*"stopped_by_kl":1' stops/metrics.jsonl)" = 3 ]
}
ok "a step's epochs end when its KL passes the limit" stops
number() { grep -m 1 -oE "\"$1\": *-?[0-9.e+-]+" "$2" | head -n 1 | sed 's/.*: *//'; } # KEY FILE
normalized() { # the same answers' scores, by the mean and deviation that the reward stage noted
  awk "BEGIN {
    want = ($(number eval_score_model stops/metrics.jsonl) - $(number rlhf_score_mean one/reward/config.json)) / $(number rlhf_score_std one/reward/config.json)
    d = want - $(number eval_score_model one/metrics.jsonl)
    exit !(d < 1e-5 && d > -1e-5)
  }"
}
ok "scores are normalized when asked for" normalized
filters() { train 1 filters --set rollout.top_k=5 --set rollout.filters=allow &&
  tail -n 1 filters/metrics.jsonl | sed 's/.*"gap_mean"://; s/,.*//' | awk '{ exit !($1 > 0.5) }'; }
ok "filtered sampling shows as a gap to the update's log-probs" filters
weighed() { # every weight of a top-k sample is the probability that the filter kept, at most 1
  tail -n 1 filters/metrics.jsonl | sed 's/.*"importance_mean"://; s/,.*//' | awk '{ exit !($1 > 0 && $1 < 0.95) }' &&
    tail -n 1 filters/metrics.jsonl | grep -q '"importance_capped":0,' &&
    grep -q '^importance weights: 0\.[0-9]* in the mean, 0.00 % at the cap' out && ! grep -q '"importance_mean":[0-9]' one/metrics.jsonl
}
ok "and is corrected by importance weights" weighed
renormalized() { # the log-probabilities of scoring and update are over what was drawn from: no gap but rounding
  local sets='--set rollout.top_k=6 --set rollout.top_p=0.9 --set rollout.min_p=0.02 --set rollout.min_new_tokens=3 --set rollout.filters=renormalize'
  # shellcheck disable=SC2086
  train 1 renorm $sets && numbers_make_sense renorm && train 3 renorm3 $sets && same_to 1e-5 renorm renorm3 &&
    tail -n 1 renorm/metrics.jsonl | sed 's/.*"entropy"://; s/,.*//' | awk '{ exit !($1 > 0 && $1 < log(6)) }'
}
ok "or there is none, where the update's are renormalized" renormalized
ok "as far as the host has room" fails 'renormalize takes [0-9]* MiB of the host' train 1 huge --set stages='[ppo]' --set models.actor.init.vocab_size=60000 \
  --set rollout.top_k=6 --set rollout.filters=renormalize --set rollout.prompts_per_step=1000000 \
  --set rollout.samples_per_prompt=20 --set ppo.minibatches=1 --set ppo.normalize_scores=false \
  --set 'rewards=[{kind: length, target: 6}]'
coded() { # rows of 48 and 64 have codes, those of 36 and 50 none; codes on an edge go either way by rounding
  local sets='--set models.actor.init.hidden_size=48 --set models.actor.init.ffn=64 --set rollout.format=int8'
  # shellcheck disable=SC2086
  train 1 coded $sets && tail -n 1 coded/metrics.jsonl | grep -o '"gap_mean":[^,]*' |
    awk -F: '$2 > 1e-4 && $2 < 0.1 { found = 1 } END { exit !found }' &&
    grep -q '^importance weights: [01]\.[0-9]* in the mean' out &&
    train 2 coded2 $sets --set rollout.weights=tensor_parallel && same_to 1e-3 coded coded2
}
ok "answers drawn with weights in codes, whole or in slices" coded
bar() { train 1 bar --set stages='[sft]' --set report.progress=bar && grep -q '\[=*\] sft 5/5' err; }
ok "a bar is drawn when asked for" bar

# ---- run directories ----

in_use() { fails 'one: not empty' train 1 one && [ "$(wc -l <one/metrics.jsonl)" = 17 ]; }
ok "a directory in use is refused" in_use
ended() { train 1 one --resume && grep -q 'has ended already' err; }
ok "resuming an ended run says so" ended
longer() { # asked for what it does not do, it does not end as if it had
  cp one/recipe.yaml had.yaml
  fails 'one: the run has ended already, and not with this recipe (another rewards.1.weight, ppo.steps)' \
    train 2 one --resume --set ppo.steps=9 --set rewards.1.weight=2 && cmp one/recipe.yaml had.yaml
}
ok "and with another recipe is refused" longer
ok "nothing to resume is an error" fails 'nothing to resume' train 1 nowhere --resume
train 1 reading --set stages='[sft]' --set sft.steps=1
again() {
  echo mine >one/notes.txt
  train 1 one --set run.overwrite=true --set stages='[sft]' && [ ! -e one/actor ] && [ -s one/notes.txt ]
}
ok "run.overwrite starts anew" again
keeps() { # what is no run's, and what this run reads, stays
  mkdir other && cp -r reading other/actor && fails 'other: found actor, but no run' train 1 other --set run.overwrite=true &&
    for key in models.actor.path tokenizer.path; do
      fails "$key: found .*reading/sft, which run.overwrite would remove" train 1 reading \
        --set run.overwrite=true --set models.actor=ranks2/sft --set "$key=reading/sft" || return 1
    done &&
    diff -r reading other/actor
}
ok "and removes neither what is no run's nor what is to be read" keeps
unwritable() { fails 'tiny.yaml/run' train 1 tiny.yaml/run; }
ok "an impossible directory is refused" unwritable

# ---- killed and resumed ----

# Each evaluation of the rewards takes a tenth of a second, so that a kill hits the middle.
slow() { # RANKS DIRECTORY ARGUMENT...
  train "$@" --set 'rewards=[{kind: model}, {kind: command, command: "sleep 0.1; awk \"{print 0.01 * length}\""}]' \
    --set ppo.steps=8 --set ppo.eval_every=4
}

# A process that runs rlhf itself for this directory; mpirun is none.
pid_of() { # DIRECTORY
  local p
  for p in $(grep -lazx "run.directory=$1" /proc/[0-9]*/cmdline 2>/dev/null); do
    p=${p%/cmdline}
    [ "$p/exe" -ef "$rlhf" ] && echo "${p#/proc/}" && return
  done
}

# killed_at DIRECTORY CHECKPOINT COMMAND...: one of the command's processes is killed with -9 as soon as
# the checkpoint is there; again where that was after its end, as on a busy machine.
killed_at() {
  local dir=$1 checkpoint=$1/checkpoints/$2 job pid
  shift 2
  for _ in 1 2 3 4 5 6 7 8; do
    rm -rf "$dir"
    "$@" &
    job=$!
    wait_for "$dir/recipe.yaml"
    pid=$(pid_of "$dir")
    while [ ! -e "$checkpoint" ] && [ -e "/proc/$pid" ]; do :; done # a sleep would come too late
    [ -n "$pid" ] && kill -9 "$pid"
    wait "$job" 2>/dev/null # bash says that it was killed, on its own stderr
    grep -q '"done"' "$dir"/checkpoints/*/state.json || return 0
  done
  return 1
}

ppo_resume() { # RANKS
  local n=$1
  slow "$n" "plain$n" || return 1
  killed_at "cut$n" step_000012 slow "$n" "cut$n" || { echo "# not killed in time"; return 1; }
  cp -r "cut$n" "copy$n"
  slow "$n" "cut$n" --resume && same_run "plain$n" "cut$n"
}
ok "killed in ppo and resumed: bit for bit, 1 rank" ppo_resume 1
ok "killed in ppo and resumed: bit for bit, 2 ranks" ppo_resume 2
other_ranks() { # and with another recipe, which becomes the run's
  slow 3 copy2 --resume --set checkpoint.keep=3 && same_to 1e-5 plain2 copy2 && grep -qx '  keep: 3' copy2/recipe.yaml
}
ok "resumed on another number of ranks" other_ranks
half_written() {
  cp -r copy1 hurt
  mkdir copy1/checkpoints/step_000099 copy1/checkpoints/step_000098.tmp &&
    slow 1 copy1 --resume && grep -q 'not whole' err && same_run plain1 copy1
}
ok "a half-written checkpoint is passed over" half_written
fewer() { # steps of the whole stage, mistaken for those to come, would end it
  fails '[0-9] steps are made, and the recipe comes to 1; expected [0-9]' train 1 hurt --resume --set ppo.steps=1 --set rewards=null &&
    grep -q 'warning: the recipe is not the one this run began with (hurt/recipe.yaml): going on with another ppo.steps, ppo.eval_every, rewards.1.kind, rewards.1.weight and 2 more$' err
}
ok "fewer steps than are made are refused, and changes of the recipe named" fewer
damaged() { # a checkpoint of which a byte was lost; the run keeps the recipe that it has
  local file recipe at was
  recipe=$(cat hurt/recipe.yaml)
  file=$(ls -d hurt/checkpoints/step_* | tail -n 1)/actor.safetensors
  at=$(($(stat -c %s "$file") / 2))
  was=$(od -An -tu1 -j "$at" -N 1 "$file")
  printf "\\$(printf %o $((255 - was)))" | dd of="$file" bs=1 seek="$at" conv=notrunc 2>/dev/null
  fails "$file: damaged" slow 1 hurt --resume --set report.progress=bar && [ "$recipe" = "$(cat hurt/recipe.yaml)" ]
}
ok "a damaged checkpoint is refused" damaged

two_at_once() { # as when a job and its restart meet
  (flock 9 && fails 'copy1: another process runs in this directory' train 2 copy1 --resume) 9<copy1 &&
    (flock 9 && fails 'copy1: another process runs in this directory' train 1 copy1 --set run.overwrite=true) 9<copy1 &&
    same_run plain1 copy1
}
ok "two processes do not run in one directory" two_at_once

sft_only() { train 1 "$@" --set stages='[sft]' --set sft.steps=150 --set checkpoint.every=10; }
sft_resume() {
  sft_only sft_plain || return 1
  killed_at sft_cut step_000010 sft_only sft_cut || { echo "# not killed in time"; return 1; }
  sft_only sft_cut --resume && same_run sft_plain sft_cut
}
ok "killed in sft and resumed: bit for bit" sft_resume
boundary_kept() { train 1 first --set stages='[sft, reward]' && [ -d first/checkpoints/step_000010 ]; }
ok "the end of a stage is a checkpoint" boundary_kept
only_kept() { [ "$(ls plain1/checkpoints | wc -l)" = 2 ]; }
ok "only the newest checkpoints are kept" only_kept

# ---- what must be refused ----

bad_command() {
  fails 'rewards.1. .command.*exit.* 3' train 2 bad --set 'rewards=[{kind: model}, {kind: command, command: "exit 3"}]' &&
    [ ! -e bad/actor ]
}
ok "a failing reward command ends the run with one error" bad_command
poison() { # FROM TO: a model whose last weight is no number
  cp -r "$1" "$2"
  printf '\377\377\377\377' | dd of="$2/model.safetensors" bs=1 seek=$(($(stat -c %s "$2/model.safetensors") - 4)) conv=notrunc 2>/dev/null
}
not_a_number() {
  poison ranks2/sft bad_actor && poison ranks2/reward bad_reward &&
    fails 'stage sft: none of the last 5 steps changed a model' train 2 nan --set models.actor=bad_actor --set stages='[sft]' &&
    fails 'stage ppo: models.reward: the score of answer 0 is -*nan' train 2 nan2 --set models.reward=bad_reward --set stages='[ppo]' &&
    [ ! -e nan/sft ] && [ ! -e nan2/actor ] && grep -q '"skipped_steps":5,' nan/metrics.jsonl
}
ok "weights that are no numbers end a run" not_a_number
broken() {
  sed 's/steps: 4/steps: many/; s/lr: 1.0e-3/lr: -1/' tiny.yaml >broken.yaml
  "$rlhf" train broken.yaml --set run.directory=broken >out 2>err
  [ $? = 1 ] && grep -q 'broken.yaml:[0-9]*:[0-9]*: ppo.steps' err &&
    grep -q 'broken.yaml:[0-9]*:[0-9]*: optimizer.actor.lr' err && [ ! -e broken ]
}
ok "a broken recipe writes nothing" broken
ok "a missing data file is named" fails 'gone.jsonl' train 1 gone --set data.sft.path=gone.jsonl
ok "a tokenizer larger than the embedding is refused" \
  fails 'models.actor: the tokenizer has' train 1 vocab --set models.actor.init.vocab_size=50
many() { fails 'tokens a step; expected at most' train 1 never --set rollout.prompts_per_step=1000000 \
  --set rollout.samples_per_prompt=1020 --set ppo.minibatches=1; }
ok "more tokens than can be numbered are refused" many
ok "what a device refuses has its place" fails '^rlhf: --set zeropp.refresh=auto: zeropp.refresh: found auto with' \
  train 1 place --set zeropp.refresh=auto --set zeropp.hpz=on
ok "a plan that does not fit is refused before anything is allocated" \
  fails 'stage sft needs' train 1 memory --set models.actor.init.hidden_size=65536 \
  --set models.actor.init.heads=256 --set models.actor.init.layers=500 --set models.actor.init.ffn=65536

# A limit on the size of files stands for a full disk: writes and reservations fail half-way.
full_disk() { # KIBIBYTES DIRECTORY ARGUMENT...
  local limit=$1
  shift
  (trap '' XFSZ && ulimit -f "$limit" && train 1 "$@")
}
no_space_model() {
  fails 'File too large' full_disk 50 full1 --set checkpoint.every=0 &&
    [ ! -e full1/sft ] && [ ! -e full1/sft.tmp ]
}
ok "no space for a model: one error, no half model" no_space_model
no_space_checkpoint() {
  fails 'File too large' full_disk 50 full2 && [ -z "$(ls full2/checkpoints)" ]
}
ok "no space for a checkpoint: one error, no half checkpoint" no_space_checkpoint
no_space_metrics() {
  fails 'metrics.jsonl: File too large' full_disk 8 full3 --set sft.steps=60 --set checkpoint.every=0 &&
    [ -s full3/metrics.jsonl ] && ! grep -qv '^{.*}$' full3/metrics.jsonl
}
ok "no space for a line: one error, whole lines only" no_space_metrics

# ---- check ----

check_prints() {
  "$rlhf" check tiny.yaml >checked.yaml 2>err && "$rlhf" check checked.yaml >twice.yaml 2>err &&
    cmp checked.yaml twice.yaml && [ ! -e run ] && grep -q 'memory plan' err
}
ok "check prints a recipe that loads back, and writes nothing" check_prints
check_all_at_once() {
  "$rlhf" check tiny.yaml --set data.sft.path=gone.jsonl --set data.prompts.path=lost.jsonl >out 2>err
  [ $? = 1 ] && grep -q gone.jsonl err && grep -q lost.jsonl err && [ ! -s out ]
}
ok "check names all problems at once" check_all_at_once
check_gone() { "$rlhf" check tiny.yaml --set models.actor=gone --set tokenizer=null >out 2>err; }
check_hints() {
  "$rlhf" check tiny.yaml --set batch.sft=58 --set batch.reward=28 2>&1 | grep '^rlhf: warning' >err
  [ "$(cat err)" = 'rlhf: warning: batch.sft: 58 a step, and data.sft has 57: a step takes some more than once' ] &&
    fails "models.actor: $tmp/gone: no such folder" check_gone
}
ok "and warns of a step that sees examples twice" check_hints
echo "1..$number"
