"""Starts what Inductor needs before its first compilation, while Dynamo still traces the model.

Every key of Inductor's caches holds a hash of all of Triton (400 MB) and of Inductor's own sources:
1 to 2 s of a process's start, also where everything is found in the cache. Hashing and reading
release the interpreter's lock, so a thread does that meanwhile (benchmarks/LOG.md, 2026-11-29). And
Inductor compiles Triton kernels side by side only in worker processes that are ready by then:
torch.compile starts them when it is called.
"""

from __future__ import annotations

import sys
import threading

import torch

__all__ = ["await_keys", "hash_keys_ahead", "start_compile_workers"]

_lock = threading.Lock()
# By what they hash. Not joined at exit: a process that ends meanwhile does not wait for them.
_threads: dict[str, threading.Thread] = {}


def hash_keys_ahead() -> None:
    """Hash the files in two threads, once in a process. Nothing of the caller's state is touched."""
    with _lock:
        if not _threads:
            for name, work in (("sources", _hash_sources), ("triton", _hash_triton)):
                _threads[name] = threading.Thread(target=work, name=f"cudal1-{name}", daemon=True)
                _threads[name].start()


def await_keys(*names: str) -> None:
    """Wait for the threads, where they run: two threads would hash the same files twice."""
    for name, thread in list(_threads.items()):
        # A child that was forked meanwhile has the list and not the threads, which are not alive.
        if thread.is_alive() and (not names or name in names):
            thread.join()


def start_compile_workers(device: torch.device) -> None:
    """Start Inductor's worker processes for kernels of `device`, as torch.compile does when it is
    called; they answer seconds later. TORCH_WARM_POOL=0 prevents it there and here. Nothing on a
    CPU, whose C++ they do not compile.
    """
    if device.type != "cuda":
        return
    # Their command line holds this key.
    await_keys("sources")
    import torch._inductor.async_compile as async_compile

    # A name that no promise of PyTorch covers. Without it kernels are compiled one by one.
    if (start := getattr(async_compile, "maybe_warm_pool", None)) is not None:
        start()


def _hash_sources() -> None:
    # Where nobody has imported it: an import here would hold up those of the thread that captures.
    codecache = sys.modules.get("torch._inductor.codecache")
    if (hash_sources := getattr(codecache, "torch_key", None)) is not None:
        hash_sources()


def _hash_triton() -> None:
    compat = sys.modules.get("torch._inductor.runtime.triton_compat")
    if (hash_triton := getattr(compat, "triton_key", None)) is not None:
        hash_triton()
