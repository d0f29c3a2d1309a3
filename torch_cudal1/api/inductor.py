"""Compiles a graph with Inductor, as `torch.compile` does: same function, same options, same caches.

`compile_fx_graph` is the one place that calls it; `compile_with_inductor` adds what the backend
needs around it to raise and to number as eager does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch.fx as fx

from torch_cudal1.core.gc_pause import pause_gc
from torch_cudal1.core.inductor_start import await_keys

__all__ = ["compile_fx_graph", "compile_with_inductor", "run_graph"]


def compile_fx_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    *,
    repeatable_backward: bool,
) -> Callable[..., Any]:
    """What `torch._inductor.compile_fx` makes of `gm`. `repeatable_backward`: a backward may run
    twice, as eager's may, which torch.compile does not promise.
    """
    # Imported here, because the backend's entry point is imported in processes that compile
    # nothing.
    from torch_cudal1.core.path_shims import file_program_shim
    from torch_cudal1.device.target import find_device
    from torch_cudal1.graph.capture import keep_backward_repeatable

    # Importing Inductor makes many objects that live for ever; the garbage collector would walk
    # them again and again while they are made.
    with pause_gc(keeps=True):
        from torch._inductor.compile_fx import compile_fx

    await_keys()
    # Triton asks the program `file` how Python is linked and puts the answer into the names of what
    # it builds. In a slim container without `file` the names would differ, and a cache that was
    # filled elsewhere would not be found. The shim gives the answer of other machines.
    with (
        file_program_shim(find_device(list(inputs))),
        keep_backward_repeatable() if repeatable_backward else nullcontext(),
    ):
        compiled = compile_fx(gm, list(inputs), config_patches=dict(options) or None)
    return cast(Callable[..., Any], compiled)


def compile_with_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any],
    *,
    repeatable_backward: bool,
) -> Callable[..., Any]:
    """The backend's call of Inductor. A recurrent layer, which torch.compile never hands to it, is
    eager's in one step. On a CPU an index out of range raises what eager raises, where it would end
    the process.
    """
    from torch_cudal1.device.target import find_device
    from torch_cudal1.ir.ops.attention_masks import with_masks_laid_out
    from torch_cudal1.ir.ops.recurrent_ops import rewrite_as_one_step
    from torch_cudal1.runtime.index_checks import (
        add_class_checks,
        cpu_index_checks,
        has_indices,
        raise_as_eager,
    )

    on_cpu = find_device(list(inputs)).type == "cpu"
    # The checks cost time, so a graph without index operators is compiled as torch.compile would.
    checks = cpu_index_checks() if on_cpu and has_indices(gm) else {}
    # Inductor's caches distinguish graphs by what they call, so the one step must be in the graph
    # itself.
    module = with_masks_laid_out(rewrite_as_one_step(gm))
    compiled = compile_fx_graph(
        add_class_checks(module) if checks else module,
        inputs,
        # The user's own options win over the checks.
        checks | options,
        repeatable_backward=repeatable_backward,
    )
    # The graph's own operators raise eager's exception for the same inputs.
    return raise_as_eager(compiled, lambda *args: run_graph(gm, *args)) if checks else compiled


def run_graph(gm: fx.GraphModule, *inputs: Any) -> Any:
    """What the graph's own operators yield. Before its first call Dynamo's graph goes through a
    wrapper that prints what is raised in it.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    # A lazy graph module compiles its code at the first call, behind a wrapper that prints a
    # traceback to stderr. Here an exception is expected.
    _LazyGraphModule.force_recompile(gm)
    return gm.forward(*inputs)
