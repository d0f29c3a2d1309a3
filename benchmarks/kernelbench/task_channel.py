"""The pipe between a run and a task's process: one JSON object a message, out of reach of what the
task's own code prints.

A task sends its stage and its row, and asks for two things: memory (so many bytes of the GPU) and
quiet (no other task works while it measures). It knows nothing of the other tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["TaskChannel", "receive", "send"]


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send one object. Raises OSError when the other end is closed."""
    connection.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """The next object. Raises EOFError when the other side has closed."""
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message


class TaskChannel:
    """A task's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def stage(self, name: str, column: str = "") -> None:
        """Send what is done now, and for which column alone: a failure names it when this process
        is ended.
        """
        send(self._connection, {"tell": "stage", "name": name, "column": column})

    def row(self, row: Mapping[str, Any]) -> None:
        """Send the result."""
        send(self._connection, {"tell": "row", "row": row})

    def memory(self, size_bytes: int | None, kept_bytes: int = 0) -> None:
        """Wait until so much of the GPU is free; in place of what was granted before. None:
        unknown.

        `kept_bytes`: what this process and its children hold of it while they wait.
        """
        self._ask({"ask": "memory", "bytes": size_bytes, "kept": kept_bytes})

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Run the body while no other task of this run works."""
        self._ask({"ask": "quiet"})
        try:
            yield
        finally:
            send(self._connection, {"tell": "loud"})

    def _ask(self, message: Mapping[str, Any]) -> None:
        send(self._connection, message)
        answer = receive(self._connection)
        if answer != {"granted": True}:
            raise RuntimeError(f"the run answered {answer}; expected a grant")
