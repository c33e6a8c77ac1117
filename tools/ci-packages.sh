#!/usr/bin/env bash
# Debian packages that some tests need (the real control plane: etcd, zstd, openssl; the live page:
# nodejs, npm, chromium; a Prometheus that scrapes).  Without them, or without the right to install
# them, those tests skip and say why.
set -euo pipefail
missing=()
command -v etcd > /dev/null || missing+=(etcd-server)
command -v zstd > /dev/null || missing+=(zstd)
command -v openssl > /dev/null || missing+=(openssl)
command -v npm > /dev/null || missing+=(nodejs npm)
command -v chromium > /dev/null || missing+=(chromium)
command -v promtool > /dev/null || missing+=(prometheus)
command -v prometheus-node-exporter > /dev/null || missing+=(prometheus-node-exporter)
[[ ${#missing[@]} -eq 0 ]] && exit 0
if [[ $(id -u) -ne 0 ]] || ! command -v apt-get > /dev/null; then
  echo "not installed: ${missing[*]}; tests that need them will not run" >&2
  exit 0
fi
apt-get -qq update
# In runlevel 1 no service of a package is started.
RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${missing[@]}" > /dev/null
