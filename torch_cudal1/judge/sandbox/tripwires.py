"""Tripwires: a file outside the child's folder and a socket of this process, which a confined
process must leave alone. The judge checks them afterwards.

The file lies in the folder for temporary files under a name that begins with "cudal1-canary"; the
socket listens on the loopback address. A process that touches neither goes unnoticed; whether the
sandbox forbids such acts is found out by `probe`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

__all__ = ["Tripwires"]


class Tripwires:
    """Placed on construction, checked by `find_disturbed`, removed by `close`. A tripwire that
    cannot be placed is left out; construction does not raise.
    """

    def __init__(self) -> None:
        self._text = secrets.token_bytes(64)
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(prefix="cudal1-canary-")
            os.write(handle, self._text)
            os.close(handle)
            self._path = Path(name)
            # Any user may write it: only the sandbox protects it.
            self._path.chmod(0o666)
        with contextlib.suppress(OSError):
            self._socket = socket.create_server(("127.0.0.1", 0), backlog=4)
            # `find_disturbed` asks for a connection and must not wait for one.
            self._socket.setblocking(False)

    @property
    def path(self) -> Path | None:
        """Path of the file, None where it could not be made."""
        return self._path

    @property
    def port(self) -> int | None:
        """Port of the socket, None where it could not be opened."""
        return self._socket.getsockname()[1] if self._socket else None

    def find_disturbed(self) -> str:
        """Which tripwire was touched, "" if none was."""
        if self._path is not None and not self._is_intact():
            return "a file outside the scratch folder was changed"
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                visitor, _ = self._socket.accept()
                visitor.close()
                return "a connection to a port of the judge was opened"
        return ""

    def close(self) -> None:
        """Delete the file and close the socket. Safe to call twice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._socket is not None:
            self._socket.close()
        self._path = self._socket = None

    def _is_intact(self) -> bool:
        assert self._path is not None
        try:
            return self._path.read_bytes() == self._text
        except OSError:
            return False
