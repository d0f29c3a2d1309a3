"""Reads which kernels stand behind PyTorch's operators in this process, from the dispatcher's own
tables.

A source that registers a kernel for `aten::mm`, in Python or in C++, changes what the reference's
operators would be, and no Python name: `object_identity` does not see it.
"""

from __future__ import annotations

import hashlib
import re

import torch

__all__ = ["digest_operator_kernels"]

# PyTorch registers shapes of fake tensors and rules of vmap when they are first used.
_LATE = re.compile(r"(?m)^(?:Meta|FuncTorch).*\n")
# Bound at import, before any candidate is.
_list_operators, _dump = torch._C._dispatch_get_all_op_names, torch._C._dispatch_dump
_sha, _without = hashlib.sha256, _LATE.sub


def digest_operator_kernels() -> str:
    """The sha256 of all kernels that are registered for the operators `aten::...`, those that another
    one covers included. It takes 0.1 s.
    """
    names = sorted(name for name in _list_operators() if name.startswith("aten::"))
    return _sha(_without("", "".join(map(_dump, names))).encode()).hexdigest()
