#!/usr/bin/env bash
# Puts Debian's Prometheus and promtool into a folder of the project, for the tests of metrics, dashboards and alerts.
#   scripts/setup_prometheus.sh [FOLDER]     (default: .venvs/prometheus; nothing is installed on the machine)
# A second call does nothing. Exit code 75: Debian's packages cannot be reached from here.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venvs/prometheus}
if [ -x "$folder/usr/bin/promtool" ]; then exit 0; fi
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# apt drops its rights for downloads, and then has to be able to write here.
chmod 777 "$work"
# A machine that has never asked for them knows no package yet.
(cd "$work" && { apt-get download prometheus || { apt-get update -qq && apt-get download prometheus; }; }) || {
  echo "setup_prometheus.sh: Debian's packages cannot be reached from here" >&2
  exit 75
}
dpkg-deb -x "$work"/prometheus_*.deb "$folder"
"$folder/usr/bin/promtool" --version | head -1
