"""A tripwire tells that it was touched."""

from __future__ import annotations

import socket

import pytest

from torch_cudal1.judge.sandbox.tripwires import Tripwires


@pytest.mark.parametrize("act", ["write", "delete", "connect", "nothing"])
def test_a_tripwire_that_was_touched_is_disturbed(act: str) -> None:
    tripwires = Tripwires()
    try:
        assert tripwires.path is not None
        assert tripwires.port is not None
        if act == "write":
            tripwires.path.write_text("here")
        elif act == "delete":
            tripwires.path.unlink()
        elif act == "connect":
            socket.create_connection(("127.0.0.1", tripwires.port)).close()
        assert bool(tripwires.find_disturbed()) == (act != "nothing")
    finally:
        tripwires.close()
