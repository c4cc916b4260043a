#!/usr/bin/env bash
# Writes requirements/run.lock and dev.lock from pyproject.toml: every package with its version and the hashes of its
# files, nothing about where they were found. torch is left to requirements/torch.txt, because each platform has its
# own build; its pure dependencies are locked.
set -euo pipefail
cd "$(dirname "$0")/.."
export CUSTOM_COMPILE_COMMAND="make lock"
compile() {
  .venv/bin/pip-compile --quiet --generate-hashes --strip-extras --unsafe-package torch \
    --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
    --constraint requirements/torch.txt "$@" pyproject.toml requirements/build.in
}
compile --output-file requirements/run.lock "${@}"
compile --output-file requirements/dev.lock --constraint requirements/run.lock --extra test --extra dev "${@}"
