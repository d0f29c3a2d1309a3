"""Children of kernel configs: fields of their parents or a step beside, and legal on the device."""

from __future__ import annotations

import random

from tests.search.kernel_cases import HELD_OUT, family, keep_legal
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.evolution.mutators import make_child


def test_what_needs_more_than_the_device_has_is_not_legal() -> None:
    config: dict[str, int | str | bool] = {
        "method": "bf16x6",
        "rows": 128,
        "columns": 128,
        "depth": 32,
        "warps": 8,
        "stages": 3,
        "group": 8,
        "split": 1,
    }
    config |= {"promote": 1, "cluster": 1}
    changes: tuple[dict[str, int | str | bool], ...] = (
        {},
        {"stages": 16},
        {"columns": 256, "warps": 4},
        {"rows": 96},
    )
    fits, deep, wide, odd = (Proposal("gemm", config | change) for change in changes)
    assert keep_legal([fits, deep, wide, odd, Proposal("conv", config)]) == (fits,)


def test_a_child_has_its_fields_from_its_parents_or_a_step_beside() -> None:
    own = family(*HELD_OUT)
    parents = [
        next(one for one in own if one.config["method"] == name) for name in ("bf16x6", "tf32x3")
    ]
    known = {name: {one.config[name] for one in own} for name in own[0].config}
    for seed in range(200):
        child = make_child(parents, own, random.Random(seed))
        moved = [
            name
            for name, value in child.config.items()
            if value not in {one.config[name] for one in parents}
        ]
        assert len(moved) <= 1
        for name in moved:
            value = child.config[name]
            own_numbers = [one.number(name, 0) for one in parents if isinstance(value, int)]
            assert value in known[name] or value in {n * 2 for n in own_numbers} | {
                n // 2 for n in own_numbers
            }
