#!/usr/bin/env bash
# What tests/browser needs: Chromium and Node.js from the system's packages, playwright-core from npm.
set -euo pipefail
cd "$(dirname "$0")/.."

missing() { ! command -v "$1" > /dev/null; }

packages=()
missing chromium && packages+=(chromium)
missing node && packages+=(nodejs)
missing npm && packages+=(npm)
if ((${#packages[@]})); then
  (($(id -u) == 0)) || { echo "install first: ${packages[*]}" >&2; exit 1; }
  export DEBIAN_FRONTEND=noninteractive
  timeout 180 apt-get update -qq
  timeout 300 apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null
fi
timeout 120 npm ci --prefix tests/browser --ignore-scripts --no-audit --no-fund --loglevel=error
