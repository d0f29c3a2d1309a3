"""Which calls a later process finds decided: those of the same classes, weights, forms and modes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_cudal1.api.signatures.known_calls import is_known, remember_pieces
from torch_cudal1.core.settings import Settings

X = torch.randn(2, 4)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path)


def test_a_call_is_known_once_it_was_remembered_also_for_an_equal_module(
    settings: Settings,
) -> None:
    assert not is_known(torch.nn.Linear(4, 4), (X,), {}, settings)
    remember_pieces(torch.nn.Linear(4, 4), (X,), {}, settings)
    assert is_known(torch.nn.Linear(4, 4), (X,), {}, settings)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (torch.nn.Linear(4, 4, bias=False), X),
        (torch.nn.Linear(4, 4).eval(), X),
        (torch.nn.Linear(4, 4), torch.randn(3, 4)),
    ],
    ids=["other weights", "other mode", "other shape"],
)
def test_another_call_is_not_known(
    module: torch.nn.Module, x: torch.Tensor, settings: Settings
) -> None:
    remember_pieces(torch.nn.Linear(4, 4), (X,), {}, settings)
    assert not is_known(module, (x,), {}, settings)


def test_a_call_under_autocast_is_another_call(settings: Settings) -> None:
    remember_pieces(torch.nn.Linear(4, 4), (X,), {}, settings)
    with torch.autocast("cpu"):
        assert not is_known(torch.nn.Linear(4, 4), (X,), {}, settings)
