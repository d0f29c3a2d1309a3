"""Parent and worker make the same patterns from a seed, and each seed another pattern."""

from __future__ import annotations

import hashlib

import pytest
import torch

from torch_cudal1.judge.wire.redzone_patterns import (
    REDZONE_BYTES,
    SOLID,
    guard_block_bytes,
    guard_block_digest,
    left_redzone_bytes,
    make_pattern,
    redzone_digest,
)


def test_a_seed_makes_its_pattern_again_whatever_else_draws_numbers() -> None:
    first = make_pattern(5, 4096)
    torch.rand(3)
    assert torch.equal(make_pattern(5, 4096), first)
    assert not torch.equal(make_pattern(6, 4096), first)
    assert len(first.unique()) == 256


def test_the_solid_pattern_is_nan_in_every_floating_type() -> None:
    pattern = make_pattern(SOLID, 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert bool(pattern.view(dtype).isnan().all())


@pytest.mark.parametrize("seed", [SOLID, 0, 5, 16, 2**62])
def test_the_left_redzone_varies_with_its_seed_and_keeps_the_alignment(seed: int) -> None:
    size_bytes = left_redzone_bytes(seed)
    assert REDZONE_BYTES <= size_bytes < REDZONE_BYTES + 16 * 512
    assert size_bytes % 512 == 0
    assert (size_bytes == REDZONE_BYTES) == (seed % 16 == 0 or seed == SOLID)


def test_a_digest_is_that_of_both_sides_of_a_tensor() -> None:
    pattern = make_pattern(7, left_redzone_bytes(7) + REDZONE_BYTES)
    assert redzone_digest(7) == hashlib.sha256(bytes(pattern.tolist())).hexdigest()
    assert len({redzone_digest(seed) for seed in (SOLID, 7, 8, 23)}) == 4


def test_a_guard_block_comes_from_the_pool_of_its_holes() -> None:
    small, large = 1 << 20, (1 << 20) + 1
    assert guard_block_bytes(small) <= small
    assert guard_block_bytes(large) > small
    assert guard_block_digest(3, small) != guard_block_digest(3, large)
    assert guard_block_digest(3, 512) == guard_block_digest(3, small)
