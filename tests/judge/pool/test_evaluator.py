from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.training.scripted import Scripted
from tests.training.sources import REFERENCE, TASK, program, source
from torch_cudal1.core.errors import TargetError
from torch_cudal1.core.settings import Settings, process_environment
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult, check_stability
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.protocol import Measurement
from torch_cudal1.judge.benchmark.quick import PreparedBenchmark, prepare_benchmark
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.pool.evaluator import JudgeEvaluator, Remembered
from torch_cudal1.judge.pool.failures import classify_failure
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.slot import Iteration, OutOfDeviceMemory, Slot
from torch_cudal1.judge.pool.slots import MeasurementRequest, SharedContextFault, SlotPool
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def terms(folder: Path) -> MeasurementSettings:
    return MeasurementSettings(Settings(), Contract(), CPU, folder, rule="cudal1")


class Clock:
    """Tells the speed-ups it was given, one after the other, in place of a race."""

    def __init__(self, *speedups: float) -> None:
        self.speedups = list(speedups)
        self.pids: list[int] = []

    def __call__(
        self, trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan
    ) -> PreparedBenchmark:
        speedup = self.speedups.pop(0)
        self.pids.append(trial.child.pid)
        if baseline.sets:  # in the candidate's own process it gets the race's inputs
            assert baseline.time_batch(2).claimed_us > 0
        found = Measurement(
            plan, {"hot": summarise([(100.0 * speedup, 100.0)] * 42)}, (1.0, 1.0), 1, 0.1
        )
        return Scripted(lambda: BenchmarkResult(found, tuple(check_stability(found)), {}))


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    with Slot(terms(tmp_path_factory.mktemp("locks")), Clock()) as made:
        yield made


