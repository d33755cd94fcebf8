#!/usr/bin/env bash
# What a recipe asks for is what the stages do: figures that follow from others or are known beforehand. Steps of tiny
# models, each a few hundredths of a second.
. tests/tap.sh
holds() { awk "BEGIN { exit !($1) }"; }
near() { holds "($1) - ($2) < ${3:-1e-5} && ($2) - ($1) < ${3:-1e-5}"; }
awk 'BEGIN { for (i = 1; i <= 40; i++) printf "{\"prompt\": \"%d is the number of %s\", \"answer\": \"%d\", \"completion\": \" %s\", \"chosen\": \" %s good\", \"rejected\": \" bad%s\", \"margin\": %d}\n",
  i, substr("owls and foxes and hens", 1, 4 + i % 19), i, substr("the cat is in the house", 1, 2 + i * 7 % 21), i, substr(" and worse", 1, i % 9), i % 4 }' >data.jsonl
cat >start.yaml <<EOF
run: {directory: start, threads: 1, overwrite: true}
tokenizer: {path: $root/recipes/demo}
models: {actor: {init: {hidden_size: 16, layers: 1, heads: 2, ffn: 16, max_positions: 64, init_std: 0.3}}}
data: {sft: {path: data.jsonl, max_tokens: 60}, preference: {path: data.jsonl, max_tokens: 60}, prompts: {path: data.jsonl, max_records: 12, held_out: 0.3}}
stages: [sft, reward]
sft: {steps: 15, eval_every: 0}
reward: {steps: 2, eval_every: 0}
batch: {sft: 8, reward: 8}
optimizer: {sft: {lr: 3.0e-2, schedule: constant}, reward: {lr: 1.0e-2, schedule: constant}, actor: {lr: 1.0e-3}, critic: {lr: 1.0e-3}}
report: {measure_peak: false}
EOF
ok "models to start from" run train start.yaml
ok "and a reference apart from them" run train start.yaml --set run.directory=apart --set sft.steps=10 --set stages='[sft]'
cp -r start/reward zero # a critic that says 0: its head is the file's last tensor
dd if=/dev/zero of=zero/model.safetensors bs=4 seek=$(($(stat -c %s zero/model.safetensors) / 4 - 16)) count=16 conv=notrunc 2>dd.err
sed "s|^stages:.*|stages: [ppo]|; s|{directory: start|{directory: run|
  s|^models:.*|models: {actor: start/sft, critic: start/reward, reward: start/reward, reference: apart/sft}|" start.yaml >ppo.yaml
cat >>ppo.yaml <<EOF
rollout: {prompts_per_step: 8, max_new_tokens: 5}
ppo: {steps: 1, epochs: 1, kl_coef: 0.1, eval_every: 0, whiten_advantages: false}
rewards: [{kind: length, target: 2}]
EOF
ppo() { # KEY=VALUE...: one step, or as many as are asked for; its figures are `of KEY [LINE]`
  local sets=()
  for s in "$@"; do sets+=(--set "$s"); done
  run train ppo.yaml "${sets[@]}"
  return "$rc"
}
of() { sed -n "${2:-$}p" run/metrics.jsonl | grep -oE "\"$1\":[^,]*" | head -1 | cut -d: -f2; }

# ---- sums ----

for kind in k1 k2 k3; do
  parts() {
    ppo ppo.kl_in=loss ppo.kl_coef=0.3 ppo.kl_estimator="$kind" ppo.entropy_coef=0.02 ppo.missing_eos_penalty=0.7 &&
      near "$(of actor_loss)" "$(of policy_loss) - 0.02 * $(of entropy) + 0.3 * $(of update_kl_ref)" &&
      near "$(of update_kl_ref)" "$(of kl_per_token)" && # of the old policy and, before it has moved, of the new one
      near "$(of shaped_reward_mean)" "$(of reward_mean) - 0.7 * (1 - $(of eos_fraction))" &&
      holds "$(of eos_fraction) > 0 && $(of eos_fraction) < 1 && $(of kl_per_token) != 0"
  }
  ok "the loss is policy, entropy and KL ($kind); a KL in it is in no reward" parts
  eval "kl_$kind=$(of kl_per_token)"
