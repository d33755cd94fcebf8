#!/usr/bin/env bash
# The rules of ARCHITECTURE.md that a machine can check: who includes whom, where MPI and BLAS may be named, and that no
# machine's paths or unfinished marks are in the tree.
. tests/tap.sh
cd "$root" || exit 1

# includes FOLDER ALLOWED...: prints the includes of FOLDER that are not allowed
includes() {
  local folder=$1
  shift
  local allowed
  allowed=$(echo "$folder $*" | tr ' ' '|')
  grep -rnoE '#include "(core|kernels|zeropp|model|generation|actor|critic|reward|orchestrator)/' "$folder" --include='*.[ch]' --include='*.cc' --include='*.cu' |
    grep -vE "\"($allowed)/"
}
is "core includes only itself" "$(includes core)" ""
is "kernels: core" "$(includes kernels core)" ""
is "zeropp: core, kernels" "$(includes zeropp core kernels)" ""
is "model: what is below" "$(includes model core kernels zeropp)" ""
for f in generation actor critic reward; do
  is "$f: what is below, none of its neighbours" "$(includes $f core kernels zeropp model)" ""
done
is "MPI only in kernels" "$(grep -rlE '\bMPI_[A-Z]|mpi\.h' --include='*.[ch]' core zeropp model generation actor critic reward orchestrator)" ""
is "MPI data calls only in kernels/cpu" "$(grep -rlE 'MPI_(Isend|Irecv|Alltoall|Reduce_scatter)' --include='*.c' --include='*.cu' kernels | grep -v '^kernels/cpu/')" ""
is "GEMM libraries only in kernels/cpu" "$(grep -rlE 'cblas|dnnl' --include='*.[ch]' --include='*.cu' . | grep -v '^./kernels/cpu/\|^./bench/\|^./build')" ""
is "CUDA only in kernels/cuda" "$(grep -rlE '#include [<"](cuda|cublas|cudnn|nccl|nvml)|\b(cuda[A-Z]|cublas|cudnn|nccl)[A-Za-z]*\(' \
  --include='*.[ch]' --include='*.cc' --include='*.cu' core kernels zeropp model generation actor critic reward orchestrator tests bench | grep -v '^kernels/cuda/')" ""
is "back ends only behind kernels.h" "$(grep -rlE '#include "kernels/(cuda|cpu)/' --include='*.[ch]' --include='*.cc' core zeropp model generation actor critic reward orchestrator)" ""
is "no library of NVIDIA's is linked" "$(ldd "$rlhf" | grep -E 'libcud|libcublas|libnccl')" ""
is "no unfinished marks" "$(grep -rnE '\b(TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b' --include='*.[ch]' --include='*.cc' --include='*.cu' core kernels zeropp model generation actor critic reward orchestrator)" ""
is "FAULTS.md names cases that are there" "$(sed 's/`[^`]*`//g' tests/FAULTS.md | grep -oE '\b[a-z][a-z0-9]*_[a-z0-9_]+\b' | sort -u |
  while read -r name; do grep -qw "$name" tests/test_*.c || echo "$name"; done)" ""
# A static library hides a name that two folders define; the linker takes whichever comes first.
is "no name is defined twice" "$(nm --defined-only "$(dirname "$rlhf")"/lib*.a 2>/dev/null | awk '$2 == "T" || $2 == "D" || $2 == "B" {print $3}' | sort | uniq -d | grep -v '^_\|__odr_asan')" ""
