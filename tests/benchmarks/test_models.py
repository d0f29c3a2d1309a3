"""The suite's models are what they say, and their inputs, weights and losses can show a mistake."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models import MODELS, bert_base, build, draw_inputs, resnet50

OUTPUT_SHAPES = {
    "lstm": (2, 8),
    "llama": (2, 16, 32),
    "bert_base_b1": (1, 16, 9),
    "bert_base": (2, 16, 9),
    "vit_b16": (2, 10),
    "unet": (2, 4, 32, 32),
    "resnet50": (2, 10),
    "llama_bf16": (2, 16, 32),
    "bert_base_bf16": (2, 16, 9),
    "feed_forward": (2, 16, 32),
}
# (parameters, input shape) of the published models. ResNet-50 and ViT-B/16: torchvision's
# documented counts, with 1000 classes. BERT-base: 109,482,240 with the pooler (590,592), which a
# token classifier lacks, plus 9 classes of 768 weights and a bias.
FULL = {
    "resnet50": (25_557_032, (16, 3, 224, 224)),
    "vit_b16": (86_567_656, (8, 3, 224, 224)),
    "bert_base": (109_482_240 - 590_592 + 9 * 769, (8, 128)),
    "bert_base_b1": (109_482_240 - 590_592 + 9 * 769, (1, 128)),
    "llama": (
        4 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 8192 + 2 * 2048) + 2048,
        (2, 512, 2048),
    ),
    "feed_forward": (2 * (2 * 1024 * 4096 + 4096 + 1024 + 2 * 1024), (8, 512, 1024)),
    "lstm": (4 * 512 * (256 + 512 + 2) + 4 * 512 * (512 + 512 + 2) + 513 * 128, (32, 64, 256)),
}


def test_every_model_is_listed_here() -> None:
    assert set(OUTPUT_SHAPES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_output_has_the_expected_shape_and_is_finite(name: str) -> None:
    workload = build(name, sizes="small", device="cpu")
    with torch.no_grad():
        output = workload.module(*workload.inputs)
    assert output.shape == OUTPUT_SHAPES[name]
    assert output.isfinite().all()
    assert output.std() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_reaches_every_parameter(name: str) -> None:
    workload = build(name, sizes="small", device="cpu")
    loss = workload.loss(workload.module.train()(*workload.inputs))
    loss.backward()
    assert loss.ndim == 0
    assert loss.isfinite()
    assert [
        n
        for n, p in workload.module.named_parameters()
        if p.grad is None or not p.grad.isfinite().all()
    ] == []


@pytest.mark.parametrize("name", MODELS)
def test_no_vector_of_weights_is_at_its_initial_value(name: str) -> None:
    module = build(name, sizes="small", device="cpu").module
    still = [n for n, p in module.named_parameters() if p.ndim == 1 and (p == p.flatten()[0]).all()]
    assert still == []
    assert [
        n for n, b in module.named_buffers() if "running" in n and ((b == 0) | (b == 1)).any()
    ] == []


@pytest.mark.parametrize("name", MODELS)
def test_equal_calls_build_equal_models_and_leave_the_generator_alone(name: str) -> None:
    state = torch.get_rng_state()
    first, second = (build(name, sizes="small", device="cpu") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            first.module.state_dict().values(), second.module.state_dict().values(), strict=True
        )
    )
    assert torch.equal(first.inputs[0], second.inputs[0])


def test_models_of_half_types_are_whole_in_them() -> None:
    """With one float32 tensor on the way, PyTorch would not choose its fused attention of half
    types.
    """
    for name in ("llama_bf16", "bert_base_bf16"):
        workload = build(name, sizes="small", device="cpu")
        assert {
            t.dtype for t in workload.module.state_dict().values() if t.is_floating_point()
        } == {torch.bfloat16}
        with torch.no_grad():
            assert workload.module(*workload.inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(FULL))
def test_full_sizes_are_the_published_ones(name: str) -> None:
    workload = build(name, sizes="full", device="meta")
    parameters, shape = FULL[name]
    assert sum(p.numel() for p in workload.module.parameters()) == parameters
    assert tuple(workload.inputs[0].shape) == shape


@pytest.mark.parametrize("name", MODELS)
def test_a_float64_copy_computes_in_float64(name: str) -> None:
    """A cast to float32 hidden in a forward would make the oracle as wrong as what it judges."""
    workload = build(name, sizes="small", device="cpu")
    module = workload.module.double()
    inputs = tuple(t.double() if t.is_floating_point() else t for t in workload.inputs)
    with torch.no_grad():
        exact = module(*inputs)
        rounded = _through_float32(module, inputs)
    assert exact.dtype == torch.float64
    assert 1e-9 < float((exact - rounded).abs().max() / exact.abs().max()) < 1e-3


def _through_float32(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    copy = tuple(t.float() if t.is_floating_point() else t for t in inputs)
    output: torch.Tensor = module.float()(*copy)
    return output.double()


def test_batch_and_dtype_are_the_callers_to_choose() -> None:
    module, (images,) = resnet50("small", "cpu", torch.float64, batch=3)
    assert images.shape[0] == 3
    assert images.dtype == next(module.parameters()).dtype == torch.float64


def test_fresh_inputs_differ_from_the_given_ones_and_stay_valid() -> None:
    module, inputs = bert_base("small", "cpu")
    drawn, again, other = draw_inputs(inputs, 1), draw_inputs(inputs, 1), draw_inputs(inputs, 2)
    assert torch.equal(drawn[0], again[0])
    assert not torch.equal(drawn[0], inputs[0])
    assert not torch.equal(drawn[0], other[0])
    assert drawn[0].dtype == torch.int64
    assert module(*drawn).isfinite().all()


@pytest.mark.parametrize(("name", "sizes"), [("no_such_model", "small"), ("lstm", "huge")])
def test_unknown_names_and_sizes_are_refused(name: str, sizes: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        build(name, sizes=sizes, device="cpu")  # type: ignore[arg-type]
