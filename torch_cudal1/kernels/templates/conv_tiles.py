"""Which ways of cutting a convolution into blocks are worth trying, ordered by a bound on their
time.

The bound counts, for each slot of weights, what the tensor core, the shared memory and the L2 need,
and the halo and ragged edges of the tiles. It orders candidates; it does not decide between them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.device.specs import H200, max_shared_bytes
from torch_cudal1.kernels.ops.convolutions import Convolution, SpatialAxis
from torch_cudal1.kernels.proposal import Proposal

__all__ = [
    "BlockLayout",
    "ConvSchedule",
    "can_merge_classes",
    "choose_schedules",
    "lay_out",
    "read_schedule",
]

_MAX_SHARED_BYTES = max_shared_bytes(H200.sm)
_WARPGROUPS = 2
# Results leave through shared memory in the order of the output. Where the operands need less than
# this, results get it all the same.
_OUTPUT_STAGING_BYTES = 36 * 1024
# The steps of a slot are unrolled.
_MAX_SLOT_STEPS = 40
# How much slower than its bound another schedule with the same tile counts, so that the first
# proposals differ in more than their stages.
_SAME_TILE_PENALTY = 1.3


@dataclass(frozen=True)
class ConvSchedule:
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


def read_schedule(proposal: Proposal) -> ConvSchedule:
    """The schedule of a proposal. Raises ProgramError for numbers that no kernel is made for."""
    if proposal.family != "conv" or set(proposal.config) != {f.name for f in fields(ConvSchedule)}:
        raise ProgramError(
            "proposal",
            f"family {proposal.family!r}, config {dict(proposal.config)!r}; expected a convolution's",
        )
    numbers: dict[str, Any] = {name: proposal.number(name, 0) for name in proposal.config}
    schedule = ConvSchedule(**numbers)
    powers = all(
        size > 0 and size & (size - 1) == 0
        for size in (schedule.z, schedule.y, schedule.x, schedule.wide)
    )
    if (
        # wgmma computes 64 rows a warpgroup and a multiple of 8 columns. With fewer than two stages
        # nothing would be copied while the tensor core computes.
        not powers
        or schedule.z * schedule.y * schedule.x != 64 * schedule.wide * _WARPGROUPS
        or schedule.columns % 8
        or schedule.stages < 2
        or schedule.products not in (1, 3)
    ):
        raise ProgramError(
            "proposal",
            f"{schedule} is no tile of {64 * _WARPGROUPS} times `wide` places and a multiple of 8 columns",
        )
    return schedule


def can_merge_classes(axis: SpatialAxis) -> bool:
    """Whether the classes along x can share a block: their taps lie on one grid of the input."""
    low = axis.low
    return len(axis.classes) > 1 and all(
        (c.low - low) % axis.step == 0 for c in axis.classes if c.count
    )


@dataclass(frozen=True)
class BlockLayout:
    """What follows from a schedule.

    `together`: classes of x in a block; `taps` along x; `steps` of a slot; `vector`: elements of a
    copy; `box`, `low`, `shift`: the input around a tile; `plane`: elements from one channel's box to
    the next; `zeros`: planes of zeros (0 or 1); `boxes` and `table` in shared memory; `staged`:
    channels whose results are brought into the order of the output at a time; `shared_bytes`.
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


