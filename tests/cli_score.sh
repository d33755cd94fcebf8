#!/usr/bin/env bash
# rlhf score from the outside: the shape of its answers, the same alone and in company and on any
# number of ranks, and everything that must be refused. That the numbers are right is parity's.
. tests/tap.sh
need_shared
model=$shared/data/stories260K
reward=$shared/fixtures/llama-reward

# Numbers of one key, a line per answer; those of arrays parted by spaces.
list() { sed -n "s/.*\"$1\":\[\([^]]*\)\].*/\1/p" "${2:-out}" | tr ',' ' '; }
scalar() { sed -n "s/.*\"$1\":\([^,}]*\)[,}].*/\1/p" "${2:-out}"; }
count() { list "$1" | awk '{print NF}' | tr '\n' ' '; }

{
  echo '{"tokens": [1, 403, 407, 261, 378]}'
  echo '{"tokens": [1]}'
  echo
  echo '{"tokens": [1, 5]}'
  for i in $(seq 60); do echo "{\"tokens\": [1$(seq -s '' -f ', %g' 260 $((260 + i * 3)))]}"; done
} >many
run score --model "$model" --tokens many
is "one line for each that is not blank" "$rc $(wc -l <out)" "0 63"
is "L-1 log-probabilities" "$(count logprobs | cut -d' ' -f1-4)" "4 0 1 4"
# What is printed reads back to the float, but differs from it by up to 2^-25 of its size.
ok "sum is their sum" awk '
  { s = $0; sub(/.*"logprobs":\[/, "", s); sub(/\].*/, "", s); n = split(s, v, ",")
    t = 0; for (i = 1; i <= n; i++) { t += v[i]; if (v[i] > 0) exit 1 } # all below 0
    u = $0; sub(/.*"sum":/, "", u); sub(/}.*/, "", u)
    d = t - u; if (d < 0) d = -d; if (d > -t / 2^25 + 1e-12) exit 1 }' out
is "of one token the sum is 0" "$(scalar sum | sed -n 2p)" 0
cp out whole

# Company and ranks change rounding only: some float epsilons (6e-8) of a sum of up to 180 log-probabilities.
close() { # KEY FILE FILE
  paste <(scalar "$1" "$2") <(scalar "$1" "$3") |
    awk '{d = $1 - $2; if (d < 0) d = -d; if (d > 1e-6 * (1 - $1) || NF != 2) bad = 1} END {exit bad || NR < 13}'
}
grep . many | awk 'NR % 5 == 1' | while read -r line; do
  echo "$line" >single && "$rlhf" score --model "$model" --tokens single
done >alone
ok "alone as in company" close sum <(awk 'NR % 5 == 1' whole) alone
mpi 3 score --model "$model" --tokens many
ok "three ranks as one" close sum whole out
"$rlhf" score --model "$model" --tokens - <many >out 2>err
ok "standard input" cmp -s out whole
{ echo '[' && grep . many | sed '$!s/$/,/' && echo ']'; } >array.json
run score --model "$model" --tokens array.json
ok "a JSON array" cmp -s out whole
gzip -k many
run score --model "$model" --tokens many.gz
ok "gzip" cmp -s out whole

# A reward model.
sed -n 's/403/3/; s/407/7/; s/261/8/; s/378/9/; 1,4p' many >short
run score --model "$reward" --tokens short
is "a value at every token" "$rc $(count values)" "0 5 1 2 "
is "the score is the last one" "$(scalar score)" "$(list values | awk '{print $NF}')"
ok "no log-probabilities" [ "$(grep -c logprobs out)" = 0 ]

# Text: the tokenizer's ids.
echo '{"text": "Once upon a time"}' >text
run score --model "$model" --text text
cp out first
"$rlhf" tokenize --model "$model" --json text >tokens
run score --model "$model" --tokens tokens
ok "text as its tokens" cmp -s out first
refuses 1 'llama-reward: no tokenizer in this folder' score --model "$reward" --text text

# Numbers read back to the same float: nine digits at most, and fewer where fewer do.
ok "short numbers" [ -z "$(list logprobs whole | tr ' ' '\n' | tr -d '.e-' | sed 's/^0*//' | grep -E '^[0-9]{12}')" ]

bad() { # LINE TEXT: refused on line 3, while the others are answered
  local name
  name=$(printf '%.60s' "$1" | LC_ALL=C tr -c ' -~' '?')
  printf '{"tokens": [1, 2]}\n{"tokens": [1]}\n%s\n{"tokens": [1]}\n' "$1" >lines
  run score --model "$model" --tokens lines
  number=$((number + 1))
  if [ $rc = 1 ] && grep -qF "rlhf: lines:3" err && grep -qF "$2" err && [ "$(wc -l <out)" = 2 ]; then
    echo "ok $number - refuses $name"
  else
    echo "not ok $number - refuses $name"
    sed 's/^/# /' out err
  fi
}
bad '{"tokens": [1, 512]}' 'token 2 is 512; expected an id from 0 to 511'
bad '{"tokens": [1, 9223372036854775807]}' 'token 2 is 9223372036854775807'
bad '{"tokens": [1, 92233720368547758070]}' 'not valid JSON'
bad '{"tokens": [null]}' 'token 1 is no whole number'
bad '{"tokens": []}' 'an empty sequence'
bad '{"tokens": "1"}' '"tokens" is no list'
bad '{}' 'no "tokens"'
bad '[{"tokens": [1]}]' 'expected'
bad 'null' 'expected'
bad '{"tokens": [1]' 'not valid JSON'
bad '{"tokens": [1]}}' 'not valid JSON'
bad "$(printf '{"text": "\xff"}')" 'not valid JSON'
bad "{\"tokens\": [$(seq -s, 513 | sed 's/[0-9]*/1/g')]}" "513 tokens; expected at most 512, the model's positions"
refuses 1 'no-such: cannot open' score --model "$model" --tokens no-such
refuses 1 "$tmp" score --model "$model" --tokens "$tmp"
refuses 1 "text: no such folder" score --model text --tokens many
printf '\x1f\x8b\x08\x00broken' >broken.gz
refuses 1 'broken.gz' score --model "$model" --tokens broken.gz

# Broken folders.
mkdir half && cp "$model"/*.json half && head -c 5000 "$model/model.safetensors" >half/model.safetensors
refuses 1 'half/model.safetensors' score --model half --tokens many
"$rlhf" score --model "$model" --tokens many >/dev/full 2>err
is "a full disk" "$? $(cat err)" "1 rlhf: standard output: No space left on device"

# Devices: what is not there, or not meant, is refused by name.
refuses 2 'found "gpu"; expected auto, cpu or cuda' score --model "$model" --tokens many --device gpu
refuses 2 'found "fp16"; expected auto, float32 or bfloat16' score --model "$model" --tokens many --precision fp16
refuses 1 'bfloat16 on the CPU' score --model "$model" --tokens many --device cpu --precision bfloat16
run score --model "$model" --tokens many --device cpu --precision float32
cp out explicit
run score --model "$model" --tokens many --device cpu
is "float32 is the CPU's precision" "$(cat explicit)" "$(cat out)"
refuses 1 'device cuda: ' score --model "$model" --tokens many --device cuda