done
ok "three estimators, of which k2 and k3 are never below 0" holds "$kl_k2 > 0 && $kl_k3 > 0 && $kl_k2 != $kl_k3 && $kl_k1 != $kl_k2"
paid() { # k3, in the reward
  ppo ppo.kl_coef=0.3 ppo.kl_estimator=k3 ppo.missing_eos_penalty=0.7 ppo.reward_clip=0 &&
    near "$(of shaped_reward_mean)" "$(of reward_mean) - 0.3 * $(of kl) - 0.7 * (1 - $(of eos_fraction))" &&
    near "$(of kl_per_token)" "$kl_k3" && near "$(of actor_loss)" "$(of policy_loss)"
}
ok "rewards are score, KL and the penalty for an answer without an end" paid
clipped() { ppo ppo.kl_coef=0 ppo.reward_clip=0.001 ppo.missing_eos_penalty=5 && holds "$(of reward_mean) < -0.2" && holds "$(of shaped_reward_mean) >= -0.00101"; }
ok "and scores are clipped, behind the penalty" clipped
adaptive() { # the second step's factor is what the controller made of the first's, and of no more than a fifth
  ppo ppo.steps=2 ppo.kl_in="$1" ppo.kl_coef=0.3 ppo.kl_controller=adaptive ppo.kl_horizon=40 ppo.kl_target="$2" &&
    near "$(of kl_coef)" "0.3 * (1 + $3 * 8 / 40)"
}
in_loss() { adaptive loss 100 -0.2 && near "$(of actor_loss)" "$(of policy_loss) + $(of kl_coef) * $(of update_kl_ref)"; }
ppo
ok "the controller is fed an answer's KL" adaptive reward "$(awk "BEGIN { printf \"%.15g\", $(of kl) / 1.1 }")" 0.1
ok "and its factor is the loss's" in_loss
weights() {
  ppo 'rewards=[{kind: length, target: 4, weight: 0.3}, {kind: regex, pattern: "e", weight: -2}, {kind: words, words: [a], weight: 0}]' &&
    near "$(of reward_mean)" "0.3 * $(of score_length) - 2 * $(of score_regex)" && holds "$(of score_regex) > 0"
}
ok "a score is the weighted sum of its terms" weights
normalized() {
  local score mean std
  mean=$(grep -oE '"rlhf_score_mean": [^,}]*' start/reward/config.json | cut -d' ' -f2)
  std=$(grep -oE '"rlhf_score_std": [^,}]*' start/reward/config.json | cut -d' ' -f2)
  ppo 'rewards=[{kind: model}]' && score=$(of reward_mean) &&
    ppo 'rewards=[{kind: model}]' ppo.normalize_scores=true && near "$(of reward_mean)" "($score - $mean) / $std" 1e-4
}
ok "the reward model's scores are normalized" normalized

# ---- advantages: with a critic that says 0 they are known ----

zero='models.critic=zero ppo.gamma=1 ppo.lambda=1 ppo.kl_coef=0 ppo.value_clip=0'
# shellcheck disable=SC2086
by_hand() { # the advantage of a token is then the answer's score
  ppo $zero ppo.mean=sequence && near "$(of policy_loss)" "-1 * $(of reward_mean)" &&
    near "$(of value_loss)" "0.5 * ($(of reward_std) ^ 2 + ($(of reward_mean)) ^ 2)" &&
    ppo $zero ppo.mean=token && ! near "$(of policy_loss)" "-1 * $(of reward_mean)" 1e-3 &&
    ppo $zero ppo.gamma=0.9 ppo.lambda=0.8 rollout.min_new_tokens=10 rollout.max_new_tokens=10 ppo.importance=off &&
    near "$(of policy_loss)" "-1 * $(of reward_mean) * (1 - 0.72 ^ 10) / (1 - 0.72) / 10"
}
ok "advantages by hand, over sequences and tokens, with a discount" by_hand
discount() { # at gamma 0 nothing is left of lambda, at lambda 0 gamma still counts
  local loss
  ppo ppo.gamma=0 ppo.lambda=0 && loss=$(of value_loss) && ppo ppo.gamma=0 ppo.lambda=0.9 && near "$(of value_loss)" "$loss" 1e-12 &&
    ppo ppo.gamma=0.9 ppo.lambda=0 && ! near "$(of value_loss)" "$loss"
}
ok "gamma is the discount, lambda the trace" discount
whitened() { ppo && holds "($(of policy_loss)) ^ 2 > 1e-4" && ppo ppo.whiten_advantages=true && near "$(of policy_loss)" 0 1e-6; }
ok "whitened advantages have mean 0" whitened
scaled() {
  local norm loss
  ppo ppo.vf_coef=0.25 && norm=$(of critic_grad_norm) loss=$(of value_loss) &&
    ppo ppo.vf_coef=1 && near "$(of critic_grad_norm) / $norm" 4 && near "$(of value_loss)" "$loss"
}
ok "vf_coef scales the critic's gradient" scaled

