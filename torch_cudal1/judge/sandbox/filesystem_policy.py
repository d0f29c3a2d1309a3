"""Which files a child may use, and which environment it gets, from what it is for.

Strangers' code reads the system's programs and libraries, Python, torch and this package, and
writes its scratch folder; our own also reads what the user's variables point to, and writes the
compilers' caches. `/etc` is given file by file, homes not at all.
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from torch_cudal1.core.settings import select_environment
from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess

__all__ = ["allow_access", "is_open_to_all", "list_roots", "make_environment"]

_KEPT_NAMES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "CONDA_PREFIX", "VIRTUAL_ENV"),
)
_KEPT_PREFIXES = (
    "CUDA_",
    "NVIDIA_",
    "TRITON_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
)
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/gnu/store",
    "/proc",
    "/sys",
)
_ETC = (
    *(
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "alternatives",
        "localtime",
        "timezone",
        "nsswitch.conf",
        "passwd",
        "group",
    ),
    *("os-release", "locale.alias", "OpenCL", "nvidia", "cuda", "libibverbs.d"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPU_DEVICES = ("/dev/nvidia*", "/dev/nvidia-caps")
_GPU_READ = ("/run/nvidia-persistenced", "/run/nvidia-topologyd")
_FOLDER_LISTS = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
)  # variables of folders; of PATH the prefix above them
_PREFIXES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "VIRTUAL_ENV")
_TOOLS = (
    "c++",
    "g++",
    "cc",
    "gcc",
    "clang++",
    "ld",
    "as",
    "nvcc",
)  # what builds start, wherever it is installed
_PACKAGE = Path(__file__).resolve().parents[2]


def make_environment(scratch: Path, *, own: bool, visible_gpu: bool) -> dict[str, str]:
    """The child's variables: what builds and libraries need, nothing that could hold a secret;
    strangers' caches in the scratch.
    """
    from torch._inductor.runtime.cache_dir_utils import (
        default_cache_dir,
    )  # a light module, but only judging needs it

    variables = select_environment(_KEPT_NAMES, _KEPT_PREFIXES)
    variables.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", default_cache_dir()
    )  # the user's own: what is compiled here is found again there
    if not own:
        variables |= {
            "HOME": str(scratch),
            "XDG_CACHE_HOME": f"{scratch}/cache",
            "USER": "candidate",
            "LOGNAME": "candidate",
        }
        variables |= {
            "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
            "TRITON_CACHE_DIR": f"{scratch}/triton",
        }
        variables |= {"TRITON_HOME": str(scratch), "CUDA_CACHE_PATH": f"{scratch}/nv"}
    if not visible_gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    paths = [str(_PACKAGE.parent), *_python_paths(own=own)]
    return variables | {
        "TMPDIR": str(scratch),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
    }


def allow_access(
    scratch: Path,
    variables: Mapping[str, str],
    *,
    own: bool,
    gpu: bool,
    watched: bool = False,
    readable: Iterable[str] = (),
) -> FilesystemAccess:
    """What Landlock leaves a child whose environment is `variables`. Folders of caches that are to
    be written are made here.

    `watched`: a tool starts the worker as a process of its own, whose folder in /proc is not there
    yet.
    """
    read = [
        *_SYSTEM,
        *(f"/etc/{name}" for name in _ETC),
        *list_roots(),
        *_python_paths(own=own),
        *_toolchains(variables),
        *readable,
    ]
    write = [str(scratch)]
    devices = list(_DEVICES)
    if own:
        read += _user_folders(variables)
        write += _caches(variables)
    if gpu:
        devices += [
            pattern_path for pattern in _GPU_DEVICES for pattern_path in sorted(glob.glob(pattern))
        ]
        read += _GPU_READ
        # CUDA's driver names its threads in the /proc folder of its process, or does not start
        # (error 304), and Landlock's rule for /proc/self is for one process only. Inductor's
        # compile workers ask CUDA too, and without it compile nothing.
        write.append("/proc" if own or watched else "/proc/self")
    readable_paths = [
        pattern_path
        for given in read
        for pattern_path in (os.path.abspath(given), os.path.realpath(given))
        if not given.startswith("/proc")
    ]
    return FilesystemAccess(
        tuple(dict.fromkeys(("/proc", *readable_paths))),
        (str(_PACKAGE.parent),),
        tuple(dict.fromkeys(write)),
        tuple(devices),
    )


def list_roots() -> list[str]:
    """Folders without which no child starts: Python's, torch's, this package's. The short import
    name lies beside the package.
    """
    short_name = [str(path) for path in (_PACKAGE.parent / "cudal1.py",) if path.is_file()]
    return [
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        str(Path(torch.__file__).parent),
        str(_PACKAGE),
        *short_name,
    ]


def is_open_to_all(path: str, *, with_parents: bool) -> bool:
    """Whether any user may read `path`, a file or folder, and may come to it if `with_parents`."""
    real = Path(os.path.realpath(path))
    needed = 0o5 if real.is_dir() else 0o4
    if real.stat().st_mode & needed != needed:
        return False
    return not with_parents or all(parent.stat().st_mode & 0o1 for parent in real.parents)


def _python_paths(*, own: bool) -> list[str]:
    """Folders to import from. Strangers get those of the installation, not the user's own projects."""
    folders = [path for path in sys.path if path and Path(path).is_dir()]
    if own:
        return folders
    installed = [*list_roots(), "/usr"]
    return [
        path
        for path in folders
        if Path(path).name in ("site-packages", "dist-packages")
        or any(Path(path).is_relative_to(root) for root in installed)
    ]


