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
from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import PREFIX, Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import target_for, triton_version
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.confinement_level import (
    LOWEST,
    NOT_STOPPED,
    REMEDIES,
    STOPPED,
    choose,
)
from torch_cudal1.judge.sandbox.limits import Limits, limits_for
from torch_cudal1.store.cache.build_files import built_home, kept_under
from torch_cudal1.store.cache.files import files_under, size_of
from torch_cudal1.store.trust.lists import BadList, read_publishers, read_revocations

__all__ = ["Finding", "examine", "run", "versions"]


@dataclass(frozen=True)
class Finding:
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
                name: {"value": plain(_shown(settings, name)), "from": source}
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
    found = {
        "torch_cudal1": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return (
        found
        | {name: _version(name) for name in names}
        | {"cuda": torch.version.cuda or "", "system": platform.platform()}
    )


def examine(settings: Settings) -> tuple[Finding, ...]:
    """Everything that was looked at, in the order a person would ask."""
    return (
        Finding("python", True, f"{platform.python_version()} ({sys.executable})"),
        Finding("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
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


def _device() -> Finding:
    why = device.without_cuda()
    if why:
        cpu = f"{target_for(torch.device('cpu')).sku}, {torch.get_num_threads()} threads"
        return Finding("device", None, f"CPU only: {cpu}. No GPU because {why}")
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    memory = f"{text.size(free)} of {text.size(total)} free"
    here = target_for(torch.device("cuda"))
    what = f"{here.sku} ({here.arch}), driver {here.driver}, {memory}, {torch.cuda.device_count()} visible"
    if (major, minor) < (8, 0):
        return Finding("device", False, what, "GPUs before sm_80 get baselines only")
    return Finding("device", True, what)


def _extension() -> Finding:
    present, reason = native.status()
    if present:
        return Finding("C++ extension", True, reason or "loaded")
    return Finding(
        "C++ extension",
        False,
        reason,
        "plain Python does its work instead: same answers, more host time per call",
    )


def _inductor() -> Finding:
    asked = inductor_config.cpp.cxx  # torch's own reading of CXX: the compiler Inductor would call
    compilers = [name for name in ((asked,) if isinstance(asked, str) else asked) if name]
    found = next(filter(None, map(shutil.which, compilers)), None)
    if found is None:
        what = f"no C++ compiler ({' or '.join(compilers)})"
        return Finding(
            "Inductor",
            False,
            what,
            "install g++: without it torch.compile fails on CPU and only eager is a baseline",
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        what = f"{_first_line(found)}, but {header} is missing"
        return Finding("Inductor", False, what, "install the Python headers (python3-dev)")
    return Finding("Inductor", True, f"{_first_line(found)} at {found}, Python headers present")


def _triton() -> Finding:
    version = triton_version()
    if not version:
        return Finding(
            "Triton",
            False if torch.version.cuda else None,
            "not installed",
            "Triton kernels are not offered",
        )
    why = device.without_cuda()
    if why:
        return Finding(
            "Triton",
            None,
            f"{version}: it can compile for a named sm, but nothing can run here because {why}",
        )
    return Finding("Triton", True, version)


def _nvcc() -> Finding:
    found = shutil.which("nvcc")
    if found is None:
        return Finding("nvcc", None, "not found; only needed to compile published CUDA C++ sources")
    return Finding("nvcc", True, f"{_first_line(found, last=True)} at {found}")


def _cache(folder: Path) -> Finding:
    kernels = built_home(folder)
    entries = [path for path in files_under(folder, ".safetensors") if kernels not in path.parents]
    compiled = kept_under(folder)
    what = f"{folder}: {text.counted(len(entries), 'entry', 'entries')}, {text.size(sum(map(size_of, entries)))}"
    if compiled.count:
        what += f"; {text.counted(compiled.count, 'compiled kernel')} kept for later searches, {text.size(compiled.size_bytes)}"
    try:
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".cudal1-probe-"):
            pass
    except OSError as error:
        remedy = "set TORCH_CUDAL1_CACHE_DIR or --cache-dir to a folder you may write to"
        return Finding(
            "cache", False, f"{folder} cannot be written ({error.strerror})", remedy, needed=True
        )
    open_to_all = [
        path
        for path in (folder, folder / "v1")
        if path.is_dir() and path.stat().st_mode & stat.S_IWOTH
    ]
    if open_to_all:
        return Finding(
            "cache",
            False,
            f"{what}. Everybody may write it, and so decide what runs here",
            f"chmod o-w {open_to_all[0]}",
        )
    return Finding("cache", True, what, needed=True)


def _lists(settings: Settings) -> Finding:
    """Whom this machine believes about entries from elsewhere, and whether that can be found out."""
    publishers, revoked = read_publishers(settings.publishers), read_revocations(settings.revoked)
    bad = [found.reason for found in (publishers, revoked) if isinstance(found, BadList)]
    if isinstance(publishers, BadList) or isinstance(revoked, BadList):
        return Finding(
            "trust",
            False,
            "; ".join(bad),
            "until then baselines run in place of what these lists are asked about",
        )
    gone = sum(map(len, (revoked.entry, revoked.program, revoked.key)))
    what = f"{text.counted(len(publishers.names), 'publisher')} allowed, {text.counted(gone, 'record')} revoked"
    if publishers.names and not _version("cryptography"):
        return Finding(
            "trust",
            False,
            f"{what}, and no signature can be verified",
            "pip install 'torch-cudal1[sign]'",
        )
    unsigned = (
        "judged first where a search is allowed, else refused"
        if settings.trust == "judge"
        else "refused"
    )
    return Finding("trust", True, f"{what}; what nobody signed and others made is {unsigned}")


def _sandbox(settings: Settings) -> tuple[Finding, Finding]:
    """What was tried in a child of each kind: the level it reached, what that leaves open, and the
    way to the next.
    """
    here = torch.device("cpu" if device.without_cuda() else "cuda")
    kinds: tuple[tuple[str, Limits], ...] = (
        ("sandbox, own code", limits_for(settings, here)),
        ("sandbox, sources of others", limits_for(settings, here, trust="foreign", phase="run")),
    )
    first, second = (_confined(name, limits) for name, limits in kinds)
    return first, second


def _confined(name: str, limits: Limits) -> Finding:
    seen = probe.survey(limits)
    choice = choose(limits.trust, seen, unsafe=limits.unsafe)
    best = max(seen, key=lambda probed: probed.level)
    level = best.level
    held = [control.name for control in best.controls if control.ok and 0 < control.level <= level]
    parts = [
        f"level {level} of 3 (user {best.uid}, Landlock {best.landlock or 'absent'}), tried act by act"
    ]
    parts += (
        [f"Stops {'; '.join(STOPPED[n] for n in range(1, level + 1))} ({', '.join(held)})"]
        if level
        else []
    )
    parts.append(f"Does not stop {NOT_STOPPED[level]}")
    parts += [
        f"Level {probed.asked} not reached: {probed.why}" for probed in seen if probed.asked > level
    ]
    remedy = f"For level {level + 1} {REMEDIES[level + 1]}" if choice.missing and level < 3 else ""
    if not choice.level:
        remedy = f"Sources of others are refused here. {remedy}. The setting unsafe_sandbox allows them all the same"
    elif limits.unsafe and limits.trust == "foreign" and level < LOWEST["foreign"]:
        remedy = f"Allowed all the same by the setting unsafe_sandbox. {remedy}"
    return Finding(name, bool(choice.level), ". ".join(parts), remedy, needed=limits.trust == "own")


def _extra(name: str, use: str) -> Finding:
    version = _version(name)
    if version:
        return Finding(name, True, f"{version} ({use})")
    return Finding(name, None, f"optional, for {use}: pip install 'torch-cudal1[report]'")


def _settings_in_force(settings: Settings) -> list[tuple[str, str, str]]:
    """Each setting, its value and its source: the command line, a variable, or the default."""
    from_env, default = Settings.from_env(), Settings()
    rows = []
    for f in fields(Settings):
        value = getattr(settings, f.name)
        if value != getattr(from_env, f.name):
            source = "command line"
        elif getattr(from_env, f.name) != getattr(default, f.name):
            source = PREFIX + f.name.upper()
        else:
            source = "default"
        shown = _shown(settings, f.name)
        rows.append(
            (
                f.name,
                str(shown) if not isinstance(shown, tuple) else ":".join(map(str, shown)) or "none",
                source,
            )
        )
    return rows


def _shown(settings: Settings, name: str) -> Any:
    """A setting's value; of a key only whether there is one."""
    value = getattr(settings, name)
    return ("(set, not shown)" if value else "") if name == "llm_key" else value


def _verdict(broken: list[Finding], limited: list[Finding]) -> str:
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
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} does not run ({type(error).__name__})"
    lines = done.stdout.strip().splitlines() or [f"{program} answered nothing"]
    return lines[-1 if last else 0]


def as_environment(settings: Settings) -> dict[str, Any]:
    """Versions and findings as name -> text, for the environment table of a page."""
    found = {
        f.name: f.what
        for f in examine(settings)
        if f.name in ("device", "C++ extension", "Inductor", "Triton")
    }
    return {name: version for name, version in versions().items() if version} | found
