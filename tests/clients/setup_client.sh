#!/usr/bin/env bash
# Makes the environment of one client that is tested as its users install it: build/clients/NAME.
#
# Usage: tests/clients/setup_client.sh lm-eval|guidellm
#
# Each client has its own: their dependencies are not ours, and contradict each other. Versions stand in requirements/.
# PYTHON names the interpreter. Takes minutes; an environment that is there already is left alone.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
name="${1:-}"
list="$here/requirements/$name.txt"
if [[ -z "$name" || ! -f "$list" ]]; then
  echo "usage: $0 lm-eval|guidellm" >&2
  exit 2
fi
env="$here/../../build/clients/$name"
if [[ -f "$env/complete" ]] && cmp -s "$env/complete" "$list"; then
  exit 0
fi
rm -rf "$env"
"${PYTHON:-python3}" -m venv "$env"
if grep -q '^torch==' "$list"; then
  # torch first, alone: where there is a build for CPUs it is taken, and nothing of CUDA comes along.
  "$env/bin/pip" install --quiet --disable-pip-version-check "$(grep '^torch==' "$list")"
fi
"$env/bin/pip" install --quiet --disable-pip-version-check --requirement "$list"
cp "$list" "$env/complete" # last: without it an earlier attempt was interrupted
