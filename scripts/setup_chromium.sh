#!/usr/bin/env bash
# Installs Debian's Chromium, in which the page of `clew serve` is tested; only as root, since it goes into the system.
# A second call does nothing. Exit code 75: it is missing and cannot be installed from here.
set -euo pipefail
if command -v chromium > /dev/null; then exit 0; fi
install() { DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends -qq chromium > /dev/null; }
if [ "$(id -u)" -ne 0 ] || ! { install || { apt-get update -qq && install; }; }; then
  echo "setup_chromium.sh: Chromium is missing and cannot be installed from here" >&2
  exit 75
fi
chromium --version
