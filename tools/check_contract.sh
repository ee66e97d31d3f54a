#!/usr/bin/env bash
# buf lint, and buf breaking against the previous version of proto/ in the history. buf comes as an npm package.
set -euo pipefail
cd "$(dirname "$0")/.."

BUF_VERSION=1.75.0
cache=".cache/buf-$BUF_VERSION"
buf="$cache/node_modules/.bin/buf"

if [ ! -x "$buf" ]; then
    if ! command -v npm >/dev/null; then
        echo "contract: buf lint and buf breaking skipped: npm is not installed"
        exit 0
    fi
    npm install --silent --no-audit --no-fund --prefix "$cache" "@bufbuild/buf@$BUF_VERSION"
fi

"$buf" lint proto
"$buf" format --diff --exit-code proto
echo "contract: lint and format clean"

previous="$(git log --format=%H -- proto | sed -n 2p)"
if [ -z "$previous" ]; then
    echo "contract: buf breaking skipped: the history holds no earlier version of proto/"
    exit 0
fi
"$buf" breaking proto --against ".git#ref=$previous,subdir=proto"
echo "contract: nothing broken since ${previous:0:12}"
