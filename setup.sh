#!/bin/sh
# Installs what building and running rlhf.c needs, from Debian's own packages (Debian 12, Ubuntu 22.04 and
# later). Asks for sudo when not root.
set -e
packages="gcc g++ make pkg-config openmpi-bin libopenmpi-dev libdnnl-dev libyaml-dev
 libjansson-dev libpcre2-dev zlib1g-dev libsentencepiece-dev libutf8proc-dev libcmocka-dev"
missing=""
for p in $packages; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
