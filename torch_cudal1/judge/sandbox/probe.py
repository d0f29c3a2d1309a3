"""Finds out, in a child, what its confinement stops and what it permits. Nothing is inferred from
version numbers. Results are kept for the life of the process.

`probe_level` probes one level; `find_levels` the levels that a trust gets, from the highest to the
first that comes out right. The acts are those of `judge.sandbox.confine.acts`; nothing is known
about what none of them tries.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.sandbox.confine import acts, landlock, seccomp
from torch_cudal1.judge.sandbox.confinement_level import Control, ProbeResult
from torch_cudal1.judge.sandbox.filesystem_policy import make_environment
from torch_cudal1.judge.sandbox.limits import Limits, Phase, Trust
from torch_cudal1.judge.sandbox.scratch import make_scratch, remove_scratch
from torch_cudal1.judge.sandbox.start import end_process, launch_process, plan_launch

__all__ = ["digest_filters", "find_levels", "probe_level"]

_TIMEOUT_S = 120.0
_KNOWN: dict[tuple[Trust, Phase, bool], tuple[ProbeResult, ...]] = {}


def find_levels(limits: Limits) -> tuple[ProbeResult, ...]:
    """The results of each level, from the highest to the first that came out right. They are kept
    for the life of this process.
    """
    key = (limits.trust, limits.phase, limits.gpu)
    if key not in _KNOWN:
        results: list[ProbeResult] = []
        for level in (2, 1) if limits.trust == "own" else (3, 2, 1):
            results.append(probe_level(limits, level))
            if results[-1].level == level:
                break
        _KNOWN[key] = tuple(results)
    return _KNOWN[key]


def record_failed_level(limits: Limits, level: int, why: str) -> None:
    """Note that a child could not start at a level, although its probe came out right."""
    key = (limits.trust, limits.phase, limits.gpu)
    results = tuple(replace(p, error=why) if p.asked == level else p for p in _KNOWN.get(key, ()))
    # The next lower level may not have been probed: `find_levels` stopped above it.
    _KNOWN[key] = (
        results
        if any(p.asked < level for p in results)
        else (*results, probe_level(limits, level - 1))
    )


def probe_level(limits: Limits, level: int) -> ProbeResult:
    """Start a child confined to `level`, which tries every act; what came of them.

    A failure to start is a result too, with its `error`.
    """
    facts = ProbeResult(
        level,
        uid=os.getuid(),
        kernel=os.uname().release,
        landlock=landlock.find_version() if level > 1 else 0,
    )
    try:
        with _set_up_targets() as targets:
            return _measure_level(
                limits, replace(facts, filter_digest=digest_filters(limits, level)), targets
            )
    except (SandboxError, OSError, ValueError, KeyError, TypeError) as error:
        return replace(facts, error=f"{error}")


def digest_filters(limits: Limits, level: int) -> str:
    """The sha256 of a child's system-call filters; "" when it has none. The rules are those for
    process id 0, so that every child of a kind has the same digest.
    """
    if level < 2 or not seccomp.is_supported():
        return ""
    own = limits.trust == "own"
    phases: tuple[Phase, ...] = ("build", "run") if limits.phase == "run" else ("build",)
    return seccomp.digest_filter(
        tuple(rule for phase in phases for rule in seccomp.list_rules(phase, own=own))
    )


def _measure_level(limits: Limits, facts: ProbeResult, targets: dict[str, Any]) -> ProbeResult:
    scratch = make_scratch()
    try:
        own = limits.trust == "own"
        variables = make_environment(scratch, own=own, visible_gpu=limits.visible_gpu)
        probe_targets = acts.ProbeTargets(
            **targets,
            scratch=str(scratch),
            library=str(Path(torch.__file__)),
            compiler=_find_compiler(variables.get("PATH")),
            gpu=limits.gpu,
            own=own,
            run=limits.phase == "run",
            level=facts.asked,
        )
        # The act "file size" writes past the limit.
        small = replace(limits, file_bytes=1 << 20)
        plan = plan_launch(small, facts.asked, scratch, variables)
        command = [
            sys.executable,
            "-S",
            "-P",
            "-m",
            "torch_cudal1.judge.sandbox.confine.acts",
            acts.format_targets(probe_targets),
        ]
        with tempfile.TemporaryFile() as log:
            process = launch_process(plan, command, variables, fds=(), log=log)
            try:
                process.wait(_TIMEOUT_S)
            finally:
                end_process(process)
            # After the end of the supervisor, which prints the output of the acts.
            log.seek(0)
            output = log.read().decode(errors="replace").strip()
        uid = os.getuid() if plan.uid is None else plan.uid
        return replace(
            facts, uid=uid, controls=(*_parse_controls(output), _check_survivors(scratch))
        )
    finally:
        remove_scratch(scratch)


def _parse_controls(output: str) -> tuple[Control, ...]:
    # Libraries may print before it.
    last = output.splitlines()[-1] if output else ""
    if not last.startswith("{"):
        raise SandboxError("probing", f"the child said {output[-300:]!r}")
    controls = []
    for name, (happened, detail) in json.loads(last).items():
        level = 0 if name in acts.NEEDS else acts.ACTS[name][0]
        if name != acts.NO_SURVIVORS:
            # A needed act (level 0) is right if it happened, a forbidden act if it did not.
            controls.append(Control(name, level, happened == (level == 0), detail))
        elif not happened:
            raise SandboxError("probing", f"no process could be left behind to look for: {detail}")
    return tuple(controls)


def _check_survivors(scratch: Path) -> Control:
    """Whether the process that was left behind is dead: its lock is free."""
    with open(scratch / acts.LOCK_NAME, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Control(
                acts.NO_SURVIVORS,
                1,
                False,
                "a process in a session of its own outlived its supervisor",
            )
    return Control(
        acts.NO_SURVIVORS, 1, True, "a process in a session of its own was found and killed"
    )


@contextlib.contextmanager
def _set_up_targets() -> Iterator[dict[str, Any]]:
    """The targets of the forbidden acts, outside the sandbox. Any user may use them, so only the
    confinement can stop the child.
    """
    outside = Path(tempfile.mkdtemp(prefix="cudal1-canary-"))
    name = f"cudal1-canary-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, outside, ignore_errors=True)
        outside.chmod(0o777)
        canary, path = outside / "canary", outside / "socket"
        canary.write_text("a secret")
        canary.chmod(0o644)
        tcp, udp, abstract, named = (
            stack.enter_context(socket.socket(family, kind))
            for family, kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_INET, socket.SOCK_DGRAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
            )
        )
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        abstract.bind("\0" + name)
        named.bind(str(path))
        path.chmod(0o777)
        # A refused connection would look like a control that holds.
        for listener in (tcp, abstract, named):
            listener.listen(1)
        yield {
            "canary": str(canary),
            "outside": str(outside),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "abstract": name,
            "path": str(path),
            "judge": os.getpid(),
        }


def _find_compiler(path: str | None) -> str:
    """Path of the C++ compiler that Inductor would call, "" if there is none."""
    configured = inductor_config.cpp.cxx
    names = [
        name for name in ((configured,) if isinstance(configured, str) else configured) if name
    ]
    return next(filter(None, (shutil.which(name, path=path) for name in names)), "")
