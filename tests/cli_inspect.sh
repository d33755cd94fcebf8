#!/usr/bin/env bash
# rlhf inspect from the outside: whole folders, and what it says of those that lack something.
. tests/tap.sh
need_shared
model=$shared/data/stories260K

says() { # NAME TEXT: the last run's output has the line "NAME ... TEXT"
  grep -E "^$1 " out | grep -qF -- "$2"
}
run inspect "$model"
ok "a whole folder" [ "$rc" = 0 -a ! -s err ]
ok "family" says family llama
ok "head" says head 'language model, tied to the embedding'
ok "sizes" says sizes '5 layers, hidden 64, 8 heads of 8, 4 key/value heads, MLP 172'
ok "vocabulary" says vocabulary 512
ok "parameters" says parameters 260,032
ok "dtype" says dtype F32
ok "tokens" says tokens 'BOS 1, EOS 2'
ok "tensors" says tensors '47 with 260,032 elements'
ok "shapes" grep -qE '^ +F32 +\[172, 64\] 5 x model.layers.\*.mlp.up_proj.weight$' out
ok "tokenizer" says tokenizer 'SentencePiece, 512 tokens, BOS 1 (put first), EOS 2'
ok "loads" says loads yes
run inspect "$shared/fixtures/llama-reward"
ok "a reward model" says head 'scalar'
ok "its tokenizer is missing, but it loads" says missing 'no tokenizer'
is "status" "$rc" 0
run inspect "$shared/fixtures/llama3-rope"
ok "RoPE scaling" says positions 'llama3 scaling by'

copy() { # NAME: a writable copy of the folder
  mkdir "$1" && cp "$model"/*.json "$model"/tokenizer.model "$model"/model.safetensors "$1" && chmod u+w "$1"/*
}
broken() { # NAME TEXT: does not load, and why
  run inspect "$1"
  ok "$1: does not load" [ "$rc" = 1 ]
  ok "$1: says so" says loads no
  ok "$1: $2" grep -qF -- "$2" err
  ok "$1: one error" [ "$(grep -c '^rlhf: ' err)" = "$(wc -l <err)" ]
}
copy untied && sed -i 's/"tie_word_embeddings": true/"tie_word_embeddings": false/' untied/config.json
broken untied 'lm_head.weight is missing'
ok "and lists it" says missing 'tensor lm_head.weight'
copy deep && sed -i 's/"num_hidden_layers": 5/"num_hidden_layers": 9/' deep/config.json
broken deep 'model.layers.5.'
ok "lists the first twenty" [ "$(grep -c '^missing *tensor ' out)" = 20 ]
ok "and counts the rest" says missing 'and 16 more tensors'
copy wide && sed -i 's/"hidden_size": 64/"hidden_size": 80/' wide/config.json
broken wide 'has shape'
copy cut && truncate -s 100000 cut/model.safetensors
broken cut 'cut/model.safetensors'
ok "the config is shown all the same" says family llama
copy weightless && rm weightless/model.safetensors
broken weightless 'weightless'
copy torch && mv torch/model.safetensors torch/pytorch_model.bin
broken torch 'torch/pytorch_model.bin: cannot be read; save the model as safetensors'
copy configless && rm configless/config.json
broken configless 'configless/config.json'
ok "its tensors are shown all the same" says tensors '47 with'
copy odd && sed -i 's/"model_type": "llama"/"model_type": "mamba"/; s/LlamaForCausalLM/MambaForCausalLM/' odd/config.json
broken odd 'mamba'
copy noise && echo '{"model_type": ' >noise/config.json
broken noise 'noise/config.json'
copy piped && rm piped/model.safetensors && mkfifo piped/model.safetensors # waits for nobody
broken piped 'not a regular file'
copy unread && rm unread/config.json && mkfifo unread/config.json
broken unread 'unread/config.json'
mkdir nothing
broken nothing 'nothing/config.json'
refuses 1 'config.json: no such folder' inspect "$model/config.json"
"$rlhf" inspect "$model" >/dev/full 2>err
is "a full disk" "$? $(cat err)" "1 rlhf: standard output: No space left on device"
