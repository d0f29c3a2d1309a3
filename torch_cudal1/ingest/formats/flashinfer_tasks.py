"""A FlashInfer-Trace folder as tasks: each solution on each workload of its definition, as
KernelBench-style sources.

    <folder>/definitions/**.json   solutions/**.json   workloads/**.jsonl   traces/**.jsonl

A definition's `run` becomes the forward of a `Model` without parameters, a solution's function that
of a `ModelNew`. Sources stay as they are; only what calls them is added. Evaluations are kept as
claims. Nothing is run here, and no tensor file is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.formats.flashinfer import (
    Definition,
    FlashInferTrace,
    Shape,
    Solution,
    Workload,
)
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

__all__ = ["FlashInferFolder", "write_candidate", "write_reference"]

_HEAD = """

import torch as _torch


def _outputs(found, names={names!r}):
    if isinstance(found, dict):
        found = [found[name] for name in names]
    if isinstance(found, (list, tuple)):
        return found[0] if len(found) == 1 else tuple(found)
    return found
"""
_REFERENCE = """

class Model(_torch.nn.Module):
    def forward(self, *given):
        return _outputs(run(*given))


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
_RETURNS = """

class ModelNew(_torch.nn.Module):
    def forward(self, *given):
        return _outputs({function}(*given))
"""
_FILLS = """

class ModelNew(_torch.nn.Module):
    def forward(self, *given):
        device = next((one.device for one in given if isinstance(one, _torch.Tensor)), None)
        made = [_torch.empty(shape, dtype=dtype, device=device) for shape, dtype in ({outputs},)]
        {function}(*given, *made)
        return _outputs(made)
"""
_FLOATING = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class FlashInferFolder:
    """A FlashInfer-Trace folder."""

    name: str = "FlashInfer-Trace"
    layout: str = "a folder with `definitions/`, `solutions/` and `workloads/`"

    def recognises(self, path: Path) -> bool:
        """A folder with `definitions`."""
        return (path / "definitions").is_dir()

    def read_tasks(
        self, path: Path, references: Path | None
    ) -> Iterator[PublishedTask | UnreadableTask]:
        """Every solution on every workload of its definition, in the order of their files."""
        folder = _Folder.read(path)
        yield from folder.damaged
        for where, solution in folder.solutions:
            definition = folder.definitions.get(solution.definition)
            if definition is None:
                yield UnreadableTask(
                    f"solution {solution.name!r} is for {solution.definition!r}, which no file "
                    f"of {path} defines",
                    where,
                )
                continue
            workloads = {
                # A trace repeats its workload, so the same one comes once from `workloads` and
                # again from `traces`.
                trace.workload.uuid: trace.workload
                for trace in folder.traces
                if trace.definition == definition.name
            }
            if not workloads and any(axis.value is None for axis in definition.axes.values()):
                yield UnreadableTask(
                    f"definition {definition.name!r} has variable axes, and no workload says how "
                    f"long they are",
                    where,
                )
                continue
            # Without variable axes a definition is one call, and needs no workload.
            for workload in workloads.values() or [
                Workload({}, {name: {"type": "random"} for name in definition.inputs}, "constant")
            ]:
                yield _make_task(where, definition, solution, workload, folder.traces)


def write_reference(definition: Definition, workload: Workload) -> str:
    """A KernelBench-style reference. Raises ValueError for a workload whose inputs cannot be made
    from the text alone.
    """
    inputs = ", ".join(
        _format_input(name, shape, definition, workload)
        for name, shape in definition.inputs.items()
    )
    head = _HEAD.format(names=tuple(definition.outputs))
    return definition.reference + head + _REFERENCE.format(inputs=inputs)


def write_candidate(definition: Definition, solution: Solution, workload: Workload) -> str:
    """A `ModelNew` around a solution of one Python file. Raises ValueError for an axis without a
    size.
    """
    head = _HEAD.format(names=tuple(definition.outputs))
    content = solution.sources[solution.entry_file]
    if not solution.into_outputs:
        return content + head + _RETURNS.format(function=solution.entry_name)
    outputs = [
        f"({_read_sizes(shape, definition, workload)!r}, _torch.{shape.dtype})"
        for shape in definition.outputs.values()
    ]
    return content + head + _FILLS.format(function=solution.entry_name, outputs=", ".join(outputs))


