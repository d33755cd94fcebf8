#!/usr/bin/env bash
# What ZeRO++ buys at four rates of the network, from compute-bound to network-bound, on two hosts
# (bench/slow_network.sh), beside what the traffic alone predicts: a step then takes what it takes without a limit
# plus the bytes that enter a host over the rate, nothing hidden. One row per rate and mode; `waits` is the share of
# the step that is spent waiting for communication. usage: bench/zeropp_rates.sh [OPTION of rlhf bench zeropp]...
# RATES: in Mbit/s; RANKS: ranks of a host, 1 or 2 (2: on fewer than four cores ranks also wait for each other);
# RLHF: the program
cd "$(dirname "$0")/.." || exit 1
rates=${RATES:-400 200 120 50}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

measure() { # RATE-AS-TC-SPELLS-IT ARGUMENT...: "MODE STEP INTER-BYTES-PER-HOST EXPOSED HIDDEN" a line
  local rate=$1
  shift
  bench/slow_network.sh 2 "$rate" --json "$@" >"$dir/json" || exit 1
  sed 's/.*"mode":"\([^"]*\)".*"local":\([0-9]*\).*"step_seconds":\([^,]*\).*"inter_bytes":\([^,]*\).*"hidden_seconds":\([^,]*\).*"exposed_seconds":\([^,}]*\).*/\1 \3 \4 \2 \6 \5/' \
    "$dir/json" | awk '{ print $1, $2, $3 * $4, $5, $6 }'
}

measure max "$@" >"$dir/free" || exit 1
printf '%9s %-8s %9s %7s %7s %9s %9s %9s %9s\n' Mbit/s mode 'step s' faster waits 'hidden s' 'MB/host' 'predicts' 'faster'
print_rate() { # RATE FILE
  awk -v rate="$1" '
    NR == FNR { free[$1] = $2; next }
    {
      predicted = free[$1] + (rate == "max" ? 0 : $3 * 8 / (rate * 1e6))
      if (first == "") { first = $2; first_predicted = predicted }
      printf "%9s %-8s %9.4f %6.2fx %6.0f%% %9.4f %9.3f %9.4f %8.2fx\n", rate, $1, $2, first / $2, 100 * $4 / $2, $5,
        $3 / 1e6, predicted, first_predicted / predicted
    }' "$dir/free" "$2"
}
print_rate max "$dir/free"
for rate in $rates; do
  measure "${rate}mbit" "$@" >"$dir/at" || exit 1
  print_rate "$rate" "$dir/at"
done
