"""The demo's models: each runs, near its float64 run, under a name of its own."""

from __future__ import annotations

import math

import pytest
import torch

from torch_cudal1.cli.commands import end_to_end_measurement
from torch_cudal1.cli.commands.demo_modules import MODELS, Model


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_a_demo_model_runs_and_float32_is_close_to_its_float64_run(model: Model) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, inputs = model.build()
    assert not module.training
    with torch.no_grad():
        output = module(*inputs)
    error = end_to_end_measurement.compute_scaled_error(
        output, end_to_end_measurement.run_in_float64(module, inputs)
    )
    assert error is not None
    assert error < 1e-5


def test_the_model_whose_shortcut_is_refused_is_zero_but_keeps_nan() -> None:
    module, (x,) = next(m for m in MODELS if m.name == "MinThenClamp").build()
    with torch.no_grad():
        assert not module(x).any()
        assert module(torch.full_like(x, math.nan)).isnan().all()


def test_names_of_demo_models_are_unique() -> None:
    assert len({m.name.lower() for m in MODELS}) == len(MODELS)
