"""What a confined process must leave alone: a file outside its folder and a socket of this process,
looked at afterwards.

The file lies in the folder for temporary files under a name that begins with "cudal1-canary", the
socket listens on the loopback address. A look-around that touches neither is not seen; whether the
sandbox really forbids things is what the probe tries.
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
    """Set out on construction; `disturbed` says what happened to them; `close` takes them in. Never
    raises for lack of a place.
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
            self._path.chmod(0o666)
        with contextlib.suppress(OSError):
            self._socket = socket.create_server(("127.0.0.1", 0), backlog=4)
            self._socket.setblocking(False)

    @property
    def path(self) -> Path | None:
        """Where the file lies, None where none could be put."""
        return self._path

    @property
    def port(self) -> int | None:
        """What the socket listens on, None where none could be opened."""
        return self._socket.getsockname()[1] if self._socket else None

    def disturbed(self) -> str:
        """What was touched, "" if nothing was."""
        if self._path is not None and not self._whole():
            return "a file outside the scratch folder was changed"
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                visitor, _ = self._socket.accept()
                visitor.close()
                return "a connection to a port of the judge was opened"
        return ""

    def close(self) -> None:
        """Delete the file, hang up. Safe to call twice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._socket is not None:
            self._socket.close()
        self._path = self._socket = None

    def _whole(self) -> bool:
        assert self._path is not None
        try:
            return self._path.read_bytes() == self._text
        except OSError:
            return False
