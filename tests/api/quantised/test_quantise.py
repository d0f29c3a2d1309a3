"""A module of fewer bits: close to the one that it is made of, which stays as it was, and refused
where it is not close.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import cudal1
from tests.kernels.traced_programs import trace_program
from torch_cudal1.api.quantised.layers import Int8Linear, QuantisedLinear
from torch_cudal1.api.quantised.quantise import CONTRACTS, OutputLimits, _Plan
from torch_cudal1.core.errors import QuantisationError, SettingError
from torch_cudal1.kernels import propose

WIDE = OutputLimits(1.0, 0.0, 10.0)


class Network(nn.Module):
    """Two large layers, of which one stands at two places, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.second = nn.Linear(512, 256)
        self.again = self.first
        self.head = nn.Linear(256, 10)
        self.register_buffer("offset", torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x))) + self.offset
        return self.head(x + self.second(F.relu(self.again(x))))


@pytest.fixture
def network() -> Network:
    return Network().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 256)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_module_of_fewer_bits_stands_beside_the_old_one(
    contract: Any, network: Network, x: Tensor
) -> None:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = network(x).detach()
    module = cudal1.quantise(network, x, contract, limits=WIDE)
    assert type(module) is Network
    assert module is not network
    assert torch.equal(network(x), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert type(network.first) is nn.Linear
    assert isinstance(module.first, QuantisedLinear)
    # What is shared stays shared, within the module and with the old one.
    assert module.again is module.first
    assert module.head.weight is network.head.weight
    assert module.offset is network.offset
    report = module.quantisation
    assert [layer.name for layer in report.layers] == ["first", "second"]
    assert report.left_out == {"head": "its weight has fewer than 65536 elements"}
    assert report.bytes_after < 0.3 * report.bytes_before
    error = (module(x).detach() - expected).norm() / expected.norm()
    assert report.deviation.relative_error == pytest.approx(float(error), rel=1e-3)
    assert contract in str(report)


def test_what_is_set_on_one_module_is_not_set_on_the_other(network: Network, x: Tensor) -> None:
    module = cudal1.quantise(network, x)
    module.head = nn.Identity()
    module.register_forward_hook(lambda *_: torch.zeros(()))
    module.train()
    assert isinstance(network.head, nn.Linear)
    assert network(x).shape == (16, 10)
    assert not network.training


def test_modes_and_hooks_of_the_old_module_are_as_they_were(network: Network, x: Tensor) -> None:
    network.train()
    cudal1.quantise(network, x)
    assert network.training
    assert not any(layer._forward_hooks for layer in network.modules())


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_layer_with_hooks_keeps_them(network: Network, x: Tensor, name: str) -> None:
    calls: list[str] = []
    getattr(network.first, name)(lambda *_: calls.append("first"))
    module = cudal1.quantise(network, x)
    assert module.quantisation.left_out["first"] == "hooks are registered on it"
    calls.clear()
    module(x)
    assert "first" in calls


def test_a_layer_whose_forward_was_replaced_keeps_that(network: Network, x: Tensor) -> None:
    own = network.second.forward
    network.second.forward = lambda y: 2 * own(y)  # type: ignore[method-assign]
    module = cudal1.quantise(network, x)
    assert module.quantisation.left_out["second"] == "its forward was replaced"
    assert module.second.forward is network.second.forward


def test_an_accelerated_module_is_quantised_by_its_own_forward(network: Network, x: Tensor) -> None:
    with torch.no_grad():
        cudal1.accelerate(network, x, on_miss="baseline")
        module = cudal1.quantise(network, x)
        assert "_compiled_call_impl" not in vars(module)
        assert torch.equal(module(x), cudal1.quantise(cudal1.restore(network), x)(x))


def test_layers_to_skip_stay_as_they_are(network: Network, x: Tensor) -> None:
    module = cudal1.quantise(network, x, skip=["second"])
    assert module.second.weight is network.second.weight
    assert module.quantisation.left_out["second"] == "it was to be skipped"
    with pytest.raises(SettingError, match="'third'"):
        cudal1.quantise(network, x, skip=["third"])


def test_layers_that_deviate_most_go_back_first(network: Network, x: Tensor) -> None:
    with torch.no_grad():
        # One outlier a row: all other weights become zero in 8 bits.
        network.second.weight[:, 0] = 1000.0
        module = cudal1.quantise(network, x, limits=OutputLimits(relative_error=1e-2))
    assert [layer.name for layer in module.quantisation.layers] == ["first"]
    assert "deviates" in module.quantisation.left_out["second"]


def test_a_layer_whose_result_is_no_number_goes_back_first() -> None:
    layers = {name: nn.Linear(4, 4) for name in ("first", "second", "third")}
    factors = {"first": 2.0, "second": float("nan"), "third": 3.0}
    plan = _Plan(layers=dict(layers))
    for name, factor in factors.items():
        plan.replacements[name] = lambda x, factor=factor: factor * x  # type: ignore[assignment,misc]
        plan.measure_layer(name, (torch.ones(4),), torch.ones(4))
    plan.take_back_worst()
    assert list(plan.layers) == ["first", "third"]


def test_what_deviates_too_much_is_not_made(network: Network, x: Tensor) -> None:
    with pytest.raises(QuantisationError, match=r"relative error .* expected OutputLimits"):
        cudal1.quantise(network, x, "weight_only_int4", limits=OutputLimits(relative_error=1e-9))
    with pytest.raises(QuantisationError, match="no linear layer"):
        cudal1.quantise(nn.Linear(8, 8), torch.randn(2, 8))
    with pytest.raises(SettingError, match="'int8'; expected one of 'weight_only_int8'"):
        cudal1.quantise(network, x, "int8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got function"):
        cudal1.quantise(lambda x: x, x)  # type: ignore[type-var]


def test_a_layer_that_a_copy_would_not_call_is_left_out(x: Tensor) -> None:
    class Hidden(nn.Module):
        """Keeps one of its layers in a list, too, and calls that."""

        def __init__(self) -> None:
            super().__init__()
            self.plain, self.layer, self.idle = (nn.Linear(256, 256) for _ in range(3))
            self.order = [self.layer]

        def forward(self, x: Tensor) -> Tensor:
            return self.order[0](self.plain(x))[:, None]

    report = cudal1.quantise(Hidden(), x).quantisation
    assert [layer.name for layer in report.layers] == ["plain"]
    assert report.left_out == {
        "layer": "a copy of the module does not call its own",
        "idle": "the example inputs do not reach it",
    }


def test_what_a_call_writes_to_is_as_it_was(x: Tensor) -> None:
    class Counting(nn.Module):
        """Writes to a buffer and to its argument."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.layer(x.mul_(0.5))

    module, before = Counting(), x.clone()
    module.layer.eval()
    cudal1.quantise(module, x)
    assert torch.equal(x, before)
    assert module.calls == 0
    assert module.training
    assert not module.layer.training


def test_what_a_forward_keeps_for_later_can_be_trained_with(x: Tensor) -> None:
    class Remembering(nn.Module):
        """Makes a table at its first call."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = nn.Linear(256, 256), None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(256)
            return self.layer(x) * self.table

    module = Remembering()
    cudal1.quantise(module, x)
    module(x).sum().backward()
    assert module.layer.weight.grad is not None


def test_a_subclass_of_linear_is_left_alone(x: Tensor) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(QuantisationError, match="no linear layer"):
        cudal1.quantise(Scaled(256, 512), x)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_both_doors_serve_what_is_quantised(contract: Any, network: Network, x: Tensor) -> None:
    with torch.no_grad():
        module = cudal1.quantise(network, x, contract, limits=WIDE)
        expected = module(x)
        compiled = torch.compile(module, backend="cudal1", options={"on_miss": "baseline"})
        torch.testing.assert_close(compiled(x), expected, rtol=1e-2, atol=1e-2)
        torch._dynamo.reset()
        cudal1.accelerate(module, x, on_miss="quick")
        torch.testing.assert_close(module(x), expected, rtol=1e-2, atol=1e-2)


def test_a_language_model_keeps_its_words() -> None:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=300,
    )
    model = LlamaForCausalLM(config).eval().bfloat16()
    inputs = {"input_ids": torch.randint(300, (2, 9)), "use_cache": False}
    module = cudal1.quantise(model, inputs)
    deviation = module.quantisation.deviation
    assert deviation.agreement is not None
    assert deviation.agreement >= 0.98
    assert deviation.relative_error < 0.03
    assert type(module.lm_head) is Int8Linear
    tokens = module.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 12)


@pytest.mark.parametrize("contract", ["weight_only_int8", "weight_only_int4"])
def test_kernels_read_the_bits_of_a_weight(contract: str) -> None:
    layer = CONTRACTS[contract](nn.Linear(256, 512, bias=False).bfloat16())

    def run(x: Tensor, digits: Tensor, scale: Tensor) -> Tensor:
        layer.digits, layer.scale = digits, scale
        return layer(x)

    inputs = (torch.randn(4, 256).bfloat16(), layer.digits, layer.scale)
    (proposal, *_) = propose(trace_program(run, inputs), 90)
    assert proposal.family == "gemm"
