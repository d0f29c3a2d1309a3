"""Which ways of cutting a convolution into blocks are worth trying, ordered by a bound on their
time.

The bound counts, for each slot of weights, what the tensor core, the shared memory and the L2 need,
and the halo and ragged edges of the tiles. It orders candidates; it does not decide between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.kernels.ops.convolutions import Axis, Convolution
from torch_cudal1.kernels.proposal import Proposal

__all__ = ["Layout", "Schedule", "layout", "merged", "read", "schedules"]

_SMS, _CLOCK, _BYTES_PER_S = 132, 1.6e9, 4.0e12
_SHARED = 227 * 1024
_WARPGROUPS = 2
_STAGED_BYTES = 36 * 1024  # for results on their way out, where the operands need less
_MAX_STEPS = 40  # of a slot: they are unrolled
_SAME = 1.3  # how much slower than its bound another schedule with the same tile counts


@dataclass(frozen=True)
class Schedule:
    """A block: `z` x `y` x `x` places and `columns` output channels; `channels` of input at a time,
    `taps` along z and y of a slot.

    `wide`: rows of 64 a warpgroup has; `stages` of weights; `blocks` an SM should hold; `products`:
    1 in TF32, 3 as exact as fp32.
    """

    z: int
    y: int
    x: int
    columns: int
    channels: int
    taps: int
    wide: int
    stages: int
    blocks: int
    products: int = 1

    def proposal(self) -> Proposal:
        """As a proposal of family "conv"."""
        return Proposal("conv", asdict(self))


def read(proposal: Proposal) -> Schedule:
    """The schedule of a proposal. Raises ProgramError for numbers that no kernel is made for."""
    if proposal.family != "conv" or set(proposal.config) != {f.name for f in fields(Schedule)}:
        raise ProgramError(
            "proposal",
            f"family {proposal.family!r}, config {dict(proposal.config)!r}; expected a convolution's",
        )
    numbers: dict[str, Any] = {name: proposal.number(name, 0) for name in proposal.config}
    one = Schedule(**numbers)
    powers = all(size > 0 and size & (size - 1) == 0 for size in (one.z, one.y, one.x, one.wide))
    if (
        not powers
        or one.z * one.y * one.x != 64 * one.wide * _WARPGROUPS
        or one.columns % 8
        or one.stages < 2
        or one.products not in (1, 3)
    ):
        raise ProgramError(
            "proposal",
            f"{one} is no tile of {64 * _WARPGROUPS} times `wide` places and a multiple of 8 columns",
        )
    return one


def merged(axis: Axis) -> bool:
    """Whether the classes along x can share a block: their taps lie on one grid of the input."""
    low = axis.low
    return len(axis.classes) > 1 and all(
        (c.low - low) % axis.step == 0 for c in axis.classes if c.count
    )


@dataclass(frozen=True)
class Layout:
    """What follows from a schedule: classes of x in a block, taps along x, steps of a slot, the
    box, and shared memory in bytes.

    `staged`: channels of which results are brought into the order of the output at a time.
    """

    together: int
    taps: int
    steps: int
    vector: int
    low: tuple[int, int, int]
    shift: int
    box: tuple[int, int, int]
    plane: int
    zeros: int
    boxes: int
    table: int
    staged: int
    shared_bytes: int


def layout(conv: Convolution, one: Schedule) -> Layout:
    """The layout of a schedule. Raises NotLowerableError where it does not fit the convolution."""
    z, y, x = conv.axes
    together = len(x.classes) if merged(x) else 1
    taps = -(-x.reach // x.step) if together > 1 else x.taps
    depth = one.taps * taps * one.channels
    steps, counts = -(-depth // 8), {a.count * b.count for a in z.classes for b in y.classes}
    filled = (
        conv.channels % one.channels == 0 or conv.channels < one.channels == 8
    )  # a chunk may be filled up with zeros
    if (
        not filled
        or any(count % one.taps for count in counts)
        or (together > 1 and one.channels % 8)
    ):
        raise NotLowerableError(
            f"{conv.channels} channels, {sorted(counts)} taps: do not divide into {one.channels} and {one.taps}"
        )
    if (
        not 0 < steps <= _MAX_STEPS
        or together * one.columns > 256
        or one.wide * together * one.columns > 256
    ):
        raise NotLowerableError(
            f"{steps} steps a slot, {together * one.columns} columns and {one.wide} rows of 64"
        )
    vector = _vector(conv, one)
    first = x.low // vector * vector
    along = (one.x - 1) * x.stride + (x.low - first) + x.reach
    tall = [(tile - 1) * axis.stride + axis.reach for tile, axis in ((one.z, z), (one.y, y))]
    box = (tall[0], tall[1], -(-along // vector) * vector)
    plane = _plane(math.prod(box), x.stride)
    holes = (
        depth % 8 > 0
        or conv.channels < one.channels
        or (together == 1 and len({c.count for c in x.classes}) > 1)
    )
    slots = max(1, min((count // one.taps for count in counts if count), default=1))
    boxes = min(-(-conv.channels // one.channels), -(-(one.stages - 1) // slots) + 1)
    table = max(counts) // one.taps * steps * 4
    floats = (
        boxes * (min(one.channels, conv.channels) + holes) * plane
        + one.stages * one.products * steps * 8 * together * one.columns
    )
    shared = -(-table * 8 // 128) * 128 + 4 * floats
    channel = 4 * together * (64 * _WARPGROUPS * one.wide + 4)
    divisors = [c for c in range(8, one.columns + 1, 8) if one.columns % c == 0]
    staged = max((c for c in divisors if c * channel <= max(shared, _STAGED_BYTES)), default=8)
    shared = max(shared, staged * channel)
    low = (z.low, y.low, first)
    return Layout(
        together,
        taps,
        steps,
        vector,
        low,
        x.low - first,
        box,
        plane,
        int(holes),
        boxes,
        table,
        staged,
        shared,
    )


def _vector(conv: Convolution, one: Schedule) -> int:
    """Elements that one copy may move: addresses and edges must all be multiples of it."""
    sizes = (*conv.input_strides[:4], conv.axes[2].size, one.x * conv.axes[2].stride)
    return next(v for v in (4, 2, 1) if all(size % v == 0 for size in sizes))


def _plane(size: int, stride: int) -> int:
    """Elements from one channel's box to the next, so that 8 places of 4 channels lie in different
    banks.
    """
    wanted = 8 if stride == 1 else 16 + 4 * (stride > 2)
    size = -(-size // 4) * 4
    return size + (wanted - size) % 32


def schedules(conv: Convolution, products: int, most: int = 8) -> tuple[Schedule, ...]:
    """At most `most` schedules, smallest bound first; those of a tile that was named before count
    as slower.
    """
    bounds: dict[Schedule, float] = {}
    for one in _all(conv, products):
        try:
            bounds[one] = bound_s(conv, one)
        except NotLowerableError:
            continue
    ranked: list[tuple[float, Schedule]] = []
    for one in sorted(bounds, key=lambda s: bounds[s]):
        before = sum(
            (s.wide, s.columns, s.blocks) == (one.wide, one.columns, one.blocks) for _, s in ranked
        )
        ranked.append((bounds[one] * _SAME**before, one))
    return tuple(one for _, one in sorted(ranked, key=lambda pair: pair[0])[:most])


def _all(conv: Convolution, products: int) -> Iterator[Schedule]:
    z, y, x = conv.axes
    together = len(x.classes) if merged(x) else 1
    counts = math.gcd(*(a.count * b.count for a in z.classes for b in y.classes))
    for columns in _columns(conv.outputs, together):
        for wide in (1, 2, 4):
            if wide * together * columns > 256:
                continue
            for tile in _tiles(conv, 64 * _WARPGROUPS * wide):
                for channels in _channels(conv.channels, together):
                    for taps in (t for t in range(1, counts + 1) if counts % t == 0):
                        for stages in (2, 3, 4):
                            sums = (products // 2 + 1) * (wide * together * columns // 2)
                            room = sums + (12 * products + 4) * wide + 36 + 4 * products
                            for blocks in (1, 2, 3):
                                if room * blocks <= 250:
                                    yield Schedule(
                                        *tile,
                                        columns,
                                        channels,
                                        taps,
                                        wide,
                                        stages,
                                        blocks,
                                        products,
                                    )


def _columns(outputs: int, together: int) -> list[int]:
    whole = -(-outputs // 8) * 8
    found = [-(-outputs // parts // 8) * 8 for parts in range(1, 65)]
    fitting = [c for c in dict.fromkeys(found) if c * together <= 256]
    return fitting[:2] if whole else []


def _channels(channels: int, together: int) -> list[int]:
    eights = [c for c in (8, 16, 32) if channels % c == 0] or [8] * (together > 1 and channels < 8)
    return eights or [c for c in range(1, 33) if channels % c == 0][-2:]


def _tiles(conv: Convolution, places: int) -> list[tuple[int, int, int]]:
    """The two boxes of so many places that waste least on edges and halo."""
    scored: list[tuple[float, tuple[int, int, int]]] = []
    x = conv.axes[2]
    for tx in (8, 16, 32, 64, 128, 256, 512):
        for ty in (1, 2, 4, 8, 16, 32, 64):
            if places % (tx * ty):
                continue
            tile = (places // (tx * ty), ty, tx)
            if tile[0] > 16 or any(
                t > 8 and t >= 2 * a.places for t, a in zip(tile, conv.axes, strict=True)
            ):
                continue
            waste = math.prod(
                -(-a.places // t) * t / a.places for t, a in zip(tile, conv.axes, strict=True)
            )
            halo = math.prod(
                ((t - 1) * a.stride + a.reach) / (t * a.stride)
                for t, a in zip(tile, conv.axes, strict=True)
            )
            halo *= ((tx - 1) * x.stride + x.reach + 6) / (
                (tx - 1) * x.stride + x.reach
            )  # whole vectors
            sectors = tx * (len(x.classes) if merged(x) else 1) / 8
            ragged = (
                sectors + (x.out % 8 > 0)
            ) / sectors  # of 32 bytes, written for a row of the tile
            written = conv.outputs / (
                conv.outputs + conv.channels
            )  # roughly the share of results in the traffic
            scored.append((waste * (1 + 0.15 * halo + 0.4 * written * ragged), tile))
    return [tile for _, tile in sorted(scored)[:2]]


def bound_s(conv: Convolution, one: Schedule) -> float:
    """A lower bound in seconds, rough. Raises NotLowerableError where the schedule does not fit."""
    made = layout(conv, one)
    if made.shared_bytes * one.blocks > _SHARED - 1024 * one.blocks:
        raise NotLowerableError(
            f"{made.shared_bytes} bytes of shared memory for each of {one.blocks} blocks"
        )
    wide, columns = one.wide * _WARPGROUPS, made.together * one.columns
    classes = [math.prod(c) for c in _products(conv)]
    slots = -(-conv.channels // one.channels) * sum(classes) / len(classes) / one.taps
    tensor = wide * max(16.0, columns / 2) * one.products
    read = wide * (16.0 * math.sqrt(conv.axes[2].stride) + columns / 4 * one.products + 2)
    step = max(tensor, read) + 0.25 * min(tensor, read)
    weights = made.steps * columns * 32 * one.products / 20  # clocks of the L2 for one SM
    boxes = one.channels * math.prod(made.box) * 4 / 16 * one.taps / max(classes)
    per_slot = (
        max(made.steps * step, weights + boxes) + (180 + 120 * (one.stages == 2)) / one.blocks
    )
    tiles = math.prod(
        -(-a.places // t) for a, t in zip(conv.axes, (one.z, one.y, one.x), strict=True)
    )
    blocks = conv.images * conv.groups * -(-conv.outputs // one.columns) * tiles * len(classes)
    inner, outer = slots * per_slot, 1500 + 64 * wide * columns * 4 / 16
    clocks: float = (
        inner + outer if one.blocks == 1 else max(inner, outer) + 0.3 * min(inner, outer)
    )
    waves = max(1.0, blocks / _SMS)
    return max(waves * clocks / _CLOCK, conv.bytes / _BYTES_PER_S) + 0.05 * waves * clocks / _CLOCK


def _products(conv: Convolution) -> list[tuple[int, ...]]:
    z, y, x = conv.axes
    last = [1] if len(x.classes) == 1 or merged(x) else [1] * len(x.classes)
    return [(a.count, b.count, c) for a in z.classes for b in y.classes for c in last]
