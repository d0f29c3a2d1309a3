"""FlashInfer-Trace records, read from JSON and written: Definition, Solution, Workload, Trace with
its Evaluation.

The fields are those of flashinfer-bench 0.1; what it requires is required, what it refuses is
refused, and unknown fields are passed over, as it does. A record that is not as it should be is a
ValueError naming the field. Nothing in one is run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

__all__ = [
    "DTYPES",
    "Definition",
    "FlashInferAxis",
    "FlashInferTrace",
    "Shape",
    "Solution",
    "TraceEvaluation",
    "Workload",
]

_T = TypeVar("_T")
# The names of flashinfer-bench 0.1: a record with another dtype would be refused there.
DTYPES = (
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"),
    *("int64", "int32", "int16", "int8", "bool"),
)
_LANGUAGES = ("python", "triton", "cpp", "cuda", "tilelang")
_STATUSES = (
    *(
        "PASSED",
        "INCORRECT_SHAPE",
        "INCORRECT_NUMERICAL",
        "INCORRECT_DTYPE",
        "RUNTIME_ERROR",
        "COMPILE_ERROR",
        "TIMEOUT",
    ),
)
_INPUTS: Mapping[str, tuple[str, ...]] = {
    "random": (),
    "scalar": ("value",),
    "safetensors": ("path", "tensor_key"),
}


@dataclass(frozen=True)
class FlashInferAxis:
    """A dimension: of a fixed `value`, or (None) one that each workload sets."""

    value: int | None = None
    description: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        kind = {"type": "var"} if self.value is None else {"type": "const", "value": self.value}
        return {**kind, **_drop_none(description=self.description)}

    @classmethod
    def from_json(cls, data: Any) -> FlashInferAxis:
        """The inverse. Raises ValueError."""
        kind = _read_text(data, "type", "const" if "value" in _require_object(data) else "var")
        if kind not in ("const", "var"):
            raise ValueError(f"type {kind!r}; expected 'const' or 'var'")
        return cls(_read_size(data, "value") if kind == "const" else None, _read_description(data))


@dataclass(frozen=True)
class Shape:
    """A tensor by the names of its axes, or (axes None) a plain number, and its dtype."""

    axes: tuple[str, ...] | None
    dtype: str
    description: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        axes = None if self.axes is None else list(self.axes)
        return {"shape": axes, "dtype": self.dtype, **_drop_none(description=self.description)}

    @classmethod
    def from_json(cls, data: Any) -> Shape:
        """The inverse. Raises ValueError."""
        axes = _read_field(data, "shape")
        if _read_text(data, "dtype") not in DTYPES:
            raise ValueError(f"dtype {data['dtype']!r}; expected one of {', '.join(DTYPES)}")
        return cls(
            None if axes is None else _read_texts(data, "shape"),
            str(data["dtype"]),
            _read_description(data),
        )


@dataclass(frozen=True)
class Definition:
    """What is to be computed: `reference` is Python with a function `run` from the inputs to the
    outputs, both in order.
    """

    name: str
    op_type: str
    axes: Mapping[str, FlashInferAxis]
    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    reference: str
    tags: tuple[str, ...] = ()
    description: str | None = None
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Inputs and outputs are parameters of one function where outputs are passed in.
        both = set(self.inputs) & set(self.outputs)
        if both:
            raise ValueError(f"{sorted(both)} are inputs and outputs")
        used = {
            axis
            for shape in (*self.inputs.values(), *self.outputs.values())
            for axis in shape.axes or ()
        }
        if used - set(self.axes):
            raise ValueError(f"axes {sorted(used - set(self.axes))} are not defined")
        # Read as syntax: nothing in a record is run here.
        body = _parse_python(self.reference, "reference").body
        if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body):
            raise ValueError("reference: it defines no function 'run' at its top level")

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        data: dict[str, Any] = {
            "name": self.name,
            "op_type": self.op_type,
            **_drop_none(description=self.description),
        }
        data |= {
            "tags": list(self.tags),
            "axes": {name: axis.to_json() for name, axis in self.axes.items()},
        }
        data |= {"constraints": list(self.constraints)}
        data |= {"inputs": {name: shape.to_json() for name, shape in self.inputs.items()}}
        data |= {"outputs": {name: shape.to_json() for name, shape in self.outputs.items()}}
        return {**data, "reference": self.reference}

    @classmethod
    def from_json(cls, data: Any) -> Definition:
        """The inverse. Raises ValueError."""
        return cls(
            _read_text(data, "name"),
            _read_text(data, "op_type"),
            _read_each(data, "axes", FlashInferAxis.from_json),
            _read_each(data, "inputs", Shape.from_json),
            _read_each(data, "outputs", Shape.from_json),
            _read_text(data, "reference"),
            _read_texts(data, "tags", ()),
            _read_description(data),
            _read_texts(data, "constraints", ()),
        )


@dataclass(frozen=True)
class Solution:
    """One way to compute a definition: `sources` are texts by their relative paths,
    `entry_point` is "path::function".

    `into_outputs`: the function is handed the outputs after the inputs, and fills them; else it
    returns them.
    """

    name: str
    definition: str
    author: str
    language: str
    target_hardware: tuple[str, ...]
    entry_point: str
    sources: Mapping[str, str]
    into_outputs: bool = True
    dependencies: tuple[str, ...] = ()
    binding: str | None = None
    description: str | None = None

    def __post_init__(self) -> None:
        if self.language not in _LANGUAGES:
            raise ValueError(f"language {self.language!r}; expected one of {', '.join(_LANGUAGES)}")
        # The paths come from a file by others, and become files where a solution is unpacked.
        for path in self.sources:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise ValueError(f"source path {path!r}; expected one below the solution")
        if self.entry_point.count("::") != 1 or self.entry_file not in self.sources:
            raise ValueError(
                f"entry_point {self.entry_point!r}; expected 'path::function' with a path of "
                f"{sorted(self.sources)}"
            )
        if not self.target_hardware:
            raise ValueError("target_hardware names nothing")

    @property
    def entry_file(self) -> str:
        """The path of the file that holds the function."""
        return self.entry_point.split("::")[0]

    @property
    def entry_name(self) -> str:
        """The function's name."""
        return self.entry_point.split("::")[-1]

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        spec = {
            "language": self.language,
            "target_hardware": list(self.target_hardware),
            "entry_point": self.entry_point,
            "dependencies": list(self.dependencies),
            "destination_passing_style": self.into_outputs,
            **_drop_none(binding=self.binding),
        }
        sources = [{"path": path, "content": content} for path, content in self.sources.items()]
        head = {"name": self.name, "definition": self.definition, "author": self.author}
        return {
            **head,
            "spec": spec,
            "sources": sources,
            **_drop_none(description=self.description),
        }

    @classmethod
    def from_json(cls, data: Any) -> Solution:
        """The inverse. Raises ValueError."""
        spec, sources = _require_object(_read_field(data, "spec")), _read_field(data, "sources")
        if not isinstance(sources, list) or not sources:
            raise ValueError("sources: expected a list of at least one file")
        texts = {_read_text(source, "path"): _read_text(source, "content") for source in sources}
        # In a mapping the second file would silently replace the first.
        if len(texts) != len(sources):
            raise ValueError("sources: two have the same path")
        into = spec.get("destination_passing_style", True)
        # The default is true, so a wrong value must not pass as "unset": the function would be
        # called with other arguments.
        if not isinstance(into, bool):
            raise ValueError(f"destination_passing_style {into!r}; expected true or false")
        return cls(
            _read_text(data, "name"),
            _read_text(data, "definition"),
            _read_text(data, "author"),
            _read_text(spec, "language"),
            _read_texts(spec, "target_hardware"),
            _read_text(spec, "entry_point"),
            texts,
            into,
            _read_texts(spec, "dependencies", ()),
            _read_text(spec, "binding") if spec.get("binding") is not None else None,
            _read_description(data),
        )


