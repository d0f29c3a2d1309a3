"""Messages between ranks through the store of the process group; every request ends, and a
heartbeat says "still deciding".

A store whose host was stopped answers nothing, and its client waits for that without end: so every
request is made in a thread of its own, and given up after `silence_s` with the error that a broken
store raises. Such a thread stays until the host goes on or this process ends. A heartbeat shows that
a process lives and is scheduled, not that it makes progress.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["StoreChannel"]

T = TypeVar("T")
# A busy machine may miss some of them without being given up.
HEARTBEATS_PER_SILENCE = 8
# The store is asked by polling: its blocking `wait` cannot be ended by another name. At the longest
# pause each rank makes 20 requests a second.
MAX_POLL_PAUSE_S = 0.05


class StoreChannel:
    """Reads and writes names below `base`. Every method raises DistError where the store fails or
    does not answer.
    """

    def __init__(self, store: Any, base: str, silence_s: float) -> None:
        self._store, self._base, self._silence_s = store, base, silence_s

    def has(self, names: Sequence[str]) -> bool:
        """Whether all of `names` are there."""
        return bool(
            self._ask_with_timeout(
                lambda: self._store.check([self._prefix_key(name) for name in names])
            )
        )

    def get(self, name: str) -> str:
        """The text under `name`, which must be there."""
        # `get` blocks until the name exists, so it is used only for names that are there.
        return self._ask_with_timeout(lambda: str(self._store.get(self._prefix_key(name)).decode()))

    def set(self, name: str, value: str) -> None:
        """Write `value` under `name`."""
        self._ask_with_timeout(lambda: self._store.set(self._prefix_key(name), value))

    def set_once(self, name: str, value: str) -> str:
        """Set `value` unless another rank did so before; the value that counts, the same for every
        rank.
        """
        return self._ask_with_timeout(
            # With "" expected, `compare_set` writes only where the name does not exist. The store
            # does it in one step, so all ranks read the same verdict.
            lambda: str(self._store.compare_set(self._prefix_key(name), "", value).decode())
        )

    def delete(self, name: str) -> None:
        """Delete `name` from the store."""
        self._ask_with_timeout(lambda: self._store.delete_key(self._prefix_key(name)))

    def wait(self, names: Sequence[str], closed: str, timeout_s: float) -> bool:
        """Wait for all of `names`, at most `timeout_s`. The name `closed` ends the wait early.

        Returns whether all of `names` are there.
        """
        deadline, pauses = time.monotonic() + timeout_s, _double_pauses()
        while (
            not (complete := self.has(names))
            and not self.has([closed])
            and time.monotonic() < deadline
        ):
            time.sleep(next(pauses))
        # The last name may have come together with `closed`.
        return complete or self.has(names)

    def wait_while_alive(
        self, name: str, closed: str, beat: str, limits_s: tuple[float, float]
    ) -> str:
        """Wait for `name` or `closed`; "" when one of them is there, else what
        ended the wait.

        `limits_s`: the longest silence of `beat`, by this process's clock, and the longest
        wait altogether.
        """
        silence_s, longest_s = limits_s
        started = changed = time.monotonic()
        # Only a change of the counter counts as a sign of life: clocks of two hosts need not agree.
        last, pauses = "", _double_pauses()
        while not (self.has([name]) or self.has([closed])):
            now, count = time.monotonic(), self.get(beat) if self.has([beat]) else ""
            if count != last:
                last, changed = count, now
            if now - changed > silence_s:
                return f"gave no sign of life for {silence_s:g} s"
            if now - started > longest_s:
                return f"decided nothing within {longest_s:g} s"
            time.sleep(next(pauses))
        return ""

    @contextlib.contextmanager
    def send_heartbeats(self, name: str, silence_s: float) -> Iterator[None]:
        """Show under `name` that this process lives, often enough for ranks that give up after
        `silence_s`.
        """
        stop = threading.Event()

        def beat() -> None:
            # The first beat is sent at once: the other ranks wait for a sign of life from now on.
            number = 0
            # The thread ends in silence: the next request of the deciding thread raises the error.
            with contextlib.suppress(dist.DistError):
                while not stop.wait(silence_s / HEARTBEATS_PER_SILENCE if number else 0.0):
                    number += 1
                    # Not through `_ask_with_timeout`: this is a thread of its own already, and may
                    # wait.
                    self._store.set(self._prefix_key(name), str(number))

        thread = threading.Thread(target=beat, name="cudal1-rank-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            # A request to a stopped store never returns, and the daemon thread must not hold the
            # rank here.
            thread.join(timeout=1.0)

    def _prefix_key(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _ask_with_timeout(self, question: Callable[[], T]) -> T:
        answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((question(), None))
            # The error is raised in the caller's thread, not printed in this one.
            except (dist.DistError, RuntimeError, ValueError, OSError) as error:
                answers.put((None, error))

        # One thread for each request: a pool's thread that waits for a stopped store would block
        # the next one.
        threading.Thread(target=ask, name="cudal1-rank-question", daemon=True).start()
        try:
            answer, error = answers.get(timeout=self._silence_s)
        except queue.Empty:
            raise dist.DistStoreError(f"no answer within {self._silence_s:g} s") from None
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]  # there is an answer where there is no error


def _double_pauses() -> Iterator[float]:
    pause = 0.001
    while True:
        yield pause
        pause = min(2 * pause, MAX_POLL_PAUSE_S)
