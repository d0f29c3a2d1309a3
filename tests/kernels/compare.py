"""The interpreted process of `test_numerics`: run as `python -m tests.kernels.compare` with
TRITON_INTERPRET=1; prints one JSON.

For each case and proposal: the largest error against float64 in units of what one rounding of the
output dtype allows, next to PyTorch's own, and whether NaN and infinity are where eager has them.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from tests.kernels.cases import all_cases
from tests.kernels.traced_programs import interpret, trace_program
from torch_cudal1.kernels import propose

# one rounding, relative; bfloat16 stores truncate in the interpreter, so two
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}


def errors(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """Facts of one output: exact match of integers, or largest error of `got` and `eager` in units
    of the output's scale.
    """
    same = got.dtype == eager.dtype and got.shape == eager.shape and got.stride() == eager.stride()
    if not got.dtype.is_floating_point:
        return {
            "dtype": str(got.dtype),
            "spec": same,
            "special": True,
            "error": 0.0 if torch.equal(got, eager) else float("inf"),
            "eager": 0.0,
        }
    # where eager's half-precision intermediate overflows, the fp32 one may stay right: then float64
    # decides
    special = any(
        torch.equal(got.isnan(), t.isnan()) and torch.equal(got.isinf(), t.isinf())
        for t in (eager, exact.to(got.dtype))
    )
    finite = eager.isfinite()
    # element-wise relative to the element plus a tenth of the typical size: small results of large
    # sums are not amplified
    scale = exact.abs() + 0.1 * exact[finite].pow(2).mean().sqrt().nan_to_num(1.0) + 1e-30
    worst = [
        (((t.double() - exact).abs() / scale)[finite].max().item() if finite.any() else 0.0)
        for t in (got, eager)
    ]
    return {
        "dtype": str(got.dtype),
        "spec": same,
        "special": special,
        "error": worst[0] / UNIT[got.dtype],
        "eager": worst[1] / UNIT[got.dtype],
    }


def as_interpreted(text: str) -> str:
    """What the interpreter can run: it has no products in pieces, and no other program comes while
    one looks for its team.
    """
    text = re.sub(r', input_precision="\w+"', ', input_precision="ieee"', text)
    return re.sub(r"looks < \d+", "looks < 2", text)


def outputs_of(function: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What eager gives, as a list."""
    result = function(*inputs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def main(names: Sequence[str]) -> None:
    """Compare the named cases and print the facts."""
    warnings.simplefilter(
        "ignore"
    )  # numpy reports every overflow and NaN, which these cases are about
    facts: dict[str, list[dict[str, Any]]] = {}
    cases = all_cases()
    for name in names:
        function, inputs = cases[name]
        program = trace_program(function, inputs)
        eager = outputs_of(function, inputs)
        exact = outputs_of(function, [t.double() if t.is_floating_point() else t for t in inputs])
        facts[name] = []
        for proposal in propose(program, 90):
            outputs = interpret(program, proposal, inputs, as_interpreted)
            for output, eager_output, exact_output in zip(outputs, eager, exact, strict=True):
                assert output is not None
                facts[name].append(
                    {"config": dict(proposal.config), **errors(output, eager_output, exact_output)}
                )
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
