"""Every format of published kernels asks for names only, reads files in a stable order, and runs
nothing.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from tests.ingest.flashinfer_records import write_folder
from torch_cudal1.ingest.formats.format import Format
from torch_cudal1.ingest.formats.registry import FORMATS
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

REFERENCE = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"
# Importing it would leave a file beside it.
CANDIDATE = "open(__file__ + '.ran', 'w')\nclass ModelNew: pass\n"


@pytest.fixture(params=FORMATS, ids=lambda each: each.name)
def published_format(request: pytest.FixtureRequest) -> Format:
    each: Format = request.param
    return each


def write_example(published_format: Format, folder: Path) -> Path:
    """A path of the format with two tasks, and something that is none."""
    if published_format.name == "FlashInfer-Trace":
        return write_folder(folder / "trace", solutions=("{",))
    if published_format.name == "KernelBench":
        (folder / "kernels").mkdir()
        for name in ("b", "a"):
            (folder / "kernels" / f"{name}.py").write_text(REFERENCE + CANDIDATE)
        return folder / "kernels"
    row = {"level_id": 1, "task_id": 2, "ref_code": REFERENCE, "custom_code": CANDIDATE}
    path = folder / "release.json"
    path.write_text("\n".join([json.dumps(row), "[1", json.dumps({**row, "task_id": 3})]))
    return path


def test_a_format_has_the_members_of_the_protocol(published_format: Format) -> None:
    assert published_format.name
    assert published_format.layout
    for member in ("recognises", "read_tasks"):
        implemented = inspect.signature(getattr(published_format, member))
        protocol = inspect.signature(getattr(Format, member))
        assert list(implemented.parameters) == list(protocol.parameters)[1:]


def test_a_format_recognises_its_own_example_and_a_path_that_is_not_there_never_raises(
    published_format: Format, tmp_path: Path
) -> None:
    path = write_example(published_format, tmp_path)
    assert published_format.recognises(path)
    assert published_format.recognises(tmp_path / "absent.txt") in (False, True)


def test_recognition_reads_no_content(
    published_format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_example(published_format, tmp_path)
    for name in ("read_text", "read_bytes", "open"):
        monkeypatch.setattr(Path, name, lambda *_, **__: pytest.fail("it read a file"))
    assert published_format.recognises(path)


def test_tasks_come_in_the_same_order_each_time_and_nothing_is_run(
    published_format: Format, tmp_path: Path
) -> None:
    path = write_example(published_format, tmp_path)
    tasks = list(published_format.read_tasks(path, None))
    assert tasks
    assert tasks == list(published_format.read_tasks(path, None))
    assert all(isinstance(task, (PublishedTask, UnreadableTask)) for task in tasks)
    assert not list(tmp_path.rglob("*.ran"))


def test_what_cannot_be_read_is_a_reason_with_its_place(
    published_format: Format, tmp_path: Path
) -> None:
    path = write_example(published_format, tmp_path)
    if published_format.name == "KernelBench":
        (path / "c.py").write_text("def (:")
    unreadable = [
        task for task in published_format.read_tasks(path, None) if isinstance(task, UnreadableTask)
    ]
    assert unreadable
    for task in unreadable:
        assert task.reason
        assert str(tmp_path) in task.where
