"""`cudal1 doctor`: what this machine can do, what is missing, what to do about it, and where every
setting comes from.

It looks, asks, and has two small processes try what they can; it changes nothing but a probe file
that it removes from the cache folder again, and the folders of compilers' caches, which it makes
where they are missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config

from torch_cudal1.cli.commands import device
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core import native
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import PREFIX, Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import target_for, triton_version
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.confinement_level import (
    MIN_LEVEL,
    REMEDIES,
    WHAT_IS_NOT_STOPPED,
    WHAT_IS_STOPPED,
    choose_level,
)
from torch_cudal1.judge.sandbox.limits import Limits, make_limits
from torch_cudal1.store.cache.build_files import build_folder, count_builds
from torch_cudal1.store.cache.files import iter_files, size_of
from torch_cudal1.store.trust.lists import read_publishers, read_revocations

__all__ = ["HealthCheck", "examine", "run", "versions"]


@dataclass(frozen=True)
class HealthCheck:
    """One thing looked at. `ok`: True works, False does not, None is optional and absent. `needed`:
    without it nothing runs.
    """

    name: str
    ok: bool | None
    what: str
    remedy: str = ""
    needed: bool = False


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Print the findings. Exit code 1 if something needed does not work."""
    findings = examine(settings)
    # Only what nothing works without makes the exit code 1: a CPU-only machine is no failure.
    broken = [f for f in findings if f.needed and f.ok is False]
    limited = [f for f in findings if not f.needed and f.ok is False]
    verdict = _verdict(broken, limited)
    screen.line(f"torch-cudal1 {__version__}")
    states = {True: "ok", False: "NO", None: "absent"}
    rows = [
        [f.name, states[f.ok], f.what + (f". {f.remedy}" if f.remedy else "")] for f in findings
    ]
    screen.table(("what", "state", "details"), rows)
    screen.line("")
    in_force = _settings_in_force(settings)
    screen.table(("setting", "value", "from"), in_force)
    screen.line("")
    screen.line(verdict)
    screen.json(
        {
            "versions": versions(),
            "findings": findings,
            "settings": {
                name: {"value": plain(_value_to_show(settings, name)), "from": source}
                for name, _, source in in_force
            },
            "state": "broken" if broken else "limited" if limited else "ready",
            "verdict": verdict,
        }
    )
    return 1 if broken else 0


