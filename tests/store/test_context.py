"""The context of a look-up has the settings' cache, and no Hub where none is named."""

from __future__ import annotations

from pathlib import Path

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.context import make_context


def test_a_context_reads_records_from_its_cache(tmp_path: Path) -> None:
    context = make_context(torch.device("cpu"), Settings(cache_dir=tmp_path))
    assert context.hub is None
    assert context.sources == (context.cache,)
    assert context.find_decision_record("ab" * 32) == Refusal("absent")
    context.cache.put_decision_record(
        "ab" * 32, {"candidates": ["x"]}, context.target, context.contract
    )
    assert context.find_decision_record("ab" * 32) == {"candidates": ["x"]}
    assert isinstance(context.find_decision_record("ab" * 32, ["y"]), Refusal)
