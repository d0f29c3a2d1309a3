"""The closed set of tasks, its split, and folders of KernelBench-style files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_cudal1.training.ksl.grammar import Device
from torch_cudal1.training.ksl.ops import OPS, make_task
from torch_cudal1.training.tasks import TaskError, list_tasks, load_split, read_folder

DEVICES: tuple[Device, ...] = ("cpu", "cuda")
FILE = "class Model:\n    pass\n\ndef get_inputs():\n    return []\n\ndef get_init_inputs():\n    return []\n"


def test_there_are_enough_tasks_each_with_a_name_of_its_own() -> None:
    assert len(list_tasks("cuda")) >= 160
    assert len(list_tasks("cpu")) >= 24
    for device in DEVICES:
        assert len({task.id for task in list_tasks(device)}) == len(list_tasks(device))


@pytest.mark.parametrize("device", DEVICES)
def test_the_committed_split_holds_out_shapes_and_whole_families_of_every_kind_it_can(
    device: Device,
) -> None:
    split = load_split(device)
    train, unseen = (
        {task.family for task in split.train},
        {task.family for task in split.held_out_families},
    )
    assert not train & unseen
    assert {task.family for task in split.held_out_shapes} == train, (
        "every family that is trained on has shapes that are not"
    )
    assert len(split.train) + len(split.held_out) == len(list_tasks(device))
    kinds = {OPS[name].kind for name in train}
    assert {OPS[name].kind for name in unseen} <= kinds, "an unseen family has relatives"
    if device == "cuda":
        assert {OPS[name].kind for name in unseen} == kinds
        assert len(split.held_out) >= 64


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda split: split["train"].pop(), "every task of cpu once"),
        (lambda split: split["train"].append("softmax/1x1/f32"), "softmax/1x1/f32"),
        (
            lambda split: split["held_out_shapes"].append(split["train"][0]),
            "every task of cpu once",
        ),
        (
            lambda split: split["held_out_families"].append(split["train"].pop()),
            "both held out and not",
        ),
        (lambda split: split.pop("train"), "is no split"),
    ],
)
def test_a_split_that_is_no_partition_is_refused(tmp_path: Path, change, word: str) -> None:
    parts = {
        name: [task.id for task in getattr(load_split("cpu"), name)]
        for name in ("train", "held_out_shapes", "held_out_families")
    }
    change(parts)
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"cpu": parts}))
    with pytest.raises(TaskError, match=word):
        load_split("cpu", path)


def test_a_task_of_no_operation_or_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="no operation"):
        make_task("attention", (4, 4))
    with pytest.raises(ValueError, match="expected sizes"):
        make_task("softmax", (4,))
    with pytest.raises(ValueError, match="float64"):
        make_task("softmax", (4, 4), "float64")
    with pytest.raises(TaskError, match="tpu"):
        list_tasks("tpu")  # type: ignore[arg-type]


def test_a_folder_yields_its_tasks_and_says_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_one.py").write_text(FILE)
    (tmp_path / "level1" / "2_two.py").write_text("raise SystemExit('it was run')\n" + FILE)
    (tmp_path / "broken.py").write_text("class Model(:")
    (tmp_path / "binary.py").write_bytes(b"\x80\x81")
    (tmp_path / "helper.py").write_text("def get_inputs(): ...")
    (tmp_path / "notes.txt").write_text("nothing")
    folder_tasks = read_folder(tmp_path)
    assert [task.id for task in folder_tasks.tasks] == ["level1/1_one", "level1/2_two"]
    assert folder_tasks.tasks[0].reference == FILE
    assert set(folder_tasks.unusable) == {"broken", "binary", "helper"}
    assert "SyntaxError" in folder_tasks.unusable["broken"]
    assert "no Model, no get_init_inputs" in folder_tasks.unusable["helper"]
    with pytest.raises(TaskError, match="no folder"):
        read_folder(tmp_path / "nowhere")
