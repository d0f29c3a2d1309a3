"""Reads the global state that a candidate could change in this process, as plain JSON values.

Flags of torch and its libraries, random states, modes, the process, hooks of the interpreter. The
parent compares them with the values from before the candidate was loaded.
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
from torch_cudal1.judge.worker.audit_hooks import count_added_hooks
from torch_cudal1.judge.worker.object_identity import (
    digest_identities,
    list_module_identities,
    read_identities,
)
from torch_cudal1.judge.worker.operator_kernels import digest_operator_kernels

__all__ = ["read_global_state", "reseed_generators"]

# Of 210 published CUDA-L1 kernels, 53 write process-global state, 25 switch TF32.
# torch.backends.<key>.<attribute>
_BACKENDS = {
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
# torch.<key>()
_TORCH_GETTERS = (
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
# The meaning of "none" there: a switch set to it explicitly is no change.
_UNSET_MEANS = {
    f"torch.backends.{part}.matmul.fp32_precision": "ieee" for part in ("cuda", "mkldnn")
}
_ABSENT = "absent"
# Elements of which a thread of PyTorch's pool takes at least so many.
_SHARED_PIECE = 32_768
# TF32 and bfloat16 round it to 1.
_TF32_PROBE = 1 + 2.0**-12


def _find_getter(path: str) -> Callable[[], Any] | None:
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value if callable(value) else None


_GETTERS: dict[str, Callable[[], Any]] = {
    name: read for name in _TORCH_GETTERS if (read := _find_getter(name)) is not None
}
# Bound at import, before any candidate, which may patch torch.
_mm, _full, _to_list = torch.mm, torch.full, torch.Tensor.tolist
_choose_attention = torch._fused_sdp_choice
_cpu_random, _python_random = torch.random.get_rng_state, random.getstate
_sha = hashlib.sha256
_get_sharing_strategy = torch.multiprocessing.get_sharing_strategy
_FUTURE_GETTERS: list[Callable[[], object]] = [
    getter for name, getter in vars(torch.__future__).items() if name.startswith("get_")
]
_modules = torch.nn.modules.module
_get_saved_tensor_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def reseed_generators(seed: int) -> None:
    """Seed every global generator, so that a candidate that sets a seed of its own is noticed."""
    # CUDA's generators too.
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def read_global_state(
    device: torch.device, *, tables: bool = True, operators: bool = False
) -> dict[str, Any]:
    """Groups of name -> JSON value. `device`: where the precision of a product is measured.

    `tables`: include the identities of modules and of their members, thousands of numbers. The
    digests alone tell whether any of them changed. `operators`: include the kernels of PyTorch's
    operators.
    """
    _fix_attention_order(device)
    # The product first: it initialises CUDA, whose flags are read below only then.
    product = _measure_product(device)
    state: dict[str, Any] = {
        "flags": {"product": product} | _read_flags(),
        "random": _digest_random_states(),
        "process": _process(),
        "interpreter": _read_interpreter_hooks(),
        "hints": _read_hints(),
        "compilers": _read_compiler_options(),
        "environment": process_environment(),
        "digests": digest_identities(),
        "operators": {"kernels": digest_operator_kernels()} if operators else {},
    }
    if tables:
        state |= {"modules": list_module_identities(), "identities": read_identities()}
    return state


def _read_flags() -> dict[str, str]:
    flags: dict[str, str] = {}
    for path, names in _BACKENDS.items():
        owner: Any = torch.backends
        for part in path.split("."):
            owner = getattr(owner, part, None)
        for name in names:
            flag = f"torch.backends.{path}.{name}"
            flags[flag] = _read_as_text(partial(getattr, owner, name)).replace(
                "none", _UNSET_MEANS.get(flag, "none")
            )
    for name, getter in _GETTERS.items():
        flags[f"torch.{name}"] = _read_as_text(getter)
    for kind in ("cpu", "cuda"):
        flags[f"autocast {kind}"] = _read_as_text(
            partial(torch.is_autocast_enabled, kind)
        ) + _read_as_text(partial(torch.get_autocast_dtype, kind))
    deterministic: Any = torch.utils.deterministic
    flags["torch.utils.deterministic.fill_uninitialized_memory"] = _read_as_text(
        lambda: deterministic.fill_uninitialized_memory
    )
    # By computing: torch.set_flush_denormal has no getter.
    flags["denormals are flushed"] = _read_as_text(_are_denormals_flushed)
    # An active mode sees and may replace every operation.
    flags["modes"] = repr(
        [
            *map(_name_type, _get_current_function_mode_stack()),
            *map(_name_type, _get_current_dispatch_mode_stack()),
        ]
    )
    flags["names of torch.ops.aten replaced"] = _read_as_text(_list_replaced_operators)
    flags["torch.__future__"] = _read_as_text(_read_future_switches)
    flags["invariants of sparse tensors are checked"] = _read_as_text(
        torch.sparse.check_sparse_tensor_invariants.is_enabled
    )
    flags["torch.multiprocessing.get_sharing_strategy"] = _read_as_text(_get_sharing_strategy)
    flags["level of forward-mode gradients"] = _read_as_text(
        lambda: torch.autograd.forward_ad._current_level
    )
    if "numpy" in sys.modules:
        flags["numpy.geterr"] = _read_as_text(sys.modules["numpy"].geterr)
    flags["operators of torch replaced"] = _read_as_text(
        lambda: sorted(name for name in torch.library._impls if _replaces(name))
    )
    # Reading these would initialise CUDA.
    if torch.cuda.is_initialized():
        flags["cuda device"] = _read_as_text(torch.cuda.current_device)
        flags["cuda stream"] = _read_as_text(lambda: torch.cuda.current_stream().cuda_stream)
        flags["cuda memory fraction"] = _read_as_text(torch.cuda.get_per_process_memory_fraction)
    return flags


def _are_denormals_flushed() -> bool:
    # On each of the threads that share an operation: the processor has the mode, one a core.
    numbers = _full((_SHARED_PIECE * torch.get_num_threads(),), 2.0**-1040, dtype=torch.float64)
    return not bool(((numbers * 1.0) != 0.0).all())


def _list_replaced_operators() -> list[str]:
    # Operators appear there when they are first used, each under its name.
    return sorted(
        name
        for name, value in list(vars(torch.ops.aten).items())
        if callable(value) and getattr(value, "_qualified_op_name", None) != f"aten::{name}"
    )


def _read_future_switches() -> list[object]:
    return [getter() for getter in _FUTURE_GETTERS]


def _replaces(registered: str) -> bool:
    """Whether a registration such as "aten/add.Tensor/CPU" replaces the code of an operator."""
    library, _, rest = registered.partition("/")
    # Inductor registers operators of prims, other libraries shapes of fake tensors (Meta), and vmap
    # its rules at its first use.
    key = rest.rpartition("/")[2]
    return library == "aten" and not key.startswith(("Meta", "AutogradMeta", "FuncTorch"))


def _read_as_text(getter: Callable[[], Any]) -> str:
    """The result as text, or that it is absent: not every version of torch has every getter."""
    try:
        return repr(getter())
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        return f"{_ABSENT}: {type(error).__name__}"


def _name_type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _measure_product(device: torch.device) -> str:
    """One element of a matrix product whose factors need 12 bits after the point, as text.

    It shows the precision of a matmul now, whatever the flags say.
    """
    with torch.no_grad():
        factor = _full((64, 64), _TF32_PROBE, device=device)
        return repr(_to_list(_mm(factor, factor))[0][0])


@cache
def _fix_attention_order(device: torch.device) -> None:
    """Have torch choose among its attention kernels once, before any candidate."""
    # The first choice in a process puts cuDNN first on some GPUs, for good (ATen's sdp_utils.cpp,
    # `priority_order`). An honest candidate would seem to have changed the order.
    if device.type == "cuda":
        query = _full((1, 1, 8, 64), 1.0, dtype=torch.float16, device=device)
        # Where the user allows no attention kernel, there is no first choice either.
        with suppress(RuntimeError):
            _choose_attention(query, query, query)


def _digest_random_states() -> dict[str, str]:
    # Digests: a state has kilobytes, and the parent only tests equality.
    states = {
        "torch": _sha(bytes(_to_list(_cpu_random()))).hexdigest(),
        "random": _sha(repr(_python_random()).encode()).hexdigest(),
    }
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state(legacy=False)
        states["numpy"] = _sha(
            repr([state["state"]["key"].tobytes(), state["state"]["pos"]]).encode()
        ).hexdigest()
    if torch.cuda.is_initialized():
        states["cuda"] = _sha(bytes(_to_list(torch.cuda.get_rng_state()))).hexdigest()
    return states


def _process() -> dict[str, str]:
    # The umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return {
        "working directory": os.getcwd(),
        "umask": oct(mask),
        "signal handlers": repr({int(s): _describe_handler(s) for s in signal.valid_signals()}),
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
        else _ABSENT,
        "locale": repr(locale.setlocale(locale.LC_ALL)),
        "user": repr((os.getuid(), os.getgid())),
        "name": Path("/proc/self/comm").read_text().strip()
        if Path("/proc/self/comm").exists()
        else _ABSENT,
    }


def _describe_handler(number: int) -> str:
    handler = signal.getsignal(number)
    return (
        str(int(handler))
        if isinstance(handler, (int, signal.Handlers))
        else f"{type(handler).__name__} {id(handler)}"
    )


def _read_interpreter_hooks() -> dict[str, str]:
    def hook(value: object) -> str:
        # The identity: a replacement may have the same name.
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
        "audit hooks": repr(count_added_hooks()),
        "hooks of all modules": repr(
            {name: len(value) for name, value in vars(_modules).items() if _is_hook_table(name)}
        ),
        "hooks of saved tensors": repr(_get_saved_tensor_hooks()),
    }


def _is_hook_table(name: str) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks")


def _read_hints() -> dict[str, str]:
    """State that honest code changes too: reported, but never a reason to reject."""
    return {
        "warning filters": repr(len(warnings.filters)),
        "sys.path": repr(sys.path),
        "sys.meta_path": repr([_name_type(finder) for finder in sys.meta_path]),
        "recursion limit": repr(sys.getrecursionlimit()),
        "print options": _read_as_text(lambda: vars(torch._tensor_str.PRINT_OPTS)),
        "exit functions": repr(atexit._ncallbacks()),
        "callbacks of gc": repr(len(gc.callbacks)),
        "standard streams": repr((id(sys.stdout), id(sys.stderr))),
    }


def _read_compiler_options() -> dict[str, str]:
    """Options of Dynamo, Inductor and Functorch that were changed at run time."""
    changed: dict[str, str] = {}
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        # No import: a process that does not compile does not load them.
        module = sys.modules.get(name)
        for option, entry in list(getattr(module, "_config", {}).items()):
            value = getattr(entry, "user_override", _ABSENT)
            value = value.get(_ABSENT) if isinstance(value, ContextVar) else value
            plain = isinstance(value, (bool, int, float, str, type(None))) and value != _ABSENT
            # A config.patch that has ended leaves the default as an override.
            if plain and value != getattr(entry, "default", _ABSENT):
                changed[f"{name}.{option}"] = repr(value)
    return changed
