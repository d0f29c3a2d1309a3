"""A swapped region runs its candidate, and its reference once the candidate failed, was withdrawn or
is switched off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.graph.regions import capture_region
from tests.graph.replays import Replay, patch_replay
from torch_cudal1.core import telemetry
from torch_cudal1.graph import swap
from torch_cudal1.ir.program import Aten, Program, Value
from torch_cudal1.ir.records import Candidate


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> type[Replay]:
    return patch_replay(monkeypatch)


CPU = torch.device("cpu")
X = torch.arange(4.0)


def later(strictness: str = "silent") -> swap.GraphedLater:
    return swap.GraphedLater(lambda x: (x + 1,), frozenset(), CPU, strictness)


def test_the_first_answer_waits_for_no_capture_and_the_second_call_is_a_replay(
    replay: type[Replay],
) -> None:
    call = later()
    assert float(call(torch.zeros(()))[0]) == 1
    assert replay.runs == 0
    assert float(call(torch.ones(()))[0]) == 2
    assert replay.runs == 1


def test_the_kill_switch_leads_to_what_inductor_compiled(replay: type[Replay]) -> None:
    call = later()
    call(torch.zeros(()))
    with torch_cudal1.disabled():
        assert float(call(torch.zeros(()))[0]) == 1
    assert replay.runs == 0


def test_after_a_failure_the_compiled_graph_runs_for_good_and_the_reason_is_kept(
    replay: type[Replay],
) -> None:
    call = later()
    call(torch.zeros(()))
    replay.fails = True
    assert float(call(torch.zeros(()))[0]) == 1
    assert call.quarantined == "RuntimeError: no graph today"
    replay.fails = False
    assert float(call(torch.zeros(()))[0]) == 1
    assert replay.runs == 0
    assert telemetry.report().counters["fallbacks"] == 1


def write_to_cache(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor]:
    cache.add_(x)
    return (cache * 2,)


def test_a_graph_that_writes_is_replayed_where_the_written_tensors_stay(
    replay: type[Replay],
) -> None:
    call = swap.GraphedLater(write_to_cache, frozenset(), CPU, "silent", frozenset({1}))
    cache, others = torch.zeros(2), [torch.zeros(2) for _ in range(3)]
    for count in range(1, 4):
        assert torch.equal(call(torch.ones(2), cache)[0], torch.full((2,), 2.0 * count))
    assert replay.runs == 2
    # Tensors that lie elsewhere at each call would be captured at each call.
    for other in others:
        assert torch.equal(call(torch.ones(2), other)[0], torch.full((2,), 2.0))
    assert replay.runs == 2
    assert call._graphed.static == {1}
    assert call._graphed.written == {1}


def test_no_copy_is_read_of_an_input_in_memory_that_the_graph_writes_to(
    replay: type[Replay],
) -> None:
    def add_sum_to_cache(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor]:
        return (cache.add_(x.sum()) * 2,)

    call = swap.GraphedLater(add_sum_to_cache, frozenset(), CPU, "silent", frozenset({1}))
    memory = torch.ones(4)
    for _ in range(3):
        call(memory[1:3], memory[2:])
    assert replay.runs == 0
    # Beside it is not in it; the written tensor stays where it was.
    call(memory[:2], memory[2:])
    assert replay.runs == 1


def shift(program: Program) -> Program:
    """The region's Program with one added to its output: another candidate, visibly so."""
    (output,) = program.outputs
    number = max(out for step in program.steps for out in step.writes) + 1
    step = Aten("aten.add.Tensor", (Value(output), 1), (), (number,), False)
    return replace(program, steps=(*program.steps, step), outputs=(number,))


def swap_shifted(**options: Any) -> swap.Swapped:
    region = capture_region(nn.Tanh(), X)
    return swap.swap(region, Candidate(shift(region.program), "eager", "kernels"), CPU, **options)


def test_the_candidate_runs_and_the_kill_switch_leads_to_the_reference() -> None:
    swapped = swap_shifted()
    assert torch.equal(swapped([X])[0], X.tanh() + 1)
    with torch_cudal1.disabled():
        assert torch.equal(swapped([X])[0], X.tanh())
    assert torch.equal(swapped([X])[0], X.tanh() + 1)


def test_a_candidate_that_fails_once_is_replaced_by_the_reference_for_good(clean: None) -> None:
    failures: list[str] = []

    def fail(swapped: swap.Swapped, runner: Any) -> Any:
        def run(inputs: Any) -> Any:
            failures.append(swapped.candidate)
            raise ValueError("no such kernel")

        return run

    swapped = swap_shifted(around=fail, strictness="silent")
    for _ in range(2):
        assert torch.equal(swapped([X])[0], X.tanh())
    assert failures == [swapped.candidate]
    assert swapped.quarantined == "ValueError: no such kernel"
    assert swapped.direct is None
    assert telemetry.report().counters["fallbacks"] == 1


def test_inputs_at_fault_raise_pytorchs_own_error_and_do_not_quarantine(clean: None) -> None:
    swapped = swap_shifted(strictness="silent")
    with pytest.raises(TypeError):
        swapped([None])
    assert not swapped.quarantined
    assert torch.equal(swapped([X])[0], X.tanh() + 1)


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def hear(self, candidate: str, reason: str) -> None:
        self.heard.append((candidate, reason))


def test_a_withdrawn_candidate_stops_in_every_swap_and_listeners_are_told() -> None:
    first, second = swap_shifted(), swap_shifted()
    listener = Listener()
    swap.on_withdrawal(listener.hear)
    assert swap.withdraw("another digest", "wrong") == 0
    assert torch.equal(first([X])[0], X.tanh() + 1)
    assert swap.withdraw(first.candidate, "wrong result") >= 2
    for swapped in (first, second):
        assert swapped.quarantined == "wrong result"
        assert torch.equal(swapped([X])[0], X.tanh())
    assert listener.heard == [("another digest", "wrong"), (first.candidate, "wrong result")]


def test_placeholders_are_passed_in_the_order_of_the_region() -> None:
    assert swap.reorder_inputs(list, (0, 1))(["a", "b", "unused"]) == ["a", "b"]
    assert swap.reorder_inputs(list, (2, 0))(["a", "b", "c"]) == ["c", "a"]
