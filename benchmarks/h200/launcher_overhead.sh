#!/usr/bin/env bash
# 90 s, at most 230; one GPU and nothing else on the host: host microseconds of a call, eager, compiled, Triton, graph replay and ours.
# Shows: one kernel at most 5.0 us, a further launch at most 1.2, BERT-base at batch 1 within 1.2x of a bare replay, results held or not;
# and, on this host's CPU, three operators no dearer than eager's module. Each results file is written after every row.
set -uo pipefail
python=${PYTHON:-python3} log=$OUT/launcher_overhead.txt
timeout 30 "$python" -c "import torch; from torch_cudal1.core import native; assert torch.cuda.is_available() and native.status()[0], native.status()" ||
    exit 1
timeout 60 "$python" -m benchmarks.bench_overhead --calls 20 --only "launches, 1" --out "$OUT/launcher_smoke.json" >"$log" 2>&1 ||
    { tail -5 "$log" && exit 1; }
: >"$log"
timeout -k 10 120 "$python" -m benchmarks.bench_overhead --calls 2000 --out "$OUT/h200-overhead.json" >>"$log" 2>&1
code=$?
timeout -k 10 15 "$python" -m benchmarks.bench_overhead --device cpu --calls 4000 --only three --out "$OUT/h200-host-overhead.json" >>"$log" 2>&1
cat "$log"
exit $code
