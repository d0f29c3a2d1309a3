"""What reading published kernels yields: a task, or what could not be read and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_cudal1.core.refusal import Refusal

__all__ = ["PublishedTask", "UnreadableTask"]


@dataclass(frozen=True)
class PublishedTask:
    """A reference (Model, get_inputs, get_init_inputs) and a candidate (ModelNew) as texts.

    - where: file and line; name: for people; labels: how its publisher numbers it; claims: what its
      publisher says of it.
    - candidate None: withdrawn by its authors. foreign: why it cannot become a Program, such as its
      language; "" where it may.
    """

    where: str
    name: str
    reference: str
    candidate: str | None
    claims: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    foreign: str = ""


@dataclass(frozen=True)
class UnreadableTask(Refusal):
    """Something that is no task: why, and where it stands."""

    where: str
