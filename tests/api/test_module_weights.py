"""Whatever way a weight is written, an accelerated module computes with the new value at the next
call, as it would by itself.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.entries import Runs, add_one_to_output, plant
from tests.graph.modules import Closed
from torch_cudal1.graph.functional_module import copy_sharing_tensors


class Tied(nn.Module):
    """Two layers of one weight, a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("alias", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale + self.alias


def step(kind: type[torch.optim.Optimizer], **options: object) -> Callable[[nn.Module], None]:
    """One optimizer step on gradients of one."""

    def write(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind(module.parameters(), lr=0.1, **options).step()

    return write


def ema(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.lerp_(torch.full_like(parameter, 3.0), 0.5)


def numpy_alias(module: nn.Module) -> None:
    module.a.weight.detach().numpy()[...] = 0.25


def dlpack_alias(module: nn.Module) -> None:
    torch.from_dlpack(module.a.weight.detach()).fill_(0.25)


def storage_copy(module: nn.Module) -> None:
    module.a.weight.untyped_storage().copy_(torch.full((8, 8), 0.25).untyped_storage())


def swap_tensors(module: nn.Module) -> None:
    torch.utils.swap_tensors(module.a.weight, nn.Parameter(torch.full((8, 8), 0.25)))


def in_inference_mode(module: nn.Module) -> None:
    with torch.inference_mode():
        module.a.weight.data.copy_(torch.full((8, 8), 0.25))


def load_doubled(module: nn.Module, **options: bool) -> None:
    module.load_state_dict(
        {name: value * 2 for name, value in module.state_dict().items()}, **options
    )


def from_file(module: nn.Module) -> None:
    file = io.BytesIO()
    torch.save({name: value * 2 for name, value in module.state_dict().items()}, file)
    file.seek(0)
    module.load_state_dict(torch.load(file, mmap=False))


def set_data(module: nn.Module) -> None:
    module.a.weight.data = torch.full((8, 8), 0.25)


def new_parameter(module: nn.Module) -> None:
    module.a.weight = nn.Parameter(torch.full((8, 8), 0.25))


def set_(module: nn.Module) -> None:
    module.a.weight.detach().set_(torch.full((8, 8), 0.25))
    module.a.weight.set_(torch.full((8, 8), 0.25))


def to_vector_and_back(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 2, module.parameters())


# Every kind of FACTS section 5, those that move nothing (version, pointer, identity) among them.
WRITES: dict[str, Callable[[nn.Module], None]] = {
    "copy_": lambda module: module.a.weight.copy_(torch.full((8, 8), 0.25)),
    "detach().copy_": lambda module: module.a.weight.detach().copy_(torch.full((8, 8), 0.25)),
    "nn.init": lambda module: nn.init.constant_(module.a.weight, 0.25),
    "load_state_dict": load_doubled,
    "load_state_dict(assign=True)": lambda module: load_doubled(module, assign=True),
    "a checkpoint file": from_file,
    "foreach": lambda module: torch._foreach_add_(list(module.parameters()), 1.0),
    "foreach on data": lambda module: torch._foreach_add_(
        [p.data for p in module.parameters()], 1.0
    ),
    ".data =": set_data,
    ".data.copy_": lambda module: module.a.weight.data.copy_(torch.full((8, 8), 0.25)),
    ".data.copy_ in inference mode": in_inference_mode,
    "EMA by .data.lerp_": ema,
    "SGD": step(torch.optim.SGD, foreach=False),
    "SGD foreach": step(torch.optim.SGD, foreach=True),
    "SGD fused": step(torch.optim.SGD, fused=True),
    "AdamW": step(torch.optim.AdamW, foreach=False),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    "Adagrad fused": step(torch.optim.Adagrad, fused=True),
    "numpy alias": numpy_alias,
    "dlpack alias": dlpack_alias,
    "storage copy": storage_copy,
    "set_": set_,
    "swap_tensors": swap_tensors,
    "vector_to_parameters": to_vector_and_back,
    "new Parameter": new_parameter,
    "untied": lambda module: setattr(module.b, "weight", nn.Parameter(torch.full((8, 8), 0.25))),
    "buffer in place": lambda module: module.scale.mul_(3),
    "new buffer": lambda module: setattr(module, "scale", torch.full((8,), 3.0)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_write_takes_effect_at_the_next_call(write, training, runs, tmp_path: Path):
    torch.manual_seed(0)
    module, x = Tied(), torch.randn(3, 8)
    with torch.set_grad_enabled(training):
        plant(module, x, tmp_path)
        torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
        before = module(x).detach()
    assert runs.total == 1
    with torch.no_grad():
        WRITES[write](module)
    with torch.set_grad_enabled(training):
        plant(module, x, tmp_path)  # weights that were tied and are not any more make another graph
        for _ in range(3):
            assert torch.equal(module(x), module._call_impl(x))
    assert not torch.equal(module(x).detach(), before)
    assert runs.total >= 3  # served again, at once or as soon as the change was seen to last


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
def test_a_module_of_another_dtype_gives_that_dtype(convert, runs, tmp_path: Path):
    module, x = Tied(), torch.randn(3, 8)
    with torch.no_grad():
        plant(module, x, tmp_path)
        torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
        getattr(module, convert)()
        y = getattr(x, convert)()
        for _ in range(3):
            assert torch.equal(module(y), module._call_impl(y))
            with pytest.raises(RuntimeError, match="same dtype"):  # as without us
                module(x)
        module.float()
        plant(module, x, tmp_path)  # its buffer is untied now
        assert torch.equal(module(x), module._call_impl(x))
        for _ in range(3):
            module(x)
    assert runs.total >= 1  # of the first form; the other was never tuned


def test_to_another_device_and_back_is_followed(runs, tmp_path: Path):
    module, x = Tied(), torch.randn(3, 8)
    with torch.no_grad():
        plant(module, x, tmp_path)
        torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
        state = {name: value.clone() for name, value in module.state_dict().items()}
        module.to("meta")
        for _ in range(3):
            assert module(x.to("meta")).device.type == "meta"
        module.to_empty(device="cpu")
        module.load_state_dict(state)
        plant(module, x, tmp_path)  # its weights are untied now
        for _ in range(3):
            assert torch.equal(module(x), module._call_impl(x))
    assert runs.total >= 1


def test_weights_that_were_replaced_are_let_go(tmp_path: Path):
    module, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.no_grad():
        plant(module, x, tmp_path)
        torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
        old = weakref.ref(module.weight)
        module.weight = nn.Parameter(torch.ones(8, 8))
        for _ in range(3):
            module(x)
    gc.collect()
    assert old() is None


class Stateful(nn.Module):
    """Tensors in plain attributes, which each call moves to where its input is; `last` is assigned
    and stays what it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.first = torch.randn(8)
        self.last = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first = self.first.to(x.device)
        self.last = self.first.to(x.device)
        return self.linear(x) * self.first + self.last


def test_a_tensor_in_a_plain_attribute_is_followed_and_let_go_when_it_was_replaced(
    runs: Runs, tmp_path: Path
) -> None:
    module, x = Stateful().eval(), torch.randn(3, 8)
    with torch.no_grad():
        plant(module, x, tmp_path, change=add_one_to_output)
        accelerated = torch_cudal1.accelerate(module, (x,), cache_dir=tmp_path, strictness="error")
        torch.testing.assert_close(accelerated(x), module.forward(x) + 1)
        module.first.mul_(2)  # in place: read at each call
        torch.testing.assert_close(accelerated(x), module.forward(x) + 1)
        assert runs.total >= 2
        old = weakref.ref(module.first)
        module.first = module.last = torch.ones(8)
        for _ in range(4):
            output = accelerated(x)
        torch.testing.assert_close(output, module.forward(x) + 1)
    assert vars(module)["first"] is module.last  # still a plain attribute
    gc.collect()
    assert old() is None


def test_a_tensor_that_changes_at_each_call_is_left_to_the_module(tmp_path: Path) -> None:
    class Counts(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first = self.first + 1
            return self.linear(x) * self.first

    module, twin, x = Counts(), Counts(), torch.randn(3, 8)
    twin.first = module.first.clone()
    twin.load_state_dict(module.state_dict())
    with torch.no_grad():
        accelerated = torch_cudal1.accelerate(module, (x,), cache_dir=tmp_path)
        assert "assigns" in torch_cudal1.explain(module).left_out[0]
        for _ in range(3):
            assert torch.equal(accelerated(x), twin(x))


def test_a_function_over_its_own_layers_is_captured_and_follows_them(
    runs: Runs, tmp_path: Path
) -> None:
    module, x = Closed().eval(), torch.randn(3, 8)
    with torch.no_grad():
        plant(module, x, tmp_path, change=add_one_to_output)
        plain = module(x)
        accelerated = torch_cudal1.accelerate(module, (x,), cache_dir=tmp_path, strictness="error")
        torch.testing.assert_close(accelerated(x), plain + 1)
        module.parts["up"].weight.mul_(2)
        expected = x + module.mlp(x)
        torch.testing.assert_close(accelerated(x), expected + 1)
        assert not torch.allclose(expected, plain)
    twin = copy_sharing_tensors(module)
    assert twin.mlp is not module.mlp
    assert twin.mlp.__closure__[0].cell_contents is not module.mlp.__closure__[0].cell_contents
    assert module.mlp.__closure__[1].cell_contents is module.parts  # the user's own is as it was


def test_a_copy_whose_function_calls_the_originals_layers_runs_its_own_forward() -> None:
    module, x = Closed().eval(), torch.randn(3, 8)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        module.parts["up"].weight.mul_(3)
        accelerated = torch_cudal1.accelerate(copied, (x,))
        assert torch.equal(accelerated(x), x + module.mlp(x))
        module.parts["up"].weight.mul_(3)
        assert torch.equal(accelerated(x), x + module.mlp(x))
