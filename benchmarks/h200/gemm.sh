#!/usr/bin/env bash
# 250 s, at most 290; one GPU and 16 cores: matrix products, every method and schedule against cuBLAS, TFLOP/s and error.
# Argument: names of cases separated by commas ("square 4096 nt,deep"; default: all). What is in the results file is not done again.
set -uo pipefail
mapfile -d, -t names < <(printf '%s' "${1:-}")
only=()
for name in "${names[@]}"; do only+=(--only "$name"); done
timeout 30 "${PYTHON:-python3}" -c "import torch; assert torch.cuda.is_available()" || exit 1
timeout -k 10 270 "${PYTHON:-python3}" -m benchmarks.bench_gemm "${only[@]}" --processes "${PROCESSES:-15}" --per-case "${PER_CASE:-4}" \
    --budget-s "${BUDGET:-235}" --out "$OUT/h200-gemm.json" >"$OUT/gemm.txt" 2>&1
code=$?
tail -60 "$OUT/gemm.txt" | cut -c1-200
exit $code
