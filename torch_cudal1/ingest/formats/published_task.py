"""What reading published kernels yields: a task, or what could not be read and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Damaged", "Task"]


@dataclass(frozen=True)
class Task:
    """A reference (Model, get_inputs, get_init_inputs) and a candidate (ModelNew) as texts.

    - where: file and line; name: for people; labels: how its publisher numbers it; claims: what its
      publisher says of it.
    - candidate None: withdrawn by its authors. foreign: why no Program can come of it whatever it
      says, such as its language.
    """

    where: str
    name: str
    reference: str
    candidate: str | None
    claims: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    foreign: str = ""


@dataclass(frozen=True)
class Damaged:
    """Something that is no task, where it stands, and why."""

    where: str
    reason: str
