"""Which steps of a Program one kernel may compute: what a cut between two steps would part.

Inductor fuses steps that are no products; a kernel of this package also fuses a product with what
is done to its result. Nothing is run or decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch.utils.flop_counter import flop_registry

from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.aten import CUSTOM_OPERATORS, overload
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Aten, Program, Step

__all__ = ["FusiblePairs", "is_library_call"]

# Beside what PyTorch counts as floating-point operations of a library.
_LIBRARY_CALLS = CUSTOM_OPERATORS | attention_names.targets(
    (
        *attention_names.FORWARDS,
        *attention_names.BACKWARDS,
        *attention_names.FORWARDS_ELSEWHERE,
    )
)


class FusiblePairs:
    """Which steps Inductor may compute in one kernel: those that are no products, where one reads
    the other's result and no product between them waits for it.
    """

    def __init__(self, program: Program) -> None:
        self._steps = program.steps
        # The step that computes a value, followed back through views; a view is no kernel.
        self.makers: dict[int, int] = {}
        makers = self.makers
        self._edges: list[tuple[int, int]] = []
        self._users: dict[int, list[int]] = {}
        # A value that every layer reads has as many readers, and each is asked for at every cut.
        self._is_fusible = cache(self._look_for_detour)
        for position, step in enumerate(program.steps):
            sources = [makers[value] for value in step.reads if value in makers]
            if is_view(step):
                makers.update((value, sources[0]) for value in step.writes if sources)
                continue
            makers.update((value, position) for value in step.writes)
            for source in dict.fromkeys(sources):
                self._edges.append((source, position))
                self._users.setdefault(source, []).append(position)

    def list_users(self, value: int) -> Sequence[int]:
        """The steps that read what the maker of a value makes, also through views."""
        return self._users.get(self.makers.get(value, -1), ())

    def count_parted(self, cut: int, length: int) -> int:
        """How many fusible pairs have one step among the `length` before `cut`, and one among as
        many from there on.

        What every layer reads is made before all of them: unless it is large, it costs no more in
        memory than computed anew.
        """
        return sum(self._is_fusible(*pair) for pair in self._list_parted(cut, length))

    def count_parted_epilogues(self, cut: int, length: int) -> int:
        """How many pairs of a product and a step on its result are parted so. Inductor loses
        nothing there, but a kernel of this package computes both: the product of T5 and its ReLU.
        """
        return sum(
            is_library_call(self._steps[source]) and not is_library_call(self._steps[user])
            for source, user in self._list_parted(cut, length)
        )

    def _list_parted(self, cut: int, length: int) -> list[tuple[int, int]]:
        return [
            (source, user)
            for source, user in self._edges
            if cut - length <= source < cut <= user < cut + length
        ]

    def _look_for_detour(self, source: int, user: int) -> bool:
        if is_library_call(self._steps[source]) or is_library_call(self._steps[user]):
            return False
        # A path through a product: in one kernel the product would wait for itself.
        pending = [(position, False) for position in self._users[source] if position < user]
        visited = set(pending)
        while pending:
            position, behind_product = pending.pop()
            behind_product = behind_product or is_library_call(self._steps[position])
            for follower in self._users.get(position, ()):
                if follower == user and behind_product:
                    return False
                item = (follower, behind_product)
                if follower < user and item not in visited:
                    visited.add(item)
                    pending.append(item)
        return True


def is_library_call(step: Step) -> bool:
    """Whether Inductor calls a library, or another kernel, for a step: nothing is fused with it."""
    if not isinstance(step, Aten):
        return True
    return overload(step.target).overloadpacket in flop_registry or step.target in _LIBRARY_CALLS
