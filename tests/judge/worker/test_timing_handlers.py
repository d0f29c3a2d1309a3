"""Timed calls run on rotating inputs, answer raw times, and hold the outputs that are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.judge.worker.sessions import call
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.worker import timing_handlers
from torch_cudal1.judge.worker.session import Session

Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]]
SETS = ["first", "second"]
BATCH = {"l2": "hot", "pairs": 6, "calls": [2, 1], "order": "abba"}


@pytest.fixture(autouse=True)
def _allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_handlers, "keep_freed", lambda: True)
    # What this process has now would never be collected again.
    monkeypatch.setattr(timing_handlers, "_freeze", lambda: None)


@pytest.fixture
def calls(session: Session) -> list[str]:
    """Two slots on two input sets, and the names of those that were called, in order."""
    names: list[str] = []

    def make_runner(name: str, factor: float) -> Runner:
        def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            names.append(name)
            return [inputs[0] * factor]

        return run

    session.slots |= {"a": make_runner("a", 1.0), "b": make_runner("b", 10.0)}
    session.sets |= {"first": [torch.tensor([1.0])], "second": [torch.tensor([2.0])]}
    return names


def test_nothing_is_timed_before_it_was_warmed_up(session: Session, calls: list[str]) -> None:
    with pytest.raises(SandboxError, match="expected the request `warm` first"):
        call(session, "time", sets=SETS, batch=BATCH, keep=1)
    assert calls == []


def test_pairs_hold_the_last_outputs_of_the_second_slot(session: Session, calls: list[str]) -> None:
    warm = call(session, "warm", a="a", b="b", sets=SETS)["warm"]
    assert len(warm) == 2
    assert all(time_us > 0 for side in warm for time_us in side[:2])
    calls.clear()
    answer = call(session, "time", sets=SETS, batch=BATCH, keep=4)
    assert len(answer["pairs"]) == 6
    assert (calls.count("a"), calls.count("b")) == (12, 6)
    assert answer["kept"] == len(session.held) == 4
    values = [float(outputs[0]) for outputs in session.held if outputs[0] is not None]
    assert sorted(values) == [10.0, 10.0, 20.0, 20.0]


def test_the_first_call_of_a_slot_is_reported_even_if_it_ran_before(
    session: Session, calls: list[str]
) -> None:
    session.first_us["a"] = 123_456.0
    first, second = call(session, "warm", a="a", b="b", sets=SETS)["warm"]
    assert first[0] == 123_456.0
    assert second[0] != 123_456.0


@pytest.mark.parametrize("keep", [True, False])
def test_a_batch_starts_at_its_place_in_the_ring_and_holds_outputs_if_asked(
    session: Session, calls: list[str], keep: bool
) -> None:
    session.held.append([torch.zeros(1)])
    answer = call(session, "spin", slot="b", calls=3, start=1, sets=SETS, keep=keep, drop=True)
    assert answer["elapsed_us"] > 0
    assert calls == ["b", "b", "b"]
    values = [float(outputs[0]) for outputs in session.held if outputs[0] is not None]
    assert values == ([20.0, 10.0, 20.0] if keep else [])


def test_the_leading_slot_of_each_pair_runs_first(session: Session, calls: list[str]) -> None:
    answer = call(session, "pairs", slots=["a", "b"], sets=SETS, calls=[2, 1], leads=[0, 1, 1])
    assert calls == ["a", "a", "b", "b", "a", "a", "b", "a", "a"]
    assert len(answer["pairs"]) == 3
    assert all(time_us > 0 for pair in answer["pairs"] for time_us in pair)
    assert len(session.held) == 1
    expected = 10.0 * (1 + answer["start"] % 2)
    assert session.held[0][0] is not None
    assert float(session.held[0][0]) == expected, "the outputs of the last batch, from its place"


def test_interleaved_samples_have_one_list_a_slot(session: Session, calls: list[str]) -> None:
    samples = call(session, "bench", slots=["a", "b"], sets=SETS, budget_s=0.05)["samples"]
    assert set(samples) == {"a", "b"}
    assert all(times and min(times) > 0 for times in samples.values())


def test_on_a_cpu_a_side_has_host_time_and_no_device_time(
    session: Session, calls: list[str]
) -> None:
    call(session, "warm", a="a", b="b", sets=SETS)
    sides = call(session, "look")
    assert set(sides) == {"a", "b"}
    for side in sides.values():
        assert side["host_us"] > 0
        assert (side["device_us"], side["sync_ratio"]) == (None, None)


def find_unlike(session: Session, held: list[float], **fields: float) -> dict[str, Any]:
    session.held[:] = [[torch.tensor(value)] for value in held]
    request = {"start": 1, "shift": 0, "judged": 0, "ring": 4, "contents": 2, "limit_s": 60.0}
    return call(session, "unlike", **{**request, **fields})


def test_outputs_that_are_those_of_no_judged_call_are_named(session: Session) -> None:
    session.copied = None
    # Calls 0, 2, 4 of one content, the others of the other; the values of call 5 are wrong.
    answer = find_unlike(session, [7.0, 3.0, 7.0, 3.0, 7.0, 3.5, 7.0], judged=2)
    unlike = set(answer["unlike"])
    assert answer["compared"] == 7 or len(unlike) == 3
    # The first one that is met of the other content is judged, or all that differ from it.
    assert unlike in ({1, 5}, {3, 5}, {5, 1}, {5, 1, 3})
    session.copied = 3, [torch.tensor(3.0)]
    assert find_unlike(session, [7.0, 3.0, 7.0, 3.0, 7.0, 3.5, 7.0])["unlike"] == [5]


def test_a_result_that_was_written_after_the_clock_stopped_is_unlike_its_copy(
    session: Session,
) -> None:
    session.copied = 1, [torch.tensor(0.0)]
    answer = find_unlike(session, [7.0] * 5, contents=1)
    assert len(answer["unlike"]) == 3


def test_no_more_outputs_are_compared_than_the_time_allows(session: Session) -> None:
    session.copied = None
    assert find_unlike(session, [7.0] * 5, limit_s=-1.0) == {"compared": 0, "unlike": []}


def test_a_batch_that_keeps_nothing_leaves_what_is_held(session: Session, calls: list[str]) -> None:
    """The first call of another instance is timed while the outputs of the benchmark are still to be
    judged.
    """
    fields = {"slot": "a", "sets": SETS, "start": 0, "shift": 0}
    call(session, "spin", calls=6, keep=True, **fields)
    copy = session.copied
    call(session, "spin", calls=1, keep=False, **fields)
    assert (len(session.held), session.copied) == (6, copy)
    request = {"start": 0, "shift": 0, "ring": 2, "contents": 2, "limit_s": 60.0}
    answer = call(session, "unlike", judged=5, **request)
    # Of a set whose calls are neither the judged nor the copied one the first is named.
    assert (answer["compared"], len(answer["unlike"]) <= 1) == (6, True)


def test_a_call_that_was_never_made_is_an_error_of_the_request(session: Session) -> None:
    with pytest.raises(SandboxError, match="a call of the last batch, 0 to 4; came 5"):
        find_unlike(session, [7.0] * 5, judged=5)


def test_slots_that_cannot_be_captured_are_timed_call_by_call(
    session: Session, calls: list[str]
) -> None:
    answer = call(session, "chains", slots=["a", "b"], sets=SETS, budget_s=0.01)
    assert set(answer["samples"]) == set(calls) == {"a", "b"}
    assert answer["uncaptured"]
    assert all(us > 0 for samples in answer["samples"].values() for us in samples)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_in_a_chain_launches_are_none_of_a_kernels_time(session: Session) -> None:
    session.device = torch.device("cuda", 0)
    inputs = [torch.ones(1 << 20, device=session.device) for _ in SETS]
    session.sets |= {name: [tensor] for name, tensor in zip(SETS, inputs, strict=True)}
    session.slots |= {
        "once": lambda tensors: [tensors[0] + 1],
        "thrice": lambda tensors: [tensors[0] + 1 + 1 + 1],
    }
    single, chained = (
        {
            slot: statistics.median(samples)
            for slot, samples in call(
                session, verb, slots=["once", "thrice"], sets=SETS, budget_s=0.5
            )["samples"].items()
        }
        for verb in ("bench", "chains")
    )
    assert chained["once"] < single["once"]
    assert chained["thrice"] < single["thrice"]
    # The first of a call meets a cold cache, the others what was just written.
    assert 1.3 < chained["thrice"] / chained["once"] < 4
