"""What a program does to a model between two calls happens to a slot, and nothing else does."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.judge.programs import linear_relu
from tests.judge.worker.sessions import (
    CPU,
    SLOT,
    call,
    load_module,
    make_inputs,
    put,
    read_outputs,
)
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors
from torch_cudal1.judge.worker.session import Session
from torch_cudal1.judge.worker.state_handlers import _UPDATES


def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What the module answers."""
    shift, weight, bias, x = inputs
    return functional.linear(x, weight, bias) + shift


def test_new_values_come_into_the_old_memory_without_a_new_version(
    session: Session, tmp_path: Path
) -> None:
    put(session, "first", make_inputs(1))
    before, new = list(session.sets["first"]), make_inputs(2)
    addresses = [tensor.data_ptr() for tensor in before]
    versions = [tensor._version for tensor in before]
    kept_bias = before[2].clone()
    layout = save_tensors([new[0], new[1], None, new[3]], tmp_path / "values")
    call(session, "rewrite", name="first", layout=layout, path=str(tmp_path / "values"))
    after = session.sets["first"]
    assert [tensor.data_ptr() for tensor in after] == addresses
    assert [tensor._version for tensor in after] == versions
    for index, expected in enumerate([new[0], new[1], kept_bias, new[3]]):
        assert torch.equal(after[index], expected)


def test_a_tensor_is_moved_one_element_and_two_positions_get_one_object(session: Session) -> None:
    session.sets["set"] = [torch.randn(4, 3).t(), torch.ones(2), torch.zeros(2)]
    values = session.sets["set"][0].clone()
    call(session, "arrange", name="set", offset=[0], same=[[1, 2]])
    moved, first, second = session.sets["set"]
    assert (moved.storage_offset(), moved.stride()) == (1, (1, 3))
    assert torch.equal(moved, values)
    assert first is second


def test_held_outputs_are_overwritten_and_views_of_inputs_are_not(session: Session) -> None:
    x = torch.ones(3)
    session.sets["set"] = [x]
    session.held[:] = [[torch.zeros(3), x[1:], None, torch.zeros(2, dtype=torch.int64)]]
    assert call(session, "scribble") == {"count": 2}
    ((first, view, _, integers),) = session.held
    assert first is not None
    assert integers is not None
    assert bool((first > 1_000).all())
    assert view is not None
    assert bool((view == 1).all())
    assert integers.tolist() == [1, 1]


def soak(
    session: Session,
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]],
    path: Path,
    *,
    calls: int = 400,
    budget_s: float = 60.0,
    least: int = 0,
    held_bytes: int = 1 << 20,
) -> tuple[int, list[tuple[int, float]]]:
    """The number of calls, and the distinct results as pairs of input set and value."""
    session.slots[SLOT] = run
    session.sets |= {"first": [torch.tensor(1.0)], "second": [torch.tensor(2.0)]}
    answer = call(
        session,
        "soak",
        slot=SLOT,
        sets=["first", "second"],
        calls=calls,
        budget_s=budget_s,
        least=least,
        least_s=60.0,
        held_bytes=held_bytes,
        path=str(path / "soak"),
    )
    assert all(width == 1 for _, width in answer["found"])
    values = load_tensors(answer["layout"], path / "soak", torch.device("cpu"))
    entries = zip(answer["found"], values, strict=True)
    return answer["calls"], sorted(
        (number, float(value)) for (number, _), value in entries if value is not None
    )


@pytest.mark.parametrize(
    ("calls", "budget_s", "least", "expected"),
    [(50, 60.0, 0, 50), (5, 0.0, 0, 0), (70, 0.0, 50, 50)],
    ids=["its calls", "its time", "the least"],
)
def test_a_soak_ends_with_its_calls_or_its_time(
    session: Session, tmp_path: Path, calls: int, budget_s: float, least: int, expected: int
) -> None:
    count, results = soak(
        *(session, lambda inputs: [inputs[0] + 1], tmp_path),
        calls=calls,
        budget_s=budget_s,
        least=least,
    )
    assert count == expected
    assert results == [(0, 2.0), (1, 3.0)][: 2 * bool(expected)]


def test_a_soak_keeps_a_result_that_differs_once(session: Session, tmp_path: Path) -> None:
    counts = itertools.count()

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [inputs[0] + (next(counts) == 217)]

    _, results = soak(session, run, tmp_path)
    assert sorted(set(results) - {(0, 1.0), (1, 2.0)}) in ([(0, 2.0)], [(1, 3.0)])


