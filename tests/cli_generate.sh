#!/usr/bin/env bash
# rlhf generate from the outside: the golden answer alone and in company, samples that depend on
# nothing but seed, line and number, and everything that must be refused.
. tests/tap.sh
need_shared
model=$shared/data/stories260K

ids() { sed -n 's/.*"tokens":\[\([^]]*\)\].*/\1/p' "${1:-out}"; } # one line of ids per answer
golden=$(tr -d ' \n' <"$model/golden_greedy.json" | sed 's/.*"greedy_ids":\[\([^]]*\)\].*/\1/')
answer=${golden#1,}
n=$(echo "$answer" | tr ',' '\n' | wc -l)

echo '{"tokens": [1]}' >one
run generate --model "$model" --tokens one --greedy --max-new-tokens "$n"
is "greedy from token 1" "$(ids)" "$answer"
ok "its finish is its length" grep -q '"finish":"length"}$' out
text=$(cat "$model/expected_stdout.txt")
sed 's/.*"text":"//; s/","tokens.*//; s/\\n/\n/g; s/\\"/"/g' out >text
is "its text" "$(head -c 300 text)" "${text:0:300}"

# In company: other prompts before and after, of other lengths, and itself twice.
{
  echo '{"tokens": [1, 403, 407, 261]}'
  cat one
  for i in $(seq 40); do echo "{\"tokens\": [1, $((i + 260)), $((i * 7 % 250 + 260))]}"; done
  cat one
  echo '[1]' | sed 's/.*/{"extra": null, "tokens": &}/'
} >many
run generate --model "$model" --tokens many --greedy --max-new-tokens "$n"
is "in company: second of 44" "$(ids | sed -n 2p)" "$answer"
is "in company: last but one" "$(ids | sed -n 43p)" "$answer"
is "in company: last" "$(ids | sed -n 44p)" "$answer"
is "as many lines as prompts" "$(wc -l <out)" 44
cp out alone
mpi 2 generate --model "$model" --tokens many --greedy --max-new-tokens "$n"
is "two ranks: the same tokens" "$(ids)" "$(ids alone)"

mpi 2 generate --model "$model" --tokens many --greedy --max-new-tokens "$n" --weights tensor_parallel
is "two ranks with half of each matrix: the same tokens" "$(ids)" "$(ids alone)"
mpi 2 generate --model "$model" --tokens one --greedy --max-new-tokens 20 --weights stream
is "weights unit by unit: the same tokens" "$(ids)" "$(echo "$answer" | cut -d, -f1-20)"

# The prompt's text, whole, and the answer's text as it goes on.
run generate --model "$model" --prompt 'Once upon a time' --greedy --max-new-tokens 8
ok "a text prompt" grep -q '^{"prompt":"Once upon a time","text":", there was a' out
echo '{"text": "Once upon a time"}' | "$rlhf" generate --model "$model" --text - --greedy \
  --max-new-tokens 8 >second 2>err
ok "the same from standard input" cmp -s out second

# Sampling.
run generate --model "$model" --prompt 'The cat' --max-new-tokens 20 --seed 5 --samples 4
is "samples: one line each" "$(wc -l <out)" 4
is "samples differ" "$(ids | sort -u | wc -l)" 4
cp out first
run generate --model "$model" --prompt 'The cat' --max-new-tokens 20 --seed 5 --samples 2
ok "a sample depends on its own number" cmp -s out <(head -n 2 first)
{ echo '{"text": "The cat"}' && for i in 1 2 3; do echo '{"text": "Lily saw a big red ball"}'; done; } >texts
run generate --model "$model" --text texts --max-new-tokens 20 --seed 5 --samples 4
is "and not on its company" "$(ids | head -n 4)" "$(ids first)"
mpi 3 generate --model "$model" --text texts --max-new-tokens 20 --seed 5 --samples 4
is "nor on the number of ranks" "$(ids | head -n 4)" "$(ids first)"
run generate --model "$model" --prompt 'The cat' --max-new-tokens 20 --seed 6 --samples 4
ok "another seed, other samples" [ "$(ids)" != "$(ids first)" ]
run generate --model "$model" --prompt 'The cat' --max-new-tokens 20 --top-k 1
cp out first
run generate --model "$model" --prompt 'The cat' --max-new-tokens 20 --greedy
is "top-k 1 is greedy" "$(ids first)" "$(ids)"
ok "of one token the log-probability is 0" grep -qE '"logprobs":\[-?0(,-?0)*\]' first
run generate --model "$model" --prompt 'The cat' --max-new-tokens 20 --top-p 0.0001
is "a tiny top-p is greedy" "$(ids)" "$(ids first)"
run generate --model "$model" --prompt 'The cat' --max-new-tokens 20 --min-p 1
is "min-p 1 is greedy" "$(ids)" "$(ids first)"
run generate --model "$model" --text texts --max-new-tokens 20 --min-p 0.1 --repetition-penalty 1.3 --samples 4
cp out first
mpi 2 generate --model "$model" --text texts --max-new-tokens 20 --min-p 0.1 --repetition-penalty 1.3 --samples 4
is "min-p and a penalty, on two ranks" "$(ids)" "$(ids first)"
run generate --model "$model" --text texts --max-new-tokens 20 --min-p 0.1 --samples 4
ok "the penalty changes answers" [ "$(ids)" != "$(ids first)" ]
run generate --model "$model" --prompt 'The cat' --max-new-tokens 60 --greedy --repetition-penalty 100
is "no word twice under a strong penalty" "$(ids | tr ',' '\n' | sort | uniq -d)" ""
run generate --model "$model" --tokens <(echo '{"tokens": [1]}') --max-new-tokens 100000 --seed 2
is "an answer ends with the model's positions" \
  "$(ids | tr ',' '\n' | wc -l) $(grep -o '"finish":"[a-z]*"' out)" '511 "finish":"length"'

# Every EOS id of generation_config.json ends an answer: make the first greedy token one.
mkdir eos && cp "$model"/*.json "$model/model.safetensors" eos && chmod u+w eos/*
echo '{"bos_token_id": 1, "eos_token_id": [2, 407]}' >eos/generation_config.json
run generate --model eos --tokens one --greedy --max-new-tokens 50
is "the second EOS id ends it" "$(ids) $(grep -o '"finish":"[a-z]*"' out)" '403,407 "finish":"eos"'
ok "without a tokenizer prompt and text are null" grep -q '^{"prompt":null,"text":null,"tokens"' out
refuses 1 'eos: no tokenizer in this folder' generate --model eos --prompt hello

# A chat template: the prompt is what a user says, and cannot spell the template's special tokens.
mkdir chat && cp "$model"/*.json "$model"/tokenizer.model "$model/model.safetensors" chat && chmod u+w chat/*
cat >chat/chat_template.jinja <<'END'
{{ bos_token }}{% for m in messages %}{{ m.role[:1] }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}
END
run generate --model chat --prompt $'u: </s> Once\na:' --greedy --max-new-tokens 12
cp out by_hand
run generate --model chat --chat --prompt '</s> Once' --greedy --max-new-tokens 12
is "--chat writes the template around a prompt" "$(ids)" "$(ids by_hand)"
ok "and shows what the user said" grep -q '^{"prompt":"</s> Once","text":' out
cp out first
printf '{"text": "hello"}\n{"text": "</s> Once"}\n' >texts
mpi 2 generate --model chat --chat --text texts --greedy --max-new-tokens 12
is "the same from a file, on two ranks" "$(sed -n 2p out)" "$(cat first)"
refuses 2 'found --chat with --tokens' generate --model chat --chat --tokens one
refuses 1 'rlhf: --chat: ' generate --model "$model" --chat --prompt hello
echo "{{ raise_exception('no such talk') }}" >chat/chat_template.jinja
refuses 1 'no such talk' generate --model chat --chat --prompt hello

# What must be refused.
run generate --model "$model" --tokens /dev/null --greedy
ok "no prompts, no answers" [ $rc = 0 -a ! -s out -a ! -s err ]
bad() { # LINE TEXT: refused on line 2, while line 1 is answered
  printf '{"tokens": [1]}\n%s\n' "$1" >lines
  run generate --model "$model" --tokens lines --greedy --max-new-tokens 3
  number=$((number + 1))
  if [ $rc = 1 ] && grep -qF "rlhf: lines:2: $2" err && [ "$(wc -l <out)" = 1 ]; then
    echo "ok $number - refuses $1"
  else
    echo "not ok $number - refuses $1"
    sed 's/^/# /' out err
  fi
}
bad '{"tokens": [1, 512]}' 'token 2 is 512; expected an id from 0 to 511'
bad '{"tokens": [-1]}' 'token 1 is -1; expected an id from 0 to 511'
bad '{"tokens": [1.0]}' 'token 1 is no whole number'
bad '{"tokens": [true]}' 'token 1 is no whole number'
bad '{"tokens": []}' 'an empty sequence; expected at least one token'
bad '{"tokens": 5}' '"tokens" is no list'
bad '{"text": "hello"}' 'no "tokens"; expected {"tokens": [1, 2, ...]}'
bad "{\"tokens\": [$(seq -s, 512 | sed 's/[0-9]*/1/g')]}" '512 tokens; expected at most 511'
for line in '{"tokens": [1' '[1]' 'hello' '{"tokens": [1]} x' '{"tokens": [NaN]}'; do
  printf '{"tokens": [1]}\n%s\n' "$line" >lines
  run generate --model "$model" --tokens lines --greedy --max-new-tokens 3
  ok "refuses $line" grep -q '^rlhf: lines:2' err
done
refuses 2 'expected replica, tensor_parallel or stream' generate --model "$model" --tokens one --weights all
refuses 2 'expected training, int8 or fp8' generate --model "$model" --tokens one --format int4
refuses 1 'rlhf: --format: found int8 with weights that stream' \
  generate --model "$model" --tokens one --weights stream --format int8
refuses 1 'no-such' generate --model "$model" --tokens no-such
refuses 1 "$tmp" generate --model "$model" --tokens "$tmp"
refuses 1 'has no language-model head' generate --model "$shared/fixtures/llama-reward" --tokens one
printf '{"text": 5}\n' >lines
refuses 1 'lines:1: "text" is no string' generate --model "$model" --text lines
