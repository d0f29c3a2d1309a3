"""Online reductions as lines: before, in and after the loop over a row."""

from __future__ import annotations

import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels import Proposal
from torch_cudal1.kernels.codegen.loop_nest import build_nest
from torch_cudal1.kernels.codegen.online import (
    PARTIALS,
    pair_means,
    print_finish,
    print_init,
    print_mean,
    print_step,
)
from torch_cudal1.kernels.expr.nodes import choose_variants
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.registry import trace

X = torch.empty(4, 5000)


def online_reductions(function):
    outputs = trace(trace_program(function, (X,))).outputs
    nodes = choose_variants(tuple(o.node for o in outputs), online=True)
    nest = build_nest(
        tuple(type(o)(o.value, n, o.spec) for o, n in zip(outputs, nodes, strict=True))
    )
    return [s for s in nest.statements if s.kind == "reduce"], nest


def test_each_partial_is_set_before_the_loop_and_moved_in_it() -> None:
    reductions, _ = online_reductions(lambda x: x.softmax(-1))
    (total,) = (s for s in reductions if s.text in PARTIALS)
    first, step = print_init(total, "[1, 64]"), print_step(total, 64, True)
    for partial in PARTIALS[total.text]:
        assert any(line.startswith(f"{partial}_{total.name} = ") for line in first)
        assert any(line.startswith(f"{partial}_{total.name} = ") for line in step)
    assert print_finish(total, 5000, 64)[-1].startswith(f"{total.name} = ")


def test_a_mean_beside_its_squared_deviations_has_no_lines_of_its_own() -> None:
    _, nest = online_reductions(lambda x: torch.var_mean(x, -1))
    ((mean, squares),) = pair_means(nest.statements).items()
    assert print_mean(mean, squares) == [f"{mean.name} = center_{squares.name}"]


def test_a_looped_kernel_has_them_in_its_text() -> None:
    config = {"rows": 1, "columns": 1024, "warps": 4, "loop": True, "split": 1}
    program = trace_program(lambda x: x.softmax(-1), (X,))
    assert "next_" in lower(program, Proposal("softmax", config)).kernels[0].text