def _toolchains(variables: Mapping[str, str]) -> list[str]:
    """The prefixes of the compilers on the path, such as /opt/gcc for /opt/gcc/bin/g++; never one
    that holds a home folder.
    """
    named = [variables.get("CC", ""), variables.get("CXX", ""), *_TOOLS]
    compilers = [
        shutil.which(name.split()[0], path=variables.get("PATH")) for name in named if name
    ]
    places = [place for path in compilers if path for place in (path, os.path.realpath(path))]
    return _outside_home([os.path.dirname(os.path.dirname(place)) for place in places], variables)


def _user_folders(variables: Mapping[str, str]) -> list[str]:
    """What the user's variables name, tools and their libraries; never a home folder as a whole, or
    anything above one.
    """
    named = [
        (name, folder)
        for name in _FOLDER_LISTS
        for folder in variables.get(name, "").split(os.pathsep)
    ]
    folders = [
        os.path.dirname(folder.rstrip("/")) if name == "PATH" else folder for name, folder in named
    ]
    folders += [folder for name, folder in named if name == "PATH"]
    folders += [variables.get(name, "") for name in _PREFIXES]
    folders += [os.path.dirname(variables.get(name, "")) for name in ("CC", "CXX")]
    return _outside_home(folders, variables)


def _outside_home(folders: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """Those that are neither the user's home folder nor above it."""
    homes = [os.path.realpath(variables.get("HOME") or "/"), os.path.realpath(Path.home())]
    return [
        path
        for path in folders
        if path.startswith("/")
        and not any(
            f"{home}/".startswith(os.path.realpath(path).rstrip("/") + "/") for home in homes
        )
    ]


def _caches(variables: Mapping[str, str]) -> list[str]:
    """Folders that compilers keep their results in, made if they can be; and where POSIX keeps
    semaphores.
    """
    home = variables.get("HOME") or "/nonexistent"
    folders = [
        variables["TORCHINDUCTOR_CACHE_DIR"],
        variables.get("TRITON_CACHE_DIR")
        or os.path.join(variables.get("TRITON_HOME") or home, ".triton"),
        variables.get("CUDA_CACHE_PATH") or os.path.join(home, ".nv"),
        os.path.join(variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "torch"),
    ]
    for folder in folders:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError:
            continue  # then the child could not make it either
    return [*folders, "/dev/shm"]
