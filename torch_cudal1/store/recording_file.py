"""The file of a recording: JSON lines, one for what was seen of one form of call since the line
before; sums are made at reading.

    {"body": {"kind": "module", "name": "Net", "identity": "3f...", "form": {...}, "mode": {...}, "calls": 128}, "check": "9c..."}

Any number of processes append to one file: each append is one write at the end, under the file's
lock where the file system has one. The file stays below a limit. What is not whole, or not ours, is
named when the file is read, and the rest is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.cache.files import NotStored, Stored

__all__ = ["LIMIT_BYTES", "LINE_LIMIT_BYTES", "Mode", "ReadBack", "Seen", "append", "read"]

LIMIT_BYTES = 16 << 20
LINE_LIMIT_BYTES = 64 << 10
_READ_LIMIT_BYTES = 4 * LIMIT_BYTES  # several recordings put together by hand are still read


@dataclass(frozen=True)
class Mode:
    """The modes that change what a call computes: grad, train or eval, and each device type's
    autocast type.
    """

    grad: bool
    training: bool
    autocast: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Seen:
    """One form of call and how often it came.

    `kind`: "module" (a call of an accelerated module) or "graph" (of a graph of the backend).
    `name`, `identity`: of the module, by its class and the shapes of its weights, or of the graph.
    `form`: the arguments with every tensor described, as canonical JSON.
    """

    kind: Literal["module", "graph"]
    name: str
    identity: str
    form: str
    mode: Mode
    calls: int = 0


@dataclass(frozen=True)
class ReadBack:
    """What a file holds, most frequent first, and what is wrong with it: one sentence a line that
    was not used.
    """

    seen: tuple[Seen, ...]
    problems: tuple[str, ...]


def append(
    path: Path, seen: Sequence[Seen], *, limit_bytes: int = LIMIT_BYTES
) -> Stored | NotStored:
    """Add a line for each at the end of `path`. NotStored where the file would pass the limit, or
    the file system refuses.
    """
    data = b"".join(
        b"\n" + _line(one) + b"\n" for one in seen
    )  # begun anew, should a killed writer have left half a line
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(
                OSError
            ):  # no locks here: appends of one write are whole on a local disk without
                fcntl.flock(file, fcntl.LOCK_EX)
            if (size := os.fstat(file).st_size) + len(data) > limit_bytes:
                return NotStored(f"{path} has {size} bytes, and is kept below {limit_bytes}")
            if (written := os.write(file, data)) != len(data):
                return NotStored(f"{path} took {written} of {len(data)} bytes")
        finally:
            os.close(file)
    except OSError as error:
        return NotStored(f"{path}: {type(error).__name__}: {error}")
    return Stored(path)


def read(path: Path) -> ReadBack:
    """Every whole line of `path`, equal ones added up. Raises OSError for a file that cannot be
    read.
    """
    sums: dict[Seen, int] = {}
    problems = []
    with open(path, "rb") as file:
        data = file.read(_READ_LIMIT_BYTES + 1)
    if len(data) > _READ_LIMIT_BYTES:
        problems.append(f"{path} is larger than {_READ_LIMIT_BYTES} bytes; the rest is not read")
    for number, line in enumerate(data[:_READ_LIMIT_BYTES].split(b"\n"), 1):
        if not line.strip():
            continue
        found = _parsed(line)
        if isinstance(found, str):
            problems.append(f"{path}, line {number} is not used: {found}")
        else:
            form = replace(found, calls=0)
            sums[form] = sums.get(form, 0) + found.calls
    seen = sorted(
        (replace(form, calls=calls) for form, calls in sums.items()), key=lambda one: -one.calls
    )
    return ReadBack(tuple(seen), tuple(problems))


def _line(one: Seen) -> bytes:
    mode = {
        "grad": one.mode.grad,
        "training": one.mode.training,
        "autocast": dict(one.mode.autocast),
    }
    body = {
        "kind": one.kind,
        "name": one.name,
        "identity": one.identity,
        "form": json.loads(one.form),
        "mode": mode,
        "calls": one.calls,
    }
    return json.dumps(
        {"body": body, "check": _check(body)}, sort_keys=True, separators=(",", ":")
    ).encode()


def _parsed(line: bytes) -> Seen | str:
    """A line, or what is wrong with it."""
    if len(line) > 2 * LINE_LIMIT_BYTES:
        return f"it has {len(line)} bytes, at most {LINE_LIMIT_BYTES} were expected"
    try:
        whole = json.loads(line)
        body = whole["body"]
        if whole["check"] != _check(body):
            return "its check sum is wrong: it was changed, or cut short"
        mode = Mode(
            body["mode"]["grad"],
            body["mode"]["training"],
            tuple(sorted(body["mode"]["autocast"].items())),
        )
        seen = Seen(
            body["kind"],
            body["name"],
            body["identity"],
            canonical_json(body["form"]),
            mode,
            body["calls"],
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"it is no line of a recording ({type(error).__name__}: {error})"
    return seen if _is_sound(seen) else "it is no line of a recording: a field has the wrong type"


def _is_sound(seen: Seen) -> bool:
    texts = all(
        isinstance(text, str)
        for text in (
            seen.name,
            seen.identity,
            *(part for pair in seen.mode.autocast for part in pair),
        )
    )
    flags = isinstance(seen.mode.grad, bool) and isinstance(seen.mode.training, bool)
    return (
        texts
        and flags
        and seen.kind in ("module", "graph")
        and type(seen.calls) is int
        and seen.calls > 0
    )


def _check(body: Any) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()[:16]
