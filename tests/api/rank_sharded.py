"""What each rank does with sharded models: FSDP2 (`fully_shard`), tensor parallelism
(`parallelize_module`), DTensors as such.

One function a scene; `seen_by` plays them all in the running process group. Only rank 0's cache
holds decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_cudal1
from tests.entries import add_one_to_output, plant, plant_compiled
from torch_cudal1.api import quick_tier
from torch_cudal1.api.backend import cudal1
from torch_cudal1.api.ranks import consensus
from torch_cudal1.core import telemetry

Seen = dict[str, Any]
_CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Block(nn.Module):
    """Two layers with a submodule without weights between them; without it every step is a matrix
    product.
    """

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.second = (
            nn.Linear(8, 8),
            activation or nn.Identity(),
            nn.Linear(8, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


@dataclass(frozen=True)
class Here:
    """One rank's place: its device, the mesh of all ranks, its own cache, and the input, which is
    the same on all.
    """

    rank: int
    device: torch.device
    mesh: DeviceMesh
    folder: Path

    @property
    def x(self) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(self.device)

    def block(self, activation: nn.Module | None = None) -> Block:
        return Block(activation).to(self.device)

    def options(self, scene: str) -> dict[str, Any]:
        return {"cache_dir": self.cache(scene), "strictness": "error", "ranks_timeout_s": 900.0}

    def cache(self, scene: str) -> Path:
        return self.folder / f"{scene}-{self.rank}"

    def tensor_parallel(self) -> nn.Module:
        return parallelize_module(
            self.block(), self.mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )


def compare_to_reference(
    module: nn.Module,
    call: Callable[[], torch.Tensor],
    reference: nn.Module,
    expected: torch.Tensor,
) -> Seen:
    """Whether `call` gives `expected`, and its backward the gradients that `reference` has got from
    it.
    """
    result = whole(call())
    whole(result).square().sum().backward()
    expected.square().sum().backward()
    named = dict(reference.named_parameters())
    pairs = [
        (whole(parameter.grad), named[name].grad)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    ]
    right = all(torch.allclose(parameter, grad, **_CLOSE) for parameter, grad in pairs) and len(
        pairs
    ) == len(named)
    outcome = {
        "right": torch.allclose(result, expected, **_CLOSE),
        "gradients": right,
        "reasons": reasons(module),
    }
    return outcome | {"swapped": telemetry.report().counters.get("regions_swapped", 0)}


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reasons(module: nn.Module) -> list[str]:
    """Why nothing was swapped, as `explain` or the report has it."""
    texts = [
        str(event.facts["reason"])
        for event in telemetry.report().events
        if event.what == "left_out"
    ]
    return [*texts, *torch_cudal1.explain(module).left_out] if module in accelerated else texts


accelerated: list[nn.Module] = []


def accelerate(module: nn.Module, x: torch.Tensor, options: dict[str, Any]) -> nn.Module:
    accelerated.append(module)
    return torch_cudal1.accelerate(module, x, **options)


# --- one function a scene


def fully_sharded(here: Here) -> Seen:
    module, reference = here.block(), here.block()
    fully_shard(module.first, mesh=here.mesh)
    fully_shard(module, mesh=here.mesh)
    accelerate(module, here.x, here.options("fsdp"))
    return compare_to_reference(module, lambda: module(here.x), reference, reference(here.x))


def sharded_after_it_was_accelerated(here: Here) -> Seen:
    module, reference = here.block(), here.block()
    if here.rank == 0:
        plant(here.block(), here.x, here.cache("after"), change=add_one_to_output)
    accelerate(module, here.x, here.options("after"))
    before = whole(module(here.x)).mean() - reference(here.x).mean()
    fully_shard(module, mesh=here.mesh)
    outcome = compare_to_reference(module, lambda: module(here.x), reference, reference(here.x))
    return outcome | {
        "before": round(before.item(), 3),
        "misses": telemetry.report().counters.get("misses", 0),
    }


def blocks_compiled_and_sharded(here: Here) -> Seen:
    if here.rank == 0:
        for argument in (
            here.x,
            here.x.requires_grad_(),
        ):  # as the first block gets it, and as the second
            plant_compiled(
                lambda call, argument=argument: call(argument),
                here.block(),
                here.cache("blocks"),
                add_one_to_output,
            )
    reference = nn.Sequential(here.block(), here.block())
    module = nn.Sequential(here.block(), here.block())
    for block in module:
        block.compile(backend=cudal1, options=here.options("blocks"))
        fully_shard(block, mesh=here.mesh)
    fully_shard(module, mesh=here.mesh)
    expected = reference[1](reference[0](here.x) + 1) + 1  # what rank 0 knows is visibly different
    outcome = compare_to_reference(module, lambda: module(here.x), reference, expected)
    counters = telemetry.report().counters
    return outcome | {"agreed": counters.get("ranks.agreed", 0)}


def tensor_parallel(here: Here) -> Seen:
    module, reference = here.tensor_parallel(), here.block()
    accelerate(module, here.x, here.options("tp"))
    return compare_to_reference(module, lambda: module(here.x), reference, reference(here.x))


def tensor_parallel_compiled(here: Here) -> Seen:
    module, reference = here.tensor_parallel(), here.block()
    compiled = torch.compile(module, backend=cudal1, options=here.options("tp-compiled"))
    return compare_to_reference(module, lambda: compiled(here.x), reference, reference(here.x))


def inside_tensor_parallel(here: Here) -> Seen:
    """A submodule that sees plain tensors is swapped: half of the features on each of two ranks."""
    module = parallelize_module(
        here.block(nn.Tanh()), here.mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )
    part = torch.zeros(4, 8 // dist.get_world_size(), device=here.device)
    reference = here.block(nn.Tanh())
    with torch.no_grad():
        if here.rank == 0:
            plant(nn.Tanh(), part, here.cache("inside"), change=add_one_to_output)
        torch_cudal1.accelerate(module.between, part, **here.options("inside"))
        result, expected = (
            whole(module(here.x)),
            reference.second(torch.tanh(reference.first(here.x)) + 1),
        )
    return {"right": torch.allclose(result, expected, **_CLOSE)}


def untuned(here: Here) -> Seen:
    """The first rank measures PyTorch's own ways, with a backward for a training step inside DDP, and
    the others run what it took.
    """
    options = here.options("untuned") | {"on_miss": "quick"}
    minimum, quick_tier.MIN_SPEEDUP_BEYOND_NOISE = quick_tier.MIN_SPEEDUP_BEYOND_NOISE, 0.0
    module, reference = here.block(), here.block()
    try:
        with torch.no_grad():
            accelerate(module, here.x, options)
            result = module(here.x)
            compiled = torch.compile(reference, backend=cudal1, options=options)(here.x)
            expected = reference(here.x)
        right = all(torch.allclose(item, expected, **_CLOSE) for item in (result, compiled))
        runs = [region.runs for region in torch_cudal1.explain(module).regions]
        trained = here.block()
        accelerate(trained, here.x, options)
        replica = nn.parallel.DistributedDataParallel(trained)
        outcome = compare_to_reference(
            trained, lambda: replica(here.x), reference, reference(here.x)
        )
    finally:
        quick_tier.MIN_SPEEDUP_BEYOND_NOISE = minimum
    events = telemetry.report().events
    measured = sum(event.what == "quick" for event in events)
    agreed = [event.facts["runs"] for event in events if event.what == "agreed"]
    right = right and outcome["right"]
    return outcome | {"right": right, "runs": runs, "measured": measured, "agreed": agreed}


def distributed_tensors(here: Here) -> Seen:
    module, reference = distribute_module(here.block(), here.mesh), here.block()
    x = distribute_tensor(here.x, here.mesh, [Replicate()])
    accelerate(module, x, here.options("dtensor"))
    outcome = compare_to_reference(module, lambda: module(x), reference, reference(here.x))
    plain = distribute_module(here.block(), here.mesh)
    torch_cudal1.accelerate(
        plain, here.x, **here.options("dtensor")
    )  # which this module does not take: nothing of ours fails
    return outcome | {"of_parameters": list(torch_cudal1.explain(plain).left_out)}


def distributed_tensors_compiled(here: Here) -> Seen:
    module, reference = distribute_module(here.block(), here.mesh), here.block()
    x = distribute_tensor(here.x, here.mesh, [Replicate()])
    compiled = torch.compile(module, backend=cudal1, options=here.options("dtensor-compiled"))
    return compare_to_reference(module, lambda: compiled(x), reference, reference(here.x))


SCENES = (
    fully_sharded,
    sharded_after_it_was_accelerated,
    blocks_compiled_and_sharded,
    tensor_parallel,
    tensor_parallel_compiled,
    inside_tensor_parallel,
    untuned,
    distributed_tensors,
    distributed_tensors_compiled,
)


def run_scenes(rank: int, device: torch.device, folder: Path) -> Seen:
    """Every scene, one after the other."""
    here, outcomes = (
        Here(rank, device, init_device_mesh(device.type, (dist.get_world_size(),)), folder),
        {},
    )
    for scene in SCENES:
        dist.barrier()
        telemetry.reset()
        torch._dynamo.reset()
        consensus._last_meeting_timed_out = False
        outcomes[scene.__name__] = scene(here)
    return outcomes
