"""What each of two ranks does in `test_ranks`: scene after scene in one process group, what was
seen as one JSON object a rank.

Run as `python -m tests.api.rank_scenes RANK PORT FOLDER`. Scenes of both ranks stand side by side
in one function.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_cudal1
from tests.entries import add_one_to_output, plant, plant_compiled
from torch_cudal1.api.backend import cudal1
from torch_cudal1.api.ranks import consensus
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Aten, Program, Value
from torch_cudal1.search.tune import choose
from torch_cudal1.store.cache.quarantine import QuarantineRecord, quarantine_candidate
from torch_cudal1.store.context import make_context

Seen = dict[str, Any]


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def twice_shifted(program: Program) -> Program:
    """Another visible change."""
    first, new = program.outputs[0], program.value_count
    step = Aten("aten.add.Scalar", (Value(first), 2), (), (new,))
    return replace(program, steps=(*program.steps, step), outputs=(new, *program.outputs[1:]))


class Deep(nn.Module):
    """Three layers of one MiB each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Scenes:
    def __init__(self, rank: int, store: Any, folder: Path) -> None:
        self.rank, self.store, self.folder = rank, store, folder
        self.x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def cache(self, scene: str) -> Path:
        return self.folder / f"{scene}-{self.rank}"

    def accelerate(self, scene: str, module: nn.Module | None = None, **options: Any) -> Seen:
        """What `accelerate` binds, how long it took, and how far the result lies from the module's
        own.
        """
        module = Net() if module is None else module
        settings = {
            "cache_dir": self.cache(scene),
            "strictness": "error",
            "ranks_timeout_s": 900.0,
            **options,
        }
        began = time.monotonic()
        with torch.no_grad():
            torch_cudal1.accelerate(module, self.x, **settings)
            seconds = time.monotonic() - began
            bound = (
                next(iter(module._compiled_call_impl.bindings.values()), None)
                if module._compiled_call_impl
                else None
            )
            digests = (
                [choice.candidate.digest for choice in bound.choices if choice.swapped]
                if bound
                else []
            )
            shift = float((module(self.x) - module._call_impl(self.x)).mean())
        outcome = {
            "digests": digests,
            "shift": round(shift, 3),
            "reason": getattr(bound, "reason", ""),
            "seconds": seconds,
        }
        return outcome | {"stored": len(list(self.cache(scene).rglob("*.safetensors")))}

    def plant(self, scene: str, change: Callable[[Program], Program] = add_one_to_output) -> None:
        with torch.no_grad():
            plant(Net(), self.x, self.cache(scene), change=change)

    def meet(self) -> None:
        """Both ranks are here, and nothing of an earlier scene is left to wait for."""
        dist.barrier()
        telemetry.reset()
        consensus._last_meeting_timed_out = False

    # --- one method a scene

    def only_the_first_knows(self) -> Seen:
        if self.rank == 0:
            self.plant("first")
        return self.accelerate("first")

    def both_know_something_else(self) -> Seen:
        self.plant("both", add_one_to_output if self.rank == 0 else twice_shifted)
        return self.accelerate("both")

    def without_agreement(self) -> Seen:
        self.plant("off", add_one_to_output if self.rank == 0 else twice_shifted)
        return self.accelerate("off", ranks_agree=False)

    def only_the_second_knows(self) -> Seen:
        if self.rank == 1:
            self.plant("second")
        return self.accelerate("second")

    def a_cache_that_cannot_be_written(self) -> Seen:
        if self.rank == 0:
            self.plant("written")
        else:
            self.cache("written").write_text("a file where the folder should be")
        return self.accelerate("written")

    def judged_on_another_machine(self) -> Seen:
        if self.rank == 0:
            self.plant("machine")
            return self.accelerate("machine")
        genuine = consensus.explain_staleness
        consensus.explain_staleness = lambda judged, here: genuine(
            judged, replace(here, sku="another CPU")
        )
        try:
            return self.accelerate("machine")
        finally:
            consensus.explain_staleness = genuine

    def quarantined_on_one(self) -> Seen:
        self.plant("held")
        if self.rank == 1:
            with torch.no_grad():
                (region,) = capture_regions(Net(), (self.x,))
            digest = choose(
                region, make_context(torch.device("cpu"), Settings(cache_dir=self.cache("held")))
            ).candidate.digest
            quarantine_candidate(
                self.cache("held"), QuarantineRecord(region.key, digest, "it was wrong here")
            )
        return self.accelerate("held")

    def under_another_contract(self) -> Seen:
        self.plant("contract")
        return self.accelerate("contract", precision="match" if self.rank == 0 else "strict")

    def damaged_on_the_way(self) -> Seen:
        self.plant("damaged")
        genuine = consensus.encode_entry
        consensus.encode_entry = lambda entry: genuine(entry)[:-9] + bytes(9)
        try:
            return self.accelerate("damaged")
        finally:
            consensus.encode_entry = genuine

    def too_large_to_hand_on(self) -> Seen:
        self.plant("large")
        limit, consensus.MAX_BROADCAST_BYTES = consensus.MAX_BROADCAST_BYTES, 10
        try:
            return self.accelerate("large")
        finally:
            consensus.MAX_BROADCAST_BYTES = limit

    def in_many_pieces(self) -> Seen:
        if self.rank == 0:
            self.plant("pieces")
        size, consensus.CHUNK_BYTES = consensus.CHUNK_BYTES, 100
        try:
            return self.accelerate("pieces")
        finally:
            consensus.CHUNK_BYTES = size

    def nobody_knows_and_must(self) -> Seen:
        try:
            self.accelerate("must", on_miss="error")
        except CacheMissError as error:
            return {"error": str(error)}
        return {"error": ""}

    def another_graph(self) -> Seen:
        module = Net(4 if self.rank == 0 else 5)
        with torch.no_grad():
            plant(module, self.x, self.cache("graph"), change=add_one_to_output)
        outcome = self.accelerate("graph", module)
        differ = [
            event.facts for event in telemetry.report().events if event.what == "graphs_differ"
        ]
        return outcome | {"others": [facts["others"] for facts in differ]}

    def one_comes_too_late(self) -> Seen:
        self.plant("late")
        if self.rank == 1:
            self.store.wait(["first is done"], timedelta(seconds=900))
        outcome = self.accelerate("late", ranks_timeout_s=0.3)
        if self.rank == 0:
            self.store.set("first is done", "yes")
        return outcome

    def and_the_next_time_both_come(self) -> Seen:
        self.plant("again")
        return self.accelerate("again")

    def data_parallel(self) -> Seen:
        module = Net()
        with torch.enable_grad():
            if self.rank == 0:
                plant(module, self.x, self.cache("ddp"), change=add_one_to_output)
            torch_cudal1.accelerate(module, self.x, cache_dir=self.cache("ddp"), strictness="error")
            wrapped = DistributedDataParallel(module)
            wrapped(self.x * (1 + self.rank)).square().sum().backward()
        gradient = module.first.weight.grad.sum().item()
        return {
            "gradient": gradient,
            "runs": dict(telemetry.report().counters).get("regions_swapped", 0),
        }

    def data_parallel_compiled(self) -> Seen:
        x = torch.ones(3, 512)
        graphs = plant_compiled(
            lambda call: call(x),
            self._make_bucketed(),
            self.folder / f"planted-{self.rank}",
            add_one_to_output,
        )
        where = self.folder / f"planted-{self.rank}" if self.rank == 0 else self.cache("empty")
        options = {"cache_dir": where, "strictness": "error"}
        telemetry.reset()
        compiled = torch.compile(self._make_bucketed(), backend=cudal1, options=options)
        out = compiled(x)
        out.sum().backward()
        counters = dict(telemetry.report().counters)
        agreements = [event for event in telemetry.report().events if event.what == "agreed"]
        return {
            "graphs": graphs,
            "mean": out.mean().item(),
            "swapped": counters.get("regions_swapped", 0),
            "agreed": len(agreements),
        }

    def _make_bucketed(self) -> nn.Module:
        """A model of its own: two reducers on one would both fire, on a rank whose garbage
        collector left the first alone.
        """
        return DistributedDataParallel(
            Deep(), bucket_cap_mb=1
        )  # a layer is one MiB: Dynamo splits there


SCENES = [
    name
    for name, value in vars(Scenes).items()
    if callable(value) and name not in ("cache", "accelerate", "plant", "meet")
]
SCENES = [name for name in SCENES if not name.startswith("_")]


def main(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=900))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=900)
    )
    scenes, outcomes = Scenes(rank, store, folder), {}
    for name in SCENES:
        scenes.meet()
        began = time.monotonic()
        outcomes[name] = getattr(scenes, name)() | {"took": time.monotonic() - began}
    (folder / f"seen-{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