def versions() -> dict[str, str]:
    """Versions of what matters to a measurement; "" for what is not installed."""
    names = ("triton", "safetensors", "filelock", "rich", "matplotlib")
    package_versions = {
        "torch_cudal1": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return (
        package_versions
        | {name: _version(name) for name in names}
        | {"cuda": torch.version.cuda or "", "system": platform.platform()}
    )


def examine(settings: Settings) -> tuple[HealthCheck, ...]:
    """Everything that was looked at, in the order a person would ask."""
    return (
        HealthCheck("python", True, f"{platform.python_version()} ({sys.executable})"),
        HealthCheck(
            "torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
        ),
        _device(),
        _extension(),
        _inductor(),
        _triton(),
        _nvcc(),
        _cache(settings.cache_dir),
        _lists(settings),
        *_sandbox(settings),
        *(
            _extra(name, use)
            for name, use in (
                ("rich", "terminal tables and progress"),
                ("matplotlib", "plots of the HTML page"),
            )
        ),
    )


def _device() -> HealthCheck:
    problem = device.without_cuda()
    if problem:
        cpu = f"{target_for(torch.device('cpu')).sku}, {torch.get_num_threads()} threads"
        return HealthCheck("device", None, f"CPU only: {cpu}. No GPU because {problem}")
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    memory = f"{text.size(free)} of {text.size(total)} free"
    here = target_for(torch.device("cuda"))
    details = f"{here.sku} ({here.arch}), driver {here.driver}, {memory}, {torch.cuda.device_count()} visible"
    # The package's kernels need sm_80 or newer.
    if (major, minor) < (8, 0):
        return HealthCheck("device", False, details, "GPUs before sm_80 get baselines only")
    return HealthCheck("device", True, details)


def _extension() -> HealthCheck:
    # `status` also says why an extension that is there is not used.
    present, reason = native.status()
    if present:
        return HealthCheck("C++ extension", True, reason or "loaded")
    return HealthCheck(
        "C++ extension",
        False,
        reason,
        "plain Python does its work instead: same answers, more host time per call",
    )


def _inductor() -> HealthCheck:
    # torch's own reading of CXX, so this is the compiler that Inductor would call.
    configured = inductor_config.cpp.cxx
    compilers = [
        name for name in ((configured,) if isinstance(configured, str) else configured) if name
    ]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        details = f"no C++ compiler ({' or '.join(compilers)})"
        return HealthCheck(
            "Inductor",
            False,
            details,
            "install g++: without it torch.compile fails on CPU and only eager is a baseline",
        )
    # A compiler alone is not enough: Inductor's C++ includes Python.h, which slim images lack.
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        details = f"{_first_line(compiler)}, but {header} is missing"
        return HealthCheck("Inductor", False, details, "install the Python headers (python3-dev)")
    return HealthCheck(
        "Inductor", True, f"{_first_line(compiler)} at {compiler}, Python headers present"
    )


def _triton() -> HealthCheck:
    version = triton_version()
    if not version:
        return HealthCheck(
            "Triton",
            # CUDA builds of torch bring Triton, so there its absence is a fault.
            False if torch.version.cuda else None,
            "not installed",
            "Triton kernels are not offered",
        )
    problem = device.without_cuda()
    if problem:
        return HealthCheck(
            "Triton",
            None,
            f"{version}: it can compile for a named sm, but nothing can run here because {problem}",
        )
    return HealthCheck("Triton", True, version)


def _nvcc() -> HealthCheck:
    compiler = shutil.which("nvcc")
    if compiler is None:
        return HealthCheck(
            "nvcc", None, "not found; only needed to compile published CUDA C++ sources"
        )
    return HealthCheck("nvcc", True, f"{_first_line(compiler, last=True)} at {compiler}")


def _cache(folder: Path) -> HealthCheck:
    kernels = build_folder(folder)
    # Kernels kept for later searches are files of the same kind, and no entries.
    entries = [path for path in iter_files(folder, ".safetensors") if kernels not in path.parents]
    compiled = count_builds(folder)
    details = f"{folder}: {text.count_text(len(entries), 'entry', 'entries')}, {text.size(sum(map(size_of, entries)))}"
    if compiled.count:
        details += f"; {text.count_text(compiled.count, 'compiled kernel')} kept for later searches, {text.size(compiled.size_bytes)}"
    try:
        # The folder may not exist yet; then the question is whether it can be made.
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        # Tried, not read from permission bits: ACLs, read-only mounts and quotas are not in them.
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".cudal1-probe-"):
            pass
    except OSError as error:
        # Needed: without a cache no decision is kept, and every start would search again.
        remedy = "set TORCH_CUDAL1_CACHE_DIR or --cache-dir to a folder you may write to"
        return HealthCheck(
            "cache", False, f"{folder} cannot be written ({error.strerror})", remedy, needed=True
        )
    # An entry decides what this user's processes run, so a user who may write one chooses what
    # runs.
    open_to_all = [
        path
        for path in (folder, folder / "v1")
        if path.is_dir() and path.stat().st_mode & stat.S_IWOTH
    ]
    if open_to_all:
        return HealthCheck(
            "cache",
            False,
            f"{details}. Every user may write to it, and so decide what runs here",
            f"chmod o-w {open_to_all[0]}",
        )
    return HealthCheck("cache", True, details, needed=True)


def _lists(settings: Settings) -> HealthCheck:
    """Whom this machine believes about entries from elsewhere, and whether that can be found out."""
    publishers, revoked = read_publishers(settings.publishers), read_revocations(settings.revoked)
    bad = [list_.reason for list_ in (publishers, revoked) if isinstance(list_, Refusal)]
    if isinstance(publishers, Refusal) or isinstance(revoked, Refusal):
        return HealthCheck(
            "trust",
            False,
            "; ".join(bad),
            "until then baselines run in place of what these lists are asked about",
        )
    revoked_count = sum(map(len, (revoked.entry, revoked.program, revoked.key)))
    details = f"{text.count_text(len(publishers.names), 'publisher')} allowed, {text.count_text(revoked_count, 'record')} revoked"
    # Without the library no signature can be verified, so the list of publishers has no effect.
    if publishers.names and not _version("cryptography"):
        return HealthCheck(
            "trust",
            False,
            f"{details}, and no signature can be verified",
            "pip install 'torch-cudal1[sign]'",
        )
    # The setting `trust` decides what `pull` and `import` are good for on this machine.
    unsigned = (
        "validated first where a search is allowed, else refused"
        if settings.trust == "judge"
        else "refused"
    )
    return HealthCheck(
        "trust", True, f"{details}; unsigned entries of other machines are {unsigned}"
    )


