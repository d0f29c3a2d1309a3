#!/usr/bin/env bash
# Builds the C++ extension with AddressSanitizer and UndefinedBehaviorSanitizer and runs its CPU tests under them:  tools/asan.sh [TEST...]
#
# Works on a copy in build/asan, so the extension in the checkout stays as it is. Leaks are not looked for here (Python itself never
# frees everything; tests count over 10,000 calls instead), nor when memory goes back, which the sanitizer delays, and nothing that needs
# Inductor's compiler is run. Any report of a sanitizer ends the run with an error.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
work=$root/build/asan
tests=("$@")
if [ ${#tests[@]} -eq 0 ]; then
    tests=(tests/runtime/test_compiled.py tests/runtime/test_launch.py tests/runtime/test_cuda_graph.py tests/runtime/test_captured.py
        tests/device/test_timer.py tests/runtime/test_huge_pages.py tests/runtime/test_dispatch.py tests/runtime/test_guard.py tests/core/test_native.py)
fi

mkdir -p "$work"
for folder in torch_cudal1 tests benchmarks csrc; do
    rm -rf "${work:?}/$folder"
    cp -r "$root/$folder" "$work/$folder"
done
rm -f "$work"/torch_cudal1/*.so
cp "$root/setup.py" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$work/"
cd "$work"
flags="-fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer -fno-sanitize-recover=undefined"
CFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined" "$python" setup.py -q build_ext --inplace
ls torch_cudal1/_native*.so

libraries=$("${CXX:-c++}" -print-file-name=libasan.so):$("${CXX:-c++}" -print-file-name=libubsan.so)
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:halt_on_error=1:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONMALLOC=malloc PYTHONPATH=$work
LD_PRELOAD=$libraries "$python" -m pytest -p no:cacheprovider -q "${tests[@]}" -k "not leak and not whole_models and not memory_goes_back and not both_schedules"
