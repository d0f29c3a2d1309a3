"""Published kernels as files: what is a task, which reference belongs to it, and what is said of
the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT, blocks
from torch_cudal1.ingest.formats import kernelbench
from torch_cudal1.ingest.formats.registry import read_tasks
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

REFERENCE = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"
CANDIDATE = "class ModelNew: pass\n"


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_file_with_both_sides_is_its_own_pair(tmp_path: Path) -> None:
    files(tmp_path, both=REFERENCE + CANDIDATE)
    (task,) = read_tasks(tmp_path / "both.py")
    assert isinstance(task, PublishedTask)
    assert task.reference == task.candidate == REFERENCE + CANDIDATE


def test_candidates_find_their_reference_by_place_and_then_by_name(tmp_path: Path) -> None:
    references = files(
        tmp_path / "ref",
        a__1_square="# a1\n" + REFERENCE,
        b__1_square="# b1\n" + REFERENCE,
        b__12_cube="# b12\n",
    )
    candidates = files(
        tmp_path / "new",
        a__1_square=CANDIDATE,
        **{"12_cube_sample_0": CANDIDATE, "1_square_x": CANDIDATE, "7_other": CANDIDATE},
    )
    tasks = {Path(task.where).name: task for task in read_tasks(candidates, references)}
    same_number, longest = tasks["1_square.py"], tasks["12_cube_sample_0.py"]
    assert isinstance(same_number, PublishedTask)
    assert same_number.reference.startswith("# a1")
    assert isinstance(longest, PublishedTask)
    assert longest.reference.startswith("# b12")
    for name, word in (
        ("1_square_x.py", "2 references fit its name"),
        ("7_other.py", "no reference has its name"),
    ):
        problem = tasks[name]
        assert isinstance(problem, UnreadableTask)
        assert word in problem.reason


def test_one_reference_serves_a_folder_of_candidates(tmp_path: Path) -> None:
    reference = files(tmp_path, ref=REFERENCE) / "ref.py"
    tasks = list(read_tasks(files(tmp_path / "new", one=CANDIDATE, two="x = 1"), reference))
    assert isinstance(tasks[0], PublishedTask)
    assert tasks[0].reference == REFERENCE
    assert isinstance(tasks[1], UnreadableTask)
    assert "ModelNew" in tasks[1].reason


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (CANDIDATE, "no --reference says where"),
        ("class ModelNew(:", "no ModelNew"),
        ("x" * 100, "no ModelNew"),
        ("", "no ModelNew"),
    ],
)
def test_a_file_that_is_no_candidate_says_why(text: str, word: str, tmp_path: Path) -> None:
    (unreadable,) = read_tasks(files(tmp_path, new=text) / "new.py")
    assert isinstance(unreadable, UnreadableTask)
    assert word in unreadable.reason


def test_a_folder_without_candidates_is_said_and_references_beside_them_are_passed_over(
    tmp_path: Path,
) -> None:
    (unreadable,) = read_tasks(files(tmp_path, ref=REFERENCE))
    assert isinstance(unreadable, UnreadableTask)
    assert "no Python file below it defines ModelNew (1 were looked at)" in unreadable.reason


def test_a_source_of_any_size_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelbench, "_SOURCE_BYTES", 10)
    (unreadable,) = read_tasks(files(tmp_path, new=CANDIDATE) / "new.py")
    assert isinstance(unreadable, UnreadableTask)


def test_the_pair_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = ROOT / "docs" / "from-laptop-to-fleet.md"
    named = {block.splitlines()[0].removeprefix("# "): block for block in blocks(page, "python")}
    for name in ("sorted_max.py", "faster_max.py"):
        (tmp_path / name).write_text(named[name])
    (task,) = read_tasks(tmp_path / "faster_max.py", tmp_path / "sorted_max.py")
    assert isinstance(task, PublishedTask)
    assert task.reference == named["sorted_max.py"]
