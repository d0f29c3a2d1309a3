"""Encoders that take batches apart by their padding run their own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.situations.kit import measure_as_faster
from torch_cudal1.api import module_trial
from torch_cudal1.api.accelerate import accelerate, explain
from torch_cudal1.api.graphs import open_decisions
from torch_cudal1.api.graphs.padding import PaddingWatch, makes_nested_tensors

X, FULL = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
PADDED = FULL.clone()
PADDED[0, 4:] = PADDED[1:, 5:] = True


class Broken(nn.Module):
    """Breaks its graph before the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_encoder()

    def forward(self, x: torch.Tensor, src_key_padding_mask: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.encoder(x, src_key_padding_mask=src_key_padding_mask)


def make_encoder(*, nested: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


def test_a_mask_that_is_looked_at_is_noted() -> None:
    with torch.no_grad():
        for mask in (FULL, PADDED):
            with PaddingWatch() as watch:
                make_encoder()(X, src_key_padding_mask=mask)
            assert watch.has_mask
        with PaddingWatch() as watch:
            make_encoder()(X)
        assert not watch.has_mask
    assert makes_nested_tensors(nn.Sequential(make_encoder()))
    assert not makes_nested_tensors(make_encoder(nested=False))
    assert not makes_nested_tensors(lambda: None)


@pytest.mark.parametrize("is_broken", [False, True])
def test_padding_that_comes_later_is_answered_as_eager_does(
    is_broken: bool, dynamo: None, inference: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (open_decisions, module_trial):
        monkeypatch.setattr(module, "end_to_end_benchmark", measure_as_faster)
    encoder: Any = Broken().eval() if is_broken else make_encoder()
    expected = [encoder(X, src_key_padding_mask=mask) for mask in (FULL, PADDED)]
    accelerate(encoder, on_miss="quick", cache_dir=tmp_path, strictness="error")
    for _ in range(5):
        torch.testing.assert_close(encoder(X, src_key_padding_mask=FULL), expected[0])
    torch.testing.assert_close(encoder(X, src_key_padding_mask=PADDED), expected[1])
    assert "padd" in str(explain(encoder))


def test_an_encoder_without_a_mask_is_bound(
    dynamo: None, inference: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (open_decisions, module_trial):
        monkeypatch.setattr(module, "end_to_end_benchmark", measure_as_faster)
    encoder = make_encoder()
    expected = encoder(X)
    accelerate(encoder, X, on_miss="quick", cache_dir=tmp_path, strictness="error")
    torch.testing.assert_close(encoder(X), expected, atol=1e-5, rtol=1e-4)
    assert [region.runs for region in explain(encoder).regions] != ["eager"]
