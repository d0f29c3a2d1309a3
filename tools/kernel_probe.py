"""Which kernels of a test case are wrong on this machine's GPU, and how:
`python tools/kernel_probe.py "decays, ragged"`.

Every proposal for the case runs in a process of its own, again and again on the same inputs: it
tells how many elements are off by more than 1e-4 of the largest (3e-2 in half types), where the
first are, and whether the results differ from run to run. Those that fail, or all with --sanitize,
run once more under compute-sanitizer's memcheck and racecheck. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_TOOLS = ("memcheck", "racecheck")
_AT_ONCE = 4
_LIMIT_S = 200


def main() -> int:
    """Tell of each proposal; 1 if one fails."""
    options = _options()
    if options.one is not None:
        return _run_one(options)
    count = 1 if options.config else _count(options.case)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda index: _asked(options, index, ()), range(count)))
    for index, (code, text) in enumerate(answers):
        print(f"-- proposal {index}: {'fails' if code else 'right'}\n{text}", flush=True)
    wanted = [index for index, (code, _) in enumerate(answers) if code or options.sanitize]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for index in wanted:
        for tool in _TOOLS:
            code, text = _asked(options, index, (sanitizer, "--tool", tool, "--print-limit", "4"))
            print(f"-- proposal {index} under {tool}: ended with {code}\n{text}", flush=True)
    return int(any(code for code, _ in answers))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "case",
        help="of tests/kernels: attention's, products', or gradient/NAME for one of attention's backward",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--sanitize", action="store_true", help="the tools on all proposals, not on those that fail"
    )
    parser.add_argument(
        "--config", type=json.loads, help="JSON of one proposal that is not made by itself"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _asked(options: argparse.Namespace, index: int, under: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and output of a process with one proposal."""
    repeats = 1 if under else options.repeats
    config = ["--config", json.dumps(options.config)] if options.config else []
    command = [
        *under,
        sys.executable,
        __file__,
        options.case,
        *config,
        "--one",
        str(index),
        "--repeats",
        str(repeats),
    ]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return 1, f"not done after {_LIMIT_S} s: {late.stdout or ''}"
    return done.returncode, (done.stdout + done.stderr)[-4000:]


def _count(case: str) -> int:
    sys.path.insert(0, str(_ROOT))
    from torch_cudal1.kernels import propose

    return len(propose(_case(case)[0], _sm()))


def _sm() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _case(name: str) -> tuple[Any, list[Any], list[Any]]:
    """The island, its inputs and the float64 results, on the host."""
    import torch

    from tests.kernels import compare_attention, compare_attention_backward, compare_products
    from tests.kernels.compare import outputs_of
    from tests.kernels.traced_programs import trace_program

    gradients = {f"gradient/{one}": case for one, case in compare_attention_backward.CASES.items()}
    if name in gradients:
        case = gradients[name]
        return case.program(), list(case.inputs()), case.expected(torch.float64)
    cases = compare_attention.CASES if name in compare_attention.CASES else compare_products.CASES
    if name not in cases:
        known = [*compare_attention.CASES, *compare_products.CASES, *gradients]
        raise SystemExit(f"no case {name!r}; expected one of {'; '.join(known)}")
    function, given = cases[name]
    make = compare_attention.program_of if cases is compare_attention.CASES else trace_program
    return (
        make(function, given),
        list(given),
        outputs_of(function, [tensor.double() for tensor in given]),
    )


def _run_one(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(_ROOT))
    import torch

    from tests.kernels.test_device import place_on_gpu
    from torch_cudal1.kernels import Proposal, build, propose
    from torch_cudal1.runtime.executor import prepare

    program, given, exact = _case(options.case)
    proposal = propose(program, _sm())[options.one]
    proposal = Proposal(proposal.family, options.config) if options.config else proposal
    print(dict(proposal.config), flush=True)
    run, inputs = (
        prepare(build(program, proposal, _sm()), torch.device("cuda")),
        [place_on_gpu(tensor) for tensor in given],
    )
    runs = [[out.cpu() for out in run(inputs) if out is not None] for _ in range(options.repeats)]
    wrong = 0
    for position, wide in enumerate(exact):
        outs = [outs[position] for outs in runs]
        kinds = len({bytes(out.contiguous().view(torch.uint8).flatten().tolist()) for out in outs})
        limit = (1e-4 if outs[0].dtype is torch.float32 else 3e-2) * wide.abs().nan_to_num(
            0.0, 0.0, 0.0
        ).max()
        off = [~((out.double() - wide).abs() <= limit) & wide.isfinite() for out in outs]
        counts = [int(one.sum()) for one in off]
        worst = counts.index(max(counts))
        print(
            f"output {position} {tuple(wide.shape)}: {kinds} different results in {len(outs)} runs, elements off {counts}"
        )
        if counts[worst]:
            places = off[worst].nonzero()
            print("first", places[:6].tolist(), "last", places[-3:].tolist())
            print(
                "got",
                outs[worst][off[worst]][:6].tolist(),
                "expected",
                wide[off[worst]][:6].tolist(),
            )
        wrong += bool(counts[worst]) or kinds > 1
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
