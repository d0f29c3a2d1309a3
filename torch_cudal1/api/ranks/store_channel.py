"""A line to the other ranks: the store of the process group, where each question has an end, and a
beat that says "still deciding".

A store whose host was stopped answers nothing, and its client waits for that without end: so every
question is asked in a thread of its own, and given up after `patience_s` with the error that a
broken store raises. Such a thread stays until the host goes on or this process ends. Who beats
lives and is scheduled; that it also makes progress is not known.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["Line"]

T = TypeVar("T")
_BEATS_IN_PATIENCE = 8  # so that a busy machine may lose some
_LONGEST_PAUSE_S = 0.05


class Line:
    """Reads and writes names below `base`. Every method raises DistError where the store fails or
    does not answer.
    """

    def __init__(self, store: Any, base: str, patience_s: float) -> None:
        self._store, self._base, self._patience_s = store, base, patience_s

    def has(self, names: Sequence[str]) -> bool:
        """Whether all of `names` are there."""
        return bool(self._asked(lambda: self._store.check([self._name(name) for name in names])))

    def get(self, name: str) -> str:
        """The text under `name`, which must be there."""
        return self._asked(lambda: str(self._store.get(self._name(name)).decode()))

    def set(self, name: str, value: str) -> None:
        """Put `value` there."""
        self._asked(lambda: self._store.set(self._name(name), value))

    def first(self, name: str, value: str) -> str:
        """What the first rank to come here set: of several proposals one wins, and everyone reads
        that one.
        """
        return self._asked(
            lambda: str(self._store.compare_set(self._name(name), "", value).decode())
        )

    def forget(self, name: str) -> None:
        """Let the store drop it."""
        self._asked(lambda: self._store.delete_key(self._name(name)))

    def wait(self, names: Sequence[str], closed: str, patience_s: float) -> bool:
        """Whether all of `names` are there before `patience_s` are over, or `closed` is, which ends
        every wait.
        """
        deadline, pauses = time.monotonic() + patience_s, _pauses()
        while (
            not (found := self.has(names))
            and not self.has([closed])
            and time.monotonic() < deadline
        ):
            time.sleep(next(pauses))
        return found or self.has(names)

    def wait_while_beating(
        self, name: str, closed: str, beat: str, limits_s: tuple[float, float]
    ) -> str:
        """Wait for `name` or `closed`; "" when one is there, else what ended the wait.

        `limits_s`: the longest silence of `beat`, by the clock of who waits, and the longest wait
        altogether.
        """
        silence_s, longest_s = limits_s
        began = heard = time.monotonic()
        last, pauses = "", _pauses()
        while not (self.has([name]) or self.has([closed])):
            now, seen = time.monotonic(), self.get(beat) if self.has([beat]) else ""
            if seen != last:
                last, heard = seen, now
            if now - heard > silence_s:
                return f"gave no sign of life for {silence_s:g} s"
            if now - began > longest_s:
                return f"told nothing within {longest_s:g} s"
            time.sleep(next(pauses))
        return ""

    @contextlib.contextmanager
    def beating(self, name: str, silence_s: float) -> Iterator[None]:
        """Show under `name` that this process lives, often enough for who gives up after
        `silence_s`.
        """
        done = threading.Event()

        def beat() -> None:
            number = 0
            with contextlib.suppress(
                dist.DistError
            ):  # told by the next question of the thread that decides
                while not done.wait(silence_s / _BEATS_IN_PATIENCE if number else 0.0):
                    number += 1
                    self._store.set(self._name(name), str(number))

        thread = threading.Thread(target=beat, name="cudal1-rank-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=1.0)

    def _name(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _asked(self, question: Callable[[], T]) -> T:
        answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((question(), None))
            except (dist.DistError, RuntimeError, ValueError, OSError) as error:
                answers.put((None, error))

        threading.Thread(target=ask, name="cudal1-rank-question", daemon=True).start()
        try:
            answer, error = answers.get(timeout=self._patience_s)
        except queue.Empty:
            raise dist.DistStoreError(f"no answer within {self._patience_s:g} s") from None
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]  # there is an answer where there is no error


def _pauses() -> Iterator[float]:
    pause = 0.001
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)
