"""Which files a child may use, and which environment variables it gets.

Foreign code reads the system's programs and libraries, Python, torch and this package, and writes
its scratch folder. Own code also reads the folders that the user's variables name, and writes the
compilers' caches. Of `/etc` only the listed files are readable; no home folder is.
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

# A list of what to keep, not of what to drop: tokens and passwords have any name.
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
# Not /etc as a whole, which holds passwords and keys.
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
# Variables that list folders. Of a folder of PATH its parent is meant too: /opt/x of /opt/x/bin.
_FOLDER_LISTS = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
)
_PREFIXES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "VIRTUAL_ENV")
# The programs that builds start, wherever they are installed.
_TOOLS = (
    "c++",
    "g++",
    "cc",
    "gcc",
    "clang++",
    "ld",
    "as",
    "nvcc",
)
_PACKAGE = Path(__file__).resolve().parents[2]


def make_environment(
    scratch: Path, *, own: bool, visible_gpu: bool, has_compile_pool: bool = True
) -> dict[str, str]:
    """The child's environment variables: those that builds and libraries need, none that could hold
    a secret. The caches of foreign code are in the scratch folder, and like a child without
    `has_compile_pool` it compiles in its own process.
    """
    # A light module, but only judging needs it.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    variables = select_environment(_KEPT_NAMES, _KEPT_PREFIXES)
    # The user's own folder: the user's process finds what own code compiled here. By default it
    # lies in the folder for temporary files, which is another one in a child.
    variables.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    if not own:
        # Foreign code must not write the caches: the user's process would run what it left there.
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
    if not own or not has_compile_pool:
        # An Inductor baseline's pool imported torch for ten seconds on the core of the timed calls,
        # and only in the baseline's turns: a copy of it was 2.06 times as fast. Nor does an untrusted
        # process's pool find the GPU (benchmarks/LOG.md, 2026-11-30; docs/judge.md).
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if not visible_gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    paths = [str(_PACKAGE.parent), *_list_python_paths(own=own)]
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
    """The paths that Landlock leaves to a child with the environment `variables`. Creates the cache
    folders that it may write.

    - own: it runs own code. gpu: it uses a GPU. readable: more paths to read.
    - watched: a tool such as compute-sanitizer starts the worker as another process, whose folder
      in /proc does not exist yet.
    """
    read = [
        *_SYSTEM,
        *(f"/etc/{name}" for name in _ETC),
        *list_roots(),
        *_list_python_paths(own=own),
        *_list_toolchains(variables),
        *readable,
    ]
    write = [str(scratch)]
    devices = list(_DEVICES)
    if own:
        read += _list_user_folders(variables)
        write += _make_cache_folders(variables)
    if gpu:
        devices += [
            pattern_path for pattern in _GPU_DEVICES for pattern_path in sorted(glob.glob(pattern))
        ]
        read += _GPU_READ
        # CUDA's driver writes thread names into the /proc folder of its process, and does not start
        # where it cannot (error 304). A Landlock rule for /proc/self holds for one process only.
        # Inductor's compile workers are processes that start CUDA too, and else compile nothing.
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
    """The folders without which no child starts: Python's, torch's, this package's; and the module
    of the short import name, which lies beside the package.
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
    """Whether any user may read the file or folder `path`; with `with_parents`, also reach it."""
    real = Path(os.path.realpath(path))
    needed = 0o5 if real.is_dir() else 0o4
    if real.stat().st_mode & needed != needed:
        return False
    return not with_parents or all(parent.stat().st_mode & 0o1 for parent in real.parents)


def _list_python_paths(*, own: bool) -> list[str]:
    """Folders to import from. Foreign code gets the installation's, not the user's projects."""
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


def _list_toolchains(variables: Mapping[str, str]) -> list[str]:
    """The prefixes of the compilers on PATH, such as /opt/gcc for /opt/gcc/bin/g++, except those
    that hold a home folder.
    """
    named = [variables.get("CC", ""), variables.get("CXX", ""), *_TOOLS]
    compilers = [
        shutil.which(name.split()[0], path=variables.get("PATH")) for name in named if name
    ]
    # A compiler is often a link; its headers and libraries lie beside the target.
    places = [place for path in compilers if path for place in (path, os.path.realpath(path))]
    return _drop_home_folders(
        [os.path.dirname(os.path.dirname(place)) for place in places], variables
    )


def _list_user_folders(variables: Mapping[str, str]) -> list[str]:
    """The folders that the user's variables name: tools and their libraries. Never a whole home
    folder, or a folder above one.
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
    return _drop_home_folders(folders, variables)


def _drop_home_folders(folders: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """The absolute paths of `folders` that are neither a home folder nor above one."""
    # HOME may differ from the home in the password file; neither is readable.
    homes = [os.path.realpath(variables.get("HOME") or "/"), os.path.realpath(Path.home())]
    return [
        path
        for path in folders
        if path.startswith("/")
        and not any(
            f"{home}/".startswith(os.path.realpath(path).rstrip("/") + "/") for home in homes
        )
    ]


def _make_cache_folders(variables: Mapping[str, str]) -> list[str]:
    """Folders in which compilers keep results, created where possible; and /dev/shm, where POSIX
    semaphores are.
    """
    home = variables.get("HOME") or "/nonexistent"
    folders = [
        variables["TORCHINDUCTOR_CACHE_DIR"],
        variables.get("TRITON_CACHE_DIR")
        or os.path.join(variables.get("TRITON_HOME") or home, ".triton"),
        variables.get("CUDA_CACHE_PATH") or os.path.join(home, ".nv"),
        os.path.join(variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "torch"),
    ]
    # A Landlock rule needs an existing folder. 0700: other users must not plant compiled code.
    for folder in folders:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError:
            # The child could not make it either.
            continue
    return [*folders, "/dev/shm"]
