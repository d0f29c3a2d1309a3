"""Several slots share the work and outlive the death of one of them and the fault of a program."""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.judge.pool.scripted_slot import make_settings
from tests.training.sources import TASK, program, source
from torch_cudal1.core.settings import process_environment
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.slot import Iteration, OutOfDeviceMemory
from torch_cudal1.judge.pool.slots import MeasurementRequest, SharedContextFault, SlotPool


def test_slots_answer_in_order_and_outlive_a_slot_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._measure_in_slot", die_at_killer)
    wrong_programs = [program(f"p{index}", source(f"x * {index}")) for index in range(2)]
    with JudgeEvaluator(make_settings(tmp_path), slots=2) as evaluator:
        results = evaluator.measure(
            TASK, [wrong_programs[0], program("killer", "x"), wrong_programs[1], wrong_programs[0]]
        )
    assert [(result.program, result.outcome) for result in results] == [
        ("p0", "wrong"),
        ("killer", "run"),
        ("p1", "wrong"),
        ("p0", "wrong"),
    ]
    assert "ended, twice" in results[1].detail
    assert evaluator.memory.counts["asked"] == 4
    assert evaluator.memory.counts["measured"] == 3


def die_at_killer(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    if question[1].program == "killer":
        os._exit(9)
    return Iteration(Measured(question[0].id, question[1].program, "wrong"), {"pid": os.getpid()})


def find_memory_once(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    """Only the first process that comes here finds memory; `first` is a link to its id, made in
    one step.
    """
    first, own_pid = Path(question[1].source), str(os.getpid())
    first.with_suffix(f".{own_pid}").touch()
    with suppress(FileExistsError):
        first.symlink_to(own_pid)
    if os.readlink(first) != own_pid:
        raise OutOfDeviceMemory(question[0].id, "none left")
    return Iteration(Measured(question[0].id, question[1].program, "wrong"), {})


def test_a_slot_that_finds_no_memory_is_given_up_and_the_others_do_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._measure_in_slot", find_memory_once)
    questions = [
        (replace(TASK, reference=f"reference {i}"), [program(f"p{i}", str(tmp_path / "first"))])
        for i in range(6)
    ]
    with JudgeEvaluator(make_settings(tmp_path), slots=2) as evaluator:
        results = [result for answers in evaluator.measure_all(questions) for result in answers]
        assert evaluator._slot_pool is not None
        slots_left = len(evaluator._slot_pool._slots)
    assert [result.outcome for result in results] == ["wrong"] * 6
    assert slots_left == 3 - len(list(tmp_path.glob("first.*")))


def test_the_last_slot_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._measure_in_slot", find_no_memory)
    with (
        JudgeEvaluator(make_settings(tmp_path), slots=2) as evaluator,
        pytest.raises(OutOfDeviceMemory, match="use fewer lanes"),
    ):
        evaluator.measure(TASK, [program("p", source())])


def find_no_memory(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    raise OutOfDeviceMemory(question[0].id, "none left")


class FakeServer:
    """In place of an MPS server: slots that it serves know by a variable."""

    started: ClassVar[list[FakeServer]] = []

    def __init__(self) -> None:
        self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(len(self.started))}
        self.closed = False
        self.started.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[FakeServer]:
    started: list[FakeServer] = []
    monkeypatch.setattr(FakeServer, "started", started)
    monkeypatch.setattr(SlotPool, "_start_server", lambda self, count: FakeServer())
    return started


def fault_where_served(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    """A program named `faulty` ends the work of all slots that a server serves; others finish
    after a moment.
    """
    server_folder = process_environment().get("CUDA_MPS_PIPE_DIRECTORY")
    if question[1].program.startswith("faulty"):
        if server_folder is not None:
            raise SharedContextFault("an illegal memory access was encountered")
        return Iteration(Measured(question[0].id, question[1].program, "run"), {})
    time.sleep(0.3)
    return Iteration(
        Measured(question[0].id, question[1].program, "wrong", detail=f"served {server_folder}"), {}
    )


def test_a_fault_of_one_program_is_held_against_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[FakeServer]
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._measure_in_slot", fault_where_served)
    names = ["p0", "faulty", "p1", "p2", "p3"]
    with JudgeEvaluator(make_settings(tmp_path), slots=2) as evaluator:
        results = evaluator.measure(TASK, [program(name, f"x = '{name}'") for name in names])
        assert evaluator._slot_pool is not None
        assert evaluator._slot_pool.faults == 1
        assert evaluator.served == 2
    assert [(result.program, result.outcome) for result in results] == [
        (name, "run" if name == "faulty" else "wrong") for name in names
    ]
    assert {result.detail for result in results if result.outcome == "wrong"} <= {
        "served 0",
        "served 1",
        "served None",
    }
    assert "served 1" in {result.detail for result in results}, "slots go on with another server"
    assert [server.closed for server in servers] == [True, True]


def test_after_some_faults_slots_do_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[FakeServer]
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._measure_in_slot", fault_where_served)
    names = [f"faulty {index}" for index in range(8)]
    with JudgeEvaluator(make_settings(tmp_path), slots=2) as evaluator:
        results = evaluator.measure(TASK, [program(name, f"x = '{name}'") for name in names])
        assert not evaluator.served
    assert [result.outcome for result in results] == ["run"] * len(names)
    assert len(servers) == 3
    assert all(server.closed for server in servers)


def test_a_server_has_room_for_so_many_slots(tmp_path: Path, servers: list[FakeServer]) -> None:
    assert SlotPool(make_settings(tmp_path), 64).served == 9


def test_slots_of_foreign_programs_or_without_a_gpu_have_no_server(tmp_path: Path) -> None:
    assert SlotPool(make_settings(tmp_path), 4).server is None
    foreign_settings = replace(make_settings(tmp_path), device=torch.device("cuda"))
    assert SlotPool(foreign_settings, 4).server is None, "a foreign fault would end the work of all"


def test_an_interrupted_caller_waits_for_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._measure_in_slot", sleep_or_answer)
    pid_link = tmp_path / "pid"
    questions = [
        (replace(TASK, reference=name), [program(name, str(pid_link))])
        for name in ("sleeps", "answers")
    ]

    def interrupt(result: Measured) -> None:
        raise KeyboardInterrupt

    with JudgeEvaluator(make_settings(tmp_path), slots=2) as evaluator:
        evaluator.on_measurement = interrupt
        with pytest.raises(KeyboardInterrupt):
            evaluator.measure_all(questions)
    with pytest.raises(ProcessLookupError):
        os.kill(int(os.readlink(pid_link)), 0)


def sleep_or_answer(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    """One program sleeps for ever, the other until that one has begun."""
    pid_link = Path(question[1].source)
    if question[1].program == "sleeps":
        pid_link.symlink_to(str(os.getpid()))
    while question[1].program == "sleeps" or not pid_link.is_symlink():
        time.sleep(0.01)
    return Iteration(Measured(question[0].id, question[1].program, "wrong"), {})


def queue_requests(**programs: int) -> dict[str, deque[MeasurementRequest]]:
    return {
        name: deque([(TASK, program("p", source()), None, False)] * count)
        for name, count in programs.items()
    }


@pytest.mark.parametrize(
    ("at", "others", "waiting", "expected"),
    [
        ("a", [], {"a": 1, "b": 9}, "a"),  # it stays where it is
        ("", [], {"a": 3, "b": 9}, "b"),  # where most wait
        ("", ["b"], {"a": 5, "b": 9}, "a"),  # for each slot that would be there
        ("", ["b"], {"b": 9}, "b"),
        ("", ["b"], {"b": 1}, ""),  # the slot that is there is as soon done
        ("", ["b", "b"], {"b": 3}, ""),
        ("a", ["a"], {"a": 0, "b": 1}, "b"),  # no slot is there
        ("a", [], {"a": 0}, ""),
    ],
)
def test_a_free_slot_goes_where_it_saves_most(
    tmp_path: Path, at: str, others: list[str], waiting: dict[str, int], expected: str
) -> None:
    slot_pool = SlotPool(make_settings(tmp_path), 1 + len(others))
    slot_pool._slots[0].reference = at
    with ProcessPoolExecutor(1) as pool:  # which starts no process before it has work
        assert slot_pool._choose_reference(
            slot_pool._slots[0], queue_requests(**waiting)
        ) or not any(waiting.values()), "a new slot takes anything"
        slot_pool._slots[0].pool = pool
        for slot, reference in zip(slot_pool._slots[1:], others, strict=True):
            slot.reference, slot.request = reference, (TASK, program("p", source()), None, False)
        assert (
            slot_pool._choose_reference(slot_pool._slots[0], queue_requests(**waiting)) == expected
        )
