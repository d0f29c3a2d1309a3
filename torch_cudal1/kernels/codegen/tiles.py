"""Which tiles to try for a loop nest, best guess first.

All these kernels are bound by memory: a tile should give each thread 16-byte loads and each SM
enough loads in flight (about 8 elements a thread, 4 to 8 warps), and the grid should fill the SMs.

    element-wise        block   256  512 1024 2048 4096     8 elements a thread; smaller when the grid would not fill the SMs
    row in one tile     columns <= 32768: several rows a program up to 1024 columns, then one row and 4, 8, 16, 32 warps
    row in a loop       longer rows, and rows that are not contiguous in memory (then 16 to 64 neighbouring rows a program)
    row split           few long rows: `split` programs share a row, partial results go through a scratch tensor
    row of a CTA group  rows too long for a tile that are read again after a reduction: programs share one, a tile each, 64 elements
                        a thread, as many programs at most as run at the same time
"""

from __future__ import annotations

from torch_cudal1.device.specs import H200
from torch_cudal1.kernels.codegen.loop_nest import Nest
from torch_cudal1.kernels.expr.affine import next_power_of_two

__all__ = ["TileConfig", "choose_tiles"]

TileConfig = dict[str, int | str | bool]

# 32 registers a thread at 32 warps; beyond that the tile spills.
_MAX_TILE_COLUMNS = 32768
_MAX_CONFIGS = 6
# columns up to ... -> (columns x rows of a tile, warps), best guess first
_ROW_TABLE: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = (
    (64, ((1024, 4), (2048, 4), (512, 2), (256, 1))),
    (256, ((1024, 4), (512, 2), (2048, 8), (256, 1))),
    (1024, ((1024, 1), (1024, 2), (1024, 4), (2048, 4), (4096, 8))),
    (2048, ((2048, 4), (2048, 2), (2048, 8), (4096, 8))),
    (4096, ((4096, 8), (4096, 4), (4096, 16))),
    (8192, ((8192, 8), (8192, 16), (8192, 4))),
    (16384, ((16384, 16), (16384, 8), (16384, 32))),
    (_MAX_TILE_COLUMNS, ((32768, 32), (32768, 16))),
)
_LOOP_TILES = ((4096, 8), (8192, 16), (16384, 32), (2048, 4))
# rows that all SMs together may hold in the L2 until they are read again: few and large programs
_L2_LOOP_TILES = ((8192, 16), (16384, 32), (8192, 32), (4096, 8))
_L2_COLUMNS = range(_MAX_TILE_COLUMNS + 1, 100_000)
# Columns, warps, and the programs that run at the same time. Larger groups would wait for CTAs that
# have not started.
_CTA_GROUP_TILES = (
    (8192, 8, 4 * H200.sm_count),
    (16384, 8, 2 * H200.sm_count),
    (8192, 4, 4 * H200.sm_count),
)
# Rows, columns, warps.
_STRIDED_TILES = ((64, 32, 4), (32, 64, 8), (64, 64, 8), (16, 128, 4))
_BLOCKS = ((1024, 4), (2048, 8), (512, 4), (4096, 8), (256, 2), (512, 2))
# With more loads than this an element, a thread has enough in flight with a few elements.
_MANY_LOADS_PER_ELEMENT = 6
_BUSY_BLOCKS = ((512, 4), (256, 4), (1024, 8), (1024, 4))
# A program should fold at least this many columns.
_MIN_SPLIT_COLUMNS = 2048


def choose_tiles(nest: Nest) -> tuple[TileConfig, ...]:
    """At most six configurations for a nest, more where a row is split: not every number of pieces
    fits its dimensions.
    """
    if not nest.reduces:
        configs = _choose_blocks(nest)
    elif _is_strided(nest):
        configs = _choose_strided_tiles(nest)
    else:
        configs = _choose_row_tiles(nest)
    splits = [config for config in configs if config.get("split", 1) != 1]
    return tuple(splits + [config for config in configs if config not in splits][:_MAX_CONFIGS])