def templates_are_ours(lane: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(lane.terms, trust="own")
    monkeypatch.setattr(lane, "terms", own)
    monkeypatch.setattr(lane._processes, "_terms", own)


def measured(lane: Slot, text: str, *speedups: float, best: float | None = None) -> Measured:
    lane._clock = Clock(*speedups)
    return lane.measure(TASK, program("p", text), best).measured


def test_a_right_program_has_the_rounded_score_and_its_buckets(lane: Slot) -> None:
    found = measured(lane, source(), 1.239)
    assert (found.outcome, found.score, found.task, found.program) == ("ok", 1.23, "relu", "p")
    assert found.buckets == pytest.approx((1.239,) * 7)


@pytest.mark.parametrize(
    ("text", "outcome", "told"),
    [
        ("def f(:", "compile", "does not parse"),
        ("x = 1", "compile", "defines no 'ModelNew'"),
        (source(top="import nonexistent_module"), "compile", "nonexistent_module"),
        (source("x.no_such_thing()"), "run", "no_such_thing"),
        (source("torch.relu(x) * 2"), "wrong", "rms error"),
        (source(before="import os; os.abort()"), "run", "SIGABRT"),
        (source("(K.append(torch.relu(x) * 2 + 1), K[0])[1]", top="K = []"), "wrong", ""),
    ],
    ids=["syntax", "no entry", "import", "error", "wrong", "abort", "first call wins"],
)
def test_what_a_program_does_wrong_is_a_value_and_costs_only_itself(
    lane: Slot, text: str, outcome: str, told: str
) -> None:
    found = measured(lane, text)
    assert found.outcome == outcome or (outcome == "wrong" and found.outcome == "hack")
    assert told in found.detail
    assert found.score is None


def test_after_all_that_the_next_program_is_measured(lane: Slot) -> None:
    assert measured(lane, source(), 1.5).score == 1.5


def test_a_surprise_is_measured_again_in_a_fresh_process_and_the_lower_counts(lane: Slot) -> None:
    found = measured(lane, source(), 4.0, 3.8)
    assert found.score == 3.8
    clock = lane._clock
    assert isinstance(clock, Clock)
    assert len(set(clock.pids)) == 2


def test_twice_the_best_so_far_is_a_surprise_too(lane: Slot) -> None:
    assert measured(lane, source(), 2.1, 2.0, best=1.0).score == 2.0
    assert measured(lane, source(), 2.1, best=1.5).score == 2.1


def test_a_surprise_that_does_not_repeat_has_no_score(lane: Slot) -> None:
    found = measured(lane, source(), 9.0, 2.0, 4.0)
    assert (found.outcome, found.score) == ("unstable", None)
    assert "jump" in found.detail
    assert "the same device" in found.detail


def test_a_reference_that_cannot_be_used_raises_with_the_tasks_name(lane: Slot) -> None:
    with pytest.raises(TargetError, match="broken task"):
        lane.measure(
            TrainingTask("broken task", "def get_inputs(): return 1"), program("p", source())
        )
    assert measured(lane, source(), 1.5).score == 1.5


def test_the_real_clock_times_a_real_program(lane: Slot) -> None:
    lane._clock = prepare_benchmark
    lap = lane.measure(TASK, program("p", source()))
    assert lap.measured.outcome in ("ok", "unstable"), (
        lap.measured
    )  # how quiet this machine is, is not the test's business
    assert lap.seconds["timing"] > 0


def test_a_program_of_ours_is_raced_in_its_own_process_against_the_reference_there(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates_are_ours(lane, monkeypatch)
    lane._clock = prepare_benchmark
    # `pairs` reads one clock for both sides, so that 20 times the work is seen on any machine
    slow = source(before="for _ in range(60): torch.relu(x).mul_(2).add_(1)")
    lap = lane.measure(TASK, program("slow", slow))
    assert lap.measured.outcome in ("ok", "unstable"), lap.measured
    assert lap.measured.score is None or lap.measured.score < 0.3
    assert "baseline" not in lap.seconds, "nothing was seated in the oracle"


def test_what_a_bucket_tells_of_more_time_than_it_took_is_refused(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates_are_ours(lane, monkeypatch)
    lane._clock = prepare_benchmark
    real = Child.call

    def lying(child: Child, verb: str, **what: Any) -> dict[str, Any]:
        answer = real(child, verb, **what)
        return (
            answer | {"pairs": [[1e9, 1e9] for _ in answer["pairs"]]} if verb == "pairs" else answer
        )

    monkeypatch.setattr(Child, "call", lying)
    found = lane.measure(TASK, program("p", source()))
    assert found.measured.outcome in ("hack", "unstable"), found.measured
    assert "wall_slope" in found.measured.detail or "told of a request" in found.measured.detail


def test_a_surprise_of_ours_goes_to_one_other_process_again_and_again(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates_are_ours(lane, monkeypatch)
    lane._clock = clock = Clock(9.0, 9.0, 9.0, 9.0)
    for _ in range(2):
        assert lane.measure(TASK, program("p", source())).measured.score == 9.0
    first, other, again, once_more = clock.pids
    assert other != first
    assert (again, once_more) == (first, other)


def test_lanes_answer_in_order_and_outlive_a_lane_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._in_lane", _dying)
    wrong = [program(f"p{index}", source(f"x * {index}")) for index in range(2)]
    with JudgeEvaluator(terms(tmp_path), lanes=2) as evaluator:
        found = evaluator.measure(TASK, [wrong[0], program("killer", "x"), wrong[1], wrong[0]])
    assert [(one.program, one.outcome) for one in found] == [
        ("p0", "wrong"),
        ("killer", "run"),
        ("p1", "wrong"),
        ("p0", "wrong"),
    ]
    assert "ended, twice" in found[1].detail
    assert evaluator.memory.counts["asked"] == 4
    assert evaluator.memory.counts["measured"] == 3


def _dying(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    if question[1].program == "killer":
        os._exit(9)
    return Iteration(Measured(question[0].id, question[1].program, "wrong"), {"pid": os.getpid()})


def _without_memory(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    """Only the first process that comes here finds memory; `first` is a link, which is there and
    says who it is at once.
    """
    first, own = Path(question[1].source), str(os.getpid())
    first.with_suffix(f".{own}").touch()
    with suppress(FileExistsError):
        first.symlink_to(own)
    if os.readlink(first) != own:
        raise OutOfDeviceMemory(question[0].id, "none left")
    return Iteration(Measured(question[0].id, question[1].program, "wrong"), {})


def test_a_lane_that_finds_no_memory_is_given_up_and_the_others_do_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._in_lane", _without_memory)
    questions = [
        (replace(TASK, reference=f"reference {i}"), [program(f"p{i}", str(tmp_path / "first"))])
        for i in range(6)
    ]
    with JudgeEvaluator(terms(tmp_path), lanes=2) as evaluator:
        found = [one for answers in evaluator.measure_all(questions) for one in answers]
        assert evaluator._lanes is not None
        left = len(evaluator._lanes._seats)
    assert [one.outcome for one in found] == ["wrong"] * 6
    assert left == 3 - len(list(tmp_path.glob("first.*")))


def test_the_last_lane_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._in_lane", _always_without_memory)
    with (
        JudgeEvaluator(terms(tmp_path), lanes=2) as evaluator,
        pytest.raises(OutOfDeviceMemory, match="use fewer lanes"),
    ):
        evaluator.measure(TASK, [program("p", source())])


def _always_without_memory(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    raise OutOfDeviceMemory(question[0].id, "none left")


class Server:
    """In place of an MPS server: lanes that it serves know by a variable."""

    began: ClassVar[list[Server]] = []

    def __init__(self) -> None:
        self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(len(self.began))}
        self.closed = False
        self.began.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    began: list[Server] = []
    monkeypatch.setattr(Server, "began", began)
    monkeypatch.setattr(SlotPool, "_begin_server", lambda self, count: Server())
    return began


def _faulty(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    """Whoever is `faulty` ends the work of all that are served; others are right once they are
    done, which takes a moment.
    """
    served = process_environment().get("CUDA_MPS_PIPE_DIRECTORY")
    if question[1].program.startswith("faulty"):
        if served is not None:
            raise SharedContextFault("an illegal memory access was encountered")
        return Iteration(Measured(question[0].id, question[1].program, "run"), {})
    time.sleep(0.3)
    return Iteration(
        Measured(question[0].id, question[1].program, "wrong", detail=f"served {served}"), {}
    )


def test_a_fault_of_one_program_is_held_against_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[Server]
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._in_lane", _faulty)
    names = ["p0", "faulty", "p1", "p2", "p3"]
    with JudgeEvaluator(terms(tmp_path), lanes=2) as evaluator:
        found = evaluator.measure(TASK, [program(name, f"x = '{name}'") for name in names])
        assert evaluator._lanes is not None
        assert evaluator._lanes.faults == 1
        assert evaluator.served == 2
    assert [(one.program, one.outcome) for one in found] == [
        (name, "run" if name == "faulty" else "wrong") for name in names
    ]
    assert {one.detail for one in found if one.outcome == "wrong"} <= {
        "served 0",
        "served 1",
        "served None",
    }
    assert "served 1" in {one.detail for one in found}, "lanes go on with another server"
    assert [server.closed for server in servers] == [True, True]


def test_after_some_faults_lanes_do_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[Server]
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._in_lane", _faulty)
    names = [f"faulty {index}" for index in range(8)]
    with JudgeEvaluator(terms(tmp_path), lanes=2) as evaluator:
        found = evaluator.measure(TASK, [program(name, f"x = '{name}'") for name in names])
        assert not evaluator.served
    assert [one.outcome for one in found] == ["run"] * len(names)
    assert len(servers) == 3
    assert all(server.closed for server in servers)


def test_a_server_has_room_for_so_many_lanes(tmp_path: Path, servers: list[Server]) -> None:
    assert SlotPool(terms(tmp_path), 64).served == 9


def test_lanes_of_strangers_or_without_a_gpu_have_no_server(tmp_path: Path) -> None:
    assert SlotPool(terms(tmp_path), 4).server is None
    stranger = replace(terms(tmp_path), device=torch.device("cuda"))
    assert SlotPool(stranger, 4).server is None, "whose fault would end the work of all"


def test_whoever_is_interrupted_waits_for_no_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.pool.slots._in_lane", _sleeping)
    mark = tmp_path / "pid"
    questions = [
        (replace(TASK, reference=name), [program(name, str(mark))])
        for name in ("sleeps", "answers")
    ]

    def interrupt(one: Measured) -> None:
        raise KeyboardInterrupt

    with JudgeEvaluator(terms(tmp_path), lanes=2) as evaluator:
        evaluator.told = interrupt
        with pytest.raises(KeyboardInterrupt):
            evaluator.measure_all(questions)
    with pytest.raises(ProcessLookupError):
        os.kill(int(os.readlink(mark)), 0)


def _sleeping(question: tuple[TrainingTask, Decoded, float | None, bool]) -> Iteration:
    """One program for ever, the other until that one has begun."""
    mark = Path(question[1].source)
    if question[1].program == "sleeps":
        mark.symlink_to(str(os.getpid()))
    while question[1].program == "sleeps" or not mark.is_symlink():
        time.sleep(0.01)
    return Iteration(Measured(question[0].id, question[1].program, "wrong"), {})


def waiting(**programs: int) -> dict[str, deque[MeasurementRequest]]:
    return {
        name: deque([(TASK, program("p", source()), None, False)] * count)
        for name, count in programs.items()
    }


@pytest.mark.parametrize(
    ("at", "others", "left", "goes"),
    [
        ("a", [], {"a": 1, "b": 9}, "a"),  # it stays where it is
        ("", [], {"a": 3, "b": 9}, "b"),  # where most wait
        ("", ["b"], {"a": 5, "b": 9}, "a"),  # for each lane that would be there
        ("", ["b"], {"b": 9}, "b"),
        ("", ["b"], {"b": 1}, ""),  # whoever is there is as soon done
        ("", ["b", "b"], {"b": 3}, ""),
        ("a", ["a"], {"a": 0, "b": 1}, "b"),  # nobody is there
        ("a", [], {"a": 0}, ""),
    ],
)
def test_a_free_lane_goes_where_it_saves_most(
    tmp_path: Path, at: str, others: list[str], left: dict[str, int], goes: str
) -> None:
    lanes = SlotPool(terms(tmp_path), 1 + len(others))
    lanes._seats[0].reference = at
    with ProcessPoolExecutor(1) as pool:  # which starts no process before it has work
        assert lanes._next(lanes._seats[0], waiting(**left)) or not any(left.values()), (
            "a new lane takes anything"
        )
        lanes._seats[0].pool = pool
        for seat, reference in zip(lanes._seats[1:], others, strict=True):
            seat.reference, seat.question = reference, (TASK, program("p", source()), None, False)
        assert lanes._next(lanes._seats[0], waiting(**left)) == goes


def ok(score: float) -> Measured:
    return Measured("relu", "p", "ok", score)


def test_a_repeated_program_is_measured_at_its_first_second_fourth_eighth_coming() -> None:
    memory, due = Remembered(), []
    for coming in range(1, 17):
        if memory.due(TASK, [program("p", source())]):
            due.append(coming)
            memory.take(ok(float(coming)))
    assert due == [1, 2, 4, 8, 16]
    assert memory.answer("relu", "p").score == 4.0
    assert memory.best("relu") == 16.0


def test_a_program_twice_in_a_batch_is_measured_once() -> None:
    assert len(Remembered().due(TASK, [program("p", source())] * 5)) == 1


@pytest.mark.parametrize("outcome", ["wrong", "hack", "compile", "run"])
def test_a_failure_is_not_tried_again_and_outweighs_earlier_scores(outcome: str) -> None:
    memory = Remembered()
    memory.due(TASK, [program("p", source())])
    memory.take(ok(2.0))
    assert memory.due(TASK, [program("p", source())])
    memory.take(Measured("relu", "p", outcome))  # type: ignore[arg-type]
    assert not any(memory.due(TASK, [program("p", source())]) for _ in range(8))
    assert memory.answer("relu", "p").outcome == outcome


def test_an_unstable_measurement_is_forgotten_once_there_is_a_score() -> None:
    memory = Remembered()
    memory.due(TASK, [program("p", source())])
    memory.take(Measured("relu", "p", "unstable"))
    assert memory.answer("relu", "p").outcome == "unstable"
    assert memory.due(TASK, [program("p", source())])
    memory.take(ok(1.25))
    assert memory.answer("relu", "p").score == 1.25


def test_a_program_that_was_found_right_here_is_only_raced_when_it_comes_again(lane: Slot) -> None:
    memory = Remembered()
    memory.learn([ok(2.0)])  # by another run, perhaps by another version of the judge
    assert [validated for *_, validated in memory.due(TASK, [program("q", source())])] == [False]
    memory.take(replace(ok(2.0), program="q"))
    assert [validated for *_, validated in memory.due(TASK, [program("q", source())])] == [True]
    lane._clock = Clock(1.5, 1.5)
    whole, again = (
        lane.measure(TASK, program("q", source()), validated=validated)
        for validated in (False, True)
    )
    assert whole.measured.score == again.measured.score == 1.5
    assert {"numerics", "call_history"} <= set(whole.seconds)
    assert "numerics" in again.seconds
    assert "call_history" not in again.seconds
    assert (
        lane.measure(TASK, program("r", source("x * 3")), validated=True).measured.outcome
        == "wrong"
    )


def test_what_was_learnt_is_not_measured_again() -> None:
    memory = Remembered()
    memory.learn([ok(2.0), replace(ok(2.0), score=3.0)])
    assert not memory.due(TASK, [program("p", source())])
    assert memory.best("relu") == 3.0


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        ("unstable", "unstable"), ("jump", "unstable"), ("compile", "compile"), ("numerics", "wrong"), ("guard_band", "wrong"),
        ("call_history", "hack"), ("wall_slope", "hack"), ("env_diff", "hack"), ("resource", "run"), ("run", "run"),
    ],
)  # fmt: skip
def test_each_check_is_one_kind_of_failure(check: str, kind: str) -> None:
    assert classify_failure(CheckResult(check, False), torch.device("cuda")) == kind


def test_on_a_cpu_that_others_use_two_clocks_that_differ_prove_no_cheat() -> None:
    assert classify_failure(CheckResult("wall_slope", False), CPU) == "unstable"


def test_the_reference_of_these_tests_is_used(lane: Slot) -> None:
    assert lane.measure(TASK, program("asks for it", source("x * 7"))).measured.outcome == "wrong"
    assert REFERENCE in lane._references.loaded


def test_a_lane_out_of_memory_gives_back_what_it_holds_and_tries_once_more(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, falls = lane._evaluate, [1]

    def short_of_memory(*given: Any) -> Any:
        if falls[0] > 0:
            falls[0] -= 1
            raise torch.OutOfMemoryError("none left")
        return judged(*given)

    monkeypatch.setattr(lane, "_evaluate", short_of_memory)
    assert measured(lane, source(), 1.5).score == 1.5
    falls[0] = 2
    with pytest.raises(TargetError, match=r"relu.*too little memory.*fewer lanes"):
        measured(lane, source())
    assert measured(lane, source(), 1.5).score == 1.5


def test_a_program_whose_process_finds_no_memory_is_tried_once_more_and_then_left_without_a_verdict(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = CheckResult(
        "resource",
        False,
        detail="run: out of memory: CUDA out of memory. Tried to allocate 64.00 MiB",
    )
    answers: list[Any] = []
    monkeypatch.setattr(lane, "_evaluate", lambda *given: answers.pop(0))
    monkeypatch.setattr(lane, "terms", replace(lane.terms, device=torch.device("cuda")))
    for answers, outcome in (([short, (1.5, (1.5,) * 7)], "ok"), ([short, short], "unstable")):
        assert lane.measure(TASK, program("p", source())).measured.outcome == outcome
        assert not answers


def test_what_the_whole_gpu_holds_is_not_held_against_a_program_beside_others(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def alone(trial: Trial) -> list[CheckResult]:
        asked.append(trial.is_alone_on_device)
        return [CheckResult("resource", True)]

    monkeypatch.setattr(
        "torch_cudal1.judge.pool.slot.select_checks",
        lambda profile: (NUMERICS, replace(NUMERICS, run=alone)),
    )
    assert measured(lane, source(), 1.5).outcome == "ok"
    assert asked == [False]


def test_a_race_whose_buckets_are_too_far_apart_is_run_again_on_the_same_preparation(
    lane: Slot,
) -> None:
    class Unsteady(Clock):
        races = steady_after = 0

        def __call__(
            self, trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan
        ) -> PreparedBenchmark:
            steady = super().__call__(trial, baseline, plan)

            def run() -> BenchmarkResult:
                self.races += 1
                if self.races > self.steady_after:
                    return steady.measure()
                pairs = [(100.0 + 20.0 * bucket, 100.0) for bucket in range(7) for _ in range(6)]
                return BenchmarkResult(
                    Measurement(plan, {"hot": summarise(pairs)}, (1.0, 1.0), 1, 0.1), (), {}
                )

            return Scripted(run)

    for steady_after, outcome, races in ((1, "ok", 2), (3, "unstable", 3)):
        lane._clock = clock = Unsteady(1.5)
        clock.steady_after = steady_after
        assert lane.measure(TASK, program("p", source())).measured.outcome == outcome
        assert clock.races == races
        assert len(clock.pids) == 1


@pytest.mark.parametrize("failed", ["", "wall_slope", "timed_output"])
def test_a_race_of_ours_is_examined_beside_others_and_a_clock_that_seems_false_once_more_alone(
    lane: Slot, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    class Examined(Clock):
        def __call__(
            self, trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan
        ) -> PreparedBenchmark:
            told = CheckResult(failed or "wall_slope", not failed, detail="what was found")
            return Scripted(
                super().__call__(trial, baseline, plan).measure,
                lambda timed: replace(timed, checks=(*timed.checks, told)),
            )

    ways: list[str] = []
    for way in ("shared", "alone"):
        entered = getattr(lane._gpu_lock, way)
        monkeypatch.setattr(
            lane._gpu_lock, way, lambda way=way, entered=entered: (ways.append(way), entered())[1]
        )
    lane._clock = Examined(1.5)
    found = lane.measure(TASK, program("p", source())).measured
    assert found.outcome == ("hack" if failed == "timed_output" else "ok"), found
    after = ways[ways.index("alone") :]
    assert (
        after == ["alone", "shared", "alone"]
        if failed == "wall_slope"
        else after == ["alone", "shared"]
    ), after


def test_two_clocks_that_differ_in_one_process_only_are_no_cheat_and_no_score(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    differ = CheckResult(
        "wall_slope", False, detail="50 us a call by the judge's clock, 25 us by the process's own"
    )
    answers: list[Any] = []
    monkeypatch.setattr(lane, "_evaluate", lambda *given: answers.pop(0))
    monkeypatch.setattr(lane, "terms", replace(lane.terms, device=torch.device("cuda")))
    cases = (
        ([differ, differ], "hack"),
        ([differ, (1.5, (1.5,) * 7)], "unstable"),
        ([differ, CheckResult("numerics", False)], "wrong"),
    )
    for given, outcome in cases:
        answers[:] = given
        assert lane.measure(TASK, program("p", source())).measured.outcome == outcome
        assert not answers


OWN = "torch.relu(x) * 2 + 1"


def test_a_program_of_ours_that_fails_in_order_leaves_its_process_to_the_next_and_a_cheat_does_not(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates_are_ours(lane, monkeypatch)
    lane._clock = Clock(1.5, 1.5, 1.5)
    cheat = source(OWN, before="torch.manual_seed(0)")
    cases = (
        (source("x.no_such_thing()"), "run", True),
        (source("torch.relu(x)"), "wrong", True),
        (cheat, "hack", False),
    )
    for text, outcome, kept in cases:
        assert lane.measure(TASK, program("right", source(OWN))).measured.outcome == "ok"
        assert lane._processes.kept is not None
        pid = lane._processes.kept.pid
        assert lane.measure(TASK, program("p", text)).measured.outcome == outcome
        left = lane._processes.kept
        assert (left is not None and left.pid == pid) is kept


def test_a_process_that_cannot_give_its_memory_back_is_ended(
    lane: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept:
        def __init__(self, *, fails: bool) -> None:
            self.fails, self.asked, self.closed = fails, list[Any](), False

        def call(self, verb: str, **what: Any) -> dict[str, Any]:
            self.asked.append((verb, what))
            if self.fails:
                raise CandidateFailure(verb, "an illegal memory access was encountered", verb)
            return {}

        def close(self) -> None:
            self.closed = True

    healthy, broken = Kept(fails=False), Kept(fails=True)
    monkeypatch.setattr(lane._processes, "kept", healthy)
    monkeypatch.setattr(lane._processes, "_second", broken)
    lane._processes.empty()
    assert healthy.asked == broken.asked == [("clear", {})]
    assert (lane._processes.kept, lane._processes._second) == (healthy, None)
    assert (healthy.closed, broken.closed) == (False, True)


def test_a_lane_holds_the_inputs_of_one_reference_at_a_time(lane: Slot) -> None:
    other = replace(TASK, reference=f"{TASK.reference}\n# another text")
    assert measured(lane, source(), 1.5).score == 1.5
    assert lane._references.loaded[TASK.reference].reference_cache
    lane._clock = Clock(1.5)
    assert lane.measure(other, program("p", source())).measured.score == 1.5
    left, there = lane._references.loaded[TASK.reference], lane._references.loaded[other.reference]
    assert (bool(left.reference_cache), left.baselines, bool(there.reference_cache)) == (
        False,
        None,
        True,
    )
    assert measured(lane, source(), 1.5).score == 1.5  # and can come back
