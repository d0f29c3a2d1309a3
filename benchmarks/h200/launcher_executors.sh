#!/usr/bin/env bash
# 120 s, at most 220; one GPU and 16 cores: every Program that the GPU tests make runs on both executors, its kernel launches too.
# Shows: the C++ executor gives what the Python one gives, bit for bit; the end of the log counts what was compared.
# Argument: files or folders of tests separated by commas (tests/ir,tests/runtime,tests/kernels).
set -uo pipefail
mapfile -d, -t paths < <(printf '%s' "${1:-tests/ir,tests/runtime,tests/kernels}")
timeout 30 "${PYTHON:-python3}" -c "import torch; assert torch.cuda.is_available()" || exit 1
timeout -k 10 200 "${PYTHON:-python3}" -m pytest -m gpu -n 8 --dist worksteal -q -rfE --tb=short -p no:cacheprovider -p tests.both_executors \
    -p tests.report_now "${paths[@]}" >"$OUT/launcher_executors.txt" 2>&1
code=$?
tail -40 "$OUT/launcher_executors.txt" | cut -c1-200
exit $code