@dataclass
class _Folder:
    """The records of a folder as far as they could be read."""

    definitions: dict[str, Definition] = field(default_factory=dict)
    solutions: list[tuple[str, Solution]] = field(default_factory=list)
    traces: list[FlashInferTrace] = field(default_factory=list)
    damaged: list[UnreadableTask] = field(default_factory=list)

    @classmethod
    def read(cls, root: Path) -> _Folder:
        records = cls()
        for where, data in records._objects(root, "definitions", ".json"):
            if definition := records._parse_or_note(where, Definition.from_json, data):
                records.definitions[definition.name] = definition
        for where, data in records._objects(root, "solutions", ".json"):
            if solution := records._parse_or_note(where, Solution.from_json, data):
                records.solutions.append((where, solution))
        # A line of either holds a workload; only a trace also has a solution and its evaluation.
        for folder in ("workloads", "traces"):
            for where, data in records._objects(root, folder, ".jsonl"):
                if trace := records._parse_or_note(where, FlashInferTrace.from_json, data):
                    records.traces.append(trace)
        return records

    def _objects(self, root: Path, folder: str, ending: str) -> Iterator[tuple[str, Any]]:
        # Sorted: `Format.read_tasks` promises a stable order.
        for path in sorted((root / folder).rglob(f"*{ending}")):
            try:
                content = path.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                self.damaged.append(UnreadableTask(f"{type(error).__name__}: {error}", str(path)))
                continue
            lines = (
                enumerate(content.splitlines(), start=1) if ending == ".jsonl" else [(1, content)]
            )
            for number, line in lines:
                where = f"{path}:{number}" if ending == ".jsonl" else str(path)
                if (
                    line.strip()
                    and (data := self._parse_or_note(where, json.loads, line)) is not None
                ):
                    yield where, data

    def _parse_or_note(self, where: str, read: Any, data: Any) -> Any:
        try:
            return read(data)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            # A damaged record is a task that could not be read; the rest of the folder goes on.
            self.damaged.append(UnreadableTask(str(error)[:400], where))
            return None


def _make_task(
    where: str,
    definition: Definition,
    solution: Solution,
    workload: Workload,
    traces: list[FlashInferTrace],
) -> PublishedTask | UnreadableTask:
    name = f"{solution.name} on {workload.uuid}"
    try:
        reference = write_reference(definition, workload)
        foreign = _check_language(solution)
        # An empty text and not None, which would say that its authors withdrew it.
        candidate = "" if foreign else write_candidate(definition, solution, workload)
    except ValueError as error:
        return UnreadableTask(f"{name}: {error}", where)
    evaluations = [
        t.evaluation.to_json()
        for t in traces
        if t.solution == solution.name and t.workload.uuid == workload.uuid and t.evaluation
    ]
    labels = {"definition": definition.name, "solution": solution.name, "workload": workload.uuid}
    return PublishedTask(
        where,
        name,
        reference,
        candidate,
        {"evaluations": evaluations} if evaluations else {},
        labels,
        str(foreign or ""),
    )


def _check_language(solution: Solution) -> Refusal | None:
    if solution.language not in ("python", "triton"):
        return Refusal(
            f"it is written in {solution.language}; only Python and Triton sources can be traced"
        )
    # A source is judged as one text: files that import each other have no folder there.
    if len(solution.sources) > 1:
        return Refusal(f"it spans {len(solution.sources)} files; one Python file can be traced")
    return None


def _read_sizes(shape: Shape, definition: Definition, workload: Workload) -> tuple[int, ...]:
    return tuple(_size(axis, definition, workload) for axis in shape.axes or ())


def _size(axis: str, definition: Definition, workload: Workload) -> int:
    fixed = definition.axes[axis].value
    if fixed is None and axis not in workload.axes:
        raise ValueError(f"axis {axis!r} has no size in workload {workload.uuid!r}")
    return workload.axes[axis] if fixed is None else fixed


def _format_input(name: str, shape: Shape, definition: Definition, workload: Workload) -> str:
    """An expression that makes an input."""
    spec: Mapping[str, Any] = workload.inputs.get(name) or {"type": "random"}
    if spec["type"] == "scalar":
        # The value becomes Python text below, so only plain numbers pass.
        if type(spec["value"]) not in (int, float, bool):
            raise ValueError(f"input {name!r}: value {spec['value']!r}; expected a number")
        return (
            # `repr` of an infinite or NaN float is a bare name, which is no Python expression.
            f"float({str(spec['value'])!r})"
            if isinstance(spec["value"], float)
            else repr(spec["value"])
        )
    # A path from a file by others is not opened.
    if spec["type"] == "safetensors":
        raise ValueError(
            f"input {name!r} lies in a tensor file, which is not read; only random and scalar "
            f"inputs are made"
        )
    if shape.axes is None:
        raise ValueError(f"input {name!r} is a number, and the workload gives none")
    sizes = _read_sizes(shape, definition, workload)
    # Made in float32 and cast: `randn` does not make 8-bit types.
    if shape.dtype in _FLOATING:
        return f"_torch.randn({sizes!r}).to(_torch.{shape.dtype})"
    if shape.dtype == "float4_e2m1":
        raise ValueError(f"input {name!r} is {shape.dtype}, which torch cannot make")
    # 0 and 1 are values of every integer dtype and of bool.
    return f"_torch.randint(0, 2, {sizes!r}).to(_torch.{shape.dtype})"
