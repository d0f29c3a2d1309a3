"""Which ways of computing a matrix product are worth trying: tables of schedules, pruned and
ordered by a bound on their time.

The bound is a roofline with whole waves of tiles: a program computes its tile at a share of an SM's
peak that grows with the tile, all operands and results pass the memory once. It orders candidates;
it does not decide between them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace

import torch

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.device.specs import H200, max_shared_bytes
from torch_cudal1.kernels.ops.matmul import Product, put_long_side_left, put_streamed_left
from torch_cudal1.kernels.proposal import Proposal

__all__ = [
    "FP32_METHODS",
    "METHODS",
    "TILED",
    "GemmSchedule",
    "choose_schedules",
    "choose_wgmma_tiles",
    "order_by_bound",
    "read_schedule",
]


@dataclass(frozen=True)
class Method:
    """What a method may serve, and its costs.

    `itemsize`: bytes of an element of its inputs (0: any). `needs_tf32`: only where the user allows
    TF32. `sm`: the oldest compute capability, with `exact_sm` the only one. `flops_per_s`: of the
    product itself at large sizes on an H200. `bytes_per_element`: of an operand in a stage's shared
    memory.
    """

    itemsize: int
    needs_tf32: bool
    sm: int
    flops_per_s: float
    bytes_per_element: int
    exact_sm: bool = False


METHODS = {
    # The packed rates are without packing: `estimate_s` adds the passes and launches for that.
    # Packed methods use wgmma, which is in sm_90a only.
    "packed-f16x3": Method(4, False, 90, 2.3e14, 4, exact_sm=True),
    "packed-stream": Method(4, False, 90, 2.1e14, 4, exact_sm=True),
    "packed-bf16x6": Method(4, False, 90, 1.2e14, 6, exact_sm=True),
    # One fp16 piece holds 11 bits, as TF32 has: only where the user allows TF32.
    "packed-f16x1": Method(4, True, 90, 6.0e14, 2, exact_sm=True),
    "bf16x6": Method(4, False, 80, 6.5e13, 4),
    "tf32x3": Method(4, False, 80, 5.5e13, 4),
    "tf32": Method(4, True, 80, 3.0e14, 4),
    "half": Method(2, False, 80, 6.0e14, 2),
    "wgmma": Method(2, False, 90, 6.5e14, 2, exact_sm=True),
    # An element size of 0 stands for any dtype: a fold has no tensor core operands.
    "fold": Method(0, False, 80, 1.0e13, 0),
}
FP32_METHODS = frozenset(name for name, method in METHODS.items() if method.itemsize == 4)
# How much slower than its bound another schedule of a method counts. The bound knows no difference
# between methods that it does not model, so the first few proposals must not all be tiles of one.
_SAME_METHOD_PENALTY = 1.5
# Between the L2 and all SMs together: 128 blocks that read 100 MB through it took 16.5 us (H200,
# benchmarks/LOG.md, 2026-12-01).
_L2_BYTES_PER_S = 6.5e12
_FED_FROM_L2 = ("half", "wgmma")
# A fold reads the matrix once for each vector; with more vectors it would be read too often.
_MAX_FOLD_COLUMNS = 4


@dataclass(frozen=True)
class GemmSchedule:
    """How a product is cut: a tile of `rows` x `columns` and `depth` of k, `split` programs a tile,
    tiles in bands of `group` rows.

    `stages` of the operand pipeline. `promote` (packed): how many depths are summed in the tensor
    core before they are added in fp32 (0: all). `cluster` (packed): blocks that fetch their common
    columns of B once.
    """

    method: str
    rows: int = 0
    columns: int = 0
    depth: int = 0
    warps: int = 8
    stages: int = 3
    group: int = 8
    split: int = 1
    promote: int = 1
    cluster: int = 1

    def proposal(self) -> Proposal:
        """As a proposal of family "gemm"."""
        return Proposal("gemm", asdict(self))


# rows, columns, depth, warps, stages
_TILES: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "bf16x6": (
        (128, 128, 32, 8, 3),
        (128, 64, 32, 8, 3),
        (64, 128, 32, 8, 3),
        (64, 64, 32, 4, 3),
        (64, 32, 32, 4, 4),
        (32, 64, 32, 4, 4),
        (16, 64, 64, 4, 4),
        (64, 16, 64, 4, 4),
    ),
    "tf32x3": (
        (128, 128, 32, 8, 3),
        (128, 64, 32, 8, 3),
        (64, 64, 32, 4, 3),
        (32, 64, 32, 4, 4),
        (16, 64, 64, 4, 4),
        (64, 16, 64, 4, 4),
    ),
    "tf32": (
        (128, 256, 32, 8, 3),
        (128, 128, 32, 8, 4),
        (128, 64, 32, 4, 4),
        (64, 64, 32, 4, 4),
        (16, 64, 64, 4, 4),
        (64, 16, 64, 4, 4),
    ),
    "half": (
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 4, 4),
        (16, 64, 128, 4, 4),
        (64, 16, 128, 4, 4),
    ),
}
# columns, stages, promote, group, cluster
_PACKED: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    # The first number of columns is the best at 4096^3: with 192 columns the last wave is mostly
    # empty (181 TFLOP/s, benchmarks/LOG.md, 2026-11-20).
    # two depths before promotion are no faster and double the error, which at small k is then above
    # cuBLAS's; pairs of blocks are slower (825 us against 704 at 4096^3, 919 against 809 at 1024 x
    # 8192 x 8192)
    "packed-f16x3": ((128, 3, 1, 8, 1), (192, 2, 1, 8, 1), (64, 4, 1, 8, 1)),
    "packed-stream": ((128, 3, 1, 8, 1), (64, 4, 1, 8, 1)),
    "packed-bf16x6": ((128, 2, 1, 8, 1), (96, 2, 1, 8, 1)),
    "packed-f16x1": (
        (256, 4, 0, 8, 1),
        (256, 4, 0, 4, 2),
        (192, 4, 0, 8, 2),
        (128, 6, 0, 8, 1),
        (128, 6, 0, 8, 2),
        (64, 8, 0, 8, 1),
    ),
}
# rows, columns, stages. With few stages two blocks share an SM's memory, and one multiplies while
# the other writes.
_WGMMA = (
    (128, 256, 4),
    (128, 192, 5),
    (128, 128, 6),
    (128, 128, 3),
    (128, 96, 6),
    (128, 64, 8),
    (128, 64, 4),
    (64, 128, 4),
    (64, 64, 6),
    (64, 32, 8),
    (64, 16, 8),
)
# Of a block's shared memory: what aligns the ring, and barriers.
_WGMMA_MARGIN = 2048
_MAX_STAGES = 16
# Methods that read their operands as they go, and serve a weight that is made on the way.
TILED = tuple(_TILES)
_PIECES = {"packed-f16x3": 2, "packed-stream": 2, "packed-bf16x6": 3, "packed-f16x1": 1}
# Rows of the operand that is not streamed: below, tiles are almost empty.
_MIN_STREAMED_ROWS = 8


def choose_schedules(
    product: Product,
    sm: int,
    rights: Collection[str] = (),
    most: int = 8,
    methods: Iterable[str] = METHODS,
) -> tuple[GemmSchedule, ...]:
    """At most `most` schedules of `methods` for `product` on `sm`, in `order_by_bound`'s order.
    `rights`: op classes that may use TF32.
    """
    # Methods that the GPU, the dtype or the user's rights rule out are not proposed at all.
    schedules = [
        s
        for name in methods
        if _serves(name, product, sm, rights)
        for s in _list_method_schedules(name, product, sm)
    ]
    return order_by_bound(product, schedules)[:most]


def order_by_bound(product: Product, schedules: Iterable[GemmSchedule]) -> tuple[GemmSchedule, ...]:
    """The schedules, smallest bound first, where each further schedule of a method counts as slower:
    the first few should differ in what the bound does not model.
    """
    ranked: list[tuple[float, GemmSchedule]] = []
    # Each further schedule of a method is penalised once more, in the order of the bound.
    for schedule in sorted(schedules, key=lambda s: estimate_s(product, s)):
        before = sum(s.method == schedule.method for _, s in ranked)
        ranked.append((estimate_s(product, schedule) * _SAME_METHOD_PENALTY**before, schedule))
    return tuple(schedule for _, schedule in sorted(ranked, key=lambda pair: pair[0]))


def read_schedule(proposal: Proposal) -> GemmSchedule:
    """The schedule of a proposal. Raises ProgramError for numbers that no kernel is made for."""
    method = proposal.config.get("method")
    if proposal.family != "gemm" or method not in METHODS:
        raise ProgramError(
            "proposal",
            f"family {proposal.family!r} and method {method!r}; expected one of {sorted(METHODS)}",
        )
    # A fold has no tile of its own: its config holds the numbers of a loop nest, read elsewhere.
    names = ("rows", "columns", "depth", "warps", "stages", "group", "split", "promote", "cluster")
    numbers = {name: proposal.number(name, 1) for name in names}
    schedule = GemmSchedule(str(method), **numbers)
    if method == "fold":
        return schedule
    sizes = (schedule.rows, schedule.columns, schedule.depth)
    # `tl.dot` takes operands of 16 and more in every dimension, `tl.arange` powers of two only. An
    # SM has 65,536 registers, and each fp32 accumulator of a tile takes one.
    packed = schedule.method.startswith("packed")
    if (
        min(sizes) < 16
        or (schedule.method in TILED and any(size & (size - 1) for size in sizes))
        or schedule.rows * schedule.columns > 65536
    ):
        raise ProgramError("proposal", f"a tile of {sizes}; expected powers of two from 16")
    if packed:
        _check_packed(schedule)
    if schedule.method == "wgmma":
        _check_wgmma(schedule)
    # The streamed kernel copies rows of A itself and knows no cluster (packed_stream.cu).
    if schedule.cluster not in ((1, 2) if packed and schedule.method != "packed-stream" else (1,)):
        raise ProgramError(
            "proposal", f"a cluster of {schedule.cluster}; expected 1, or for packed tiles 2"
        )
    if (
        schedule.warps not in (1, 2, 4, 8, 16)
        or min(schedule.stages, schedule.group, schedule.split) < 1
    ):
        raise ProgramError(
            "proposal",
            f"{schedule}: warps must be a power of two up to 16, the other numbers positive",
        )
    return schedule


def _check_packed(schedule: GemmSchedule) -> None:
    never = schedule.promote == 0
    # A streamed row is scaled by a power of two of its 64 of k alone, and the scale is put back
    # when the partial sum leaves the tensor core: sums of several depths would mix scales.
    if schedule.method == "packed-stream" and (schedule.promote != 1 or schedule.columns > 128):
        raise ProgramError(
            "proposal",
            f"{schedule}: a streamed product promotes every depth, in tiles of at most 128 columns",
        )
    # With promotion a warpgroup holds two sets of accumulators in registers (the tensor core's and
    # the fp32 sums), without it one.
    widest = 256 if never else 192
    if (
        (schedule.rows, schedule.depth) != (128, 64)
        or schedule.columns % 32
        or schedule.columns > widest
    ):
        sizes = (schedule.rows, schedule.columns, schedule.depth)
        raise ProgramError(
            "proposal",
            f"a packed tile of {sizes}; expected 128 x (32 to {widest}, in steps of 32) x 64",
        )
    # The tensor core's accumulator truncates: the rms error grows by about 1.2e-9 a unit of k and
    # product, 4.9e-6 at k = 4096 (benchmarks/LOG.md, 2026-11-20).
    if never and schedule.method != "packed-f16x1":
        raise ProgramError(
            "proposal", f"{schedule.method} without promotion would be less exact than fp32"
        )


def _check_wgmma(schedule: GemmSchedule) -> None:
    sizes = (schedule.rows, schedule.columns, schedule.depth)
    if (
        schedule.rows not in (64, 128)
        or schedule.depth != 64
        or schedule.columns % 16
        or schedule.columns > 256
        or schedule.stages < 3
    ):
        raise ProgramError(
            "proposal",
            f"a wgmma tile of {sizes} in {schedule.stages} stages; expected 64 or 128 x (16 to 256, "
            "in steps of 16) x 64 in 3 or more",
        )


def estimate_s(product: Product, schedule: GemmSchedule) -> float:
    """Seconds that `schedule` cannot go below, roughly; for ordering."""
    method, size = METHODS[schedule.method], product.dtype.itemsize
    # The tile is over the operands as the kernel takes them, not as the Program has them.
    if schedule.method == "packed-stream":
        product, _ = put_streamed_left(product)
    if schedule.method == "wgmma":
        product, _ = put_long_side_left(product, schedule.rows)
    operands = size * product.batch * (product.m + product.n) * product.k
    moved = operands + 4 * product.batch * product.m * product.n
    if schedule.method == "fold":
        return moved / H200.bytes_per_s + H200.launch_s
    tiles = _count_tiles(product, schedule.rows, schedule.columns) * schedule.split
    area = schedule.rows * schedule.columns
    # Small tiles wait for the shared memory more than they compute.
    share = min(1.0, 0.35 + 0.65 * area / 16384)
    # How many programs an SM runs side by side: it has 65,536 registers, and a program takes about
    # two for each accumulator.
    per_sm = max(1, min(4, 65536 // (area * 2)))
    # The last wave takes as long as a full one. Fewer tiles than SMs are one wave.
    waves = math.ceil(tiles / (H200.sm_count * per_sm)) * per_sm if tiles > H200.sm_count else 1
    work = (
        2.0
        * area
        * product.k
        / schedule.split
        * waves
        / (method.flops_per_s * share / H200.sm_count)
    )
    if schedule.method in _FED_FROM_L2:
        # Every tile reads its rows and columns through the L2.
        fed = size * tiles * (schedule.rows + schedule.columns) * product.k / schedule.split
        work = max(work, fed / _L2_BYTES_PER_S)
    launches = 1
    if schedule.split > 1:
        # Partial sums are written and read once, 4 bytes each way; a second launch adds them up.
        moved += 8 * schedule.split * product.batch * product.m * product.n
        launches = 2
    if schedule.method in _PIECES:
        # Only the right operand of a streamed product is packed.
        packed = (
            size * product.batch * product.n * product.k
            if schedule.method == "packed-stream"
            else operands
        )
        # Packing reads its operands twice, 4 bytes an element, and writes pieces of 2 bytes.
        extra = (8 + 2 * _PIECES[schedule.method]) / 4 * packed / H200.bytes_per_s
        # Packing comes before the product, in two launches of its own: it does not overlap with it.
        return max(work, moved / H200.bytes_per_s) + extra + (2 + launches) * H200.launch_s
    return max(work, moved / H200.bytes_per_s) + launches * H200.launch_s


def _serves(name: str, product: Product, sm: int, rights: Collection[str]) -> bool:
    method = METHODS[name]
    if (
        sm < method.sm
        or (method.exact_sm and sm != method.sm)
        or (method.needs_tf32 and "matmul" not in rights)
    ):
        return False
    if name == "fold":
        return min(product.m, product.n) <= _MAX_FOLD_COLUMNS
    # The kernels in CUDA C++ walk a batch by one stride.
    if name not in TILED and (product.left.digits or product.right.digits):
        return False
    return method.itemsize == product.dtype.itemsize and (
        product.dtype is not torch.float32 or name != "half"
    )


def _list_method_schedules(name: str, product: Product, sm: int) -> Iterable[GemmSchedule]:
    if name == "fold":
        yield GemmSchedule("fold", warps=4)
        return
    if name in _PACKED:
        yield from _list_packed_schedules(name, product)
        return
    if name == "wgmma":
        yield from _list_wgmma_schedules(product)
        return
    for rows, columns, depth, warps, stages in _TILES[name]:
        # Half of such a tile or more would be empty. Tiles of 16 are the smallest there are, so
        # they stay.
        if rows >= 2 * max(16, product.m) or columns >= 2 * max(16, product.n):
            continue
        shared = stages * depth * (rows + columns) * METHODS[name].bytes_per_element
        # The table is for an H200; GPUs with less shared memory get a shorter pipeline.
        if shared > max_shared_bytes(sm):
            stages = max(2, stages * max_shared_bytes(sm) // shared)
        for split in _choose_splits(product, rows, columns):
            # Stages beyond the steps of k hold nothing and keep programs off the SM: four stages of
            # 20 KiB for a single step left room for two (KernelBench 3/49, benchmarks/LOG.md,
            # 2026-11-25).
            steps = math.ceil(product.k / split / depth)
            yield GemmSchedule(
                name, rows, columns, depth, warps, min(stages, max(1, steps)), 8, split
            )


def _list_packed_schedules(name: str, product: Product) -> Iterable[GemmSchedule]:
    """The schedules of a packed method; none for a product whose tiles would be mostly empty, which
    costs more to pack than the method saves.
    """
    least = min(product.m, product.n) if name == "packed-stream" else product.m
    # Packing costs about 15 us: at 333 x 517 x 259 and below small tiles of bf16x6 are faster
    # (benchmarks/LOG.md, 2026-11-20).
    if least < (_MIN_STREAMED_ROWS if name == "packed-stream" else 64) or product.k < 32:
        return
    if name == "packed-stream":
        try:
            product, _ = put_streamed_left(product)
        except NotLowerableError:
            return
    for columns, stages, promote, group, cluster in _PACKED[name]:
        if columns > max(64, 2 * product.n) or 128 * cluster >= 2 * product.m:
            continue
        tiles = product.batch * math.ceil(product.m / 128) * math.ceil(product.n / columns)
        for split in _choose_even_splits(product, tiles):
            yield GemmSchedule(name, 128, columns, 64, 8, stages, group, split, promote, cluster)


def choose_wgmma_tiles(product: Product, narrowest: int | None = None) -> list[GemmSchedule]:
    """Schedules of wgmma for a product as the kernel takes it, of whose tiles less than half is
    empty. `narrowest`: columns of the narrowest of the products that it stands for.
    """
    columns = max(16, product.n if narrowest is None else narrowest)
    schedules = [
        _fill_shared_memory(
            GemmSchedule("wgmma", tile_rows, tile_columns, 64, 8, stages, 8, split), product
        )
        for tile_rows, tile_columns, stages in _WGMMA
        if tile_columns < 2 * columns and tile_rows < 2 * max(64, product.m)
        for split in _choose_even_splits(product, _count_tiles(product, tile_rows, tile_columns))
    ]
    return list(dict.fromkeys(schedules))


def _count_tiles(product: Product, rows: int, columns: int) -> int:
    return product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)


def _fill_shared_memory(schedule: GemmSchedule, product: Product) -> GemmSchedule:
    """As many stages as fit where each SM has one tile: all of a short k is on its way at once."""
    tiles = _count_tiles(product, schedule.rows, schedule.columns)
    if tiles * schedule.split > H200.sm_count:
        return schedule
    steps = math.ceil(product.k / schedule.split / schedule.depth)
    stage_bytes = 2 * schedule.depth * (schedule.rows + schedule.columns)
    most_stages = (max_shared_bytes(90) - _WGMMA_MARGIN) // stage_bytes
    return replace(schedule, stages=max(3, min(steps, most_stages, _MAX_STAGES)))


def _list_wgmma_schedules(product: Product) -> Iterable[GemmSchedule]:
    for rows in (128, 64):
        long_side, _ = put_long_side_left(product, rows)
        yield from (s for s in choose_wgmma_tiles(long_side) if s.rows == rows)


def _choose_even_splits(product: Product, tiles: int) -> tuple[int, ...]:
    """1, and the power of two that fills the SMs where tiles leave more than half of them idle;
    pieces are whole depths of k.
    """
    # The pieces of k become the matrices of a batch, so a batch cannot be split once more.
    if product.batch > 1 or tiles > H200.sm_count // 2:
        return (1,)
    split = 1 << int(math.log2(2 * H200.sm_count / tiles))
    # Pieces must be equal and whole depths: the kernel walks them by one stride.
    while split > 1 and (product.k % (64 * split) or product.k // split < 512):
        split //= 2
    return (1, split) if split > 1 else (1,)


def _choose_splits(product: Product, rows: int, columns: int) -> tuple[int, ...]:
    """Numbers of programs that share a tile: 1, and those that fill the SMs once or twice where tiles
    alone do not. A piece keeps at least 256 of k.
    """
    tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)
    max_split = product.k // 256
    splits = {1} | {
        split
        for times in (1, 2)
        if 1 < (split := min(max_split, times * H200.sm_count // tiles)) <= 64
    }
    return tuple(sorted(splits))
