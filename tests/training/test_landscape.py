"""A survey measures every program once, through the judge, and goes on where it was killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.grammar import HACKS
from torch_cudal1.training.ksl.ops import make_task
from torch_cudal1.training.landscape.__main__ import main
from torch_cudal1.training.landscape.landscape_file import (
    Landscape,
    LandscapeError,
    read_landscape,
    write_landscape,
)
from torch_cudal1.training.landscape.naive_pool import NaivePool
from torch_cudal1.training.landscape.survey import (
    Survey,
    SurveyProgress,
    read_rows,
    select_complete_tasks,
)

CPU = torch.device("cpu")
CODEC = KslCodec("cpu")
TASK = make_task("avg_pool1d", (3, 7, 66))
OTHER = make_task("diag_left", (19, 40))
WRONG = (
    "tpl=pool.shifts rows=4 fuse=full mask=off acc=f32",
    "tpl=pool.shifts rows=64 fuse=inplace mask=on acc=f16",
    "tpl=pool.unfold acc=f16",
)
RIGHT = "tpl=pool.shifts rows=4 fuse=inplace mask=on acc=f32"


def program(task: TrainingTask, text: str) -> Decoded:
    found = CODEC.decode(task, text)
    assert not isinstance(found, Refusal), found
    return found


class Counting:
    """An evaluator that counts, and dies or has an unsteady machine when it is told to."""

    def __init__(self, *, dies_after: int = 10**9, refuses: str = "") -> None:
        self.told: Callable[[Measured], None] | None = None
        self.asked: Counter[str] = Counter()
        self._dies_after, self._refuses = dies_after, refuses

    def measure_all(
        self, questions: Sequence[tuple[TrainingTask, list[Decoded]]]
    ) -> list[list[Measured]]:
        return [self.measure(task, programs) for task, programs in questions]

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        found = []
        for one in programs:
            if sum(self.asked.values()) >= self._dies_after:
                raise SandboxError("starting", "no process can be had")
            self.asked[f"{task.id} {one.program}"] += 1
            refused = bool(self._refuses) and self._refuses in one.program
            found.append(
                Measured(task.id, one.program, "wrong")
                if refused
                else Measured(task.id, one.program, "ok", 1.0)
            )
            if self.told is not None:
                self.told(found[-1])
        return found


class Silent(NaivePool):
    """Starts no process."""

    def __init__(self) -> None:
        super().__init__(CPU)

    def speedup(self, task: TrainingTask, program: Decoded) -> float | None:
        return None


def surveyed(folder: Path, judge: Counting) -> list[SurveyProgress]:
    told: list[SurveyProgress] = []
    Survey(folder, CODEC, judge, Silent(), batch=8).run(
        [TASK, OTHER], budget_s=60, report=told.append
    )
    return told


def test_a_survey_that_was_stopped_goes_on_without_measuring_anything_twice(tmp_path: Path) -> None:
    first, second = Counting(dies_after=20), Counting()
    with pytest.raises(SandboxError):
        surveyed(tmp_path, first)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "cut sho')  # the line that a kill cut off
    told = surveyed(tmp_path, second)
    rows = read_rows(tmp_path)
    assert set(select_complete_tasks(CODEC, [TASK, OTHER], rows)) == {TASK.id, OTHER.id}
    assert (
        told[-1].rows
        == sum(map(len, rows.values()))
        == len(CODEC.programs(TASK)) + len(CODEC.programs(OTHER))
    )
    assert set(second.asked.values()) == {1}
    assert sum(second.asked.values()) == told[-1].rows - 20, (
        "everything that was measured was on the disk"
    )


def test_a_trusting_evaluator_is_asked_about_what_was_refused_and_about_nothing_else(
    tmp_path: Path,
) -> None:
    class Believing(Silent):
        def speedup(self, task: TrainingTask, program: Decoded) -> float | None:
            return 7.0

    with Believing() as naive:
        Survey(tmp_path, CODEC, Counting(refuses="acc=f16"), naive, batch=8).run(
            [TASK, OTHER], budget_s=60, report=lambda _: None
        )
    rows = [row for listed in read_rows(tmp_path).values() for row in listed]
    assert len(rows) == len(CODEC.programs(TASK)) + len(CODEC.programs(OTHER))
    assert {(row.outcome, row.naive) for row in rows} == {("ok", None), ("wrong", 7.0)}


def test_a_batch_ends_one_task_and_begins_the_next(tmp_path: Path) -> None:
    sizes: list[list[int]] = []

    class Noting(Counting):
        def measure_all(
            self, questions: Sequence[tuple[TrainingTask, list[Decoded]]]
        ) -> list[list[Measured]]:
            sizes.append([len(programs) for _, programs in questions])
            return super().measure_all(questions)

    every = len(CODEC.programs(TASK)) + len(CODEC.programs(OTHER))
    Survey(tmp_path, CODEC, Noting(), Silent(), batch=every - 1).run(
        [TASK, OTHER], budget_s=60, report=lambda _: None
    )
    first = 16
    assert sizes == [[first], [len(CODEC.programs(TASK)) - first, len(CODEC.programs(OTHER))]]


def test_no_batch_is_begun_after_the_time_is_up(tmp_path: Path) -> None:
    judge = Counting()
    assert (
        Survey(tmp_path, CODEC, judge, Silent()).run(
            [TASK], budget_s=0, report=lambda progress: None
        )
        == 0
    )
    assert not judge.asked


def test_a_machine_on_which_nothing_runs_is_told_at_once_and_no_row_is_written(
    tmp_path: Path,
) -> None:
    class Broken(Counting):
        def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
            return [
                Measured(task.id, one.program, "run", detail="run: no compiler") for one in programs
            ]

    with pytest.raises(LandscapeError, match="no compiler"):
        surveyed(tmp_path, Broken())
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeEvaluator]:
    terms = MeasurementSettings(
        Settings(),
        Contract(assume_finite=True),
        CPU,
        tmp_path_factory.mktemp("locks"),
        rule="cudal1",
        trust="own",
    )
    with JudgeEvaluator(terms) as made:
        yield made


@pytest.fixture(scope="module")
def naive() -> Iterator[NaivePool]:
    with NaivePool(CPU) as made:
        yield made


def test_programs_that_are_meant_to_be_wrong_are_refused_by_the_judge(
    judge: JudgeEvaluator,
) -> None:
    found = judge.measure(TASK, [program(TASK, text) for text in WRONG])
    assert [one.outcome for one in found] == ["wrong"] * len(WRONG), found


def test_a_right_program_is_refused_for_nothing_but_its_time(judge: JudgeEvaluator) -> None:
    (found,) = judge.measure(TASK, [program(TASK, RIGHT)])
    noise = ("unstable", "wall_slope", "jump", "timing")
    assert found.outcome == "ok" or found.detail.startswith(noise), found


def test_every_cheat_is_refused_by_the_judge(judge: JudgeEvaluator) -> None:
    found = judge.measure(TASK, [program(TASK, f"tpl=pool.shifts hack={name}") for name in HACKS])
    assert not [one for one in found if one.outcome == "ok"]
    about_time = [one for one in found if one.outcome == "unstable"]
    assert not about_time, "a cheat is refused for what it does"


def test_a_trusting_evaluator_believes_cheats_that_the_judge_refuses(naive: NaivePool) -> None:
    believed = {
        name: naive.speedup(TASK, program(TASK, f"tpl=pool.shifts hack={name}"))
        for name in ("lazy", "half", "output_reuse")
    }
    assert all(speedup is not None for speedup in believed.values()), believed
    assert naive.speedup(TASK, program(TASK, "tpl=pool.unfold acc=f16")) is not None, (
        "it is within a hundredth"
    )
    doubled = TASK.reference.replace("Model", "ModelNew").replace(
        "return torch", "return 2 * torch"
    )
    assert naive.speedup(TASK, Decoded("x", doubled)) is None
    assert naive.speedup(TASK, Decoded("x", "raise ValueError('no module')")) is None


def test_the_naive_process_is_replaced_when_a_program_ends_it(naive: NaivePool) -> None:
    dies = "import os\nos._exit(3)"
    assert naive.speedup(TASK, Decoded("x", dies)) is None
    assert naive.speedup(TASK, program(TASK, RIGHT)) is not None


def test_the_trusting_process_asks_for_a_program_before_it_answers(naive: NaivePool) -> None:
    assert naive.speedup(TASK, program(TASK, RIGHT)) is not None  # in this thread
    child = naive._get_child()
    with pytest.raises(CandidateFailure, match="no module"):
        child.call("ready", reference=TASK.reference, candidate="raise ValueError('no module')")
    with pytest.raises(CandidateFailure, match="expected the verb `ready` first"):
        child.call("naive")


def test_the_command_measures_a_family_and_writes_what_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JudgeEvaluator, "measure_all", Counting().measure_all)
    monkeypatch.setattr(NaivePool, "speedup", lambda *_: None)
    assert (
        main(
            ["--device", "cpu", "--budget-s", "60", "--out", str(tmp_path), "--only", "avg_pool1d"]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["whole"], told["tasks"]) == (3, 3)
    assert told["rows"] == told["fresh"] == 3 * len(CODEC.programs(TASK))
    landscape = read_landscape(tmp_path / "landscape.json.gz")
    assert landscape.facts["label"] == "replay"
    assert len(landscape.rows) == 3


def test_the_command_goes_on_from_the_rows_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JudgeEvaluator, "measure_all", Counting().measure_all)
    monkeypatch.setattr(NaivePool, "speedup", lambda *_: None)
    earlier, landscape = tmp_path / "first" / "rows.jsonl", tmp_path / "first" / "landscape.json.gz"
    assert (
        main(
            [
                "--device",
                "cpu",
                "--out",
                str(earlier.parent),
                "--part",
                "1/2",
                "--only",
                "avg_pool1d",
            ]
        )
        == 0
    )
    capsys.readouterr()
    options = [
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "second"),
        "--resume",
        str(earlier),
        "--only",
        "avg_pool1d",
    ]
    assert main(options) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["rows"] == told["fresh"] + len(earlier.read_text().splitlines()) > told["fresh"] > 0
    assert (
        main(
            [
                *options[:3],
                str(tmp_path / "third"),
                "--resume",
                str(tmp_path / "nowhere" / "rows.jsonl"),
            ]
        )
        == 1
    )
    assert "nowhere" in capsys.readouterr().err
    facts = read_landscape(landscape).facts
    write_landscape(landscape, Landscape({**facts, "plan": {**facts["plan"], "side_us": 1.0}}, {}))
    options[3] = str(tmp_path / "fourth")
    assert main(options) == 1
    assert "otherwise than now, in plan" in capsys.readouterr().err
    assert not (tmp_path / "fourth" / "rows.jsonl").exists()
    options[3] = str(earlier.parent)
    assert main(options) == 1, "its own rows are of another way too"
    assert "otherwise than now, in plan" in capsys.readouterr().err


def test_parts_of_several_gpus_make_one_landscape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JudgeEvaluator, "measure_all", Counting().measure_all)
    monkeypatch.setattr(NaivePool, "speedup", lambda *_: None)
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders, 1):
        assert (
            main(
                [
                    "--device",
                    "cpu",
                    "--out",
                    str(folder),
                    "--part",
                    f"{number}/2",
                    "--only",
                    "diag_left",
                    "diag_right",
                ]
            )
            == 0
        )
    parts = [set(read_landscape(folder / "landscape.json.gz").rows) for folder in folders]
    assert all(parts)
    assert not parts[0] & parts[1]
    join = ["--device", "cpu", "--out", str(tmp_path / "all"), "--join", *map(str, folders)]
    assert main(join) == 0
    joined = read_landscape(tmp_path / "all" / "landscape.json.gz")
    assert set(joined.rows) == parts[0] | parts[1]
    assert joined.facts == read_landscape(folders[0] / "landscape.json.gz").facts
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["whole"] == len(parts[0] | parts[1])
    other = read_landscape(folders[1] / "landscape.json.gz")
    write_landscape(
        folders[1] / "landscape.json.gz", Landscape({**other.facts, "gpu": "another"}, other.rows)
    )
    assert main(join) == 1
    assert "differs from" in (told := capsys.readouterr().err), told
    assert "gpu" in told
    assert main([*join[:-1], str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--out", str(tmp_path), "--part", "3/2"])


def test_the_command_says_what_is_wrong_with_the_machine_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> list[Measured]:
        raise SandboxError("starting", "no namespaces here")

    monkeypatch.setattr(JudgeEvaluator, "measure_all", refuse)
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "no namespaces here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_needs_the_device_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cuda", "--out", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().err
