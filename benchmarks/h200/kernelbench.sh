#!/usr/bin/env bash
# 900 s, at most 940; as many lanes as there are GPUs, 16 cores each: KernelBench, every task against the best of PyTorch's own ways.
#
# Put it on the line of each GPU: lanes share the tasks, and a later call goes on where all lanes together had stopped. Argument: the
# seconds of this call (900). KERNELBENCH: a checkout of KernelBench. SIZES=release with RELEASE=FILE.json: the sizes of a CUDA-L1
# release, whose code becomes a column with CANDIDATES=1. ARMS="only rewrites,only kernels": searches with techniques left out, as
# columns. RIGHTS=tf32|ieee|bf16: other precision for everyone. ONLY="1/1 2/76": these tasks.
# PROFILE=quick: longer searches. THREADS=4: compilers of each task. Rows go to kernelbench-SIZES-RIGHTS-LANE.jsonl; those that
# KNOWN names (files) are not done again. The entries of the searches, which a cache folder can hold, come back in NAME-entries.tgz.
set -uo pipefail
seconds=${1:-900} sizes=${SIZES:-today} rights=${RIGHTS:-default} python=${PYTHON:-python3} device=${DEVICE:-cuda:0}
name=kernelbench-${ARMS:+arms-}$sizes-$rights
rows=$OUT/$name-${CUDA_VISIBLE_DEVICES:-all}.jsonl log=${rows%.jsonl}.txt
case $sizes in
today) tasks=${KERNELBENCH:?a checkout of KernelBench} ;;
release) tasks=${RELEASE:?a CUDA-L1 release, such as h100.json} ;;
*) echo "SIZES=$sizes; expected today or release" && exit 2 ;;
esac
"$python" -c "import einops" 2>/dev/null || echo "einops is not installed: tasks 3/48 and 3/49 of today's sizes cannot run"

# one folder of compiler caches and claims for all lanes: what one of them has compiled serves the others
work=${KERNELBENCH_WORK:-${TMPDIR:-/tmp}/$name}
mkdir -p "$work"
cores=$(nproc --all) gpus=$(nvidia-smi -L 2>/dev/null | grep -c GPU)
[ "$gpus" -gt 0 ] || gpus=1
workers=${WORKERS:-$((cores / gpus / 2))}
[ "$workers" -gt 0 ] || workers=1
threads=${THREADS:-1} # more of them start a pool of compilers in each task: for few tasks with hundreds of kernels
# shellcheck disable=SC2206  # words
only=(${ONLY:+--only $ONLY}) known=("$OUT/$name"-*.jsonl ${KNOWN:-})
candidates=() arms=()
IFS=, read -ra named <<<"${ARMS:-}"
[ ${#named[@]} -eq 0 ] || arms=(--arms "${named[@]}")
[ -z "${CANDIDATES:-}" ] || candidates=(--candidates "${RELEASE:?}")

# the first lane to come compiles for all of them, on the cores that nobody else wants
(
    flock -n 9 || exit 0
    taskset -cp "0-$((cores - 1))" "$BASHPID" >/dev/null 2>&1 # not this lane's alone
    exec env CUDA_VISIBLE_DEVICES= timeout -k 10 "$seconds" "$python" -m benchmarks.kernelbench compile "$tasks" --work "$work" --rights "$rights" \
        --processes $((cores > 2 ? cores / 2 : 1)) --budget-s "$((seconds / 2))" "${only[@]}" >"$OUT/$name-compile.txt" 2>&1
) 9>"$work/compile.lock" &
compiling=$!

timeout -s TERM -k 10 $((seconds + 20)) "$python" -m benchmarks.kernelbench run "$tasks" --out "$rows" --known "${known[@]}" \
    --claims "$work/claims" --work "$work" --device "$device" --profile "${PROFILE:-fast}" --rights "$rights" --workers "$workers" --threads "$threads" \
    --budget-s "$seconds" --reserve-s "${RESERVE:-40}" "${only[@]}" "${candidates[@]}" "${arms[@]}" >>"$log" 2>&1
code=$?
[ ! -d "$work/cudal1/v1" ] || tar czf "$OUT/$name-entries.tgz" -C "$work/cudal1" v1 # by each lane: the last one to end has all
kill "$compiling" 2>/dev/null
wait "$compiling" 2>/dev/null
tail -3 "$log" | cut -c1-400
"$python" -m benchmarks.kernelbench report "$OUT/$name"-*.jsonl --markdown "$OUT/$name.md" 2>>"$log" && head -30 "$OUT/$name.md"
[ $code -eq 3 ] && echo "the time was up first: call it again" && code=0
exit $code
