"""Input sets that a child lets go of for want of room: the same verdicts, with two or three sets
there at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.judge.programs import V, candidate, linear_relu, op, subject, with_steps
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference import input_cache
from torch_cudal1.judge.reference import trial as trials
from torch_cudal1.judge.reference.input_cache import InputCache
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits
from torch_cudal1.judge.wire.channel import message_bytes

CPU = torch.device("cpu")
REGION = linear_relu()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_cache, "_HOST_BYTES", 0)


@pytest.fixture
def memory_is_short(no_room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "is_memory_short", lambda device, size_bytes: True)
    monkeypatch.setattr(trials, "max_cached_bytes", lambda device: 0)


def make_trial(child: Child, program: Program) -> Trial:
    trial = Trial(subject(REGION), candidate(program), Contract(), CPU, child)
    trial.load("candidate", candidate(program))
    return trial


def repeat_half_the_batch() -> Program:
    """Right for the first half of the rows only."""
    transpose, _, relu = REGION.program.steps
    half = op("aten.slice.Tensor", V(0), 0, 0, 16, out=4)
    twice = op("aten.cat.default", (V(4), V(4)), out=5)
    return with_steps(
        REGION,
        transpose,
        half,
        twice,
        op("aten.addmm.default", V(2), V(5), V(3), out=6),
        op(relu.target, V(6), out=7),
        output=7,
    )


def test_verdicts_are_the_same_with_room_for_hardly_any_set(
    child: Child, no_room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_sets, evicted_count, admit = 0, 0, InputCache.admit

    def note_admission(self: InputCache, *arguments: object) -> list[str]:
        nonlocal most_sets, evicted_count
        evicted = admit(self, *arguments)  # type: ignore[arg-type]
        most_sets, evicted_count = max(most_sets, len(self.sizes)), evicted_count + len(evicted)
        return evicted

    monkeypatch.setattr(InputCache, "admit", note_admission)
    honest = make_trial(child, REGION.program)
    assert validate(honest).passed
    assert evicted_count > 10
    assert most_sets <= 5  # four threads want a set each, and one comes
    assert len(honest.samples) <= most_sets
    honest.drop(*list(honest.samples.values()))
    assert not honest.input_cache.sizes
    wrong = make_trial(child, repeat_half_the_batch())
    assert [check.name for check in validate(wrong).checks if not check.passed] == ["numerics"]
    wrong.drop(*list(wrong.samples.values()))


def test_where_memory_is_short_hardly_any_results_stay_and_the_verdicts_are_the_same(
    child: Child, memory_is_short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_counts: list[int] = []
    run = Trial.call_slot

    def count_results(self: Trial, *arguments: object, **options: object) -> object:
        computed = [
            name
            for sample in self.samples.values()
            for name in ("expected", "exact", "sensitivity")
            if name in sample.__dict__
        ]
        result_counts.append(len(computed) + len(self.accepted_outputs))
        return run(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Trial, "call_slot", count_results)
    honest = make_trial(child, REGION.program)
    assert validate(honest).passed
    assert len(result_counts) > 30
    assert (
        sum(count > 1 for count in result_counts) <= 6
    )  # 18 where they stay until a detector has ended
    honest.drop_large_sets()
    assert not honest.samples
    assert not honest.input_cache.sizes
    wrong = make_trial(child, repeat_half_the_batch())
    assert [check.name for check in validate(wrong).checks if not check.passed] == ["numerics"]
    wrong.drop_large_sets()


def test_small_sets_stay_when_large_ones_are_dropped(child: Child) -> None:
    trial = make_trial(child, REGION.program)
    first = trial.draw("normal")
    trial.drop_large_sets()
    assert list(trial.samples) == [first.name]
    trial.drop(first)


def test_an_evicted_set_is_sent_again_with_the_memory_it_shared(
    child: Child, no_room: None
) -> None:
    trial = make_trial(child, REGION.program)
    first, _ = trial.draw("normal"), trial.draw("shifted")
    sibling = trial.derive_sibling(first)
    before = trial.run(sibling).outputs[0]
    trial.draw("uniform")
    assert sibling.name not in trial.input_cache.sizes
    assert sibling.name not in trial.samples
    again = trial.run(sibling).outputs[0]
    assert before is not None
    assert again is not None
    assert torch.equal(before, again)
    assert trial.input_cache.bases[sibling.name] == first.name
    trial.drop(*list(trial.samples.values()))


def test_sets_unused_for_longest_are_evicted_first_and_none_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(input_cache, "_HOST_BYTES", 100)
    sets = InputCache("cpu")
    assert [sets.admit(name, 30, "", ()) for name in "abc"] == [[], [], []]
    assert sets.mark_used("a")
    assert sets.admit("d", 30, "", ()) == ["b"]
    assert sets.admit("e", 60, "c", {"a"}) == ["d"]  # c is what e shares memory with
    assert list(sets.sizes) == ["c", "a", "e"]
    assert not sets.mark_used("b")
    sets.forget("e")
    assert sets.admit("b", 30, "", ()) == []


def test_a_message_is_as_large_as_the_memory_it_must_hold() -> None:
    wide = torch.zeros(4, 8)
    assert message_bytes([wide, None]) == 128 + 512
    assert message_bytes([wide[:, :2]]) == (3 * 8 + 2) * 4 + 512