@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_soak_sees_a_ring_of_buffers(session: Session, tmp_path: Path, size: int) -> None:
    ring, turns = [torch.zeros(()) for _ in range(size)], itertools.count()

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        buffer = ring[next(turns) % size]
        return [buffer.copy_(inputs[0])]

    _, results = soak(session, run, tmp_path)
    # A result of one set has the values of the other when all calls are made.
    assert {(0, 2.0), (1, 1.0)} & set(results)


def test_a_soak_holds_no_more_than_it_may(session: Session, tmp_path: Path) -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        nonlocal most
        most = max(most, sum(each() is not None for each in outputs))
        out = torch.zeros(256)
        outputs.append(weakref.ref(out))
        return [out]

    session.slots[SLOT] = run
    session.sets["set"] = []
    fields = {"slot": SLOT, "sets": ["set"], "calls": 50, "budget_s": 60.0}
    fields |= {"least": 0, "least_s": 60.0}
    answer = call(session, "soak", held_bytes=10 << 10, path=str(tmp_path / "soak"), **fields)
    assert len(answer["found"]) == 1
    assert most in (10, 11)
    outputs.clear()
    # Too large to hold even once.
    answer = call(session, "soak", held_bytes=1 << 9, path=str(tmp_path / "soak"), **fields)
    assert answer["found"] == []


def test_the_state_is_that_of_the_present_instance(session: Session) -> None:
    runner = load_module(session)
    runner(session.sets["first"])
    answer = call(session, "state", slot=SLOT)
    assert sorted(answer["state"]) == [
        ["linear.bias", "float32", [3]],
        ["linear.weight", "float32", [3, 4]],
        ["shift", "float32", [3]],
    ]
    assert answer["training"] is False


@pytest.mark.parametrize("way", sorted(_UPDATES))
def test_every_way_to_write_weights_reaches_the_next_call(session: Session, way: str) -> None:
    runner = load_module(session)
    runner(session.sets["first"])
    instance = runner.instance
    put(session, "second", make_inputs(2))
    call(session, "update", slot=SLOT, name="second", way=way)
    for value, expected in zip(runner.state(), make_inputs(2), strict=False):
        torch.testing.assert_close(value.detach(), expected)
    (result,) = runner(session.sets["second"])
    assert result is not None
    torch.testing.assert_close(result, compute(make_inputs(2)))
    # A new instance from the constructor would hide a stale weight; a copy has what it was left.
    assert (runner.instance is instance) == (way != "deepcopy")
    if way == "deepcopy":
        old = instance.state_dict(keep_vars=True)
        assert not any(a is b for a, b in zip(runner.state(), old.values(), strict=True))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_module_takes_the_place_of_the_first_one(session: Session, how: str) -> None:
    runner = load_module(session)
    runner(session.sets["first"])
    instance = runner.instance
    call(session, "transform", slot=SLOT, how=how)
    assert runner.instance is not instance
    (result,) = runner(session.sets["first"])
    assert result is not None
    torch.testing.assert_close(result, compute(make_inputs(1)))


def test_threads_answer_their_distinct_results_in_order(session: Session, tmp_path: Path) -> None:
    load_module(session)
    put(session, "second", make_inputs(2))
    path = tmp_path / "outputs"
    # The same weights, as two calls of one module have them.
    session.sets["second"][:3] = session.sets["first"][:3]
    jobs = [[SLOT, "first"], [SLOT, "second"]]
    session.slots[SLOT](session.sets["first"])
    answer = call(session, "reenter", jobs=jobs, calls=6, path=str(path))
    assert answer["calls"] == 6
    assert answer["found"] == [[0, 1], [1, 1]]
    for result, name in zip(read_outputs(answer, path), ("first", "second"), strict=True):
        assert result is not None
        torch.testing.assert_close(result, compute(session.sets[name]))


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [("state", {}), ("update", {"name": "set", "way": "copy"}), ("transform", {"how": "pickle"})],
)
def test_a_program_has_no_module_to_change(
    session: Session, verb: str, arguments: dict[str, Any]
) -> None:
    session.slots[SLOT] = interpret(linear_relu().program, CPU)
    with pytest.raises(SandboxError, match="no module is in this slot, a Program is"):
        call(session, verb, slot=SLOT, **arguments)
