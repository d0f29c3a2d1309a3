#!/usr/bin/env bash
# 20 s, at most 60; one GPU: seconds of the judge's float64 references for transposed convolutions, and of PyTorch's own kernels.
set -uo pipefail
timeout -k 5 60 "${PYTHON:-python3}" -m benchmarks.bench_float64 --device cuda --out "$OUT/h200-float64.json"
