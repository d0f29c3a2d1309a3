"""Runs an NVIDIA MPS server for one evaluator, so that many processes run kernels side by side.

Without it a GPU gives the contexts of different processes turns. A slot exchanges a hundred
messages for a program, and mostly waits for its turn: 9 programs a second on an H200, 19 with a
server. The price: a fault of one process (an unmapped address) ends the work of all processes that
the server serves. `slots` notices that, and measures the programs concerned again without the
server. So it is used for own programs only, where faults are rare.

The daemon belongs to one evaluator: its socket and log are in its own folder, it serves one GPU,
and it ends with the thread that started it. Source: NVIDIA, Multi-Process Service, sections 3.3
(limits) and 3.6 (errors).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import select_environment
from torch_cudal1.judge.sandbox.confine.process_identity import die_with_parent

__all__ = ["MOST_CLIENTS", "Mps", "start"]

# The most contexts that a server serves on one GPU before Blackwell.
MOST_CLIENTS = 48
_CONTROL = "nvidia-cuda-mps-control"
_PREFIX, _OWNER = "cudal1-mps-", "owner"
_START_S, _PROBE_S, _END_S = 10.0, 60.0, 10.0
_INHERITED = ("PATH", "HOME", "LD_LIBRARY_PATH"), ("CUDA_", "NVIDIA_")
# A context, through the driver alone: importing torch would take seconds.
_PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
"""


@dataclass
class Mps:
    """A server for one GPU.

    `variables`: environment variables that a process must set before it initialises CUDA, to be
    served. The GPU is device 0 for that process.
    """

    variables: dict[str, str]
    _folder: Path
    _daemon: subprocess.Popen[bytes]
    _lock: BinaryIO

    def close(self) -> None:
        """End the server and all work that it serves. Safe to call twice."""
        if self._daemon.poll() is None:
            self.ask_daemon("quit -t 1")
            try:
                self._daemon.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def ask_daemon(self, command: str) -> str:
        """The daemon's answer to a command; "" where none comes within 10 s."""
        environment = select_environment(*_INHERITED) | self.variables
        try:
            answer = subprocess.run(
                [_CONTROL],
                input=f"{command}\n",
                env=environment,
                capture_output=True,
                text=True,
                timeout=_END_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return answer.stdout.strip()

    def probe(self) -> Refusal | None:
        """Start a process through the server, to see that it can serve one."""
        until = time.monotonic() + _START_S
        while not (self._folder / "control").exists():
            if self._daemon.poll() is not None or time.monotonic() > until:
                return Refusal(f"the daemon did not start: {self._log()}")
            time.sleep(0.02)
        environment = select_environment(*_INHERITED) | self.variables
        try:
            probe = subprocess.run(
                [sys.executable, "-c", _PROBE],
                env=environment,
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Refusal("a process that it should serve did not start in time")
        if probe.returncode:
            return Refusal(f"it serves no process: {self._log()}")
        # A process that finds no daemon runs without it, and would pass the probe.
        if not self.ask_daemon("get_server_list"):
            return Refusal("a process ran, but not through it")
        return None

    def _log(self) -> str:
        path = self._folder / "control.log"
        return path.read_text(errors="replace").strip()[-300:] if path.exists() else "no log"


def start(device: torch.device) -> Mps | None:
    """A server for this GPU; None where this machine has no MPS, or it does not work."""
    if shutil.which(_CONTROL) is None:
        return None
    _sweep()
    # A short path: the name of a socket has at most 108 characters.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = _lock_folder(folder)
    variables = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(folder))
    variables["CUDA_VISIBLE_DEVICES"] = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    daemon = subprocess.Popen(
        # In the foreground: a daemon that detaches would not be a child of this process.
        [_CONTROL, "-f"],
        env=select_environment(*_INHERITED) | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A killed evaluator must not leave a daemon behind.
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    server = Mps(variables, folder, daemon, lock)
    if refusal := server.probe():
        telemetry.record("judge", "mps", "none", reason=refusal.reason)
        server.close()
        return None
    telemetry.record("judge", "mps", "started")
    return server


def _lock_folder(folder: Path) -> BinaryIO:
    """A file in the folder that stays locked while this process lives."""
    # A lock, not a process id: another container sees the folder, but not the process.
    lock = open(folder / "new", "xb")  # noqa: SIM115  the server's owner closes it
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Renamed when it is locked: `_sweep` never sees an owner file without a lock.
    os.rename(folder / "new", folder / _OWNER)
    return lock


def _sweep() -> None:
    """Remove the folders of evaluators that were killed; their daemons died with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # OSError: the folder is another user's, not locked yet, or in use.
        with contextlib.suppress(OSError), open(folder / _OWNER, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
