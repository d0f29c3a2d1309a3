#!/usr/bin/env bash
# 150 s, at most 180; one GPU and 16 cores: convolutions, our kernels against PyTorch's own and the floor of their memory traffic.
# Argument: names of cases separated by commas (default: all). What is in the results file is not done again.
set -uo pipefail
mapfile -d, -t names < <(printf '%s' "${1:-}")
only=()
for name in "${names[@]}"; do only+=(--only "$name"); done
timeout 30 "${PYTHON:-python3}" -c "import torch; assert torch.cuda.is_available()" || exit 1
timeout -k 10 165 "${PYTHON:-python3}" -m benchmarks.bench_conv "${only[@]}" --processes "${PROCESSES:-15}" --per-case "${PER_CASE:-4}" \
    --budget-s "${BUDGET:-135}" --out "$OUT/h200-conv.json" >"$OUT/conv.txt" 2>&1
code=$?
tail -50 "$OUT/conv.txt" | cut -c1-200
exit $code
