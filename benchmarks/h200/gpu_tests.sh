#!/usr/bin/env bash
# 570 s on one GPU with 16 cores: every test that needs a GPU but the ranks' (ranks.sh) and the hacking cases (matrix.sh). Those
# that measure time, and those that failed, run alone at the end.
# The log names each test when it ends, for a run that the limit cuts.
# Argument: what to test, files separated by commas (all). TESTS_S, ALONE_S: seconds at most for the first round (430) and the
# second (100).
set -uo pipefail
python=${PYTHON:-python3}
GPUS=$(timeout 30 "$python" -c "import torch; print(torch.cuda.device_count())") && [ "$GPUS" -gt 0 ] || exit 1
export GPUS
timed=(tests/judge/benchmark/test_timing_gpu.py tests/judge/benchmark/test_clock.py tests/judge/pool/test_measure_gpu.py)
if [ -n "${1:-}" ]; then
    mapfile -d, -t files < <(printf '%s' "$1") && timed=()
else
    # files by name: most of tests without the hacking cases is refused, as tests/matrix.txt names those
    mapfile -t files < <(grep -rlE 'mark\.gpu' tests --include='test_*.py' | grep -vE 'adversarial|ranks|test_timing_gpu|test_clock|test_measure_gpu')
fi
run_tests() { # seconds at most, what to test and options
    timeout -k 10 "$1" "$python" -W ignore -m pytest -m gpu -vv -rfE --tb=short -p no:cacheprovider -p tests.report_now "${@:2}"
}
run_tests "${TESTS_S:-430}" -n $((12 * GPUS)) --dist worksteal -p tests.spread_over_gpus "${files[@]}" >"$OUT/gpu_tests.txt" 2>&1
code=$?
tail -12 "$OUT/gpu_tests.txt" | cut -c1-250
mapfile -t alone < <(sed -nE 's/^FAILED (tests[^ ]*(\[[^]]*\])?)( - .*)?$/\1/p' "$OUT/gpu_tests.txt" | sort -u)
alone+=("${timed[@]}")
if [ "$code" -le 1 ] && [ ${#alone[@]} -gt 0 ] && [ ${#alone[@]} -le 20 ]; then
    echo "alone:"
    run_tests "${ALONE_S:-100}" -n 0 "${alone[@]}" >"$OUT/gpu_tests_alone.txt" 2>&1
    code=$?
    tail -25 "$OUT/gpu_tests_alone.txt" | cut -c1-250
fi
exit $code
