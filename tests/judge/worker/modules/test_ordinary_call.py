"""What a module sees of its caller is a script that calls it, and nothing of the judge."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from torch_cudal1.core import native
from torch_cudal1.judge.worker.modules import ordinary_call
from torch_cudal1.judge.worker.modules.ordinary_call import call_as_main

needs_extension = pytest.mark.skipif(native.extension() is None, reason="no C++ extension here")


def list_frames(*_: object) -> list[tuple[str, str, list[str]]]:
    frames: list[tuple[str, str, list[str]]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_name, frame.f_code.co_filename, sorted(frame.f_locals)))
        frame = frame.f_back
    return frames


MAIN = [("main", "main.py", ["args", "kwargs", "model"])]


@needs_extension
def test_below_the_call_is_one_frame_of_a_script() -> None:
    assert call_as_main(list_frames, (3,), {}) == MAIN
    # Those of the caller are there again.
    assert len(list_frames()) > 3


@needs_extension
def test_the_frames_come_back_after_an_error() -> None:
    def fail() -> None:
        raise ValueError("a candidate's")

    before = [name for name, *_ in list_frames()]
    with pytest.raises(ValueError, match="a candidate's"):
        call_as_main(fail, (), {})
    assert [name for name, *_ in list_frames()] == before


@needs_extension
def test_each_thread_has_frames_of_its_own() -> None:
    seen: list[Any] = []
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leave.wait(30)
        seen.append(list_frames())

    thread = threading.Thread(target=call_as_main, args=(wait, (), {}))
    thread.start()
    assert entered.wait(30)
    assert call_as_main(list_frames, (), {}) == MAIN
    leave.set()
    thread.join(30)
    assert seen[0][1:] == MAIN


@needs_extension
def test_calls_within_calls_generators_and_recursion_work() -> None:
    def generate() -> Any:
        yield list_frames()
        yield 2

    generator = generate()
    assert call_as_main(next, (generator,), {})[1:] == MAIN
    assert next(generator) == 2
    assert call_as_main(call_as_main, (list_frames, (), {}), {}) == MAIN

    def count(depth: int) -> int:
        return 0 if depth == 0 else 1 + count(depth - 1)

    assert call_as_main(count, (300,), {}) == 300


def test_a_module_answers_as_ever() -> None:
    linear, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    assert torch.equal(call_as_main(linear, (x,), {}), linear(x))
    assert call_as_main(dict, (), {"a": 1}) == {"a": 1}


def test_an_argument_that_nothing_else_holds_is_held_by_the_tuple_alone() -> None:
    def count_references(value: object) -> int:
        return sys.getrefcount(value)

    arguments = (object(),)
    # Unpacked, as the judge's frame does it: once Dynamo evaluates frames, a plain call counts one more.
    ordinary = count_references(*arguments)
    assert call_as_main(count_references, (object(),), {}) == ordinary


def test_without_the_extension_it_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordinary_call, "_call_outermost", None)
    frames = call_as_main(list_frames, (), {})
    assert frames[:1] == MAIN
    assert len(frames) > 3


@needs_extension
@pytest.mark.parametrize("arguments", [(), (print,), (print, [], {}), (print, (), None)])
def test_wrong_arguments_are_an_error(arguments: tuple[Any, ...]) -> None:
    extension = native.extension()
    assert extension is not None
    call: Callable[..., object] = extension.call_outermost
    with pytest.raises(TypeError, match="a callable, a tuple and a dict"):
        call(*arguments)
