#!/usr/bin/env bash
# The commands as a whole: help, version, usage, exit status, where output goes.
. tests/tap.sh

run --version
is "--version" "$(cat out)" "rlhf 0.1.0"
run --help
ok "--help is on standard output" [ "$rc" = 0 -a -s out -a ! -s err ]
run help
ok "help is --help" [ "$rc" = 0 -a -s out ]
run help --help
ok "and so is help --help" [ "$rc" = 0 -a -s out ]
run
ok "no command: usage on standard error" [ "$rc" = 2 -a ! -s out -a -s err ]

flags() { # the options of each command, as the documentation has them
  case $1 in
    train) echo --set --resume ;;
    check) echo --set ;;
    score) echo --device --precision --model --tokens --text ;;
    generate) echo --device --precision --model --prompt --text --tokens --chat --max-new-tokens --temperature --top-k --top-p --min-p --repetition-penalty \
      --greedy --seed --samples --weights --format ;;
    tokenize) echo --model --json --no-bos --decode ;;
  esac
}
mentions() { # COMMAND
  local f
  for f in $(flags "$1") example: "usage: rlhf $1"; do grep -q -- "$f" out || return 1; done
  # and none that the documentation does not have
  [ "$(grep -cE '^  --' out)" = "$(flags "$1" | wc -w)" ]
}
for c in train check score generate tokenize inspect report bench; do
  run $c --help
  ok "$c --help fits into 100 columns" eval '! grep -E ".{101}" out'
done
for c in train check score generate tokenize inspect report; do
  run --help
  ok "--help lists $c" grep -qE "^  $c " out
  run $c --help
  ok "$c --help: its options and an example" mentions $c
  cp out first
  run help $c
  ok "help $c is the same" cmp -s out first
done
run help recipe
ok "help recipe is the reference of keys" grep -q '^| `clip_low` | number | `0.2` | above 0 and below 1 |' out

ok "recipes/REFERENCE.md is that reference" cmp out "$root/recipes/REFERENCE.md"

# the resolved recipe is a recipe, and resolved already
run check "$root/recipes/demo.yaml"
ok "check prints YAML" grep -q '^  clip_low: 0.2$' out
cp out resolved.yaml
run check resolved.yaml
ok "which loads back to the same" cmp out resolved.yaml

# usage: status 2, the nearest name
refuses 2 'unknown command "trian"; did you mean "train"?' trian
refuses 2 'unknown command "xyzzy"' xyzzy
refuses 2 'unknown command "scor"; did you mean "score"?' help scor
refuses 2 'help: found "b"' help train b
refuses 2 'train: expected RECIPE' train
refuses 2 'train: found "b.yaml"; expected no more than RECIPE' train a.yaml b.yaml
refuses 2 'train: unknown option "--reusme"; did you mean "--resume"?' train --reusme a.yaml
refuses 2 'train: --resume: takes no value' train --resume=1 a.yaml
refuses 2 'train: --set: expected KEY=VALUE behind it' train a.yaml --set
refuses 2 'score: expected exactly one of --tokens --text; found 0' score --model d
refuses 2 'score: expected exactly one of --tokens --text; found 2' score --model d --text a --tokens b
refuses 2 'score: expected --model DIR' score --text a
refuses 2 'score: found "a"; expected options only' score a
refuses 2 'score: --model: given twice' score --model a --model b --text c
refuses 2 'generate: expected --model DIR' generate --prompt a
refuses 2 'generate: --temperature: found "0"; expected a number from 0.001 to 1000000 (--greedy' \
  generate --model d --prompt a --temperature 0
refuses 2 'generate: --temperature: found "nan"' generate --model d --prompt a --temperature nan
refuses 2 'generate: --temperature: found ""' generate --model d --prompt a --temperature=
refuses 2 'generate: --top-p: found "1.1"; expected a number from 0.0001 to 1' \
  generate --model d --prompt a --top-p 1.1
refuses 2 'generate: --top-k: found "-1"; expected a whole number from 0' \
  generate --model d --prompt a --top-k -1
refuses 2 'generate: --max-new-tokens: found "1.5"; expected a whole number' \
  generate --model d --prompt a --max-new-tokens 1.5
refuses 2 'generate: --seed: found "x"' generate --model d --prompt a --seed=x
refuses 2 'generate: --samples: found "0"' generate --model d --prompt a --samples 0
refuses 2 'generate: found --top-k with --greedy' generate --model d --prompt a --greedy --top-k 3
refuses 2 'generate: found --min-p with --greedy' generate --model d --prompt a --greedy --min-p 0.1
refuses 2 'tokenize: expected FILE' tokenize --model d
refuses 2 'tokenize: found --no-bos with --decode' tokenize --model d --no-bos --decode f
refuses 2 'inspect: expected DIR' inspect
refuses 2 'report: expected RUN_DIR' report

# the outside world: status 1, the name
refuses 1 'no-such.yaml' train no-such.yaml
refuses 1 'no-such.yaml' check no-such.yaml
refuses 1 'no-such: no such folder' inspect no-such
refuses 1 'no-such: no such folder' score --model no-such --text f
refuses 1 'no-such: no such folder' generate --model no-such --prompt x
refuses 1 'no-such' tokenize --model no-such f
refuses 1 'no-such' report no-such
mkdir empty
refuses 1 'empty' report empty
refuses 1 'empty' train empty
refuses 1 'empty/config.json' score --model empty --text f
refuses 1 'empty: no tokenizer' tokenize --model empty f

# a recipe's problems, all at once, each with its place
printf 'stages: [sft]\nppo: {clp_low: 1}\nrun: {seed: x}\n' >bad.yaml
refuses 1 'bad.yaml:2:7: unknown key "ppo.clp_low"; did you mean "clip_low"?' check bad.yaml
ok "and the second" grep -qF 'rlhf: bad.yaml:3:13: run.seed: found "x"; expected a whole number' err
refuses 1 '--set ppo.stps=1: unknown key "ppo.stps"; did you mean "steps"?' train bad.yaml --set ppo.stps=1
refuses 1 'bad.yaml:2:7' check --set=run.seed=1 bad.yaml
"$rlhf" check - <bad.yaml >out 2>err
ok "a recipe from standard input" grep -qF 'rlhf: stdin:2:7: unknown key' err

refuses 1 '--set zeropp.ranks_per_node=3: zeropp.ranks_per_node: ranks per node: 1 ranks do not divide into nodes of 3' \
  check "$root/recipes/demo.yaml" --set zeropp.ranks_per_node=3

# output that cannot be written
"$rlhf" help recipe >/dev/full 2>err
rc=$?
ok "a full disk is an error" [ $rc = 1 ]
ok "which is named" grep -qF 'rlhf: standard output: No space left on device' err
(
  sleep 0.5 # until the reader has gone
  "$rlhf" help recipe 2>err
  echo $? >status
) | true
is "a closed pipe is an error, no signal" "$(cat status)" 1
ok "which is named" grep -qF 'rlhf: standard output: Broken pipe' err

# under mpirun rank 0 alone speaks
mpi 2 --version
is "two ranks, one version" "$(cat out)" "rlhf 0.1.0"
mpi 2 check bad.yaml
ok "two ranks, one message" [ "$rc" = 1 -a "$(grep -c 'clp_low' err)" = 1 ]
mpirun -n 2 --bind-to none "$rlhf" check - <bad.yaml >out 2>err
ok "two ranks read standard input" grep -qF 'rlhf: stdin:2:7: unknown key' err
mpi 2 trian
ok "two ranks, one usage" [ "$(grep -c 'did you mean' err)" = 1 ]
