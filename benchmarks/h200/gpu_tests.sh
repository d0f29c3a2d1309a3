#!/usr/bin/env bash
# 200 s, at most 290; one GPU and 16 cores: every test that needs a GPU but the ranks' (ranks.sh) and the hacking cases (matrix.sh).
# Failures are in the log at once, for a run that the limit cuts.
# Argument: what to test, files or folders separated by commas (all of tests).
set -uo pipefail
mapfile -d, -t paths < <(printf '%s' "${1:-tests}")
timeout 30 "${PYTHON:-python3}" -c "import torch; assert torch.cuda.is_available()" || exit 1
timeout -k 10 260 "${PYTHON:-python3}" -m pytest -m gpu -n 8 --dist worksteal -q -rfE --tb=short -p no:cacheprovider \
    -p tests.report_now --ignore tests/api/test_ranks_gpu.py --ignore tests/adversarial "${paths[@]}" >"$OUT/gpu_tests.txt" 2>&1
code=$?
tail -40 "$OUT/gpu_tests.txt"
exit $code
