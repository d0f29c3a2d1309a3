"""A session serves requests in order: those that are due first, and each failure as its reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.judge.programs import linear_relu
from tests.judge.worker.sessions import call, load_module, make_inputs, put
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import child as child_module
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.wire.channel import Channel, load_tensors, save_tensors
from torch_cudal1.judge.wire.transport import write_payloads
from torch_cudal1.judge.worker.raw_copy import RefusedOutput
from torch_cudal1.judge.worker.session import Session, _answer

CPU = torch.device("cpu")
PROGRAM = linear_relu().program
INPUTS = [torch.randn(spec.shape) for spec in PROGRAM.inputs]
SLOT = "reference"


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running_child:
        payloads = write_payloads(PROGRAM, running_child.reserve_file())
        running_child.call(
            "load",
            slot=SLOT,
            program=PROGRAM.to_json(),
            payloads=payloads,
            schedule="eager",
            static=[],
        )
        yield running_child


@pytest.fixture
def sent_verbs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The verbs of each message that goes out."""
    frames: list[list[str]] = []
    send_message = Channel.send

    def send(self: Channel, message: Any, **options: Any) -> None:
        if "verb" in message:
            frames.append([*(request["verb"] for request in message["due"]), message["verb"]])
        send_message(self, message, **options)

    monkeypatch.setattr(Channel, "send", send)
    return frames


def _run(child: Child, inputs: str) -> torch.Tensor | None:
    path = child.reserve_file()
    answer = child.call("run", slot=SLOT, inputs=inputs, path=str(path))
    return load_tensors(answer["layout"], path, CPU)[0]


def test_small_sets_come_and_go_with_the_run_between(
    child: Child, sent_verbs: list[list[str]]
) -> None:
    first, second = INPUTS, [2 * tensor for tensor in INPUTS]
    child.put("first", first)
    first_result = _run(child, "first")
    child.drop(["first"], 0)
    child.put("second", second)
    second_result = _run(child, "second")
    assert sent_verbs == [["put", "run"], ["drop", "put", "run"]]
    assert first_result is not None
    assert second_result is not None
    assert not torch.equal(first_result, second_result)
    with pytest.raises(CandidateFailure, match="first"):
        _run(child, "first")


def test_a_second_message_waits_until_the_first_was_read(
    child: Child, sent_verbs: list[list[str]]
) -> None:
    """It may lie where that one lies."""
    child.put("third", INPUTS)
    child.put("fourth", INPUTS)
    assert sent_verbs == [["put"]]
    _run(child, "third")
    assert sent_verbs[1:] == [["put", "run"]]


def test_a_large_set_comes_and_goes_at_once(
    child: Child, sent_verbs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_SMALL_BYTES", 100)
    child.put("large", INPUTS)
    child.drop(["large"], 101)
    assert sent_verbs == [["put"], ["drop"]]


def test_a_request_that_is_due_and_fails_is_named_and_nothing_after_it_is_served(
    child: Child,
) -> None:
    child.put("present", INPUTS)
    _run(child, "present")
    child.put("fifth", INPUTS, base="no such set")
    child.queue_request("drop", names=["present"])
    with pytest.raises(CandidateFailure) as error_info:
        _run(child, "present")
    assert (error_info.value.detector, "no such set" in error_info.value.found) == ("put", True)
    assert child.usable
    _run(child, "present")  # was not dropped, and nothing is due any more


def test_a_set_takes_missing_tensors_from_its_base(session: Session) -> None:
    put(session, "first", make_inputs(1))
    path = session.scratch / "changed"
    new = torch.full((3,), 9.0)
    layout = save_tensors([None, None, new, None], path)
    call(session, "put", name="second", layout=layout, path=str(path), base="first")
    first, second = session.sets["first"], session.sets["second"]
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True, False, True]
    assert torch.equal(second[2], new)
    assert not path.exists(), "the scratch folder may be in memory"


def test_dropped_sets_take_their_rings_and_held_outputs_with_them(session: Session) -> None:
    session.sets |= {"a": [torch.ones(1)], "b": [torch.zeros(1)]}
    session.turn_ring({"sets": ["a", "b"]})
    session.turn_ring({"sets": ["b"]})
    session.held.append([torch.ones(1)])
    call(session, "drop", names=["a"], held=True)
    assert list(session.sets) == ["b"]
    assert list(session.rings) == [("b",)]
    assert len(session.held) == 1
    call(session, "drop", names=["no such set"])
    assert session.held == []


def test_a_cleared_session_is_as_a_new_one(session: Session) -> None:
    load_module(session)
    session.held.append([torch.ones(1)])
    call(session, "clear")
    assert session == Session(session.device, session.scratch)


def test_a_module_is_loaded_with_its_state_and_its_run_answers_facts(
    session: Session, tmp_path: Path
) -> None:
    runner = load_module(session)
    assert session.static == {0, 1, 2}
    path = tmp_path / "outputs"
    answer = call(session, "run", slot="candidate", inputs="first", path=str(path), hold=True)
    (result,) = load_tensors(answer["layout"], path, CPU)
    assert result is not None
    assert answer["tree"] == runner.tree != ""
    assert session.first_us["candidate"] > 0
    session.held[0][0] = 2 * result
    call(session, "reread", index=0, path=str(path))
    (later,) = load_tensors(answer["layout"], path, CPU)
    assert later is not None
    assert torch.equal(later, 2 * result)


@pytest.mark.parametrize(
    ("error", "detector", "lost"),
    [
        (MemoryError("none"), "resource", None),
        (RuntimeError("cannot allocate memory"), "resource", False),
        (PermissionError(13, "no"), "isolation", None),
        (RefusedOutput("a subclass"), "fresh_output", False),
        (ValueError("wrong"), None, False),
    ],
)
def test_each_error_of_a_handler_becomes_its_reason(
    session: Session, error: Exception, detector: str | None, lost: bool | None
) -> None:
    def fail(session: Session, request: object) -> dict[str, Any]:
        raise error

    answer = _answer(session, {"verb": "fail"}, {"fail": fail})
    assert str(error) in answer["error"]
    assert answer.get("detector") == detector
    assert answer.get("lost") is lost


def test_an_interrupt_ends_the_process_and_is_no_reason(session: Session) -> None:
    def interrupt(session: Session, request: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _answer(session, {"verb": "interrupt"}, {"interrupt": interrupt})
