#!/usr/bin/env bash
# rlhf tokenize from the outside: there and back for every kind of text, and what must be refused.
. tests/tap.sh
own=$root/recipes/demo/tokenizer.model

# The text of JSON Lines is the same behind --json, --decode: spaces, emoji, control characters.
cat >texts <<'EOT'
{"text":"Once upon a time"}
{"text":""}
{"text":" two  spaces "}
{"text":"tab\tnewline\nquote\" backslash\\ slash/"}
{"text":"é 字 😀 مرحبا"}
{"text":"<s></s><unk><0x0A>"}
{"text":"nul\u0000 and bell\u0007"}
EOT
there_and_back() { # MODEL [OPTION]
  "$rlhf" tokenize --model "$@" --json texts >ids 2>err &&
    "$rlhf" tokenize --model "$1" --decode ids >back 2>err && cmp -s texts back
}
ok "there and back" there_and_back "$own"
ok "without BOS" there_and_back "$own" --no-bos
is "a line for each" "$(wc -l <ids)" 7
is "an empty text without BOS" "$(sed -n 2p ids)" '{"tokens":[]}'
printf 'Once upon a time\r\n\nlast' >plain
run tokenize --model "$own" --no-bos plain
is "lines of text: one each, empty ones too" "$rc $(wc -l <out)" "0 3"
is "CRLF is the line's end" "$(head -n 1 out)" "$(head -n 1 ids)"
"$rlhf" tokenize --model "$own" --no-bos - <plain >again 2>err
ok "standard input" cmp -s out again
head -c 8388609 /dev/zero | tr '\0' a | "$rlhf" tokenize --model "$own" - >out 2>err
is "and its place in an error" "$(cat err)" 'rlhf: (standard input):1: a text of 8388609 bytes is longer than SentencePiece is given, 8 MiB'
run tokenize --model "$own" --no-bos plain
"$rlhf" tokenize --model "$own" --no-bos - <plain | "$rlhf" tokenize --model "$own" --decode - >back
is "through two pipes" "$(tail -n 1 back)" '{"text":"last"}'
gzip -k plain
run tokenize --model "$own" --no-bos plain.gz
ok "gzip" cmp -s out again
mpi 2 tokenize --model "$own" --no-bos plain
ok "two ranks, one answer" cmp -s out again
run tokenize --model "$own" /dev/null
ok "nothing in, nothing out" [ "$rc" = 0 -a ! -s out -a ! -s err ]

refuses 1 'no-such' tokenize --model "$own" no-such
refuses 1 "$tmp" tokenize --model "$own" "$tmp"
refuses 1 'no-such' tokenize --model no-such plain
refuses 1 'plain' tokenize --model plain plain
head -c 300 "$own" >half.model
refuses 1 'half.model' tokenize --model half.model plain
bad() { # OPTION LINE TEXT
  printf '%s\n%s\n' "$([ "$1" = --json ] && echo '{"text":"a"}' || echo '{"tokens":[5]}')" "$2" >lines
  run tokenize --model "$own" "$1" lines
  number=$((number + 1))
  if [ "$rc" = 1 ] && grep -qF "rlhf: lines:2" err && grep -qF -- "$3" err && [ "$(wc -l <out)" = 1 ]; then
    echo "ok $number - refuses $1 $2"
  else
    echo "not ok $number - refuses $1 $2"
    sed 's/^/# /' out err
  fi
}
bad --json '{"text": 5}' '"text" is no string'
bad --json '{"tokens": [5]}' 'no "text"'
bad --json 'text' 'not valid JSON'
bad --json '["a"]' 'expected'
bad --decode '{"tokens": [99999]}' 'token 1 is 99999; expected an id from 0 to'
bad --decode '{"tokens": [-1]}' 'token 1 is -1'
bad --decode '{"tokens": ["a"]}' 'token 1 is no whole number'
bad --decode '{"text": "a"}' 'no "tokens"'
yes '{"text":"abc abc"}' | head -n 20000 >long
"$rlhf" tokenize --model "$own" --json long >/dev/full 2>err
is "a full disk ends it" "$? $(cat err)" "1 rlhf: standard output: No space left on device"

need_shared
model=$shared/data/stories260K
run tokenize --model "$model" <(echo 'Once upon a time')
is "BOS comes first where the tokenizer is set so" "$(cat out)" '{"tokens":[1,403,407,261,378]}'
run tokenize --model "$model" --no-bos <(echo 'Once upon a time')
is "and not with --no-bos" "$(cat out)" '{"tokens":[403,407,261,378]}'
ok "there and back: Mistral's tokenizer" there_and_back "$shared/data/tokenizers/mistral-v1"
sed -i 's/" two  spaces "/"one space"/' texts # this model was trained to squeeze spaces
ok "there and back: byte fallback of 512 tokens" there_and_back "$model"
ok "there and back: GPT-2's byte-level BPE" there_and_back "$shared/data/tokenizers/gpt2"
printf 'broken \xff\xfe UTF-8\n' >bytes
run tokenize --model "$model" bytes
ok "bytes that are no UTF-8 go through byte fallback" [ "$rc" = 0 -a "$(wc -l <out)" = 1 ]