def lay_out(conv: Convolution, schedule: ConvSchedule) -> BlockLayout:
    """The layout of a schedule. Raises NotLowerableError where it does not fit the convolution."""
    z, y, x = conv.axes
    together = len(x.classes) if can_merge_classes(x) else 1
    taps = -(-x.reach // x.step) if together > 1 else x.taps
    depth = schedule.taps * taps * schedule.channels
    steps, counts = -(-depth // 8), {a.count * b.count for a in z.classes for b in y.classes}
    _check_slots(conv, schedule, together, counts)
    _check_registers(schedule, together, steps)
    vector = _copy_elements(conv, schedule)
    # The box begins at a whole vector, so that copies are aligned.
    first = x.low // vector * vector
    box = _size_box(conv, schedule, x.low - first, vector)
    plane = _pad_plane(math.prod(box), x.stride)
    # What a step reads and does not exist comes from a plane of zeros.
    holes = (
        depth % 8 > 0
        or conv.channels < schedule.channels
        or (together == 1 and len({c.count for c in x.classes}) > 1)
    )
    slots = max(1, min((count // schedule.taps for count in counts if count), default=1))
    boxes = min(-(-conv.channels // schedule.channels), -(-(schedule.stages - 1) // slots) + 1)
    table = max(counts) // schedule.taps * steps * 4
    floats = (
        boxes * (min(schedule.channels, conv.channels) + holes) * plane
        + schedule.stages * schedule.products * steps * 8 * together * schedule.columns
    )
    # A pair of offsets is 8 bytes; what follows the table is aligned to 128.
    operand_bytes = -(-table * 8 // 128) * 128 + 4 * floats
    staged, staged_bytes = _stage_results(schedule, together, operand_bytes)
    return BlockLayout(
        together=together,
        taps=taps,
        steps=steps,
        vector=vector,
        low=(z.low, y.low, first),
        shift=x.low - first,
        box=box,
        plane=plane,
        zeros=int(holes),
        boxes=boxes,
        table=table,
        staged=staged,
        shared_bytes=max(operand_bytes, staged_bytes),
    )


def _check_slots(
    conv: Convolution, schedule: ConvSchedule, together: int, counts: Collection[int]
) -> None:
    """Raises NotLowerableError where channels and taps (`counts` of each class) leave a rest."""
    # A step is 8 of k: a chunk of fewer channels may be filled up with zeros to one step.
    filled = conv.channels % schedule.channels == 0 or conv.channels < schedule.channels == 8
    if (
        not filled
        or any(count % schedule.taps for count in counts)
        or (together > 1 and schedule.channels % 8)
    ):
        raise NotLowerableError(
            f"{conv.channels} channels, {sorted(counts)} taps: do not divide into {schedule.channels} and {schedule.taps}"
        )


def _check_registers(schedule: ConvSchedule, together: int, steps: int) -> None:
    """Raises NotLowerableError where a block is larger than wgmma and registers allow."""
    columns = together * schedule.columns
    if (
        # wgmma takes at most 256 columns. Each thread keeps `wide * columns / 2` accumulators: 128
        # of its 255 registers at this limit.
        not 0 < steps <= _MAX_SLOT_STEPS or columns > 256 or schedule.wide * columns > 256
    ):
        raise NotLowerableError(
            f"{steps} steps a slot, {columns} columns and {schedule.wide} rows of 64"
        )


def _size_box(
    conv: Convolution, schedule: ConvSchedule, shift: int, vector: int
) -> tuple[int, int, int]:
    """The input around a tile, whole vectors along x; `shift`: elements before the tile's first."""
    z, y, x = conv.axes
    along = (schedule.x - 1) * x.stride + shift + x.reach
    return (
        (schedule.z - 1) * z.stride + z.reach,
        (schedule.y - 1) * y.stride + y.reach,
        -(-along // vector) * vector,
    )


def _stage_results(schedule: ConvSchedule, together: int, operand_bytes: int) -> tuple[int, int]:
    """Channels whose results are staged at a time, and their bytes: what fits the operands' memory."""
    # Rows of staged results are 4 elements longer than a tile: fragments of 4 channels x 8 places
    # lie in different banks then (PITCH of conv.cu).
    channel_bytes = 4 * together * (64 * _WARPGROUPS * schedule.wide + 4)
    limit = max(operand_bytes, _OUTPUT_STAGING_BYTES)
    divisors = [c for c in range(8, schedule.columns + 1, 8) if schedule.columns % c == 0]
    staged = max((c for c in divisors if c * channel_bytes <= limit), default=8)
    return staged, staged * channel_bytes


def _copy_elements(conv: Convolution, schedule: ConvSchedule) -> int:
    """Elements that one copy may move: addresses and edges must all be multiples of it."""
    sizes = (*conv.input_strides[:4], conv.axes[2].size, schedule.x * conv.axes[2].stride)
    return next(v for v in (4, 2, 1) if all(size % v == 0 for size in sizes))


def _pad_plane(size: int, stride: int) -> int:
    """Elements from one channel's box to the next, so that 8 places of 4 channels lie in different
    banks.
    """
    # Shared memory has 32 banks of 4 bytes.
    bank_offset = 8 if stride == 1 else 16 + 4 * (stride > 2)
    size = -(-size // 4) * 4
    return size + (bank_offset - size) % 32


def choose_schedules(conv: Convolution, products: int, most: int = 8) -> tuple[ConvSchedule, ...]:
    """At most `most` schedules, smallest bound first; each further schedule of a tile counts as
    slower.
    """
    bounds: dict[ConvSchedule, float] = {}
    for schedule in _enumerate(conv, products):
        try:
            bounds[schedule] = estimate_s(conv, schedule)
        except NotLowerableError:
            continue
    ranked: list[tuple[float, ConvSchedule]] = []
    for schedule in sorted(bounds, key=lambda s: bounds[s]):
        # The bound knows little of what differs between schedules of one tile: others come first.
        before = sum(
            (s.wide, s.columns, s.blocks) == (schedule.wide, schedule.columns, schedule.blocks)
            for _, s in ranked
        )
        ranked.append((bounds[schedule] * _SAME_TILE_PENALTY**before, schedule))
    return tuple(schedule for _, schedule in sorted(ranked, key=lambda pair: pair[0])[:most])


def _enumerate(conv: Convolution, products: int) -> Iterator[ConvSchedule]:
    z, y, x = conv.axes
    together = len(x.classes) if can_merge_classes(x) else 1
    counts = math.gcd(*(a.count * b.count for a in z.classes for b in y.classes))
    for columns in _choose_columns(conv.outputs, together):
        for wide in (1, 2, 4):
            if wide * together * columns > 256:
                continue
            for tile in _choose_tiles(conv, 64 * _WARPGROUPS * wide):
                for channels in _choose_channels(conv.channels, together):
                    for taps in (t for t in range(1, counts + 1) if counts % t == 0):
                        for stages in (2, 3, 4):
                            # Three products need the fp32 sums beside the tensor core's
                            # accumulators.
                            sums = (products // 2 + 1) * (wide * together * columns // 2)
                            room = sums + (12 * products + 4) * wide + 36 + 4 * products
                            for blocks in (1, 2, 3):
                                # A block has 256 threads: of an SM's 65,536 registers each thread
                                # of a single block may have 256.
                                if room * blocks <= 250:
                                    yield ConvSchedule(
                                        *tile,
                                        columns,
                                        channels,
                                        taps,
                                        wide,
                                        stages,
                                        blocks,
                                        products,
                                    )


def _choose_columns(outputs: int, together: int) -> list[int]:
    padded = -(-outputs // 8) * 8
    candidates = [-(-outputs // parts // 8) * 8 for parts in range(1, 65)]
    fitting = [c for c in dict.fromkeys(candidates) if c * together <= 256]
    return fitting[:2] if padded else []


def _choose_channels(channels: int, together: int) -> list[int]:
    # A step of 8 of k is of a single tap where the channels divide by 8.
    eights = [c for c in (8, 16, 32) if channels % c == 0] or [8] * (together > 1 and channels < 8)
    return eights or [c for c in range(1, 33) if channels % c == 0][-2:]


def _choose_tiles(conv: Convolution, places: int) -> list[tuple[int, int, int]]:
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
            # Copies move whole vectors of up to 4 elements along x: a box is up to 6 elements
            # longer.
            halo *= ((tx - 1) * x.stride + x.reach + 6) / ((tx - 1) * x.stride + x.reach)
            sectors = tx * (len(x.classes) if can_merge_classes(x) else 1) / 8
            # Memory is written in sectors of 32 bytes: a row that ends within one writes it in
            # part.
            ragged = (sectors + (x.out % 8 > 0)) / sectors
            # Roughly the share of results in the traffic.
            written = conv.outputs / (conv.outputs + conv.channels)
            scored.append((waste * (1 + 0.15 * halo + 0.4 * written * ragged), tile))
    return [tile for _, tile in sorted(scored)[:2]]


def estimate_s(conv: Convolution, schedule: ConvSchedule) -> float:
    """A lower bound in seconds, rough. Raises NotLowerableError where the schedule does not fit."""
    block_layout = lay_out(conv, schedule)
    # CUDA reserves 1 KiB of shared memory for each block.
    if block_layout.shared_bytes * schedule.blocks > _MAX_SHARED_BYTES - 1024 * schedule.blocks:
        raise NotLowerableError(
            f"{block_layout.shared_bytes} bytes of shared memory for each of {schedule.blocks} blocks"
        )
    wide, columns = schedule.wide * _WARPGROUPS, block_layout.together * schedule.columns
    classes = [math.prod(c) for c in _count_products_per_class(conv)]
    slots = -(-conv.channels // schedule.channels) * sum(classes) / len(classes) / schedule.taps
    tensor = wide * max(16.0, columns / 2) * schedule.products
    read = wide * (16.0 * math.sqrt(conv.axes[2].stride) + columns / 4 * schedule.products + 2)
    step = max(tensor, read) + 0.25 * min(tensor, read)
    # Clocks of the L2 for one SM.
    weights = block_layout.steps * columns * 32 * schedule.products / 20
    boxes = schedule.channels * math.prod(block_layout.box) * 4 / 16 * schedule.taps / max(classes)
    per_slot = (
        max(block_layout.steps * step, weights + boxes)
        + (180 + 120 * (schedule.stages == 2)) / schedule.blocks
    )
    tiles = math.prod(
        -(-a.places // t)
        for a, t in zip(conv.axes, (schedule.z, schedule.y, schedule.x), strict=True)
    )
    blocks = conv.images * conv.groups * -(-conv.outputs // schedule.columns) * tiles * len(classes)
    inner, outer = slots * per_slot, 1500 + 64 * wide * columns * 4 / 16
    clocks: float = (
        inner + outer if schedule.blocks == 1 else max(inner, outer) + 0.3 * min(inner, outer)
    )
    waves = max(1.0, blocks / H200.sm_count)
    return (
        max(waves * clocks / H200.clock_hz, conv.bytes / H200.bytes_per_s)
        + 0.05 * waves * clocks / H200.clock_hz
    )


def _count_products_per_class(conv: Convolution) -> list[tuple[int, ...]]:
    z, y, x = conv.axes
    last = [1] if len(x.classes) == 1 or can_merge_classes(x) else [1] * len(x.classes)
    return [(a.count, b.count, c) for a in z.classes for b in y.classes for c in last]
