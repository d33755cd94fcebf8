#!/usr/bin/env bash
# Tests and benchmarks on GPUs, with a short table at the end. From the repository's root:
#   bench/gpu.sh [PART]...     default: build tests parity train
# Parts:
#   build     make for the card that is here (ARCHS=sm_90a), with BUILD, CUDA_INC and JOBS
#   tests     every tests/test_cuda_*.c; ONLY="model gemm" for some
#   parity    float32 and bfloat16 against FIXTURES (../shared/fixtures)
#   demo      recipes/demo.yaml on two ranks
#   train     bench train, 1.1B, 8 x 2048        train-modes  the same with selective and full recomputation
#   7b        bench train, 7B, 4 x 2048, full recomputation;  7b-offload: with the optimizer in the host
#   kernels   bench kernels, 1.1B                ppo      an iteration of four 1.1B models
#   two       bench train on two GPUs: 1.1B and 7B, 4 x 2048 each
#   nodes     two GPUs as two nodes over sockets: stage 3 and ZeRO++ on 1.1B
#   ppo-nodes the same two: PPO updates with int8 weights, by delta, and whichever is shorter (bench/zeropp_delta_ppo.sh)
#   generate  greedy and sampled answers of a fixture on the GPU
# Logs go to OUT (a new folder in /tmp), one per part. RLHF_CUDA_LIBS: where CUDA's libraries are, if not in the
# system's path.
set -u
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build} ARCHS=${ARCHS:-sm_90a} JOBS=${JOBS:-$(nproc)} FIXTURES=${FIXTURES:-../shared/fixtures}
OUT=${OUT:-$(mktemp -d /tmp/rlhf-gpu-XXXXXX)}
small=bench/configs/llama-1.1b.json large=bench/configs/llama-2-7b.json
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mkdir -p "$OUT"
summary=()

# Runs a command into a log, shows its last lines, notes the outcome and the seconds.
part() { # NAME LINES COMMAND...
  local name=$1 lines=$2 start=$SECONDS rc
  shift 2
  timeout "${LIMIT:-540}" "$@" >"$OUT/$name.log" 2>&1
  rc=$?
  echo "== $name ($((SECONDS - start)) s, status $rc)"
  tail -n "$lines" "$OUT/$name.log"
  summary+=("$(printf '%-26s %-8s %4d s  %s' "$name" "$([ $rc = 0 ] && echo ok || echo "FAILED $rc")" $((SECONDS - start)) \
    "$(result "$OUT/$name.log")")")
  return $rc
}
result() { # the row of a benchmark, or what a test program says of itself
  local row
  row=$(grep -E '^(stage [0-3]|zero3|qwz|hpz|qgz|all|all-ef) ' "$1" | tail -1 |
    awk '{ n = $1 == "stage" ? 3 : 2; print $n " ms, " $(n + 2) " TFLOP/s, " $(NF - 1) " GiB" }')
  [ -n "$row" ] || row=$(grep -E 'folders checked|^iteration' "$1" | tail -1)
  [ -n "$row" ] || row="$(grep -cE '^ok ' "$1") ok, $(grep -E '^not ok' "$1" | grep -vc SKIP) not, $(grep -c SKIP "$1") skipped, $(grep -c '^FAILED' "$1") comparisons"
  echo "$row"
}
train() { # NAME ARGUMENT...
  local name=$1
  shift
  part "$name" 8 "$BUILD/rlhf" bench train --device cuda "$@"
}
ranks() { # NAME N ARGUMENT...
  local name=$1 n=$2
  shift 2
  part "$name" 8 mpirun --oversubscribe --bind-to none -n "$n" "$BUILD/rlhf" bench train --device cuda "$@"
}

part_build() {
  part build 3 make -s -j"$JOBS" BUILD="$BUILD" CUDA_ARCHS="$ARCHS" CUDA_INC="${CUDA_INC:-}" "$BUILD/rlhf" "$BUILD/tests/parity" \
    $(for t in tests/test_cuda_*.c; do echo "$BUILD/${t%.c}"; done)
}
part_tests() {
  local t
  for t in tests/test_cuda_*.c; do
    t=$(basename "$t" .c)
    [ -z "${ONLY:-}" ] || [[ " $ONLY " == *" ${t#test_cuda_} "* ]] || continue
    if grep -q 'ranks:' "tests/$t.c"; then
      for n in $(grep -oE 'ranks: [0-9 ]+' "tests/$t.c" | head -1 | cut -d: -f2); do
        part "$t-$n" 2 mpirun --oversubscribe --bind-to none -n "$n" "$BUILD/tests/$t"
      done
    else
      part "$t" 2 "$BUILD/tests/$t"
    fi
  done
}
part_parity() {
  part parity-float32 1 "$BUILD/tests/parity" "$FIXTURES" cuda float32
  part parity-bfloat16 1 "$BUILD/tests/parity" "$FIXTURES" cuda bfloat16
}
part_demo() {
  part demo 40 mpirun --oversubscribe --bind-to none -n 2 "$BUILD/rlhf" train recipes/demo.yaml --set run.device=cuda \
    --set run.directory="$OUT/demo"
}
part_train() { train train-1.1b --model $small; }
part_train-modes() {
  train train-1.1b-selective --model $small --recompute selective --steps 5
  train train-1.1b-full --model $small --recompute full --steps 5
}
part_7b() { train train-7b --model $large --seqs 4 --recompute full --steps 5; }
part_7b-offload() { train train-7b-offload --model $large --seqs 4 --recompute full --steps 3 --offload optimizer; }
part_kernels() { part kernels 60 "$BUILD/rlhf" bench kernels --device cuda --model $small; }
part_ppo() { part ppo 25 "$BUILD/rlhf" bench ppo --device cuda --model $small; }
part_two() {
  ranks two-1.1b 2 --model $small --seqs 4
  ranks two-7b 2 --model $large --seqs 4 --recompute full --steps 5
}
part_nodes() {
  export NCCL_SOCKET_IFNAME=lo NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
  ranks nodes-1.1b 2 --model $small --seqs 4 --ranks-per-node 1 --modes zero3,all --steps 5
  unset NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE
}
part_ppo-nodes() {
  DEVICE=cuda RLHF=$BUILD/rlhf SHARED=${SHARED:-$FIXTURES/../data} STEPS=3 part ppo-nodes 7 bench/zeropp_delta_ppo.sh all delta auto
}
part_generate() {
  local p
  for p in cpu cuda; do
    part "generate-$p" 1 "$BUILD/rlhf" generate --model "$FIXTURES/llama" --tokens <(echo '{"tokens": [1, 5, 9, 12]}') --greedy \
      --device $p --precision float32
  done
  cmp "$OUT/generate-cpu.log" "$OUT/generate-cuda.log" | sed 's/^/generate: /'
}

nvidia-smi --query-gpu=index,name,memory.used,utilization.gpu --format=csv,noheader 2>/dev/null
for p in ${*:-build tests parity train}; do
  declare -F "part_$p" >/dev/null || { echo "no part $p; see the top of $0" >&2; exit 2; }
  "part_$p"
done
printf '\n%s\n' "${summary[@]}"
echo "logs: $OUT"
[[ "${summary[*]}" != *FAILED* ]]
