#!/usr/bin/env bash
# Every family from its fixture folder: a few steps of PPO, whose rollout and update agree; what is
# saved scores and generates as the run's own weights do, and is saved again to the same bytes.
. tests/tap.sh
need_shared
fixtures=$shared/fixtures
if [ ! -d "$fixtures/gpt2" ]; then
  echo "ok 1 - families # SKIP no fixtures"
  exit 0
fi

# tokenizer SIZE: one token a byte (in GPT-2's letters for bytes), as the fixtures' vocabularies of
# some 300 allow, and words for the rest, since any id may be sampled.
mkdir tok
tokenizer() {
  awk -v size="$1" 'BEGIN {
    printf "{\"<pad>\": 0, \"<s>\": 1, \"</s>\": 2"
    other = 256
    for (b = 0; b < 256; b++) {
      itself = (b >= 33 && b <= 126) || (b >= 161 && b != 173)
      printf ", \"\\u%04x\": %d", itself ? b : other++, b + 3
    }
    for (id = 259; id < size; id++) printf ", \"word%d\": %d", id, id
    print "}"
  }' >tok/vocab.json
}
echo '#version: 0.2' >tok/merges.txt
echo '{"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}' \
  >tok/tokenizer_config.json
for word in one two three four five six seven eight; do echo "{\"text\": \"say $word\"}"; done >prompts.jsonl
cat >ppo.yaml <<'YAML'
run: {seed: 3, threads: 1}
tokenizer: {path: tok}
data: {prompts: {path: prompts.jsonl, text_field: text}}
stages: [ppo]
models: {critic: {from: actor, init_head: true}}
rollout: {prompts_per_step: 4, max_new_tokens: 14}
ppo: {steps: 3, minibatches: 2}
rewards: [{kind: length, weight: 1, target: 6}]
optimizer: {actor: {lr: 1.0e-3}, critic: {lr: 1.0e-3}}
report: {measure_peak: false}
YAML
for i in 7 3 21; do
  echo "{\"tokens\": [$(seq -s ', ' $((i + 3)) $((2 * i + 3)))]}"
done >sequences

# Whether all gaps between the log-probabilities of rollout and update are roundings.
small_gaps() {
  [ "$(grep -c '"gap_max"' "$1")" -ge 3 ] && ! grep -o '"gap_max":[^,}]*' "$1" | cut -d: -f2 |
    awk '!($1 < 1e-4) { bad = 1 } END { exit !bad }'
}

family() { # NAME FOLDER RANKS
  local name=$1 folder=$2 ranks=$3
  tokenizer "$(grep -o '"vocab_size": [0-9]*' "$folder/config.json" | tr -dc 0-9)"
  local args=(train ppo.yaml --set "run.directory=run-$name" --set "models.actor.path=$folder")
  if [ "$ranks" = 1 ]; then run "${args[@]}"; else mpi "$ranks" "${args[@]}"; fi
  ok "$name: PPO on $ranks" [ "$rc" = 0 ]
  ok "$name: rollout and update agree" small_gaps "run-$name/metrics.jsonl"
  run score --model "run-$name/actor" --tokens sequences
  is "$name: three sequences scored" "$(wc -l <out)" 3
  cp out scores
  run score --model "$folder" --tokens sequences
  ok "$name: it learned" [ "$(cat scores)" != "$(cat out)" ]
  # Saved by a run that changes nothing.
  run train ppo.yaml --set "run.directory=again-$name" --set "models.actor.path=run-$name/actor" \
    --set ppo.steps=1 --set optimizer.actor.lr=1.0e-30
  ok "$name: the saved folder goes on" [ "$rc" = 0 ]
  ok "$name: the same tensors again" \
    cmp "run-$name/actor/model.safetensors" "again-$name/actor/model.safetensors"
  run score --model "again-$name/actor" --tokens sequences
  is "$name: the same scores" "$(cat out)" "$(cat scores)"
  run score --model "run-$name/critic" --tokens sequences
  is "$name: its critic scores" "$(wc -l <out)" 3
}

ranks=1
for name in llama-gqa llama3-rope mistral qwen2 qwen3 phi3 opt gpt2; do
  family $name "$fixtures/$name" $((ranks++ % 2 + 1))
done

# Frequencies by length, which some sequences are beyond and others not (7 to 9 bytes and 14 more).
cp -r "$fixtures/phi3" longrope
chmod -R u+w longrope
sed -i 's/"original_max_position_embeddings": [0-9]*,/"original_max_position_embeddings": 22,/
s/"rope_theta": 10000.0/"rope_theta": 10000.0, "rope_scaling": {"type": "longrope",\
"short_factor": [1, 1, 1, 1, 1, 1, 1, 1], "long_factor": [1, 2, 3, 4, 5, 6, 7, 8]}/' longrope/config.json
family longrope "$tmp/longrope" 2

sed 's/"model_type": "phi3"/"model_type": "phi9"/' longrope/config.json >config.json
cp config.json longrope/config.json
refuses 1 'family "phi9" is not supported' score --model longrope --tokens sequences
