"""Types of values that a guard compares by identity alone: their values are immutable, or their
state does not change what a call computes.
"""

from __future__ import annotations

import enum
import logging
import re
import threading
import types
import weakref
from pathlib import PurePath

import torch

__all__ = ["OPAQUE_TYPES", "PLAIN_TYPES"]

# Immutable, and told apart by their text.
PLAIN_TYPES: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)

OPAQUE_TYPES: tuple[type, ...] = (
    # Immutable values.
    *PLAIN_TYPES,
    *(
        range,
        slice,
        type(NotImplemented),
        type,
        enum.Enum,
        PurePath,
    ),
    *(
        # The names that code looks up in a module have records of their own (guard_builder).
        types.ModuleType,
        types.BuiltinFunctionType,
        types.MethodWrapperType,
        types.MethodDescriptorType,
        types.GenericAlias,
    ),
    *(
        # Bookkeeping of processes and logs, which no result depends on.
        weakref.ReferenceType,
        re.Pattern,
        logging.Logger,
        type(threading.Lock()),
        type(threading.RLock()),
    ),
    *(
        torch.qscheme,
        torch.Generator,
        torch.finfo,
        torch.iinfo,
    ),
    *(
        torch._ops.OpOverload,
        torch._ops.OpOverloadPacket,
        torch.fx.Graph,
        torch.Stream,
        torch.Event,
    ),
)
