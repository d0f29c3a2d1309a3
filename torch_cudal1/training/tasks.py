"""The closed set of tasks of the kernel-schedule language, its split, and any folder of
KernelBench-style files as tasks.

Tasks are (operation, shape) pairs; their references are made from `ksl.ops`. The split into
training and held-out tasks is a committed file that was written before the first training run. A
file of a folder is read and never executed here: only the judge finds out what it computes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.kernelbench_format import NAMES
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.ksl.grammar import Device
from torch_cudal1.training.ksl.ops import OPS, make_task

__all__ = ["Split", "TaskError", "TaskFolder", "list_tasks", "load_split", "read_folder"]

Shape = tuple[int, ...]
# Two even shapes of each operation and a ragged one: where no size is a multiple of a block, a
# program without its mask is wrong. Small, as every program of every task is measured on a CPU.
_CPU_SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "residual_scale": ((64, 1024), (128, 512), (70, 900)),
    "scale_gelu_add": ((64, 512), (128, 256), (70, 300)),
    "silu_mul": ((64, 512), (128, 256), (70, 300)),
    "rms_norm": ((64, 512), (128, 256), (70, 500)),
    "linear_relu": ((64, 64, 256), (128, 96, 192), (70, 80, 100)),
    "diag_left": ((64, 256), (128, 128), (70, 200)),
    "diag_right": ((64, 256), (128, 128), (70, 200)),
    "reverse_cumsum": ((64, 512), (128, 256), (70, 300)),
    "avg_pool1d": ((4, 16, 512), (8, 32, 256), (5, 14, 300)),
}
# Tensors of about 32 MiB: a launch from Python takes 45 us of the host at best, and smaller kernels
# end before the next one arrives. Larger ones do not leave room for ten lanes on one GPU. Each kind
# has shapes that are no multiples of a block.
_CUDA_SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "chain": ((4096, 2048), (8192, 1024), (1024, 8192), (2000, 4100), (8192, 1023), (511, 16384)),
    "row": ((8192, 1024), (2048, 4096), (16384, 512), (1024, 8192), (8000, 1000), (4099, 2047)),
    "mm": (
        (4096, 4096, 1024),
        (2048, 4096, 2048),
        (2048, 8192, 1024),
        (8192, 1024, 2048),
        (4000, 4000, 1000),
        (2500, 4100, 1500),
    ),
    "diag": ((2048, 2048), (3072, 2048), (2048, 3072), (2000, 2000), (3000, 2077)),
    "scan": ((8192, 1024), (4096, 2048), (1024, 8192), (32768, 256), (8000, 1000), (1666, 5000)),
    "pool": ((64, 128, 1024), (16, 128, 4096), (64, 170, 777), (32, 128, 2048), (33, 50, 5001)),
}
# On the GPU. Products in float32 would ask for arithmetic that eager does not use.
_DTYPE_OF = {"mm": "float16"}


class TaskError(Cudal1Error, ValueError):
    """A task, a split or a folder of tasks that cannot be used, and why."""


@cache
def list_tasks(device: Device) -> tuple[TrainingTask, ...]:
    """The closed set of a device, in a fixed order."""
    if device == "cpu":
        return tuple(
            make_task(name, shape) for name, shapes in _CPU_SHAPES.items() for shape in shapes
        )
    if device == "cuda":
        return tuple(
            make_task(op.name, shape, _DTYPE_OF.get(op.kind, "float32"))
            for op in OPS.values()
            for shape in _CUDA_SHAPES[op.kind]
        )
    raise TaskError(f"expected a device of ('cpu', 'cuda'), got {device!r}")


@dataclass(frozen=True)
class Split:
    """Which tasks are trained on, and which are held out: by shape, or with their whole family."""

    train: tuple[TrainingTask, ...]
    held_out_shapes: tuple[TrainingTask, ...]
    held_out_families: tuple[TrainingTask, ...]

    @property
    def held_out(self) -> tuple[TrainingTask, ...]:
        """Tasks of both held-out kinds."""
        return self.held_out_shapes + self.held_out_families


def load_split(device: Device, path: Path | None = None) -> Split:
    """Load the split of a device's tasks, from the committed file or another one of that form.
    Raises TaskError where it is not a partition.
    """
    # The split is a file of the package that was committed before the first training run, so that
    # held-out tasks cannot be chosen by their results.
    split_path = (
        resources.files("torch_cudal1.training") / "data" / "split.json" if path is None else path
    )
    try:
        content = json.loads(split_path.read_text())[device]
        named = [
            tuple(map(str, content[part]))
            for part in ("train", "held_out_shapes", "held_out_families")
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(
            f"{split_path} is no split of tasks: {type(error).__name__}: {error}"
        ) from error
    tasks = {task.id: task for task in list_tasks(device)}
    listed = [name for part in named for name in part]
    # A task that is listed twice would be trained on and tested; one that is missing would silently
    # shrink the experiment.
    if sorted(listed) != sorted(tasks):
        wrong = sorted(set(listed) ^ set(tasks)) or sorted(
            {name for name in listed if listed.count(name) > 1}
        )
        raise TaskError(f"{split_path}: every task of {device} once; wrong: {', '.join(wrong[:5])}")
    split = Split(*(tuple(tasks[name] for name in part) for part in named))
    # A held-out family with a shape among the training tasks would measure shapes, not families.
    leaked = {task.family for task in split.held_out_families} & {
        task.family for task in split.train + split.held_out_shapes
    }
    if leaked:
        raise TaskError(
            f"{split_path}: families both held out and not: {', '.join(sorted(leaked))}"
        )
    return split


@dataclass(frozen=True)
class TaskFolder:
    """The files of a folder as tasks for codecs that read source, and the files that cannot be
    tasks, with the reason.
    """

    tasks: tuple[TrainingTask, ...]
    unusable: Mapping[str, str]


def read_folder(folder: Path) -> TaskFolder:
    """Read every .py file below a folder, in the order of paths. A task's id is the path without
    suffix. Raises TaskError where there is no folder.
    """
    if not folder.is_dir():
        raise TaskError(f"{folder} is no folder; expected one with KernelBench-style files")
    tasks: list[TrainingTask] = []
    unusable: dict[str, str] = {}
    # Sorted: the order of a directory differs between file systems, and the order of tasks decides
    # which of them a step trains on.
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        text, refusal = _read_source(path)
        if refusal:
            unusable[name] = refusal
        else:
            tasks.append(TrainingTask(name, text, family=name))
    return TaskFolder(tuple(tasks), unusable)


def _read_source(path: Path) -> tuple[str, str]:
    """Return the text of a file, and why it cannot be a task ("" if it can)."""
    try:
        text = path.read_text()
        # Parsed and never imported: a file of a foreign folder runs only in the judge's sandbox.
        tree = ast.parse(text)
    # All that `ast.parse` raises for hostile or broken text: null bytes, deep nesting, encodings
    # that are no UTF-8.
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return "", f"{type(error).__name__}: {error}"
    # At the top level only: the evaluator looks the names up in the module.
    bound = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    missing = [name for name in NAMES if name not in bound]
    return text, f"it defines no {', no '.join(missing)}" if missing else ""
