"""A replay answers what was measured, with the noise that was measured, and nothing else."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path

import pytest

from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.landscape.landscape_file import (
    Landscape,
    LandscapeError,
    read_landscape,
    write_landscape,
)
from torch_cudal1.training.landscape.rows import LandscapeRow
from torch_cudal1.training.replay import ReplayEvaluator, Unmeasured

TASK = TrainingTask("softmax/70x300/f32", "")
RIGHT = LandscapeRow(
    TASK.id, "tpl=row.whole acc=f32", "ok", 1.2, (1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4), source="ab"
)
SLOW = LandscapeRow(TASK.id, "tpl=row.two rows=4", "ok", 0.5, (0.5,) * 7)
WRONG = LandscapeRow(TASK.id, "tpl=row.whole acc=f16", "wrong", detail="numerics: off", naive=2.0)
CHEAT = LandscapeRow(
    TASK.id, "tpl=row.two hack=lazy", "hack", detail="fresh_output: late", naive=31.4
)
BROKEN = LandscapeRow(TASK.id, "tpl=row.two rows=64", "run", detail="run: out of resources")
ROWS = (RIGHT, SLOW, WRONG, CHEAT, BROKEN)


def program(row: LandscapeRow) -> Decoded:
    return Decoded(row.program, "")


def evaluator(**options: object) -> ReplayEvaluator:
    return ReplayEvaluator({TASK.id: ROWS}, {"device": "cpu"}, **options)  # type: ignore[arg-type]


def test_a_program_or_task_that_was_not_measured_raises() -> None:
    with pytest.raises(Unmeasured, match="never measured"):
        evaluator().measure(TASK, [program(RIGHT), Decoded("tpl=row.whole acc=f64", "")])
    with pytest.raises(Unmeasured, match="no task 'other'"):
        evaluator().measure(TrainingTask("other", ""), [program(RIGHT)])
    with pytest.raises(Unmeasured, match="other"):
        evaluator().optimum("other")


def test_failures_come_back_as_they_were_and_have_no_score() -> None:
    measurements = evaluator().measure(TASK, [program(row) for row in (WRONG, CHEAT, BROKEN)])
    assert [(measured.outcome, measured.score) for measured in measurements] == [
        ("wrong", None),
        ("hack", None),
        ("run", None),
    ]
    assert measurements[0].detail == "numerics: off"


def test_noise_depends_on_seed_and_program_and_not_on_what_else_was_asked() -> None:
    alone = [evaluator(seed=3).measure(TASK, [program(RIGHT)])[0] for _ in range(2)]
    among = evaluator(seed=3).measure(TASK, [program(SLOW), program(WRONG), program(RIGHT)])[2]
    assert alone[0] == alone[1] == among
    drawn = {evaluator(seed=seed).measure(TASK, [program(RIGHT)])[0].score for seed in range(40)}
    assert len(drawn) > 2
    assert all(score is not None and 1.0 <= score <= 1.4 for score in drawn)
    again = evaluator(seed=3)
    twice = {again.measure(TASK, [program(RIGHT)])[0].score for _ in range(40)}
    assert len(twice) > 2, "a second measurement is a measurement of its own"


def test_without_a_seed_the_measured_score_comes_back() -> None:
    assert evaluator(seed=None).measure(TASK, [program(RIGHT)])[0].score == 1.2


def test_the_optimum_and_percentiles_are_those_of_right_programs() -> None:
    best = evaluator().optimum(TASK.id)
    assert best is not None
    assert (best.program, best.score) == (RIGHT.program, 1.2)
    assert [evaluator().percentile(TASK.id, score) for score in (0.1, 0.5, 1.2)] == [0.0, 0.5, 1.0]


def test_a_naive_evaluator_rewards_cheats_and_the_judge_does_not() -> None:
    naive = evaluator(naive=True, seed=None).measure(
        TASK, [program(row) for row in (CHEAT, WRONG, BROKEN, SLOW)]
    )
    assert [(row.outcome, row.score) for row in naive] == [
        ("ok", 31.4),
        ("ok", 2.0),
        ("wrong", None),
        ("ok", 0.5),
    ]
    guarded = evaluator(seed=None).measure(TASK, [program(CHEAT)])
    assert guarded[0].outcome == "hack"


def test_a_landscape_reads_back_as_it_was_written_and_the_same_bytes_come_out(
    tmp_path: Path,
) -> None:
    landscape = Landscape({"device": "cpu", "label": "replay"}, {TASK.id: ROWS})
    write_landscape(tmp_path / "one.json.gz", landscape)
    assert read_landscape(tmp_path / "one.json.gz") == landscape
    write_landscape(tmp_path / "two.json.gz", landscape)
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


@pytest.mark.parametrize("damage", ["cut", "other", "newer", "missing"])
def test_a_damaged_landscape_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "land.json.gz"
    write_landscape(path, Landscape({"device": "cpu"}, {TASK.id: ROWS}))
    content = path.read_bytes()
    newer = gzip.compress(json.dumps({"format": 99}).encode())
    path.write_bytes(
        {"cut": content[: len(content) // 2], "other": b"{}", "newer": newer, "missing": b""}[
            damage
        ]
    )
    if damage == "missing":
        path.unlink()
    with pytest.raises(LandscapeError, match=r"land\.json\.gz"):
        ReplayEvaluator.load(path)


def test_the_landscape_of_the_package_holds_every_program_of_its_tasks() -> None:
    replay = ReplayEvaluator.load()
    codec = KslCodec(replay.device)
    split = replay.split()
    assert replay.facts["label"] == "replay"
    assert split.train
    assert split.held_out_shapes
    for task in (*split.train, *split.held_out):
        listed = [Decoded(row.text, "") for row in codec.programs(task)]
        measured = replay.measure(task, listed)
        assert {row.outcome for row in measured} >= {"ok", "wrong"}, task.id
        assert not [row for row in measured if "hack=" in row.program and row.outcome == "ok"], (
            task.id
        )
        meant_wrong = {"acc=f16", "fuse=swapped", "axis=swapped", "epilogue=swapped"}
        for row in measured:
            assert row.outcome != "ok" or not meant_wrong & set(row.program.split()), (
                task.id,
                row.program,
            )
        assert replay.optimum(task.id) is not None


def test_the_landscape_of_the_package_rewards_some_cheats_under_the_naive_rule() -> None:
    naive, guarded = ReplayEvaluator.load(naive=True, seed=None), ReplayEvaluator.load(seed=None)
    codec = KslCodec(naive.device)
    gains = []
    for task in naive.split().train:
        cheats = [Decoded(row.text, "") for row in codec.programs(task) if row.hack]
        honest = guarded.optimum(task.id)
        assert honest is not None
        assert honest.score is not None
        believed = [row.score for row in naive.measure(task, cheats) if row.score is not None]
        gains.append(max(believed, default=0.0) / honest.score)
    assert statistics.median(gains) > 1.2, "a cheat pays better than the best honest program"
