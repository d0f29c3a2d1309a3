"""The networks of the workloads compute what their papers say."""

from __future__ import annotations

import torch

from benchmarks import nets


def test_rotary_embedding_keeps_lengths_and_turns_by_the_position() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    angles = torch.arange(4)[:, None] * 0.3 * torch.ones(8)
    turned = nets.rotate(x, angles.cos(), angles.sin())
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])  # position 0 turns by nothing
    assert not torch.allclose(turned[:, :, 1], x[:, :, 1])


def test_rotated_products_depend_on_the_distance_of_positions_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    angles = torch.arange(6, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1] * 2)
    rotated_q, rotated_k = (nets.rotate(x, angles.cos(), angles.sin()) for x in (q, k))
    scores = rotated_q @ rotated_k.transpose(-1, -2)
    torch.testing.assert_close(scores[..., 1, 0], scores[..., 5, 4])
    torch.testing.assert_close(scores[..., 2, 0], scores[..., 5, 3])


def test_an_rms_norm_is_pytorchs() -> None:
    torch.manual_seed(0)
    norm = nets.RMSNorm(16)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(3, 16)
        expected = torch.nn.functional.rms_norm(x, (16,), norm.weight, norm.eps)
        torch.testing.assert_close(norm(x), expected)