# ---- learning rates ----

ppo ppo.steps=4 ppo.critic_warmup_steps=1 'optimizer.actor={lr: 8.0e-4, schedule: linear, warmup_steps: 2, min_lr_ratio: 0.25}' \
  'optimizer.critic={lr: 4.0e-4, schedule: linear, min_lr_ratio: 0.5}'
is "learning rates of actor and critic, each with its own beginning and end" \
  "$(for i in 1 2 3 4; do of actor_lr $i; of critic_lr $i; done | awk '{ printf "%.6g ", $1 }')" \
  "0 0.0004 0.0004 0.000333333 0.0008 0.000266667 0.0002 0.0002 "
run train start.yaml --set run.directory=rates --set sft.steps=3 --set reward.steps=3 \
  --set 'optimizer.sft={lr: 4.0e-4, schedule: linear, min_lr_ratio: 0.5}' --set 'optimizer.reward={lr: 8.0e-4, schedule: linear, min_lr_ratio: 0.5}'
is "and of the other stages" "$(grep -oE '"lr":[^,]*' rates/metrics.jsonl | cut -d: -f2 | awk '{ printf "%.6g ", $1 }')" \
  "0.0004 0.0003 0.0002 0.0008 0.0006 0.0004 "

# ---- which model a key moves ----

moves() { # actor|critic|both KEY=VALUE: a step of three epochs with and without it
  local found
  ppo "${base[@]}" "$2" || return 1
  found=$(for m in actor critic; do cmp -s run/$m/model.safetensors base/$m/model.safetensors || echo $m; done)
  [ "${found/actor*critic/both}" = "$1" ] || { echo "# moves ${found:-nothing}"; return 1; }
}
base=(ppo.epochs=3 optimizer.actor.lr=0.01 optimizer.critic.lr=0.01 'rewards=[{kind: model}]' rollout.top_k=50 rollout.filters=allow)
ok "a step to compare with" ppo "${base[@]}"
rm -rf base && mv run base
while read -r which key; do
  ok "$key moves $which" moves "$which" "$key"
done <<EOF
actor ppo.clip_low=0.01
actor ppo.clip_high=0.01
actor ppo.importance_cap=0.01
actor ppo.ema_decay=0.5
actor ppo.critic_warmup_steps=1
actor ppo.whiten_advantages=true
actor ppo.entropy_coef=0.01
actor optimizer.actor.weight_decay=1
actor optimizer.actor.beta1=0.5
actor optimizer.actor.beta2=0.5
actor optimizer.actor.eps=0.01
actor optimizer.actor.max_grad_norm=0.001
critic optimizer.critic.weight_decay=1
critic optimizer.critic.beta1=0.5
critic optimizer.critic.beta2=0.5
critic optimizer.critic.eps=0.01
critic optimizer.critic.max_grad_norm=0.001
critic ppo.value_clip=0.001
both ppo.minibatches=2
both ppo.mean=sequence
both ppo.max_kl=0.000001
both ppo.missing_eos_penalty=1
EOF
averaged() { ppo "${base[@]}" ppo.ema_decay=0.5 && mv run/actor half && ppo "${base[@]}" ppo.ema_decay=0.9 && ! cmp -s run/actor/model.safetensors half/model.safetensors; }
ok "and by how much ema_decay says" averaged
stage_moves() { # MODELS KEY=VALUE: the stages before, as long as those that were started from
  run train start.yaml --set run.directory=run --set "$2" &&
    is "$2 moves $1" "$(for m in sft reward; do cmp -s run/$m/model.safetensors start/$m/model.safetensors || echo $m; done | xargs)" "$1"
}
for key in weight_decay=1 max_grad_norm=0.001; do
  stage_moves 'sft reward' optimizer.sft.$key
  stage_moves reward optimizer.reward.$key
done

# ---- who draws what ----

