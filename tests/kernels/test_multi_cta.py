"""Programs that share a row: what they are told, in which order, and that nobody waits for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels import Proposal, build, propose
from torch_cudal1.kernels.codegen import multi_cta
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.runtime.executor import prepare

Function = Callable[..., Any]
SMALL = {"rows": 1, "columns": 256, "warps": 4, "loop": False, "split": 1, "team": True}
ROWS = torch.randn(3, 1000)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def make_cooperative_proposal(program: Program, **changes: int | bool) -> Proposal:
    (family,) = {proposal.family for proposal in propose(program, 90)}
    return Proposal(family, SMALL | changes)


def test_long_rows_that_are_read_again_are_proposed_for_several_ctas() -> None:
    proposals = propose(trace_program(softmax, (torch.empty(512, 131072),)), 90)
    teams = [
        (proposal.config["columns"], proposal.config["warps"])
        for proposal in proposals
        if proposal.config.get("team")
    ]
    assert teams == [(8192, 8), (16384, 8), (8192, 4)]
    assert proposals[0].config["team"], "the best guess first"


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (softmax, (512, 32768)),  # one tile is enough
        (lambda x: x.sum(1), (512, 131072)),  # nothing is read again
        (softmax, (2, 300 * 16384 + 256 * 1024 * 16)),  # more programs than run at the same time
        (lambda x: x.cumsum(1), (512, 131072)),
    ],
    ids=["a tile", "rows only", "too many", "a scan"],
)
def test_several_ctas_are_not_proposed_where_they_gain_nothing(
    function: Function, shape: tuple[int, ...]
) -> None:
    assert not any(
        proposal.config.get("team")
        for proposal in propose(trace_program(function, (torch.empty(shape),)), 90, most=20)
    )


def test_ctas_meet_at_one_grid_barrier_a_level_and_its_count_is_cleared_before() -> None:
    program = trace_program(
        lambda x: (x - x.amax(1, keepdim=True)).square().sum(1, keepdim=True) * x, (ROWS,)
    )
    cleared, kernel = lower(program, make_cooperative_proposal(program)).kernels
    ((count, kind),) = cleared.arguments
    assert kind == "*i32"
    assert kernel.grid == 3 * 4
    assert kernel.registers == 64
    met = re.findall(r"all_met\(p(\d+) \+ \(place \* 2 \+ (\d)\) \* 32, 4\)", kernel.text)
    assert met == [(str(count), "0"), (str(count), "1")]


def test_softmax_and_layer_norm_meet_once() -> None:
    for function in (softmax, lambda x: F.layer_norm(x, (1000,))):
        program = trace_program(function, (ROWS,))
        assert (
            lower(program, make_cooperative_proposal(program))
            .kernels[-1]
            .text.count("if not all_met")
            == 1
        )


def test_what_is_not_needed_before_the_meeting_is_read_after_it() -> None:
    program = trace_program(lambda x, w: F.layer_norm(x, (1000,), w), (ROWS, torch.randn(1000)))
    before, after = (
        lower(program, make_cooperative_proposal(program)).kernels[-1].text.split("if not all_met")
    )
    assert "tl.load(p0" in before
    assert "tl.load(p1" not in before
    assert "tl.load(p1" in after


def test_all_that_others_have_written_is_read_around_the_first_cache() -> None:
    program = trace_program(softmax, (ROWS,))
    kernel = lower(program, make_cooperative_proposal(program)).kernels[-1]
    words = [value for value, _ in kernel.arguments[2:-1]]
    assert len(words) == 3
    for value in words:
        (load,) = re.findall(rf"tl\.load\(p{value} .*\)", kernel.text)
        assert load.endswith('cache_modifier=".cg")')


@pytest.mark.parametrize("changes", [{"columns": 1024}, {"rows": 2}], ids=str)
def test_a_cta_group_of_one_program_or_of_several_rows_is_refused(changes: dict[str, int]) -> None:
    program = trace_program(softmax, (ROWS,))
    with pytest.raises(ProgramError, match="a team of"):
        lower(program, make_cooperative_proposal(program, **changes))


def test_a_scan_is_not_shared_by_several_ctas() -> None:
    program = trace_program(lambda x: x.cumsum(1), (ROWS,))
    with pytest.raises(ProgramError, match="no scan"):
        lower(program, make_cooperative_proposal(program))


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_cta_groups_compile_for_every_target(sm: int) -> None:
    program = trace_program(softmax, (torch.empty(4, 40000),))
    for proposal in propose(program, sm):
        if proposal.config.get("team"):
            build(program, proposal, sm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_who_does_not_wait_yields_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 100_000, device="cuda")
    program = trace_program(softmax, (x,))
    proposal = make_cooperative_proposal(program, columns=8192)
    waiting = prepare(build(program, proposal, 90), x.device)([x])[0]
    monkeypatch.setattr(
        multi_cta, "_GRID_BARRIER", multi_cta._GRID_BARRIER.replace("looks < 4096", "looks < 0")
    )
    assert "looks < 0" in lower(program, proposal).kernels[-1].text
    alone = prepare(build(program, proposal, 90), x.device)([x])[0]
    assert waiting is not None
    assert alone is not None
    assert torch.equal(waiting, alone)
    torch.testing.assert_close(waiting, x.softmax(-1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_more_ctas_than_the_gpu_can_hold_end_and_are_right() -> None:
    x = torch.randn(2, 600_000, device="cuda")
    program = trace_program(softmax, (x,))
    proposal = make_cooperative_proposal(program, columns=64, warps=1)
    assert lower(program, proposal).kernels[-1].grid == 2 * 9375  # 132 SMs hold 4,224 of them
    out = prepare(build(program, proposal, 90), x.device)([x])[0]
    torch.testing.assert_close(out, x.softmax(-1))
