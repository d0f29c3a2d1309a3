"""Frames and tensors survive the trip; what is neither is refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_cudal1.errors import SandboxError
from torch_cudal1.judge.channel import Channel, load_tensors, save_tensors
from torch_cudal1.program.model import TensorSpec

CPU = torch.device("cpu")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield Channel(left), right


def test_a_frame_arrives_whole(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    message = {"verb": "run", "numbers": [1, 2.5, None], "text": "ü" * 5_000}
    Channel(other).send(message)
    assert channel.receive(deadline=time.monotonic() + 5) == message


@pytest.mark.parametrize("raw", [b"\x00\x00\x00\x04PASS", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02\xff\xfe"])
def test_garbage_is_refused(ends: tuple[Channel, socket.socket], raw: bytes) -> None:
    channel, other = ends
    other.sendall(raw)
    with pytest.raises(SandboxError, match="frame"):
        channel.receive(deadline=time.monotonic() + 5)


def test_nesting_without_end_is_refused(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    body = b"[" * 100_000
    other.sendall(len(body).to_bytes(4, "big") + body)
    with pytest.raises(SandboxError, match="JSON"):
        channel.receive(deadline=time.monotonic() + 5)


def test_silence_ends_at_the_deadline_and_a_hang_up_is_seen(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    with pytest.raises(TimeoutError):
        channel.receive(deadline=time.monotonic() + 0.05)
    other.close()
    with pytest.raises(EOFError):
        channel.receive()


def test_every_layout_survives(tmp_path: Path) -> None:
    tensors = [
        torch.randn(3, 4).t(),
        torch.randn(4).expand(3, 4),
        torch.randn(10)[3:9:2],
        torch.tensor(1.5),
        torch.empty(0, 3),
        None,
        torch.tensor([True, False]),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).bfloat16(),
        torch.arange(3),
    ]
    layout = save_tensors(tensors, tmp_path / "file")
    read = load_tensors(layout, tmp_path / "file", CPU)
    for old, new in zip(tensors, read, strict=True):
        if old is None or new is None:
            assert old is new
            continue
        assert torch.equal(old, new)
        assert TensorSpec.of(old) == TensorSpec.of(new)


@pytest.mark.parametrize(
    "layout", [[["float32", [9], [1]]], [["int32", [4], [1]]], [["float32", [2, 2], [-2, 1]]], [["evil", [4], [1]]], [3]]
)
def test_a_layout_that_does_not_fit_the_bytes_is_refused(tmp_path: Path, layout: list[object]) -> None:
    save_tensors([torch.ones(4)], tmp_path / "file")
    with pytest.raises((SandboxError, ValueError)):
        load_tensors(layout, tmp_path / "file", CPU)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"PASS" * 100)
    with pytest.raises(SandboxError, match="tensors"):
        load_tensors([["float32", [1], [1]]], tmp_path / "file", CPU)
