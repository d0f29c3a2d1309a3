"""The input sets that timed calls take in turn, and the calls themselves; the child's side of
timing.

Values change with every call, and `rotate` puts other values at the same addresses, so an answer
kept from an earlier call is the wrong one. It reads no clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence

import torch

from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["RotatingCalls", "RotatingInputs", "plan_rotation"]

# Copies of inputs in GPU or host memory: at most this much.
_RING_BYTES = 512 << 20
_RING_SETS = 8
# Numbers that new values of one tensor are made with.
_FACTORS = 64


def plan_rotation(
    inputs: Sequence[torch.Tensor], static: Collection[int], sets: int
) -> tuple[int, bool]:
    """How many sets rotate, made of `sets` sets like `inputs`, and whether their values do. The judge
    computes this itself and does not ask the child.
    """
    moving = sum(
        tensor.numel() * tensor.element_size() for i, tensor in enumerate(inputs) if i not in static
    )
    # At least two, or each call would have the values of the one before.
    size = min(_RING_SETS, max(2, sets, _RING_BYTES // max(1, moving)))
    # Values rotate only where every set is a copy: the given sets are the judge's and stay as they
    # are.
    return size, size * moving <= _RING_BYTES


class RotatingInputs:
    """At least two input sets made of given ones. Parameters and buffers (`static`) are those of
    the first, as in a model.

    `is_rotating`: its tensors are copies of their own, which `rotate` may overwrite. Sets too large
    for that are used as they are.
    """

    def __init__(self, sets: Sequence[Sequence[torch.Tensor]], static: Collection[int]) -> None:
        self._static = frozenset(static)
        self._sets = sets
        self.shift = 0
        size, self.is_rotating = plan_rotation(sets[0], self._static, len(sets))
        self.entries = [self._make_entry(index) for index in range(size)]

    def rotate(self, shift: int) -> None:
        """From now on entry i holds the values of given set (i + shift) modulo their number."""
        # The copies would take time and change nothing.
        if not self.is_rotating or shift == self.shift:
            return
        for index, entry in enumerate(self.entries):
            source = self._sets[(index + shift) % len(self._sets)]
            for old, new in zip(
                self._list_moving_tensors(entry), self._list_moving_tensors(source), strict=True
            ):
                # Whole extents, gaps between strides included, so that a copy works for every
                # layout.
                _flatten(old).copy_(_flatten(new))
        self.shift = shift

    def restore(self) -> None:
        """Put the values of the present rotation back."""
        shift, self.shift = self.shift, -1
        self.rotate(shift)

    def make_unseen(self) -> bool:
        """Give every entry values that no call has had, of about the same size; whether any floating
        input could be changed. `restore` undoes it.
        """
        changed = False
        for entry in self.entries if self.is_rotating else ():
            for tensor in self._list_moving_tensors(entry):
                if tensor.dtype.is_floating_point and tensor.numel():
                    _shuffle_rows(tensor)
                    _shrink_values(_flatten(tensor))
                    changed = True
        return changed

    def _make_entry(self, index: int) -> list[torch.Tensor]:
        first, source = self._sets[0], self._sets[index % len(self._sets)]
        # Sets beyond the given ones would otherwise be the same memory under two positions.
        copied = self.is_rotating or index >= len(self._sets)
        return [
            # Parameters are the same tensors in all sets, as they are between calls of a model.
            first[i] if i in self._static else _copy(t) if copied else t
            for i, t in enumerate(source)
        ]

    def _list_moving_tensors(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for i, tensor in enumerate(inputs) if i not in self._static]


class RotatingCalls:
    """A callable without arguments that runs a slot on rotating input sets in turn; `position` is
    that of the next call.
    """

    def __init__(
        self,
        runner: Callable[[Sequence[torch.Tensor]], object],
        rotation: RotatingInputs,
        position: int = 0,
    ) -> None:
        self._runner, self._entries = runner, rotation.entries
        self.position = position % len(rotation.entries)

    def __call__(self) -> object:
        entry = self._entries[self.position]
        self.position = (self.position + 1) % len(self._entries)
        return self._runner(entry)


def _shuffle_rows(tensor: torch.Tensor) -> None:
    """Put what lies along the first dimension of more than one element into another order, in place:
    a module could know its inputs by their signs or sizes, which a factor leaves as they are.
    """
    # Elements of an expanded tensor share memory, and cannot be written one by one.
    if storage_extent(tensor.shape, tensor.stride()) < tensor.numel():
        return
    # Values of one column stay in it, since columns may mean different things.
    dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
    if dim is None:
        return
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    order = torch.randperm(tensor.shape[dim], generator=generator).to(tensor.device)
    # PyTorch selects from no tensors of float8.
    bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    bits.copy_(bits.index_select(dim, order))


def _shrink_values(flat: torch.Tensor) -> None:
    """Make every element of a contiguous vector smaller by 1.6 to 14 %, in place."""
    # Smaller, never larger: a function may end where its inputs do. All elements, as a module may
    # look at some only. Many factors, as two that are close round a short vector of half precision
    # to the same values.
    factors = torch.tensor(
        [1.0 - 2.0**-6 - secrets.randbelow(1 << 20) * 2.0**-23 for _ in range(_FACTORS)],
        dtype=torch.float32,
        device=flat.device,
    )
    full_rows = flat.numel() // _FACTORS * _FACTORS
    for part in (flat[:full_rows].view(-1, _FACTORS), flat[full_rows:]):
        scale = factors[: part.shape[-1]]
        if part.element_size() == 1:
            # PyTorch multiplies no tensors of float8.
            part.copy_(part.float() * scale)
        else:
            part.mul_(scale)


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    # Elements of an expanded tensor share memory: the extent holds each of them once.
    return tensor.as_strided((storage_extent(tensor.shape, tensor.stride()),), (1,))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return _flatten(tensor).clone().as_strided(tensor.shape, tensor.stride())
