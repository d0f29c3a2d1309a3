"""PyTorch's fused attention operators by name, without "aten." and the overload, which is "default"
for all of them.
"""

from __future__ import annotations

__all__ = ["BACKWARDS", "FORWARDS", "FORWARDS_ELSEWHERE", "targets"]

_KINDS = ("efficient", "flash", "cudnn")
# Of GPUs. Each yields a natural log-sum-exp of its rows, or has a backward that knows it.
FORWARDS = tuple(f"_scaled_dot_product_{kind}_attention" for kind in _KINDS)
BACKWARDS = tuple(f"{name}_backward" for name in FORWARDS)
# Of the CPU and of backends of other devices.
FORWARDS_ELSEWHERE = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


def targets(names: tuple[str, ...]) -> frozenset[str]:
    """The operators as an ATen step of a Program names them."""
    return frozenset(f"aten.{name}.default" for name in names)