@dataclass(frozen=True)
class Workload:
    """One call of a definition: the sizes of its variable axes, and where each input comes from
    (JSON, see `_INPUTS`).
    """

    axes: Mapping[str, int]
    inputs: Mapping[str, Mapping[str, Any]]
    uuid: str

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        return {
            "axes": dict(self.axes),
            "inputs": {name: dict(spec) for name, spec in self.inputs.items()},
            "uuid": self.uuid,
        }

    @classmethod
    def from_json(cls, data: Any) -> Workload:
        """The inverse. Raises ValueError."""
        axes = {
            name: _read_size(_read_field(data, "axes"), name)
            for name in _require_object(_read_field(data, "axes"))
        }
        return cls(axes, _read_each(data, "inputs", _read_input), _read_text(data, "uuid"))


@dataclass(frozen=True)
class TraceEvaluation:
    """How a solution fared. `correctness` and `performance` are their records' JSON, where the
    status has them.
    """

    status: str
    hardware: str
    timestamp: str
    libs: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    correctness: Mapping[str, Any] | None = None
    performance: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in _STATUSES:
            raise ValueError(f"status {self.status!r}; expected one of {', '.join(_STATUSES)}")
        # As flashinfer-bench requires: numbers exist only where the run came far enough to have
        # them.
        expected = (self.status in ("PASSED", "INCORRECT_NUMERICAL"), self.status == "PASSED")
        if (self.correctness is not None, self.performance is not None) != expected:
            raise ValueError(
                f"status {self.status}: correctness and performance must be there {expected}"
            )

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        environment = {"hardware": self.hardware, "libs": dict(self.libs)}
        data = {
            "status": self.status,
            "environment": environment,
            "timestamp": self.timestamp,
            "log": self.log,
        }
        return {**data, "correctness": self.correctness, "performance": self.performance}

    @classmethod
    def from_json(cls, data: Any) -> TraceEvaluation:
        """The inverse. Raises ValueError."""
        environment = _read_field(data, "environment")
        libs = {
            str(name): str(version)
            for name, version in _require_object(environment.get("libs") or {}).items()
        }
        parts = [
            None if data.get(name) is None else dict(_require_object(data[name]))
            for name in ("correctness", "performance")
        ]
        return cls(
            *(
                _read_text(data, "status"),
                _read_text(environment, "hardware"),
                _read_text(data, "timestamp"),
            ),
            libs,
            str(data.get("log", "")),
            *parts,
        )


