"""A disposable child process for one candidate: started, spoken to, and killed with everything it started.

This is sandbox level 1. It gives the child its own session, a cleaned environment, a private scratch folder, resource limits,
closed file descriptors and a deadline on every request, and kills the whole process group at the end. So a crash, a hang,
a memory grab, a sticky CUDA error, garbage on the channel or an early exit costs that candidate only.

What it does not stop: reading or writing any file the user can, the network, signals and ptrace between processes of one user, a
spinning GPU kernel that outlives its process, attacks on the driver. It is meant for Programs, which are data and hold no host
code; sources nobody vouches for need a higher level. If this process is itself killed (SIGKILL, SIGTERM) the child dies with it,
but its scratch folder stays.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torch_cudal1.errors import SandboxError
from torch_cudal1.judge.channel import Channel
from torch_cudal1.judge.rights import flags_for
from torch_cudal1.records import Contract
from torch_cudal1.settings import Settings, inherited_environment

__all__ = ["CandidateFailure", "Child", "Limits", "limits_for"]

WORKER = "torch_cudal1.judge.worker"
_START_S = 120.0  # importing torch from a cold network disk takes a minute; a hang must still end
_GRACE_S = 5.0
_ROOMY_BYTES = 8 << 30
_TAIL_CHARS = 600
_KEPT_NAMES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "CONDA_PREFIX", "VIRTUAL_ENV"),
)
_KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "TRITON_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "MKL_", "KMP_")


class CandidateFailure(SandboxError):
    """The child refused, failed or died while serving a request. It costs the candidate only; `detector` says what noticed."""

    def __init__(self, stage: str, found: str, detector: str) -> None:
        super().__init__(stage, found)
        self.detector = detector
        self.args = (stage, found, detector)  # so that it can be pickled


@dataclass(frozen=True)
class Limits:
    """What one child gets. `memory_bytes` 0: no limit. `visible_gpu`: a child that only compiles is shown none."""

    device: torch.device
    deadline_s: float
    memory_bytes: int = 0
    threads: int = 1
    visible_gpu: bool = True
    file_bytes: int = 64 << 30


def limits_for(settings: Settings, device: torch.device, *, visible_gpu: bool = True) -> Limits:
    """The limits that follow from the settings. An address-space limit breaks CUDA's reservations, so only CPU children get one."""
    memory = int(settings.memory_limit_gib * 2**30) if device.type == "cpu" else 0
    return Limits(device, settings.candidate_timeout_s, memory, torch.get_num_threads(), visible_gpu)


class Child:
    """A running child. Use it as a context manager: leaving it, by whatever exception, kills the group and deletes the scratch."""

    def __init__(self, limits: Limits, contract: Contract) -> None:
        """Start it. Raises SandboxError when no working child can be had on this machine."""
        self.limits = limits
        self.scratch = _make_scratch()
        self._log = self.scratch / "log"
        self._files = 0
        self.usable = True  # False once it hung, died or broke the protocol
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        try:
            self._start()
            self._greet(contract)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the child, which leads its own process group."""
        assert self._process is not None
        return self._process.pid

    def new_file(self) -> Path:
        """A fresh path in the scratch folder for tensors."""
        self._files += 1
        return self.scratch / f"{self._files}.safetensors"

    def call(self, verb: str, *, deadline_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Send a request and wait at most `deadline_s` seconds. Raises CandidateFailure for anything but a proper answer."""
        assert self._channel is not None
        if not self.usable:
            raise CandidateFailure(verb, "the process was given up earlier", "resource")
        nonce = secrets.token_hex(8)
        deadline = time.monotonic() + (self.limits.deadline_s if deadline_s is None else deadline_s)
        try:
            self._channel.send({"verb": verb, "nonce": nonce, **fields}, deadline=deadline)
            answer = self._channel.receive(deadline=deadline)
        except TimeoutError:
            self.usable = False
            tail = self._tail()
            self.close()
            raise CandidateFailure(verb, f"no answer within its deadline; killed{tail}", "resource") from None
        except EOFError:
            raise self._death(verb) from None
        except SandboxError as error:
            if error.stage == "sending":
                raise self._death(verb) from error
            self.usable = False
            raise CandidateFailure(verb, f"garbage on the channel: {error.found}", "protocol") from error
        if answer.get("nonce") != nonce:
            self.usable = False
            raise CandidateFailure(verb, "an answer without this request's nonce", "protocol")
        if "error" in answer:
            raise CandidateFailure(verb, str(answer["error"])[:2000], str(answer.get("detector") or verb))
        return answer

    def close(self) -> None:
        """Kill the whole process group, reap the child, delete the scratch folder. Safe to call twice."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            _kill_group(self._process)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        command = [sys.executable, "-P", "-m", WORKER, str(theirs.fileno())]
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.scratch,
                    env=_environment(self.scratch, self.limits),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            raise SandboxError("starting", f"{' '.join(command)}: {error}") from error
        finally:
            theirs.close()

    def _greet(self, contract: Contract) -> None:
        limits = self.limits
        config = {
            "device": str(limits.device),
            "threads": limits.threads,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "flags": flags_for(contract),
            "scratch": str(self.scratch),
            "parent": os.getpid(),
        }
        try:
            self.call("hello", deadline_s=_START_S, **config)
        except CandidateFailure as error:
            raise SandboxError("starting", error.found) from error

    def _death(self, verb: str) -> CandidateFailure:
        assert self._process is not None
        self.usable = False
        try:
            status = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return CandidateFailure(verb, "hung up without ending", "protocol")
        if status >= 0:
            detector = "protocol" if status == 0 else "resource"
            return CandidateFailure(verb, f"the process exited with status {status} instead of answering{self._tail()}", detector)
        name = signal.Signals(-status).name
        return CandidateFailure(verb, f"the process died of {name}{self._tail()}", "resource")

    def _tail(self) -> str:
        try:
            text = self._log.read_bytes()[-_TAIL_CHARS:].decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; its last words: {text!r}" if text else ""


def _make_scratch() -> Path:
    shared = Path("/dev/shm")  # memory, not disk, where there is enough of it
    try:
        roomy = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= _ROOMY_BYTES
        return Path(tempfile.mkdtemp(prefix="cudal1-judge-", dir=shared if roomy else None))
    except OSError as error:
        raise SandboxError("starting", f"no scratch folder: {error}") from error


def _environment(scratch: Path, limits: Limits) -> dict[str, str]:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # a light module, but only judging needs it

    kept = inherited_environment(_KEPT_NAMES, _KEPT_PREFIXES)
    package_root = str(Path(__file__).resolve().parents[2])
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # the user's own: what is compiled here is found again there
    if not limits.visible_gpu:
        kept["CUDA_VISIBLE_DEVICES"] = ""
    paths = [package_root, *(path for path in sys.path if path and Path(path).is_dir())]
    return kept | {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the child leads its group, and is not reaped yet, so the number is still its own
    except (ProcessLookupError, PermissionError):
        process.kill()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return  # in an uninterruptible driver call: it dies when that returns, and answers nobody
