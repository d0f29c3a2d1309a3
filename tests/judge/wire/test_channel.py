"""Frames and tensors survive the trip; what is neither is refused."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.judge.wire import channel
from torch_cudal1.judge.wire.channel import DTYPES, Channel, load_tensors, save_tensors

CPU = torch.device("cpu")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield Channel(first), second


def test_a_frame_arrives_whole(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    message = {"verb": "run", "numbers": [1, 2.5, None], "text": "ü" * 5_000}
    Channel(other).send(message)
    assert channel.receive(deadline=time.monotonic() + 5) == message


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x00\x00\x04PASS",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02\xff\xfe",
    ],
)
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


def test_silence_ends_at_the_deadline_and_a_hang_up_is_seen(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, other = ends
    with pytest.raises(TimeoutError):
        channel.receive(deadline=time.monotonic() + 0.05)
    other.close()
    with pytest.raises(EOFError):
        channel.receive()


def test_a_peer_that_does_not_read_is_past_the_deadline(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, _ = ends
    with pytest.raises(TimeoutError):
        channel.send({"text": "x" * (32 << 20)}, deadline=time.monotonic() + 0.2)
    with pytest.raises(TimeoutError):
        channel.send({}, deadline=time.monotonic())


def test_a_send_to_nobody_is_no_timeout(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.close()
    with pytest.raises(SandboxError, match="sending"):
        channel.send({}, deadline=time.monotonic() + 5)


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
    "layout",
    [
        [["float32", [9], [1]]],
        [["int32", [4], [1]]],
        [["float32", [2, 2], [-2, 1]]],
        [["evil", [4], [1]]],
        [3],
    ],
)
def test_a_layout_that_does_not_fit_the_bytes_is_refused(
    tmp_path: Path, layout: list[object]
) -> None:
    save_tensors([torch.ones(4)], tmp_path / "file")
    with pytest.raises((SandboxError, ValueError)):
        load_tensors(layout, tmp_path / "file", CPU)


FOUR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (
            {"0": FOUR, "1": FOUR},
            16,
        ),  # the same bytes twice: a small file would become any number of large tensors
        ({"0": FOUR, "1": FOUR | {"data_offsets": [16, 32]}}, 31),
        ({"0": FOUR, "1": FOUR | {"data_offsets": [-16, 0]}}, 64),
        ({"0": FOUR, "1": FOUR | {"data_offsets": [1 << 62, (1 << 62) + 16]}}, 64),
        ({"0": FOUR, "1": FOUR | {"data_offsets": [16, 36]}}, 64),
        ({"0": FOUR, "1": FOUR | {"shape": [2, 2], "data_offsets": [16, 32]}}, 64),
        ({"0": FOUR, "1": FOUR | {"dtype": "I32", "data_offsets": [16, 32]}}, 64),
        ({"0": FOUR, "1": 7}, 64),
        ({"0": FOUR}, 64),
        ([FOUR, FOUR], 64),
    ],
    ids=[
        "twice",
        "short",
        "before",
        "beyond",
        "odd",
        "shape",
        "dtype",
        "no place",
        "missing",
        "no object",
    ],
)
def test_a_header_that_does_not_fit_the_bytes_is_refused(
    tmp_path: Path, header: object, size: int
) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(SandboxError, match="tensors"):
        load_tensors([["float32", [4], [1]], ["float32", [4], [1]]], tmp_path / "file", CPU)


def test_a_header_longer_than_a_frame_may_be_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
    with pytest.raises(SandboxError, match="at most"):
        load_tensors([["float32", [1], [1]]], tmp_path / "file", CPU)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = save_tensors([torch.ones(1 << 16)], tmp_path / "file")
    monkeypatch.setattr(channel, "_AT_ONCE_BYTES", 1 << 16)
    read = os.preadv

    def shrunk(fd: int, buffers: Sequence[Any], offset: int) -> int:
        os.truncate(tmp_path / "file", 1 << 17)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrunk)
    with pytest.raises(SandboxError, match="of 262144 bytes are there"):
        load_tensors(layout, tmp_path / "file", CPU)


def test_bytes_added_to_a_file_while_it_is_read_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = json.dumps(
        {"0": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}
    ).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header)
    fstat = os.fstat

    def then_grown(fd: int) -> os.stat_result:
        status = fstat(fd)
        os.truncate(tmp_path / "file", 1 << 41)  # of which nothing is on the disk
        return status

    monkeypatch.setattr(os, "fstat", then_grown)
    with pytest.raises(SandboxError, match="where 0 are"):
        load_tensors([["uint8", [1 << 40], [1]]], tmp_path / "file", CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_named_as_the_library_names_it(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(16, dtype=torch.uint8)
    tensor = bits > 7 if dtype is torch.bool else bits.view(dtype)
    (back,) = load_tensors(save_tensors([tensor], tmp_path / "file"), tmp_path / "file", CPU)
    assert back is not None
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"PASS" * 100)
    with pytest.raises(SandboxError, match="tensors"):
        load_tensors([["float32", [1], [1]]], tmp_path / "file", CPU)


@pytest.mark.parametrize("kind", ["pipe", "link", "sparse", "folder"])
def test_outputs_are_read_from_a_plain_file_only(tmp_path: Path, kind: str) -> None:
    layout = save_tensors([torch.ones(3)], tmp_path / "real")
    path = tmp_path / "path"
    if kind == "pipe":
        os.mkfifo(path)  # a reader that waits for a writer would wait for ever
    elif kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(64 << 30)
    with pytest.raises(SandboxError, match="reading tensors"):
        load_tensors(layout, path, CPU)


def test_outputs_are_copied_and_not_mapped(tmp_path: Path) -> None:
    """A process that truncates a mapped file kills its reader with SIGBUS."""
    path = tmp_path / "outputs"
    layout = save_tensors([torch.ones(1 << 20)], path)
    (tensor,) = load_tensors(layout, path, CPU)
    os.truncate(path, 0)
    assert tensor is not None
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert tensor.sum() == 1 << 20
