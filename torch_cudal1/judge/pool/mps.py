"""One GPU's work of many processes side by side: an MPS server of NVIDIA's, started for an
evaluator and ended with it.

Without it a GPU gives the contexts of different processes turns, and a judge whose lanes exchange a
hundred messages for a program mostly waits for its own. The price is that a fault of one process
(an address that nothing is mapped at) ends the work of all that are served: `lanes` notices and
asks about the programs that were in the air one by one, elsewhere. So it is for programs of our own
templates only, where faults are rare.

The daemon belongs to this evaluator alone: its socket and its log are in a folder of its own, it
serves one GPU, and it dies with the thread that started it. Source: NVIDIA, Multi-Process Service,
sections 3.3 (limits) and 3.6 (errors).
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
from torch_cudal1.core.settings import select_environment
from torch_cudal1.judge.sandbox.confine.process_identity import die_with_parent

__all__ = ["MOST_CLIENTS", "Mps", "start"]

MOST_CLIENTS = 48  # contexts that a server serves on one GPU before Blackwell
_CONTROL = "nvidia-cuda-mps-control"
_PREFIX, _OWNER = "cudal1-mps-", "owner"
_START_S, _PROBE_S, _END_S = 10.0, 60.0, 10.0
_INHERITED = ("PATH", "HOME", "LD_LIBRARY_PATH"), ("CUDA_", "NVIDIA_")
_PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
"""


@dataclass
class Mps:
    """A server for one GPU. `variables`: of the environment, before a process that it is to serve
    first meets CUDA; for that one the GPU is device 0.
    """

    variables: dict[str, str]
    _folder: Path
    _daemon: subprocess.Popen[bytes]
    _lock: BinaryIO

    def close(self) -> None:
        """End it and all work that it serves. Safe to call twice."""
        if self._daemon.poll() is None:
            self.told("quit -t 1")
            try:
                self._daemon.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def told(self, command: str) -> str:
        """What the daemon answers to a command; "" for nothing within some seconds."""
        environment = select_environment(*_INHERITED) | self.variables
        try:
            asked = subprocess.run(
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
        return asked.stdout.strip()

    def ready(self) -> str:
        """Why no process can be served, "" if one was."""
        until = time.monotonic() + _START_S
        while not (self._folder / "control").exists():
            if self._daemon.poll() is not None or time.monotonic() > until:
                return f"the daemon did not start: {self._log()}"
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
            return "a process that it should serve did not start in time"
        if probe.returncode:
            return f"it serves no process: {self._log()}"
        return "" if self.told("get_server_list") else "a process ran, but not through it"

    def _log(self) -> str:
        path = self._folder / "control.log"
        return path.read_text(errors="replace").strip()[-300:] if path.exists() else "no log"


def start(device: torch.device) -> Mps | None:
    """A server for this GPU, None where this machine has no such program or it does not work here."""
    if shutil.which(_CONTROL) is None:
        return None
    _sweep()
    folder = Path(
        tempfile.mkdtemp(prefix=_PREFIX)
    )  # a short path: a socket's name has 108 characters
    lock = _owned(folder)
    variables = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(folder))
    variables["CUDA_VISIBLE_DEVICES"] = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    daemon = subprocess.Popen(
        [_CONTROL, "-f"],
        env=select_environment(*_INHERITED) | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    server = Mps(variables, folder, daemon, lock)
    if problem := server.ready():
        telemetry.record("judge", "mps", "none", reason=problem)
        server.close()
        return None
    telemetry.record("judge", "mps", "started")
    return server


def _owned(folder: Path) -> BinaryIO:
    """A file of the folder, locked for as long as this process lives, whoever else sees it from
    whichever container.
    """
    lock = open(folder / "new", "xb")  # noqa: SIM115  the server's owner closes it
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "new", folder / _OWNER)
    return lock


def _sweep() -> None:
    """Remove the folders of evaluators that were killed; their daemons died with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with (
            contextlib.suppress(OSError),
            open(folder / _OWNER, "rb") as lock,
        ):  # somebody else's, not locked yet, or alive
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
