"""One worker of a warm-up: `python -m torch_cudal1.api.fleet.fleet_worker FD`. It reads an
order, then tasks, and answers each.

Lines of JSON: the order and the tasks come on stdin, what it says and answers goes to the
descriptor FD; what a user's file prints goes to the log, which is shown if the worker dies. It ends
when stdin ends, or on SIGTERM, with every judge process that it started. It runs the user's own
targets, as `cudal1 warmup` does, and decides by `api.warmup` alone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from torch_cudal1.api.fleet.warmup_task import WarmupAnswer, WarmupOrder, WarmupTask, call_record_of
from torch_cudal1.api.recording.replay import enter_recorded_modes, list_recorded_calls
from torch_cudal1.api.targets import LoadedTarget, load, try_call
from torch_cudal1.api.warmup import warm
from torch_cudal1.core.errors import TargetError
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.recording_file import RecordingContents

__all__ = ["main", "run_task"]

# Time to end judge processes in, once the parent is gone.
SHUTDOWN_GRACE_S = 10.0


def run_task(
    order: WarmupOrder, task: WarmupTask, progress: Callable[[str, float | None], None]
) -> WarmupAnswer:
    """Warm one task in this process. What fails is part of the answer; only what ends the process
    is not.
    """
    settings = order.settings.but(on_miss="tune")
    try:
        (loaded,) = load(task.target, device=order.device)
        try_call(loaded)
        if task.signature:
            return _run_recorded_call(task, loaded, settings, progress)
    except TargetError as error:
        return WarmupAnswer(task, unusable=str(error))
    return WarmupAnswer(task, warm(loaded, settings, progress=progress, training=order.training))


def _run_recorded_call(
    task: WarmupTask,
    loaded: LoadedTarget,
    settings: Settings,
    progress: Callable[[str, float | None], None],
) -> WarmupAnswer:
    """The target as production called it, in the modes of that call. Raises TargetError where it
    never did.
    """
    try:
        (call,) = list_recorded_calls(
            loaded, RecordingContents((call_record_of(task.signature),), ())
        )
    # A signature is text from another process or from a journal, so it may be anything.
    except (ValueError, TypeError, LookupError) as error:
        if isinstance(error, TargetError):
            raise
        raise TargetError(
            task.label, f"its signature is no line of a recording ({type(error).__name__}: {error})"
        ) from error
    if call.problem:
        raise TargetError(task.label, call.problem)
    with enter_recorded_modes(call):
        return WarmupAnswer(
            task, warm(call.loaded, settings, progress=progress, training=call.mode.grad)
        )


def main(descriptor: int) -> int:
    """Serve until stdin ends."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # A terminal sends Ctrl-C to every process of the group. The parent handles it and ends its
    # workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines: queue.Queue[str | None] = queue.Queue()
    # A thread, because a task runs for minutes in this one and the parent may die meanwhile.
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    # A descriptor of its own: a user's file may print to stdout, which would break the protocol.
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:

        def write(value: Any) -> None:
            print(json.dumps(value), file=out, flush=True)

        order: WarmupOrder | None = None
        while (line := lines.get()) is not None:
            message = json.loads(line)
            if order is None:
                # Before any task: compile workers and judge processes inherit the cores.
                os.sched_setaffinity(0, message["cores"])
                order = WarmupOrder.from_json(message["order"])
                write({"ready": True})
                continue
            task = WarmupTask(message["target"], message["signature"])
            answer = run_task(
                order, task, lambda activity, fraction: write({"say": [activity, fraction]})
            )
            write({"answer": answer.to_json()})
    return 0


def _listen(lines: queue.Queue[str | None]) -> None:
    """Read lines ahead, so that the end of stdin is seen during a task. Ends the process then."""
    rest = b""
    # `sys.stdin` has a lock that the interpreter takes at exit, while this thread holds it in a
    # read.
    while data := os.read(0, 1 << 16):
        *complete_lines, rest = (rest + data).split(b"\n")
        for line in complete_lines:
            lines.put(line.decode())
    lines.put(None)
    # SIGTERM raises SystemExit in the main thread, which ends the judge's processes on its way out.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_GRACE_S)
    # The main thread is in a call into a library that does not return, so it never saw the signal.
    os._exit(1)


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