# An answer's score: 1 where no other of its batch reads so; and the batch is kept in the log.
fresh="rewards=[{kind: command, command: \"tee -a log | awk '{ print !seen[\$0]++ }'\"}]"
distinct() { ppo "$fresh" rollout.samples_per_prompt=3 rollout.prompts_per_step=2 rollout.max_new_tokens=20 rollout.min_new_tokens=10 && near "$(of reward_mean)" 1; }
ok "the samples of a prompt differ" distinct
answers() { # KEY=VALUE...: a sum over what was drawn from one prompt
  rm -f log
  ppo "$fresh" rollout.prompts_per_step=1 rollout.max_new_tokens=10 data.prompts.max_records=1 data.prompts.held_out=0 rollout.filters=allow "$@" && cksum log
}
drawn=$(answers)
for key in run.seed=2 rollout.temperature=0.5 rollout.min_new_tokens=10 rollout.top_k=1 rollout.top_p=0.1 rollout.min_p=0.9 rollout.repetition_penalty=9; do
  ok "other answers by $key" [ "$(answers $key)" != "$drawn" ]
done
ok "and the same by what does not concern them" [ "$(answers ppo.gamma=0.9)" = "$drawn" ]
anew() { answers ppo.steps=2 optimizer.actor.lr=1e-12 >drawn && [ "$(sort -u log | wc -l)" = 2 ]; }
ok "each step draws anew" anew
order() { # eight prompts, four a step: each once in two steps, then in another order, and in another by another seed
  rm -f log
  ppo "$fresh" data.prompts.max_records=8 data.prompts.held_out=0 rollout.prompts_per_step=4 ppo.steps=4 && cut -d, -f1 log >first &&
    [ "$(head -n 8 first | sort -u | wc -l)" = 8 ] && [ "$(tail -n 8 first | sort -u | wc -l)" = 8 ] && ! cmp -s <(head -n 8 first) <(tail -n 8 first) &&
    rm log && ppo "$fresh" data.prompts.max_records=8 data.prompts.held_out=0 run.seed=2 &&
    [ "$(cut -d, -f1 log | sort)" = "$(head -n 8 first | sort)" ] && ! cmp -s <(cut -d, -f1 log) <(head -n 8 first)
}
ok "prompts come once an epoch each, in an order of the seed's and the epoch's" order
mine() {
  rm -f log
  ppo "$fresh" data.prompts.answer_field=answer && [ "$(sed -E 's/^\{"prompt":"([0-9]+) .*"answer":"([0-9]+)"\}$/\1 \2/' log | awk '$1 == $2' | wc -l)" = 8 ]
}
ok "rewards see the prompt that was answered, and its answer" mine
held() { # four of twelve
  rm -f log
  ppo "$fresh" ppo.eval_every=1 optimizer.actor.lr=1e-12 && cmp run/samples/step_000000.jsonl run/samples/step_000001.jsonl &&
    head -n 4 log | cut -d, -f1 | sort >held && sed -n 5,12p log | cut -d, -f1 | sort >trained &&
    [ "$(sort -u held trained | wc -l)" = 12 ] && [ -z "$(comm -12 held trained)" ]
}
ok "evaluation draws alike each time, from prompts that are not trained on" held
nameless() {
  cp -r start/sft nameless && sed -i 's/"eos_token_id": *[0-9]*/"eos_token_id": null/' nameless/*config.json && sed -i 's/"eos_token_id"/"unknown"/' nameless/generation_config.json &&
    ppo models.actor=nameless && grep -q 'names no EOS token' err && holds "$(of eos_fraction) > 0"
}
ok "an actor that names no EOS ends with the tokenizer's" nameless
growing() { # rotary positions that depend on the length: of the longest there may be, in rollout and update
  cp -r start/sft growing &&
    sed -i 's/"max_position_embeddings": *64/"max_position_embeddings": 8/; s/"rope_scaling": null/"rope_scaling": {"type": "dynamic", "factor": 2.0}/' growing/config.json &&
    ppo models.actor=growing models.reference=growing && holds "$(of gap_max) < 1e-5" && near "$(of kl)" 0
}
ok "rotary positions by length are alike in rollout and update" growing

# ---- the loss of a batch is the mean of its examples', each with its own mask or margin ----

records() { # STAGE DATA FROM TO: a step on these records of data.jsonl
  sed -n "$3,$4p" data.jsonl >some.jsonl
  run train start.yaml --set run.directory=run --set stages="[$1]" --set "$1.steps=1" --set "batch.$1=$(($4 - $3 + 1))" --set "data.$2.path=some.jsonl" \
    --set "data.$2.held_out=0" "${@:5}"
  return "$rc"
}
masks() {
  local sum=0 n=0 i
  for i in 1 2 3 4 5; do
    records sft sft $i $i || return 1
    sum="$sum + $(of loss) * $(of loss_tokens)" n="$n + $(of loss_tokens)"
  done
  records sft sft 1 5 && [ "$(of loss_tokens)" = $((n)) ] && near "$(of loss)" "($sum) / ($n)"
}
ok "sft: over all tokens, each example with its own mask" masks
margins() {
  local sum=0 i
  for i in 1 2 3 4 5; do
    records reward preference $i $i --set data.preference.margin_field=margin --set reward.normalize=false || return 1
    sum="$sum + $(of loss)"
  done
  records reward preference 1 5 --set data.preference.margin_field=margin && near "$(of loss)" "($sum) / 5"
}
ok "reward: over the pairs, each with its own margin" margins

# ---- what goes from stage to stage, and out ----

figures() { grep '"stage":"ppo"' "$1/metrics.jsonl" | sed 's/"run_step":[0-9]*,//; s/,"seconds":.*//'; }
through() { # each from the result of the one before
  local steps='ppo={steps: 2, epochs: 2, minibatches: 2, eval_every: 0}' answers='rollout={prompts_per_step: 8, max_new_tokens: 5}'
  run train start.yaml --set stages='[sft, reward, ppo]' --set run.directory=all --set "$steps" --set "$answers" &&
    ppo models.reference=start/sft "$steps" "$answers" rewards=null && [ "$(figures all)" = "$(figures run)" ] &&
    cmp all/actor/model.safetensors run/actor/model.safetensors && cmp all/critic/model.safetensors run/critic/model.safetensors
}
ok "stages in one run are the stages one by one" through
configured() {
  run train start.yaml --set run.directory=run --set stages='[sft]' --set sft.steps=1 --set checkpoint.dtype=bfloat16 --set checkpoint.max_shard_gb=1e-5 \
    --set 'models.actor={init: {vocab_size: 700, hidden_size: 24, layers: 2, heads: 4, kv_heads: 2, head_dim: 8, ffn: 20, max_positions: 70, rope_theta: 500, norm_eps: 1.0e-4, init_std: 0.25, tied_head: true}}' &&
    [ -e run/sft/model.safetensors.index.json ] && run inspect run/sft && grep -q 'BF16 .*embed_tokens' out &&
    [ "$(tr -d ' ,"' <run/sft/config.json | grep -E '^(vocab_size|hidden_size|num_.*|head_dim|intermediate_size|max_position.*|rope_theta|rms_norm_eps|init.*|tie.*):' | cut -d: -f2 | xargs)" = \
      "700 24 20 2 4 2 8 70 0.0001 0.25 true 500.0" ]
}
ok "random weights are of the sizes and the type that the recipe names" configured
foreign() {
  rm -rf foreign && mv run/sft foreign && ! ppo models.reference=foreign &&
    grep -q '^rlhf: models.reference: the vocabulary has 700 tokens, the actor.s 640: expected the same' err
}
ok "models of different vocabularies are refused" foreign
seeded() { # at a rate that moves nothing the weights are those of the start
  local still='--set run.directory=run --set stages=[sft] --set sft.steps=1 --set optimizer.sft.lr=1e-30' w=run/sft/model.safetensors
  # shellcheck disable=SC2086
  run train start.yaml $still && cp $w w && run train start.yaml $still --set batch.sft=3 && cmp $w w &&
    run train start.yaml $still --set run.seed=2 && ! cmp -s $w w
}
ok "which are the seed's" seeded
counts() { # 38 examples and 2 held out, 12 a step
  run train start.yaml --set run.directory=run --set stages='[sft]' --set sft.steps=0 --set sft.epochs=2 --set batch.sft=12 && [ "$(wc -l <run/metrics.jsonl)" = 7 ] &&
    ppo ppo.eval_every=1 ppo.eval_prompts=3 report.samples=2 && [ "$(wc -l <run/samples/step_000001.jsonl)" = 2 ] &&
    ppo ppo.eval_every=1 ppo.eval_prompts=1 report.samples=2 && [ "$(wc -l <run/samples/step_000001.jsonl)" = 1 ]
}
ok "epochs, evaluations and samples are as many as asked for" counts
echo "1..$number"
