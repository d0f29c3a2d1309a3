"""The child's side of `env_diff`, part two: everything global that a candidate could change, as
plain JSON values.

Flags of torch and its libraries, random states, modes, the process, hooks of the interpreter.
Functions are taken hold of when this module is imported. It compares nothing and judges nothing:
the parent does both, with what was seen before the candidate came.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import hashlib
import locale
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_cudal1.core.settings import process_environment
from torch_cudal1.judge.worker.object_identity import digests, identities, modules

__all__ = ["stir", "surroundings"]

_BACKENDS = {  # torch.backends.<key>.<attribute>
    "cuda.matmul": (
        *(
            "allow_tf32",
            "fp32_precision",
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        ),
        "allow_fp16_accumulation",
    ),
    "cudnn": ("enabled", "benchmark", "benchmark_limit", "deterministic", "fp32_precision"),
    "cudnn.conv": ("fp32_precision",),
    "cudnn.rnn": ("fp32_precision",),
    "mkldnn": ("enabled", "deterministic", "fp32_precision"),
    "mkldnn.matmul": ("fp32_precision",),
    "mkldnn.conv": ("fp32_precision",),
    "mkldnn.rnn": ("fp32_precision",),
    "opt_einsum": ("enabled", "strategy"),
    "quantized": ("engine",),
    "nnpack": ("enabled",),
}
_QUESTIONS = (  # torch.<key>()
    *(
        "get_float32_matmul_precision",
        "are_deterministic_algorithms_enabled",
        "is_deterministic_algorithms_warn_only_enabled",
    ),
    *(
        "get_deterministic_debug_mode",
        "get_default_dtype",
        "get_default_device",
        "is_grad_enabled",
        "is_inference_mode_enabled",
    ),
    *(
        "get_num_threads",
        "get_num_interop_threads",
        "is_anomaly_enabled",
        "is_anomaly_check_nan_enabled",
        "is_warn_always_enabled",
    ),
    *(
        "is_autocast_cache_enabled",
        "_C._is_multithreading_enabled",
        "_C._get_graph_executor_optimize",
    ),
    *("_C._jit_texpr_fuser_enabled", "_C._jit_can_fuse_on_cpu", "_C._jit_can_fuse_on_gpu"),
    *(
        "_C._get_cublas_allow_tf32",
        "_C._get_cudnn_sdp_enabled",
        "_C._get_flash_sdp_enabled",
        "_C._get_mem_efficient_sdp_enabled",
    ),
    *(
        "_C._get_math_sdp_enabled",
        "_C._get_overrideable_sdp_enabled",
        "_C._get_math_sdp_allow_fp16_bf16_reduction",
    ),
    *(
        "_C._get_blas_preferred_backend",
        "_C._get_linalg_preferred_backend",
        "_C._get_sdp_priority_order",
    ),
    *(
        "_C._is_torch_function_enabled",
        "_C._is_torch_function_all_disabled",
        "_C._dispatch_tls_local_include_set",
    ),
    *("_C._dispatch_tls_local_exclude_set", "_C._get_tracing_state", "jit.is_tracing"),
)
_NOT_SET = {
    f"torch.backends.{part}.matmul.fp32_precision": "ieee" for part in ("cuda", "mkldnn")
}  # what "none" means there
_NO_VALUE = "absent"
_WIDE = 1 + 2.0**-12  # TF32 and bfloat16 round it to 1


def _reader(path: str) -> Callable[[], Any] | None:
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if callable(found) else None


_ASKED: dict[str, Callable[[], Any]] = {
    name: read for name in _QUESTIONS if (read := _reader(name)) is not None
}
_mm, _full, _byte_view = torch.mm, torch.full, torch.Tensor.tolist
_attention_way = torch._fused_sdp_choice
_cpu_random, _python_random = torch.random.get_rng_state, random.getstate
_sha = hashlib.sha256


def stir(seed: int) -> None:
    """Put every global generator somewhere else, so that a seed that is set again shows."""
    torch.manual_seed(seed)  # CUDA's too
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def surroundings(device: torch.device, *, tables: bool = True) -> dict[str, Any]:
    """Name -> JSON value, in groups. `device`: where the precision of a product is tried. `tables`:
    with the thousands of identities of modules and of what they hold, of which the digests say
    whether anything is other than before.
    """
    _order_of_attention(device)
    found = {
        "flags": {"product": _product(device)}
        | _flags(),  # in this order: the product starts CUDA, which has flags of its own
        "random": _random_states(),
        "process": _process(),
        "interpreter": _interpreter(),
        "hints": _hints(),
        "compilers": _compilers(),
        "environment": process_environment(),
        "digests": digests(),
    }
    return found | ({"modules": modules(), "identities": identities()} if tables else {})


def _flags() -> dict[str, str]:
    flags: dict[str, str] = {}
    for path, names in _BACKENDS.items():
        owner: Any = torch.backends
        for part in path.split("."):
            owner = getattr(owner, part, None)
        for name in names:
            flag = f"torch.backends.{path}.{name}"
            flags[flag] = _told(partial(getattr, owner, name)).replace(
                "none", _NOT_SET.get(flag, "none")
            )
    for name, ask in _ASKED.items():
        flags[f"torch.{name}"] = _told(ask)
    for kind in ("cpu", "cuda"):
        flags[f"autocast {kind}"] = _told(partial(torch.is_autocast_enabled, kind)) + _told(
            partial(torch.get_autocast_dtype, kind)
        )
    deterministic: Any = torch.utils.deterministic
    flags["torch.utils.deterministic.fill_uninitialized_memory"] = _told(
        lambda: deterministic.fill_uninitialized_memory
    )
    flags["denormals are flushed"] = _told(
        lambda: (torch.tensor(2.0**-1040, dtype=torch.float64) * 1.0).item() == 0.0
    )
    flags["modes"] = repr(
        [
            *map(_type_name, _get_current_function_mode_stack()),
            *map(_type_name, _get_current_dispatch_mode_stack()),
        ]
    )
    flags["operators of torch replaced"] = _told(
        lambda: sorted(name for name in torch.library._impls if _replaces(name))
    )
    if torch.cuda.is_initialized():
        flags["cuda device"] = _told(torch.cuda.current_device)
        flags["cuda stream"] = _told(lambda: torch.cuda.current_stream().cuda_stream)
        flags["cuda memory fraction"] = _told(torch.cuda.get_per_process_memory_fraction)
    return flags


def _replaces(registered: str) -> bool:
    """Whether "aten/add.Tensor/CPU" and the like is what really runs. Inductor adds to prims,
    others shapes of fake tensors.
    """
    library, _, rest = registered.partition("/")
    return library == "aten" and not rest.endswith(("/Meta", "/AutogradMeta"))


def _told(ask: Callable[[], Any]) -> str:
    """An answer as text. Which of these questions a version of torch answers is its own affair."""
    try:
        return repr(ask())
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        return f"{_NO_VALUE}: {type(error).__name__}"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _product(device: torch.device) -> str:
    """One element of a product whose factors have 12 bits after the point: what precision a matmul
    has now.
    """
    with torch.no_grad():
        one = _full((64, 64), _WIDE, device=device)
        return repr(_byte_view(_mm(one, one))[0][0])


@cache
def _order_of_attention(device: torch.device) -> None:
    """Have torch choose among its ways of attention: the first such choice of a process puts cuDNN
    first on some GPUs, for good (ATen's sdp_utils.cpp, `priority_order`), which an honest candidate
    would seem to have done.
    """
    if device.type == "cuda":
        given = _full((1, 1, 8, 64), 1.0, dtype=torch.float16, device=device)
        with suppress(
            RuntimeError
        ):  # where the user allows none of them: then there is no first choice either
            _attention_way(given, given, given)


def _random_states() -> dict[str, str]:
    states = {
        "torch": _sha(bytes(_byte_view(_cpu_random()))).hexdigest(),
        "random": _sha(repr(_python_random()).encode()).hexdigest(),
    }
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state(legacy=False)
        states["numpy"] = _sha(
            repr([state["state"]["key"].tobytes(), state["state"]["pos"]]).encode()
        ).hexdigest()
    if torch.cuda.is_initialized():
        states["cuda"] = _sha(bytes(_byte_view(torch.cuda.get_rng_state()))).hexdigest()
    return states


def _process() -> dict[str, str]:
    mask = os.umask(0)
    os.umask(mask)
    return {
        "working directory": os.getcwd(),
        "umask": oct(mask),
        "signal handlers": repr({int(s): _handler(s) for s in signal.valid_signals()}),
        "blocked signals": repr(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))),
        "timers": repr(
            [
                signal.getitimer(which)[1] > 0 or signal.getitimer(which)[0] > 0
                for which in (0, 1, 2)
            ]
        ),
        "niceness": repr(os.getpriority(os.PRIO_PROCESS, 0)),
        "limits": repr(
            {
                name: resource.getrlimit(getattr(resource, name))
                for name in dir(resource)
                if name.startswith("RLIMIT_")
            }
        ),
        "affinity": repr(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else _NO_VALUE,
        "locale": repr(locale.setlocale(locale.LC_ALL)),
        "user": repr((os.getuid(), os.getgid())),
        "name": Path("/proc/self/comm").read_text().strip()
        if Path("/proc/self/comm").exists()
        else _NO_VALUE,
    }


def _handler(number: int) -> str:
    found = signal.getsignal(number)
    return (
        str(int(found))
        if isinstance(found, (int, signal.Handlers))
        else f"{type(found).__name__} {id(found)}"
    )


def _interpreter() -> dict[str, str]:
    def hook(value: object) -> str:
        return "None" if value is None else f"{type(value).__name__} {id(value)}"

    return {
        "sys.settrace": hook(sys.gettrace()),
        "sys.setprofile": hook(sys.getprofile()),
        "threading.settrace": hook(threading.gettrace()),
        "threading.setprofile": hook(threading.getprofile()),
        "sys.excepthook": hook(sys.excepthook),
        "sys.unraisablehook": hook(sys.unraisablehook),
        "threading.excepthook": hook(threading.excepthook),
        "sys.displayhook": hook(sys.displayhook),
        "sys.breakpointhook": hook(sys.breakpointhook),
        "sys.modules": hook(sys.modules),
        "sys.exit": hook(sys.exit),
        "gc": repr((gc.isenabled(), gc.get_threshold())),
        "switch interval": repr(sys.getswitchinterval()),
        "faulthandler": repr(faulthandler.is_enabled()),
        "main thread": repr(threading.main_thread().ident),
    }


def _hints() -> dict[str, str]:
    """What honest code changes too: recorded, never a reason to refuse."""
    return {
        "warning filters": repr(len(warnings.filters)),
        "sys.path": repr(sys.path),
        "sys.meta_path": repr([_type_name(finder) for finder in sys.meta_path]),
        "recursion limit": repr(sys.getrecursionlimit()),
        "print options": _told(lambda: vars(torch._tensor_str.PRINT_OPTS)),
        "exit functions": repr(atexit._ncallbacks()),
        "callbacks of gc": repr(len(gc.callbacks)),
        "standard streams": repr((id(sys.stdout), id(sys.stderr))),
    }


def _compilers() -> dict[str, str]:
    """Settings of Dynamo, Inductor and Functorch that were set at run time, where these are loaded
    at all.
    """
    changed: dict[str, str] = {}
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        module = sys.modules.get(name)
        for option, entry in list(getattr(module, "_config", {}).items()):
            value = getattr(entry, "user_override", _NO_VALUE)
            value = value.get(_NO_VALUE) if isinstance(value, ContextVar) else value
            plain = isinstance(value, (bool, int, float, str, type(None))) and value != _NO_VALUE
            if plain and value != getattr(
                entry, "default", _NO_VALUE
            ):  # a patch that was undone leaves the default behind
                changed[f"{name}.{option}"] = repr(value)
    return changed