def _choose_blocks(nest: Nest) -> list[TileConfig]:
    many = sum(s.kind == "load" for s in nest.statements) > _MANY_LOADS_PER_ELEMENT
    blocks = _BUSY_BLOCKS if many else _BLOCKS
    # A block is worth trying where its grid fills the SMs.
    fills = [(block, warps) for block, warps in blocks if nest.row_count >= block * H200.sm_count]
    # Where the grid cannot fill the SMs: more, smaller programs.
    small = [
        (256, 2),
        (128, 1),
        (512, 4),
        (1024, 4),
    ]
    return _remove_duplicates([{"rows": block, "warps": warps} for block, warps in fills + small])


def _choose_row_tiles(nest: Nest) -> list[TileConfig]:
    width = next_power_of_two(nest.column_count)
    configs: list[TileConfig] = []
    scans = any(s.kind == "scan" for s in nest.statements)
    for limit, choices in _ROW_TABLE:
        if width <= limit:
            for size, warps in choices:
                configs.append(
                    _make_config(
                        max(1, min(size // width, next_power_of_two(nest.row_count))),
                        width,
                        warps,
                        False,
                    )
                )
            break
    if nest.column_count > 4096:
        loops = (
            _L2_LOOP_TILES
            if nest.column_count in _L2_COLUMNS
            else _LOOP_TILES[: 2 if configs else None]
        )
        looped = [
            _make_config(1, size, warps, True) for size, warps in loops if size < nest.column_count
        ]
        # a scan of the whole row at once waits for all of its warps; half of them are faster than
        # all
        configs = (
            [looped[0], *configs[1:], *configs[:1], *looped[1:]]
            if scans and configs
            else [*_choose_cta_groups(nest), *configs, *looped]
        )
    return _choose_splits(nest) + _remove_duplicates(configs)


def _choose_cta_groups(nest: Nest) -> list[TileConfig]:
    """Several CTAs a row, where a row of outputs is too long to stay in one program's
    registers.
    """
    # Rows that are not read again after a reduction have nothing to keep in registers.
    again = any(s.kind == "store" and s.columns for s in nest.statements)
    if (
        nest.column_count <= _MAX_TILE_COLUMNS
        or not again
        or any(s.kind == "scan" for s in nest.statements)
    ):
        return []
    fits = [
        (columns, warps)
        for columns, warps, most in _CTA_GROUP_TILES
        if -(-nest.column_count // columns) <= most
    ]
    return [_make_config(1, columns, warps, False) | {"team": True} for columns, warps in fits]


def _is_strided(nest: Nest) -> bool:
    """Whether neighbouring elements in memory belong to different rows."""
    loads = [s.access for s in nest.statements if s.kind == "load"]
    main = max(loads, key=lambda form: (len(form.terms), form.largest))
    nearest = min(main.terms, key=lambda term: term[1], default=None)
    return nearest is not None and not nearest[0].column


def _choose_strided_tiles(nest: Nest) -> list[TileConfig]:
    width, height = next_power_of_two(nest.column_count), next_power_of_two(nest.row_count)
    configs = []
    for rows, columns, warps in _STRIDED_TILES:
        rows, columns = min(rows, height), min(columns, width)
        configs.append(_make_config(rows, columns, warps, columns < nest.column_count))
    if 64 < width <= 1024:
        configs.append(_make_config(min(16, height), width, 8, False))
    return _choose_splits(nest) + _remove_duplicates(configs)


def _choose_splits(nest: Nest) -> list[TileConfig]:
    """Several programs a row, when rows alone leave most SMs idle and are long enough to share."""
    if nest.row_count >= H200.sm_count or nest.column_count < 8 * _MIN_SPLIT_COLUMNS:
        return []
    max_pieces = max(
        1, min(4 * H200.sm_count // nest.row_count, nest.column_count // _MIN_SPLIT_COLUMNS)
    )
    # Pieces are equal, so their number must divide the columns.
    pieces = [
        s for s in range(max_pieces, max(3, max_pieces // 8), -1) if nest.column_count % s == 0
    ]
    return [
        {"rows": 1, "columns": 2048, "warps": 8, "loop": True, "split": split} for split in pieces
    ]


def _make_config(rows: int, columns: int, warps: int, loop: bool) -> TileConfig:
    return {"rows": rows, "columns": columns, "warps": warps, "loop": loop, "split": 1}


def _remove_duplicates(configs: list[TileConfig]) -> list[TileConfig]:
    return [c for i, c in enumerate(configs) if c not in configs[:i]]
