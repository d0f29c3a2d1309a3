"""The file of a recording: JSON lines. Each line counts the calls of one form since the last line
of that form; reading adds them up.

    {"body": {"kind": "module", "name": "Net", "identity": "3f...", "form": {...}, "mode": {...}, "calls": 128}, "check": "9c..."}

Any number of processes append to one file: each append is one write at the end, under the file's
lock where the file system has one. The file stays below a limit. A line that is damaged, or of
another program, is reported when the file is read, and the rest is used.
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

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.cache.files import Stored

__all__ = [
    "LIMIT_BYTES",
    "LINE_LIMIT_BYTES",
    "CallRecord",
    "Mode",
    "RecordingContents",
    "append_calls",
    "read_calls",
]

LIMIT_BYTES = 16 << 20
LINE_LIMIT_BYTES = 64 << 10
# Several recordings put together by hand are still read.
_READ_LIMIT_BYTES = 4 * LIMIT_BYTES


@dataclass(frozen=True)
class Mode:
    """The modes that change what a call computes: grad, train or eval, and each device type's
    autocast type.
    """

    grad: bool
    training: bool
    autocast: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CallRecord:
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
class RecordingContents:
    """What a file holds, most frequent first, and what is wrong with it: one sentence a line that
    was not used.
    """

    seen: tuple[CallRecord, ...]
    problems: tuple[str, ...]


def append_calls(
    path: Path, calls: Sequence[CallRecord], *, limit_bytes: int = LIMIT_BYTES
) -> Stored | Refusal:
    """Add a line for each at the end of `path`. Refusal where the file would pass the limit, or
    the file system refuses.
    """
    # A line break first: a killed writer may have left half a line, which must not swallow this
    # one.
    data = b"".join(b"\n" + _encode_line(call) + b"\n" for call in calls)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND places each write at the end at that moment, whatever other processes wrote
        # meanwhile.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Without locks on this file system the append goes on: with O_APPEND a single write is
            # whole on a local disk.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # Asked under the lock, so that several writers together stay below the limit.
            if (size := os.fstat(file).st_size) + len(data) > limit_bytes:
                return Refusal(f"{path} has {size} bytes, and is kept below {limit_bytes}")
            # One write and no loop: a second write could land after another process's line.
            if (written := os.write(file, data)) != len(data):
                return Refusal(f"{path} took {written} of {len(data)} bytes")
        finally:
            os.close(file)
    except OSError as error:
        return Refusal(f"{path}: {type(error).__name__}: {error}")
    return Stored(path)


def read_calls(path: Path) -> RecordingContents:
    """Every whole line of `path`, equal ones added up. Raises OSError for a file that cannot be
    read.
    """
    sums: dict[CallRecord, int] = {}
    problems = []
    with open(path, "rb") as file:
        data = file.read(_READ_LIMIT_BYTES + 1)
    if len(data) > _READ_LIMIT_BYTES:
        problems.append(f"{path} is larger than {_READ_LIMIT_BYTES} bytes; the rest is not read")
    for number, line in enumerate(data[:_READ_LIMIT_BYTES].split(b"\n"), 1):
        if not line.strip():
            continue
        call = _parse_line(line)
        if isinstance(call, str):
            problems.append(f"{path}, line {number} is not used: {call}")
        else:
            # The count is no part of what is equal: lines of one form of call are added up.
            form = replace(call, calls=0)
            sums[form] = sums.get(form, 0) + call.calls
    calls = sorted(
        (replace(form, calls=calls) for form, calls in sums.items()), key=lambda call: -call.calls
    )
    return RecordingContents(tuple(calls), tuple(problems))


def _encode_line(call: CallRecord) -> bytes:
    mode = {
        "grad": call.mode.grad,
        "training": call.mode.training,
        "autocast": dict(call.mode.autocast),
    }
    body = {
        "kind": call.kind,
        "name": call.name,
        "identity": call.identity,
        "form": json.loads(call.form),
        "mode": mode,
        "calls": call.calls,
    }
    return json.dumps(
        {"body": body, "check": _check(body)}, sort_keys=True, separators=(",", ":")
    ).encode()


def _parse_line(line: bytes) -> CallRecord | str:
    """A line, or what is wrong with it."""
    if len(line) > 2 * LINE_LIMIT_BYTES:
        return f"it has {len(line)} bytes, at most {LINE_LIMIT_BYTES} were expected"
    try:
        row = json.loads(line)
        body = row["body"]
        if row["check"] != _check(body):
            return "its check sum is wrong: it was changed, or cut short"
        mode = Mode(
            body["mode"]["grad"],
            body["mode"]["training"],
            tuple(sorted(body["mode"]["autocast"].items())),
        )
        call = CallRecord(
            body["kind"],
            body["name"],
            body["identity"],
            # Canonical, because equal forms must compare equal however a line spells them.
            canonical_json(body["form"]),
            mode,
            body["calls"],
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"it is no line of a recording ({type(error).__name__}: {error})"
    return call if _is_sound(call) else "it is no line of a recording: a field has the wrong type"


def _is_sound(call: CallRecord) -> bool:
    texts = all(
        isinstance(text, str)
        for text in (
            call.name,
            call.identity,
            *(part for pair in call.mode.autocast for part in pair),
        )
    )
    flags = isinstance(call.mode.grad, bool) and isinstance(call.mode.training, bool)
    return (
        texts
        and flags
        and call.kind in ("module", "graph")
        # Not `isinstance`: `true` is an int in Python and would count as one call.
        and type(call.calls) is int
        and call.calls > 0
    )


def _check(body: Any) -> str:
    # Against damage only: it proves nothing about who wrote the line.
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()[:16]
