"""The analysis of an answer, checked against its exemplars."""

from __future__ import annotations

from tests.training.ksl_cases import CPU, task_for
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import Decoded


def test_the_analysis_of_an_answer_is_checked_against_its_exemplars() -> None:
    task = task_for("softmax")
    shown = [
        Exemplar("tpl=row.two rows=64 mask=on acc=f32", 0.7),
        Exemplar("tpl=row.two rows=16 mask=on acc=f32", 1.4),
    ]
    written = "tpl=row.two rows=4 mask=on acc=f32"
    right = CPU.completion(task, written, shown)
    assert right.startswith(
        "<pa> better=2 diff=rows <ad> tpl:keep2 rows:down mask:keep2 acc:keep2 <code> tpl=row.two rows=4"
    )
    decoded = CPU.decode(task, right)
    assert isinstance(decoded, Decoded)
    marks = CPU.marks(task, decoded, shown)
    assert (marks.better, marks.differences, marks.intents) == (True, 1.0, 1.0)
    lied = CPU.decode(
        task,
        right.replace("better=2", "better=1")
        .replace("diff=rows", "diff=acc")
        .replace("rows:down", "rows:up"),
    )
    assert isinstance(lied, Decoded)
    marks = CPU.marks(task, lied, shown)
    assert (marks.better, marks.differences) == (False, 0.0)
    assert marks.intents is not None
    assert 0 < marks.intents < 1
