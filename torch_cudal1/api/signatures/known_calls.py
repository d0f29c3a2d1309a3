"""Remembers, for later processes, which calls of modules the cache has a decision for, by a digest
that needs no capture.

A hint only: whether the decision still holds is found when the call is captured.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import find_device
from torch_cudal1.graph.module_call import list_call_tensors
from torch_cudal1.runtime.guard import call_state, python_signature
from torch_cudal1.store.context import TuneContext, make_context

__all__ = ["compute_call_digest", "is_known", "remember_call", "remember_pieces"]


def remember_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: TuneContext
) -> None:
    """Note that the cache holds a decision for a call like this one."""
    name = compute_call_digest(module, args, kwargs)

    if isinstance(
        context.cache.get_decision_record(name, context.target, context.contract), Refusal
    ):
        context.cache.put_decision_record(name, {"decided": True}, context.target, context.contract)


def remember_pieces(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> None:
    """Note that calls like this one won in several graphs."""
    remember_call(
        module,
        args,
        kwargs,
        make_context(
            find_device([*list_call_tensors(args, kwargs), *module.parameters()]), settings
        ),
    )


def is_known(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> bool:
    """Whether the cache has a decision for a call like this one, without capturing it."""
    # The same rules as a real look-up, Hub and read-only caches included.
    context = make_context(
        find_device([*list_call_tensors(args, kwargs), *module.parameters()]), settings
    )
    return not isinstance(
        context.find_decision_record(compute_call_digest(module, args, kwargs)), Refusal
    )


def compute_call_digest(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """What kind of module is called with what: classes, forms of weights and arguments, modes. The
    same in every process.
    """
    # Everything here is equal in every process: no ids, no addresses, no values of weights.
    parts = [
        # Train or eval mode of each submodule: some may be frozen.
        f"{name} {type(part).__module__}.{type(part).__qualname__} {part.training}"
        for name, part in module.named_modules()
    ]
    weights = [
        f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"
        for tensor in (*module.parameters(), *module.buffers())
    ]

    described = repr(
        (
            parts,
            weights,
            python_signature(args, kwargs, opaque=True),
            call_state("cpu"),
            call_state("cuda"),
        )
    )
    return hashlib.sha256(described.encode()).hexdigest()
