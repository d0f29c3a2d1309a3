"""`Refusal`: the value that a function returns where it declines, with its reason. It stands in
place of an exception or an empty text.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Refusal"]


@dataclass(frozen=True)
class Refusal:
    """Why something is not done, not there or not used. `str()` is the reason, for messages.

    A function that may decline returns `Answer | Refusal`, or `Refusal | None` where it only
    objects. Raises ValueError for an empty reason.
    """

    reason: str

    def __post_init__(self) -> None:
        # A user or caller cannot act on a refusal without a reason.
        if not self.reason:
            raise ValueError(
                "a Refusal needs a reason; return None where there is nothing to object to"
            )

    def __str__(self) -> str:
        return self.reason
