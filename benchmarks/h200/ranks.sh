#!/usr/bin/env bash
# 55 s, at most 120; as many GPUs as the argument says (2 or 4), no other lane: ranks agree by digest in DDP, FSDP2 and tensor
# parallel (nccl), one searches for all, and, with 2 GPUs, the cheat that assumes a device.
set -uo pipefail
count=${1:?number of GPUs, 2 or 4}
python=${PYTHON:-python3} out=$OUT/ranks-$count.txt folder=$(mktemp -d)
tests=("$python" -m pytest -m gpu -n 0 -q -rA --tb=short --show-capture=no -p no:cacheprovider)
trap 'rm -rf "$folder"' EXIT
say() { echo "== $* ($SECONDS s)" | tee -a "$out"; }
unusable() { say "these GPUs or files cannot be used: nothing was run" && tail -5 "$out" && exit 1; }
: >"$out"
timeout 30 "$python" - "$count" >>"$out" 2>&1 <<'PY' || unusable
import sys
import torch, torch.distributed
import benchmarks.bench_ranks, tests.api.rank_crew
print(torch.__version__, torch.cuda.device_count(), torch.cuda.get_device_name(), "nccl", torch.cuda.nccl.version())
assert torch.cuda.device_count() >= int(sys.argv[1]), f"needs {sys.argv[1]} GPUs"
PY
quick() { # nothing is measured here, so it runs beside the search
    timeout -k 5 100 "${tests[@]}" tests/api/test_ranks_gpu.py -k "[$count]" || return 1
    [ "$count" != 2 ] || timeout -k 5 60 "${tests[@]}" tests/adversarial/test_cases.py -k device_assumption
}
say "the tests, beside the search"
quick >"$folder/tests" 2>&1 &
beside=$!
timeout -k 5 100 "$python" -m benchmarks.bench_ranks --kind cuda --counts "$count" --budget-s 10 --time-limit-s 90 \
    --out "$OUT/h200-ranks-$count.json" >>"$out" 2>&1
searched=$?
wait "$beside"
tested=$?
cat "$folder/tests" >>"$out"
say "search $searched, tests $tested (0: all is well)"
tail -40 "$out"
exit $((searched || tested))
