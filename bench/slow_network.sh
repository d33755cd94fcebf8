#!/usr/bin/env bash
# rlhf bench zeropp, or rlhf train, over a slow network on one machine: hosts are network namespaces, each with a host name of its
# own and joined to a switch by a link of the given rate in both directions (tc tbf); mpirun goes across them over TCP,
# and through shared memory inside a host.
#
# usage: bench/slow_network.sh HOSTS RATE [OPTION of rlhf bench zeropp]...
#        bench/slow_network.sh HOSTS RATE train RECIPE [OPTION of rlhf train]...
#   bench/slow_network.sh 2 100mbit --modes zero3,all
#   RANKS=1 bench/slow_network.sh 3 1gbit
#
# RATE: as tc spells it, or `max` for links without a limit. RANKS: ranks of a host, 1 or 2 (2). RLHF: the program
# (./rlhf). Needs root, iproute2 and util-linux. Everything it makes has its process id in the name and is gone at
# its end, also when it is interrupted: namespaces, the links in them, and a folder in memory.
set -u
usage() { sed -n '6,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { echo "slow_network.sh: $*" >&2; exit 1; }

[ $# -ge 2 ] || usage
hosts=$1 rate=$2
shift 2
ranks=${RANKS:-2} rlhf=$(realpath "${RLHF:-./rlhf}")
case $hosts in '' | *[!0-9]*) usage ;; esac
[ "$hosts" -ge 2 ] && [ "$hosts" -le 250 ] || fail "HOSTS: found $hosts; expected 2 to 250"
case $ranks in 1 | 2) ;; *) fail "RANKS: found $ranks; expected 1 or 2" ;; esac
[ -x "$rlhf" ] || fail "$rlhf: no such program; build it with make, or say RLHF=PATH"
[ "$(id -u)" = 0 ] || fail "network namespaces need root"
for tool in ip tc unshare mpirun; do
  command -v $tool >/dev/null || fail "$tool is not installed (iproute2, util-linux, openmpi-bin)"
done

net=rlhf$$ # prefix of all names
job="" tmp=""
spaces() { ip netns list 2>/dev/null | cut -d' ' -f1 | grep "^$net-"; }
processes() { for n in $(spaces); do ip netns pids "$n"; done; }

cleanup() {
  trap '' INT TERM HUP # no second one in the middle of the first
  local p i
  [ -n "$job" ] && kill "$job" 2>/dev/null # mpirun ends its ranks
  for i in $(seq 40); do
    [ -z "$(processes)" ] && break
    [ "$i" -gt 20 ] && for p in $(processes); do kill -9 "$p" 2>/dev/null; done
    sleep 0.1
  done
  for n in $(spaces); do ip netns del "$n"; done # their links go with them
  [ -n "$tmp" ] && rm -rf "$tmp"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

shape() { # NAMESPACE LINK
  [ "$rate" = max ] && return
  # A burst of half a segmentation block: short, so that short messages are not let through for nothing.
  tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst 32kb limit 512kb ||
    fail "RATE: tc does not take \"$rate\"; expected the like of 100mbit"
}

must() { "$@" || fail "failed: $*"; }

make_network() {
  local i
  must ip netns add "$net-switch"
  must ip -n "$net-switch" link add switch type bridge
  must ip -n "$net-switch" link set switch up
  for i in $(seq "$hosts"); do
    must ip netns add "$net-h$i"
    must ip -n "$net-h$i" link set lo up
    must ip link add name eth0 netns "$net-h$i" type veth peer name "port$i" netns "$net-switch"
    must ip -n "$net-h$i" address add "10.77.0.$i/24" dev eth0
    must ip -n "$net-h$i" link set eth0 up
    must ip -n "$net-switch" link set "port$i" master switch up
    shape "$net-h$i" eth0
    shape "$net-switch" "port$i"
  done
}

# The remote shell of mpirun: HOST COMMAND. Also a command of this script's own.
make_agent() {
  cat >"$tmp/agent" <<END
#!/bin/sh
host=\$1
shift
exec ip netns exec $net-\$host unshare --uts sh -c 'hostname "\$0" && exec sh -c "\$1"' "\$host" "\$*"
END
  chmod +x "$tmp/agent"
}

run_ranks() {
  local list='' i task=(bench zeropp)
  [ "${1:-}" = train ] && task=()
  for i in $(seq "$hosts"); do list=$list${list:+,}h$i:$ranks; done
  local command=(mpirun -n $((hosts * ranks)) --host "$list" --bind-to none --oversubscribe
    --mca plm rsh --mca plm_rsh_agent "$tmp/agent" --mca plm_rsh_no_tree_spawn 1
    --mca pml ob1 --mca btl tcp,self,vader --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0
    --mca btl_tcp_flags 1 # plain sends: with its puts Open MPI uses a full-duplex link one way at a time
    --mca orte_tmpdir_base "$tmp" --mca btl_vader_backing_directory "$tmp"
    --mca mpi_yield_when_idle 1 -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    "$rlhf" "${task[@]}" "$@")
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$tmp/agent" h1 "$(printf '%q ' "${command[@]}")" \
    2> >(grep -v 'plm:rsh: Warning: setpgid' >&2) & # a race of Open MPI's own, without consequence
  job=$!
  wait "$job"
}

tmp=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)/$net.XXXXXX") || exit 1
make_network
make_agent
run_ranks "$@"
