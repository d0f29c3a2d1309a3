"""A disposable child process for one candidate: started confined, sent requests, and killed with
every process that it started.

Every child has its own session, a cleaned environment, a private scratch folder, limits, closed
descriptors and a deadline on every request. A supervisor keeps the end of its output, and kills all
processes that it leaves behind. A crash, a hang, a memory grab, a sticky CUDA error, garbage on the
channel or an early exit costs that candidate only.

How much more is stopped depends on the level: `confinement_level` says what each level adds and
does not stop, `probe` finds out which levels work on this machine, and `Child.confinement` says
which level was used. Own code gets the best level up to 2, and at least 1; foreign code needs
level 2.

It does not stop a GPU kernel that outlives its process, or attacks on the driver. If this process
is itself killed (SIGKILL), the child dies with it, but its scratch folder stays.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.device.gpu_memory import make_room
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import cancellable, probe
from torch_cudal1.judge.sandbox.choose_confinement import choose_confinement
from torch_cudal1.judge.sandbox.filesystem_policy import make_environment
from torch_cudal1.judge.sandbox.fork_server import ForkedProcess, ForkServer
from torch_cudal1.judge.sandbox.limits import Limits, make_limits
from torch_cudal1.judge.sandbox.scratch import make_scratch, remove_scratch
from torch_cudal1.judge.sandbox.sharing import DeviceSharing
from torch_cudal1.judge.sandbox.start import end_process, launch_process, plan_launch
from torch_cudal1.judge.sandbox.tripwires import Tripwires
from torch_cudal1.judge.wire import arena
from torch_cudal1.judge.wire.channel import Channel, message_bytes, save_tensors
from torch_cudal1.judge.wire.precision_rights import choose_flags

__all__ = ["CandidateFailure", "Child", "Limits", "make_limits"]

WORKER = "torch_cudal1.judge.worker.session"
# Importing torch from a cold network disk takes a minute; a hang must still end.
_START_S = 120.0
_GRACE_S = 5.0
# Larger messages would pass through the host and a file for minutes; a search has seconds.
_MOST_BY_FILE_BYTES = 2 << 30
# Messages and freed memory up to this size wait for the next request: one turn on the GPU less.
_SMALL_BYTES = 256 << 20
_TAIL_CHARS = 600
_ERROR_CHARS = 2000


class CandidateFailure(SandboxError):
    """The child refused, failed or died while serving a request. It costs the candidate only.

    `detector`: the check that noticed it. `is_late`: the child was ended for want of time, which
    says nothing of what it was asked.
    """

    def __init__(self, stage: str, reason: str, detector: str, is_late: bool = False) -> None:
        super().__init__(stage, reason)
        self.detector, self.is_late = detector, is_late
        # Unpickling calls the class with `args`, and pools send failures between processes.
        self.args = (stage, reason, detector, is_late)


class Child:
    """A running child. As a context manager it kills all processes of the child and deletes the
    scratch folder on exit.
    """

    def __init__(
        self,
        limits: Limits,
        contract: Contract,
        *,
        tool: Sequence[str] = (),
        worker: str = "",
        fork_server: ForkServer | None = None,
        shared_bytes: int = 0,
    ) -> None:
        """Start it. Raises SandboxError when no child works on this machine, or only at a level
        below the one that `limits.trust` needs.

        - tool: the command of a tool that runs the interpreter, such as compute-sanitizer. Its
          failures say nothing about the sandbox.
        - worker: the module that serves requests in the child; "": the judge's own.
        - fork_server: forks the child; None: a new interpreter.
        - shared_bytes: GPU memory to share with the child, for messages that fit into it; see
          `arena`, and `enlarge_arena` for larger ones.
        """
        self.limits, self._shared_bytes = limits, shared_bytes
        self._fork_server = fork_server
        self._under, self._worker = tuple(tool), worker or WORKER
        self.confinement = choose_confinement(limits)
        try:
            self._begin(contract)
        except SandboxError:
            scope = cancellable.current_scope()
            # A fork server or a tool may be at fault, and not the sandbox.
            is_plain_start = fork_server is None and not tool
            if (
                limits.trust != "own"
                or self.confinement.level < 2
                or not is_plain_start
                or (scope is not None and scope.cancelled)
            ):
                raise
            self._begin_again(contract)

    def _begin_again(self, contract: Contract) -> None:
        """Start it once more, and then at the next lower level, for own code only."""
        try:
            # Beside much other work a start may fail by its deadline.
            self._begin(contract)
        except SandboxError as error:
            # The acts of the probe did not cover it.
            probe.record_failed_level(self.limits, self.confinement.level, str(error))
            self.confinement = choose_confinement(self.limits)
            self._begin(contract)

    def _begin(self, contract: Contract) -> None:
        self.scratch = make_scratch()
        # Closed by `close`. It has no name, so the child cannot open it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._files = 0
        # Requests that go with the next one.
        self._due: list[dict[str, Any]] = []
        # False once it hung, died, broke the protocol or lost its CUDA context.
        self.usable = True
        # The child's global state before it had read anything of a candidate.
        self.surroundings: dict[str, Any] = {}
        self.sharing = DeviceSharing()
        self.canaries = Tripwires()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._channel: Channel | None = None
        # On the monotonic clock: when the caller gives up, however long a request may take.
        self.given_up_at = math.inf
        try:
            self._start()
            self._greet(contract)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the child's supervisor, which leads its own process group and ends when the
        child does.
        """
        assert self._process is not None
        return self._process.pid

    def reserve_file(self) -> Path:
        """A new path in the scratch folder for tensors, which both sides may write. Raises
        CandidateFailure when the child is no longer usable.
        """
        if not self.usable:
            raise CandidateFailure("file", "the process was given up earlier", "resource")
        self._files += 1
        path = self.scratch / f"{self._files}.safetensors"
        if self.confinement.uid != os.getuid():
            # The child runs as another user. Other users cannot enter the folder.
            path.touch()
            path.chmod(0o666)
        return path

    def write_message(
        self, tensors: Sequence[torch.Tensor | None]
    ) -> tuple[Path, list[list[Any] | None]]:
        """Write tensors for a request; their file and layout. Raises CandidateFailure."""
        # Shared memory holds one message, and this one would overwrite that of a due request: the
        # child reads that first.
        if any("layout" in due for due in self._due):
            last = self._due.pop()
            self.call(last.pop("verb"), **last)
        path = self.reserve_file()
        return path, save_tensors(tensors, path)

    def put(self, name: str, tensors: Sequence[torch.Tensor | None], *, base: str = "") -> None:
        """Send an input set under a name; up to 256 MiB, together with the next request.

        `base`: name of the set that supplies the tensors that are None here. Raises
        CandidateFailure.
        """
        path, layout = self.write_message(tensors)
        self._choose_sender(message_bytes(tensors))(
            "put", name=name, layout=layout, path=str(path), base=base
        )

    def drop(self, names: Sequence[str], size_bytes: int) -> None:
        """Have the child free input sets and held outputs; up to 256 MiB, with the next request.
        Raises CandidateFailure.
        """
        self._choose_sender(size_bytes)("drop", names=list(names))

    def _choose_sender(self, size_bytes: int) -> Callable[..., object]:
        return self.queue_request if size_bytes <= _SMALL_BYTES else self.call

    def queue_request(self, verb: str, **fields: Any) -> None:
        """Queue a request whose answer carries no values; it is served just before the next one.

        If it fails, the next request fails in its place. This saves a turn on a GPU that other
        processes use too.
        """
        self._due.append({"verb": verb, **fields})

    def call(self, verb: str, *, deadline_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Send a request and wait at most `deadline_s` seconds for its answer, and not beyond
        `given_up_at`.

        Raises CandidateFailure for an error, a wrong frame, the child's death or no answer in time.
        """
        assert self._channel is not None
        if not self.usable:
            raise CandidateFailure(verb, "the process was given up earlier", "resource")
        self.sharing.give_way()
        # Unpredictable: an answer that a candidate wrote ahead cannot pass for the answer.
        nonce = secrets.token_hex(8)
        # Emptied first: a request that fails is not sent again.
        due, self._due = self._due, []
        deadline_s = self.limits.deadline_s if deadline_s is None else deadline_s
        deadline = min(time.monotonic() + deadline_s, self.given_up_at)
        try:
            self._channel.send(
                {"verb": verb, "nonce": nonce, "due": due, **fields}, deadline=deadline
            )
            answer = self._channel.receive(deadline=deadline)
        except TimeoutError:
            self.usable = False
            self._stop()
            # After the stop: the supervisor prints the end of the output when it ends. Before
            # `close`, which deletes the log.
            tail = self._quote_log_tail()
            self.close()
            reason = (
                "all requests together took longer than they may"
                if deadline == self.given_up_at
                else "no answer within its deadline"
            )
            raise CandidateFailure(
                verb, f"{reason}; killed{tail}", "resource", is_late=True
            ) from None
        except EOFError:
            # The exit status says more than the end of the stream.
            raise self._explain_death(verb) from None
        except SandboxError as error:
            # A send fails when the process has died: a broken pipe, not garbage.
            if error.stage == "sending":
                raise self._explain_death(verb) from error
            self.usable = False
            raise CandidateFailure(
                verb, f"garbage on the channel: {error.found}", "protocol"
            ) from error
        if answer.get("nonce") != nonce:
            self.usable = False
            raise CandidateFailure(verb, "an answer without this request's nonce", "protocol")
        if "error" in answer:
            # A due request may be the one that failed.
            verb = next(
                (request["verb"] for request in due if request["verb"] == answer.get("failed")),
                verb,
            )
            # After an illegal access, CUDA calls of this process fail for later candidates too.
            self.usable = not answer.get("lost", False)
            raise CandidateFailure(
                verb, _cut_middle(str(answer["error"])), str(answer.get("detector") or verb)
            )
        return answer

    @contextmanager
    def enlarge_arena(self, size_bytes: int) -> Iterator[None]:
        """Share `size_bytes` of GPU memory for the messages of the body, if the memory that is
        shared already is too small for them.

        Without a GPU, or where it is full, messages go through files. Raises CandidateFailure for
        one of over 2 GiB, which would take minutes that way.
        """
        make_room(self.limits.device, size_bytes)
        standing = arena.find_arena(self.scratch)
        if (
            standing is None
            or size_bytes <= standing.size_bytes
            or not self._share_larger_arena(size_bytes)
        ):
            yield
            return
        try:
            yield
        finally:
            try:
                if self.usable:
                    # The child closes its mapping before the memory is freed: CUDA leaves the other
                    # order undefined.
                    self.call("unshare")
            finally:
                arena.return_to_first(self.scratch)

    def _share_larger_arena(self, size_bytes: int) -> bool:
        try:
            larger = arena.share_at_once(size_bytes, self.limits.device)
        except SandboxError as error:
            telemetry.record("judge", "arena", "none", reason=error.found)
            if size_bytes > _MOST_BY_FILE_BYTES:
                reason = f"the GPU has no room for a message of {size_bytes / (1 << 30):.1f} GiB: {error.found}"
                raise CandidateFailure("handing tensors over", reason, "resource") from error
            return False
        arena.lend_also(self.scratch, larger)
        try:
            shared = not self.call("share", arena=(larger.handle, larger.size_bytes))["unshared"]
        except CandidateFailure:
            arena.return_to_first(self.scratch)
            raise
        if not shared:
            arena.return_to_first(self.scratch)
        return shared

    def finish(self, wait_s: float) -> bool:
        """Close the channel and let the child end by itself: a tool such as compute-sanitizer
        reports at the end. Whether it ended within `wait_s` seconds.
        """
        assert self._process is not None
        assert self._channel is not None
        self.usable = False
        self._channel.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Kill everything, reap the supervisor, delete the scratch folder. Safe to call twice."""
        self.usable = False
        if self._channel is not None:
            self._channel.close()
        self._stop()
        arena.withdraw(self.scratch)
        self._log.close()
        self.canaries.close()
        remove_scratch(self.scratch)

    def _stop(self) -> None:
        if self._process is not None:
            end_process(self._process)

    def _start(self) -> None:
        limits = self.limits
        variables = make_environment(
            self.scratch,
            own=limits.trust == "own",
            visible_gpu=limits.visible_gpu,
            has_compile_pool=limits.has_compile_pool,
        )
        plan = plan_launch(
            limits, self.confinement.level, self.scratch, variables, watched=bool(self._under)
        )
        uid = os.getuid() if plan.uid is None else plan.uid
        self.confinement = replace(self.confinement, uid=uid)
        parent_socket, child_socket = socket.socketpair()
        self._channel = Channel(parent_socket)
        command = [
            *self._under,
            sys.executable,
            "-P",
            "-m",
            self._worker,
            str(child_socket.fileno()),
        ]
        try:
            # A tool must start the interpreter itself, so it gets no fork.
            can_fork = (
                self._fork_server is not None
                and not self._under
                and self._fork_server.serves(variables)
            )
            launcher = (
                self._fork_server.launch
                if self._fork_server is not None and can_fork
                else launch_process
            )
            self._process = launcher(
                plan, command, variables, fds=(child_socket.fileno(),), log=self._log
            )
        finally:
            # The child has its own copy. With this one open, its death would not end the stream.
            child_socket.close()
        if (scope := cancellable.current_scope()) is not None:
            # Before the greeting, which waits for the import of torch: a cancelled search kills it
            # there.
            scope.add_process(self._process)

    def _greet(self, contract: Contract) -> None:
        limits = self.limits
        config = {
            "device": str(limits.device),
            "threads": limits.threads,
            "memory_bytes": limits.memory_bytes,
            "gpu_fraction": limits.gpu_fraction if limits.gpu else 1.0,
            "flags": choose_flags(contract),
            "scratch": str(self.scratch),
            # Below level 2 there is no filter, so the child must not install that of the run phase.
            "phase": limits.phase if self.confinement.level >= 2 else "build",
            "own": limits.trust == "own",
            "arena": self._share_arena(),
        }
        try:
            answer = self.call("hello", deadline_s=_START_S, **config)
        except CandidateFailure as error:
            raise SandboxError("starting", error.found) from error
        self.surroundings = answer["surroundings"]
        if answer["unshared"] and arena.find_arena(self.scratch) is not None:
            telemetry.record("judge", "arena", "none", reason=str(answer["unshared"]))
            arena.withdraw(self.scratch)

    def _share_arena(self) -> tuple[str, int] | None:
        """Handle and size in bytes of GPU memory for this child's messages.

        None where none was requested, or this machine cannot share it; files serve then.
        """
        if not (self._shared_bytes and self.limits.gpu):
            return None
        try:
            shared_arena = arena.share(self._shared_bytes, self.limits.device)
        except SandboxError as error:
            telemetry.record("judge", "arena", "none", reason=error.found)
            return None
        arena.lend(self.scratch, shared_arena)
        return shared_arena.handle, shared_arena.size_bytes

    def _explain_death(self, verb: str) -> CandidateFailure:
        assert self._process is not None
        self.usable = False
        try:
            # The stream ends a moment before the supervisor has reaped the child.
            status = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return CandidateFailure(verb, "hung up without ending", "protocol")
        if status >= 0:
            # Status 0 without an answer: a candidate that called exit is no crash.
            detector = "protocol" if status == 0 else "resource"
            return CandidateFailure(
                verb,
                f"the process exited with status {status} instead of answering{self._quote_log_tail()}",
                detector,
            )
        name = signal.Signals(-status).name
        return CandidateFailure(
            verb, f"the process died of {name}{self._quote_log_tail()}", "resource"
        )

    def _quote_log_tail(self) -> str:
        self._log.seek(0)
        text = self._log.read()[-_TAIL_CHARS:].decode(errors="replace").strip()
        return f"; its last words: {text!r}" if text else ""


def _cut_middle(text: str) -> str:
    """A long text without its middle: a traceback ends with the cause."""
    return (
        text
        if len(text) <= _ERROR_CHARS
        else f"{text[: _ERROR_CHARS // 2]} [...] {text[-_ERROR_CHARS // 2 :]}"
    )
