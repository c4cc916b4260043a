#!/usr/bin/env bash
# The C++ by itself. check: formatting, and a build in which warnings are errors. sanitize: the native tests on a
# library built with ASan and UBSan. Without a compiler both say so and succeed: the package installs there too.
set -euo pipefail
cd "$(dirname "$0")/.."
source=src/perilune/native
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "native: no C++ compiler (${CXX:-c++}), nothing to check"
  exit 0
fi

build() { # folder, then CMake definitions
  local folder=$1
  shift
  .venv/bin/cmake -S "$source" -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" \
    -DCMAKE_BUILD_TYPE=Release -DPERILUNE_WERROR=ON "$@" >/dev/null
  .venv/bin/cmake --build "$folder"
}

case ${1:-} in
  check)
    find "$source" \( -name '*.cc' -o -name '*.h' \) -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror
    build build/native-check
    ;;
  sanitize)
    build build/native-sanitize -DPERILUNE_SANITIZE=ON
    # Python itself is not instrumented: the runtime must be there before it starts, and its leaks are not ours.
    # No capture: a report is written as the process ends, and pytest would take it along.
    LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libasan.so) $("${CXX:-c++}" -print-file-name=libubsan.so)" \
      ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
      .venv/bin/python -m pytest tests/native -m "" --capture=no --native-library build/native-sanitize/libperilune_codecs.so
    ;;
  *)
    echo "usage: scripts/native.sh check|sanitize" >&2
    exit 2
    ;;
esac