def _sandbox(settings: Settings) -> tuple[HealthCheck, HealthCheck]:
    """What was tried in a child of each kind: the level it reached, what that leaves open, and the
    way to the next.
    """
    here = torch.device("cpu" if device.without_cuda() else "cuda")
    # Two kinds of children: code of this package needs less confinement than sources of others.
    kinds: tuple[tuple[str, Limits], ...] = (
        ("sandbox, own code", make_limits(settings, here)),
        ("sandbox, sources of others", make_limits(settings, here, trust="foreign", phase="run")),
    )
    first, second = (_probe_sandbox(name, limits) for name, limits in kinds)
    return first, second


def _probe_sandbox(name: str, limits: Limits) -> HealthCheck:
    # Tried in a child, act by act: a kernel may have Landlock and a container may forbid it.
    attempts = probe.find_levels(limits)
    choice = choose_level(limits.trust, attempts, unsafe=limits.unsafe)
    best = max(attempts, key=lambda probed: probed.level)
    level = best.level
    controls = [
        control.name for control in best.controls if control.ok and 0 < control.level <= level
    ]
    parts = [
        f"level {level} of 3 (user {best.uid}, Landlock {best.landlock or 'absent'}), tried act by act"
    ]
    parts += (
        [
            f"Stops {'; '.join(WHAT_IS_STOPPED[n] for n in range(1, level + 1))} ({', '.join(controls)})"
        ]
        if level
        else []
    )
    parts.append(f"Does not stop {WHAT_IS_NOT_STOPPED[level]}")
    parts += [
        f"Level {probed.asked} not reached: {probed.why}"
        for probed in attempts
        if probed.asked > level
    ]
    remedy = f"For level {level + 1} {REMEDIES[level + 1]}" if choice.missing and level < 3 else ""
    # Below the least level foreign sources do not run at all, unless the setting says so.
    if not choice.level:
        remedy = f"Sources of others are refused here. {remedy}. The setting unsafe_sandbox allows them all the same"
    # Foreign sources run here with less confinement than they need, so the table says it.
    elif limits.unsafe and limits.trust == "foreign" and level < MIN_LEVEL["foreign"]:
        remedy = f"Allowed all the same by the setting unsafe_sandbox. {remedy}"
    return HealthCheck(
        name, bool(choice.level), ". ".join(parts), remedy, needed=limits.trust == "own"
    )


def _extra(name: str, use: str) -> HealthCheck:
    version = _version(name)
    if version:
        return HealthCheck(name, True, f"{version} ({use})")
    return HealthCheck(name, None, f"optional, for {use}: pip install 'torch-cudal1[report]'")


def _settings_in_force(settings: Settings) -> list[tuple[str, str, str]]:
    """Each setting, its value and its source: the command line, a variable, or the default."""
    # Compared by value: a variable that repeats the default is shown as the default.
    from_env, default = Settings.from_env(), Settings()
    rows = []
    for f in fields(Settings):
        value = getattr(settings, f.name)
        # The command line wins over the environment, which wins over the default.
        if value != getattr(from_env, f.name):
            source = "command line"
        elif getattr(from_env, f.name) != getattr(default, f.name):
            source = PREFIX + f.name.upper()
        else:
            source = "default"
        shown = _value_to_show(settings, f.name)
        rows.append(
            (
                f.name,
                str(shown) if not isinstance(shown, tuple) else ":".join(map(str, shown)) or "none",
                source,
            )
        )
    return rows


def _value_to_show(settings: Settings, name: str) -> Any:
    """A setting's value; of a key only whether there is one."""
    value = getattr(settings, name)
    # A key is a secret: only whether it is set is printed.
    return ("(set, not shown)" if value else "") if name == "llm_key" else value


def _verdict(broken: list[HealthCheck], limited: list[HealthCheck]) -> str:
    if broken:
        return "Verdict: not usable yet. " + "; ".join(
            f"{f.name}: {f.what}. {f.remedy}" for f in broken
        )
    if limited:
        return "Verdict: works, with limits: " + "; ".join(
            f"{f.name} ({f.remedy or f.what})" for f in limited
        )
    return "Verdict: ready" + (" (CPU only)" if device.without_cuda() else "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(program: str, *, last: bool = False) -> str:
    """What `program --version` says first (nvcc: last), or why it says nothing."""
    try:
        process = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} does not run ({type(error).__name__})"
    lines = process.stdout.strip().splitlines() or [f"{program} answered nothing"]
    return lines[-1 if last else 0]


def as_environment(settings: Settings) -> dict[str, Any]:
    """Versions and findings as name -> text, for the environment table of a page."""
    findings = {
        f.name: f.what
        for f in examine(settings)
        # What numbers on a page depend on.
        if f.name in ("device", "C++ extension", "Inductor", "Triton")
    }
    return {name: version for name, version in versions().items() if version} | findings