@dataclass(frozen=True)
class FlashInferTrace:
    """A workload of a definition, with how a solution fared on it if one was run."""

    definition: str
    workload: Workload
    solution: str | None = None
    evaluation: TraceEvaluation | None = None

    def to_json(self) -> dict[str, Any]:
        """The record's JSON."""
        evaluation = None if self.evaluation is None else self.evaluation.to_json()
        head = {"definition": self.definition, "workload": self.workload.to_json()}
        return {**head, "solution": self.solution, "evaluation": evaluation}

    @classmethod
    def from_json(cls, data: Any) -> FlashInferTrace:
        """The inverse. Raises ValueError."""
        evaluation, workload = (
            _read_field(data, "evaluation", None),
            Workload.from_json(_read_field(data, "workload")),
        )
        solution = None if data.get("solution") is None else _read_text(data, "solution")
        return cls(
            _read_text(data, "definition"),
            workload,
            solution,
            None if evaluation is None else TraceEvaluation.from_json(evaluation),
        )


def _require_object(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__}; expected a JSON object")
    return data


def _read_field(data: Any, name: str, default: Any = ...) -> Any:
    # `...` marks a required field, because None is a value that JSON can hold.
    value = _require_object(data).get(name, default)
    if value is ...:
        raise ValueError(f"no field {name!r}")
    return value


def _read_text(data: Any, name: str, default: Any = ...) -> str:
    value = _read_field(data, name, default)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: {str(value)[:80]!r}; expected a text")
    return value


def _read_texts(data: Any, name: str, default: Any = ...) -> tuple[str, ...]:
    value = _read_field(data, name, default)
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(item, str) and item for item in value
    ):
        raise ValueError(f"{name}: {str(value)[:80]!r}; expected a list of texts")
    return tuple(value)


def _read_size(data: Any, name: str) -> int:
    value = _read_field(data, name)
    # Not `isinstance`: `true` is an int in Python.
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: {value!r}; expected a whole number from 0 up")
    return value


def _read_description(data: Any) -> str | None:
    value = _require_object(data).get("description")
    return None if value is None else str(value)


def _read_each(data: Any, name: str, read: Callable[[Any], _T]) -> dict[str, _T]:
    values = {}
    for key, value in _require_object(_read_field(data, name)).items():
        try:
            values[key] = read(value)
        except ValueError as error:
            # The name of the field in front, so that the message of a nested record says where it
            # is.
            raise ValueError(f"{name}.{key}: {error}") from error
    return values


def _read_input(data: Any) -> Mapping[str, Any]:
    kind = _read_text(data, "type")
    if kind not in _INPUTS:
        raise ValueError(f"type {kind!r}; expected one of {', '.join(_INPUTS)}")
    # Only the known fields: unknown ones are passed over, as flashinfer-bench does.
    return {"type": kind, **{name: _read_field(data, name) for name in _INPUTS[kind]}}


def _drop_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _parse_python(text: str, name: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{name}: not valid Python: {error}") from error
