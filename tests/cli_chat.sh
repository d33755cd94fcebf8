#!/usr/bin/env bash
# A model that learns a chat format: the result says how to talk to it, and stops where a turn ends.
. tests/tap.sh
need_shared
for i in $(seq 8); do
  echo '{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me"},
    {"role": "assistant", "content": "Once"}, {"role": "user", "content": "More </s>"},
    {"role": "assistant", "content": "upon a time"}]}' | tr -d '\n'
  echo
done >talk.jsonl
cat >chat.yaml <<END
run: {directory: run, threads: 1}
models: {actor: $shared/data/stories260K}
data:
  sft: {path: talk.jsonl, held_out: 0}
  prompts: {path: talk.jsonl, held_out: 0}
  chat: {name: llama2}
stages: [sft, ppo]
sft: {steps: 2}
batch: {sft: 4}
rewards: [{kind: length, target: 4}]
rollout: {prompts_per_step: 4, max_new_tokens: 6}
ppo: {steps: 1}
report: {measure_peak: false}
END
run train chat.yaml
is "trains" "$rc" 0
for model in sft actor; do
  ok "run/$model has the format's template" grep -q 'INST' "run/$model/chat_template.jinja"
  run generate --model "run/$model" --chat --prompt 'Tell me' --greedy --max-new-tokens 2
  ok "run/$model: generate takes it from there" grep -q '^{"prompt":"Tell me","text":' out
done
refuses 1 'no chat_template' generate --model "$shared/data/stories260K" --chat --prompt 'Hi'
run check chat.yaml --set data.chat.name=llama3
is "a format that the tokenizer cannot spell" "$rc" 1
ok "which is named" grep -qF \
  'data.chat.name: the chat format llama3 needs the special token <|start_header_id|>' err
run check chat.yaml --set data.chat.name=auto
ok "no template of its own" grep -qF 'no chat_template' err
run check chat.yaml --set data.chat.name=mistrall
ok "an unknown name" grep -qF 'mistral' err

# The format ends turns with another token than the tokenizer's EOS: the result stops at both.
mkdir gpt2
cp "$shared"/data/tokenizers/gpt2/{vocab.json,merges.txt} gpt2
cat >gpt2/tokenizer_config.json <<'END'
{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "added_tokens_decoder": {
  "50257": {"content": "<|im_start|>", "special": true},
  "50258": {"content": "<|im_end|>", "special": true}}}
END
cat >chatml.yaml <<'END'
run: {directory: run2, threads: 1}
tokenizer: {path: gpt2}
models: {actor: {init: {hidden_size: 8, layers: 1, heads: 1, ffn: 8}}}
data:
  sft: {path: talk.jsonl, held_out: 0}
  chat: {name: chatml}
stages: [sft]
sft: {steps: 1}
batch: {sft: 4}
report: {measure_peak: false}
END
run train chatml.yaml
is "trains with ChatML" "$rc" 0
ok "and says where answers end" grep -q 'also end with token 50258' err
is "so does the result" "$(tr -d ' \n' <run2/sft/generation_config.json |
  sed 's/.*"eos_token_id":\(\[[^]]*\]\).*/\1/')" '[50256,50258]'
echo "1..$number"
