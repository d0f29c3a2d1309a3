"""The templates of each kind of operation on each device, in the order in which programs are
enumerated. Cheats are attached to the first template of a kind.

The spaces are small on purpose: every program of a task is measured once, so that a look-up in a
landscape never misses. They include values that break a program: `mask=off` on ragged sizes,
`acc=f16`, tiles that overflow shared memory, operators in the wrong order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch_cudal1.training.ksl.grammar import (
    Device,
    Knob,
    KslProgram,
    KslTemplate,
    enumerate_programs,
)

__all__ = ["SPACES", "get_templates", "list_programs"]


def _make_template(name: str, **knobs: str) -> KslTemplate:
    """Make a template. `name` is KIND.ALGORITHM; the values of a knob are given in one string,
    separated by spaces.
    """
    return KslTemplate(
        name,
        name.partition(".")[0],
        tuple(Knob(knob, tuple(values.split())) for knob, values in knobs.items()),
    )


# Values that break something must exist: without wrong programs stages 1 and 2 have nothing to
# learn. `off` is right where sizes are multiples of the block, f16 passes a tolerance of 1e-2 and
# fails the judge.
_SAFE = {"mask": "on off", "acc": "f32 f16"}
# PyTorch's own scans on a CPU add up in float64, so a program needs that choice to be as exact.
_WIDE = {"mask": "on off", "acc": "f64 f32 f16"}
_CPU = (
    # "swapped" computes the steps in another order: a program that is wrong for every shape.
    _make_template("chain.blocks", block="64 16 4", fuse="full inplace swapped", **_SAFE),
    _make_template("chain.whole", fuse="full inplace swapped", acc="f32 f16"),
    _make_template("row.two", rows="64 16 4", **_SAFE),
    _make_template("row.online", block="64 256", rows="64 16", **_SAFE),
    _make_template("row.whole", acc="f32 f16"),
    _make_template(
        "mm.blocks", block_m="64 16", split_k="1 2 4", epilogue="fused swapped", **_SAFE
    ),
    _make_template("mm.whole", epilogue="fused split swapped", acc="f32 f16"),
    _make_template("diag.blocks", block_m="64 16 4", axis="right swapped", **_SAFE),
    _make_template("diag.whole", axis="right swapped", acc="f32 f16"),
    _make_template("scan.carry", block="64 256", carry="on off", **_WIDE),
    _make_template("scan.matmul", block="64 16", **_WIDE),
    _make_template("scan.whole", acc="f64 f32 f16"),
    _make_template("pool.shifts", rows="64 16 4", fuse="full inplace", **_SAFE),
    _make_template("pool.unfold", acc="f32 f16"),
)
_CUDA = (
    _make_template(
        "chain.flat",
        block="1024 4096",
        warps="4 8",
        persist="off on",
        fuse="full split swapped",
        **_SAFE,
    ),
    _make_template("row.one", rows="1 2", warps="4 16", persist="off on", **_SAFE),
    _make_template("row.two", block="1024 512 4096", warps="4 16", stages="1 3", **_SAFE),
    _make_template("row.online", block="1024 512 4096", warps="4 16", stages="1 3", **_SAFE),
    _make_template(
        # 128 x 256 x 64 with five stages of half precision asks for 240 KiB of shared memory, where
        # an H100 has 227 KiB: a policy must be able to write a program that does not launch, and
        # learn to avoid it.
        "mm.tiles",
        block_m="128 64",
        block_n="128 256",
        block_k="32 64",
        warps="4 8",
        stages="3 5",
        group_m="8 1",
        **_SAFE,
    ),
    _make_template(
        # Half-precision sums are left out here: partial sums are in float32 by construction.
        "mm.split",
        block_m="64",
        block_n="64 128",
        block_k="32",
        split_k="2 4 8",
        warps="4 8",
        mask="on off",
    ),
    _make_template(
        "diag.tile", block_m="4 1 16", block_n="512 128", warps="4 8", axis="right swapped", **_SAFE
    ),
    _make_template("scan.one", rows="1 2", warps="4 8 16", **_SAFE),
    _make_template("scan.carry", block="1024 256 4096", warps="4 8 1", carry="on off", **_SAFE),
    _make_template(
        "pool.flat", block="512 128", warps="4 1", persist="off on", unroll="on off", **_SAFE
    ),
)
SPACES: Mapping[Device, tuple[KslTemplate, ...]] = {"cuda": _CUDA, "cpu": _CPU}


@cache
def get_templates(device: Device, kind: str) -> Mapping[str, KslTemplate]:
    """The templates of a kind by name, in their order. Raises KeyError for an unknown device."""
    return {template.name: template for template in SPACES[device] if template.kind == kind}


@cache
def list_programs(device: Device, kind: str) -> tuple[KslProgram, ...]:
    """Every program for a kind of operation on a device."""
    return tuple(enumerate_programs(tuple(get_templates(device, kind).values())))
