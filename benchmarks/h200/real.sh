#!/usr/bin/env bash
# One GPU and 16 cores, nothing else on it: models of transformers and timm as `benchmarks.real_models` measures them.
# Arguments, separated by commas: what, then models.
#   columns,swin-tiny,convnext-tiny   150 s a batch of as many models as 15 processes take; every batch is kept when it ends. WAYS: the
#                                     columns (eager,torch.compile,reduce-overhead,accelerate,accelerate-tuned); SIZE, PRECISION; PROFILE=1:
#                                     the kernels of each column too, and the floor of each model; ENTRIES=1: what searches found, as
#                                     NAME-entries.tgz for `benchmarks.ship`
#   starts,bert-base                  90 s a model: cold side by side, then two warm starts of each way alone
#   generate                          120 s a way: tokens a second of a Llama of 1.1 billion parameters; WAYS (eager,transformers,accelerate)
#   depth                             230 s: a Llama of 7-billion width with 2 and 32 layers, then another with the same blocks
# A process takes 10 to 30 s to its first line there. REAL_S: seconds at most for all of it (500).
set -uo pipefail
what=${1%%,*} models=${1#*,}
[ "$models" != "$1" ] || models=
python=${PYTHON:-python3} device=${DEVICE:-cuda} limit=${REAL_S:-500}
timeout 90 "$python" - "$device" <<'PY' || exit 1
import sys
import torch, transformers, cudal1, benchmarks.real_models.columns
assert sys.argv[1] == "cpu" or torch.cuda.is_available(), "no GPU"
PY
entries=$(mktemp -d)
name=real-$what${models:+-${models//,/_}}
common=(--device "$device" --out "$OUT/h200-$name.json")
case $what in
columns)
    command=(benchmarks.real_models "${common[@]}" --columns "${WAYS:-eager,torch.compile,reduce-overhead,accelerate,accelerate-tuned}"
        --workers "${WORKERS:-15}" --limit-s "${BATCH_S:-180}" --size "${SIZE:-small}" --precision "${PRECISION:-half}" ${PROFILE:+--profile}
        ${ENTRIES:+--entries "$entries"})
    ;;
starts)
    command=(benchmarks.real_models.start "${common[@]}" --columns "${WAYS:-torch.compile,accelerate,backend}" --runs "${RUNS:-2}"
        --compile-threads "${COMPILE_THREADS:-4}" --total-limit-s $((limit - 60)) --size "${SIZE:-small}")
    ;;
generate) command=(benchmarks.real_models.generate "${common[@]}" --limit-s "${BATCH_S:-180}" ${WAYS:+--ways ${WAYS//,/ }}) ;;
depth) command=(benchmarks.real_models.depth "${common[@]}" --width "${WIDTH:-full}" --tokens "${TOKENS:-1024}") ;;
*) echo "expected columns, starts, generate or depth, got '$what'" && exit 2 ;;
esac
[ -z "$models" ] || command+=(--models "$models")
timeout -k 10 "$limit" "$python" -m "${command[@]}" >"$OUT/$name.txt" 2>&1
code=$?
[ ! -d "$entries/v1" ] || tar czf "$OUT/h200-$name-entries.tgz" -C "$entries" v1
tail -12 "$OUT/$name.txt" | cut -c1-700
exit $code
