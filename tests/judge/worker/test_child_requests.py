"""What is due goes with the next request: in order, before it, and failing as if it had been asked
by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.judge.programs import linear_relu
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import child as child_module
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.wire.channel import Channel, load_tensors
from torch_cudal1.judge.wire.transport import write_payloads

CPU = torch.device("cpu")
PROGRAM = linear_relu().program
INPUTS = [torch.randn(spec.shape) for spec in PROGRAM.inputs]
SLOT = "reference"


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as one:
        payloads = write_payloads(PROGRAM, one.new_file())
        one.call(
            "load",
            slot=SLOT,
            program=PROGRAM.to_json(),
            payloads=payloads,
            schedule="eager",
            static=[],
        )
        yield one


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The verbs of each message that goes out."""
    frames: list[list[str]] = []
    really = Channel.send

    def send(self: Channel, message: Any, **kw: Any) -> None:
        if "verb" in message:
            frames.append([*(one["verb"] for one in message["due"]), message["verb"]])
        really(self, message, **kw)

    monkeypatch.setattr(Channel, "send", send)
    return frames


def _run(child: Child, inputs: str) -> torch.Tensor | None:
    path = child.new_file()
    answer = child.call("run", slot=SLOT, inputs=inputs, path=str(path))
    return load_tensors(answer["layout"], path, CPU)[0]


def test_small_sets_come_and_go_with_the_run_between(child: Child, sent: list[list[str]]) -> None:
    first, second = INPUTS, [2 * tensor for tensor in INPUTS]
    child.put("first", first)
    one = _run(child, "first")
    child.drop(["first"], 0)
    child.put("second", second)
    two = _run(child, "second")
    assert sent == [["put", "run"], ["drop", "put", "run"]]
    assert one is not None
    assert two is not None
    assert not torch.equal(one, two)
    with pytest.raises(CandidateFailure, match="first"):
        _run(child, "first")


def test_a_second_message_waits_until_the_first_was_read(
    child: Child, sent: list[list[str]]
) -> None:
    """It may lie where that one lies."""
    child.put("third", INPUTS)
    child.put("fourth", INPUTS)
    assert sent == [["put"]]
    _run(child, "third")
    assert sent[1:] == [["put", "run"]]


def test_what_is_large_comes_and_goes_at_once(
    child: Child, sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_SMALL_BYTES", 100)
    child.put("large", INPUTS)
    child.drop(["large"], 101)
    assert sent == [["put"], ["drop"]]


def test_what_fails_beforehand_is_named_and_nothing_after_it_is_done(child: Child) -> None:
    child.put("fifth", INPUTS, base="no such set")
    child.later("drop", names=["fourth"])
    with pytest.raises(CandidateFailure) as caught:
        _run(child, "fourth")
    assert (caught.value.detector, "no such set" in caught.value.found) == ("put", True)
    assert child.usable
    _run(child, "fourth")  # was not dropped, and nothing is due any more
