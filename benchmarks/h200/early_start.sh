#!/usr/bin/env bash
# 60 s, at most 90; one GPU: chains of kernels of ours as CUDA graphs, with and without programmatic dependent launch.
set -uo pipefail
timeout 30 "${PYTHON:-python3}" -c "import torch; assert torch.cuda.is_available()" || exit 1
timeout -k 10 90 "${PYTHON:-python3}" -m benchmarks.bench_early_start --budget-s "${BUDGET:-4}" --out "$OUT/h200-early-start.json" \
    >"$OUT/early-start.txt" 2>&1
code=$?
tail -20 "$OUT/early-start.txt" | cut -c1-200
exit $code
