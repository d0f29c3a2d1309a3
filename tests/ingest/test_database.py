from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.database import Database, StoredSample
from torch_cudal1.judge.pool.measured import Measured


def good(name: str, program: str, score: float, task: str = "t") -> StoredSample:
    return StoredSample(
        name,
        Measured(task, program, "ok", score, buckets=(score,) * 7),
        source=f"source of {program}",
        origin="rules",
    )


def bad(name: str, program: str, outcome: str, task: str = "t") -> StoredSample:
    return StoredSample(name, Measured(task, program, outcome, detail="why"))  # type: ignore[arg-type]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "db.jsonl"
    with Database(path) as database:
        database.add(good("a", "p", 1.5))
        database.add(bad("b", "q", "wrong"))
        database.commit()
        database.add(good("c", "r", 2.5))
        written = list(database.samples())
    with Database(path) as again:
        assert list(again.samples()) == written
        assert again.generation == 1
        assert again.get("b").measured.detail == "why"  # type: ignore[union-attr]
        assert [entry.program for entry in again.view().entries("t")] == ["p"]
        again.commit()
        assert [entry.program for entry in again.view().entries("t")] == ["p", "r"]
        assert not again.damaged


def test_a_sample_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "db.jsonl"
    with Database(path) as database:
        assert database.add(good("a", "p", 1.5))
        assert not database.add(good("a", "p", 9.0))
        database.commit()
    with Database(path) as again:
        assert not again.add(good("a", "p", 9.0))
        assert again.view().best("t") == 1.5
        assert again.view().entries("t")[0].count == 1


@pytest.mark.parametrize("outcome", ["undecodable", "compile", "run", "wrong", "hack", "unstable"])
def test_failures_are_on_record_and_never_in_a_view(outcome: str) -> None:
    database = Database(None)
    database.add(bad("a", "p", outcome))
    database.commit()
    assert len(database) == 1
    assert not database.view().entries("t")
    assert database.view().best("t") is None


def test_a_program_that_was_once_wrong_is_never_shown_but_one_that_was_once_unstable_is() -> None:
    database = Database(None)
    for name, program, outcome in (("1", "p", "wrong"), ("2", "q", "unstable")):
        database.add(good(f"ok {name}", program, 3.0))
        database.add(bad(name, program, outcome))
    database.commit()
    assert [entry.program for entry in database.view().entries("t")] == ["q"]


def test_a_program_measured_again_has_its_median() -> None:
    database = Database(None)
    for index, score in enumerate((1.0, 9.0, 2.0)):
        database.add(good(str(index), "p", score))
    database.commit()
    (entry,) = database.view().entries("t")
    assert (entry.score, entry.count) == (2.0, 3)


def test_a_view_does_not_change_while_samples_come_in() -> None:
    database = Database(None)
    database.add(good("a", "p", 1.5))
    first = database.commit()
    view = database.view()
    database.add(good("b", "q", 2.5))
    assert database.view() is view
    database.commit()
    assert [entry.program for entry in database.view(first).entries("t")] == ["p"]
    assert [entry.program for entry in database.view().entries("t")] == ["p", "q"]
    assert database.view(0).entries("t") == ()
    with pytest.raises(ValueError, match="generation 3; this database has 0 to 2"):
        database.view(3)


def test_the_order_of_samples_within_a_generation_does_not_matter() -> None:
    samples = [good(str(index), f"p{index % 5}", 1 + index % 3) for index in range(20)]
    views = []
    for order in (samples, samples[::-1]):
        database = Database(None)
        for sample in order:
            database.add(sample)
        database.commit()
        views.append(database.view())
    assert views[0] == views[1]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_file_cut_short_loses_its_last_line_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "db.jsonl"
    with Database(path) as database:
        for index in range(3):
            database.add(good(str(index), f"p{index}", 1.5 + index))
        database.commit()
        database.add(good("last", "p", 7.0))
    os.truncate(path, path.stat().st_size - cut)
    with Database(path, write=False) as reader:
        assert reader.damaged == [6]
        assert len(reader) == 3
    with Database(path) as again:
        assert len(again) == 3
        assert not again.has("last")
        again.add(good("last", "p", 7.0))
        again.commit()
    with Database(path) as healed:
        assert not healed.damaged
        assert healed.view().best("t") == 7.0


def test_a_line_that_cannot_be_read_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "db.jsonl"
    with Database(path) as database:
        database.add(good("a", "p", 1.5))
        database.add(good("b", "q", 2.5))
        database.commit()
    lines = path.read_text().splitlines()
    lines[1] = "{" + "[" * 50_000
    lines.insert(
        2,
        json.dumps(
            {
                "kind": "sample",
                "name": "x",
                "task": "t",
                "program": "p",
                "outcome": "ok",
                "score": -1,
            }
        ),
    )
    path.write_text("\n".join(lines) + "\n")
    with Database(path) as again:
        assert again.damaged == [2, 3]
        assert [entry.program for entry in again.view().entries("t")] == ["q"]


def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(SettingError, match="a journal whose first line is its header"):
        Database(path)
    assert path.read_text() == "hello\nworld\n"
    path.write_text('{"kind": "header", "schema": 99}\n')
    with pytest.raises(SettingError, match="update this package"):
        Database(path)


def test_one_process_writes_and_others_read(tmp_path: Path) -> None:
    path = tmp_path / "db.jsonl"
    with Database(path) as writer:
        writer.add(good("a", "p", 1.5))
        writer.commit()
        with pytest.raises(SettingError, match="no other process is writing"):
            Database(path)
        with Database(path, write=False) as reader:
            assert reader.view() == writer.view()
            with pytest.raises(ValueError, match="opened for reading"):
                reader.add(good("b", "q", 2.5))
    Database(path).close()


def test_a_kill_at_any_moment_loses_no_measured_sample(tmp_path: Path) -> None:
    path = tmp_path / "db.jsonl"
    code = """
import sys
from pathlib import Path
from torch_cudal1.ingest.llm.database import Database, StoredSample
from torch_cudal1.ingest.llm.records import Measured
database = Database(Path(sys.argv[1]))
for index in range(10**9):
    database.add(StoredSample(str(index), Measured("t", f"p{index}", "ok", 1.5)))
    print(index, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    printed = [int(child.stdout.readline()) for _ in range(50)]
    child.send_signal(signal.SIGKILL)
    printed += [int(line) for line in child.stdout.read().splitlines() if line.isdecimal()]
    child.wait()
    with Database(path) as database:
        stored = {sample.name for sample in database.samples()}
        assert {
            str(index) for index in printed[:-1]
        } <= stored  # the last number may itself have been cut


def test_a_sample_from_an_uncommitted_round_is_not_lost_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "db.jsonl"
    with Database(path) as database:
        database.add(good("a", "p", 1.5))
    with Database(path) as again:
        assert again.has("a")
        assert not again.view().entries("t")
        again.commit()
        assert again.view().entries("t")


def test_settling_again_makes_no_further_generation(tmp_path: Path) -> None:
    with Database(tmp_path / "db.jsonl") as database:
        database.add(good("a", "p", 1.5))
        assert [database.settle(), database.settle()] == [1, 1]
    with Database(tmp_path / "db.jsonl") as again:
        assert again.settle() == 1
        again.add(good("b", "q", 1.5))
        assert again.settle() == 2
