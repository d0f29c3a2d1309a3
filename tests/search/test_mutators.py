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
    proposals = family(*HELD_OUT)
    parents = [
        next(proposal for proposal in proposals if proposal.config["method"] == name)
        for name in ("bf16x6", "tf32x3")
    ]
    values_by_name = {
        name: {proposal.config[name] for proposal in proposals} for name in proposals[0].config
    }
    for seed in range(200):
        child = make_child(parents, proposals, random.Random(seed))
        moved = [
            name
            for name, value in child.config.items()
            if value not in {proposal.config[name] for proposal in parents}
        ]
        assert len(moved) <= 1
        for name in moved:
            value = child.config[name]
            own_numbers = [
                proposal.number(name, 0) for proposal in parents if isinstance(value, int)
            ]
            assert value in values_by_name[name] or value in {n * 2 for n in own_numbers} | {
                n // 2 for n in own_numbers
            }
