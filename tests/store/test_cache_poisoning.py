"""Two processes, one Inductor cache folder: plain torch.compile never runs our graph, and ours is
never replaced by Inductor's.

The planted swap adds 1 to the result, so each process can tell by the numbers whose graph it ran.
AOTAutogradCache is keyed by the graph that Dynamo found and not by its compiler, which is why this
can go wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import PlantingBackend, add_one_to_output

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch_cudal1.api.backend import cudal1
from tests.store.test_cache_poisoning import answers, make

whose, entries, forced = sys.argv[1], sys.argv[2], sys.argv[3] == "forced"
torch._functorch.config.force_autograd_cache = forced
net, x = make()
options = {"cache_dir": entries, "strictness": "error"}
compiled = torch.compile(net) if whose == "plain" else torch.compile(net, backend=cudal1, options=options)
print(json.dumps(answers(compiled, net, x) | {"hits": counters["aot_autograd"]["autograd_cache_hit"]}))
"""


def make() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    ), torch.randn(5, 8)


def answers(call: Any, net: torch.nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Mean difference from eager of an inference call and of a training step, and the largest error
    of a gradient.
    """
    with torch.no_grad():
        inference = call(x) - net(x)
    out = call(x)
    gradients_served = torch.autograd.grad(out.sum(), list(net.parameters()))
    gradients_plain = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    wrong = max(
        (a - b).abs().max().item() for a, b in zip(gradients_served, gradients_plain, strict=True)
    )
    return {
        "inference": inference.mean().item(),
        "training": (out - net(x)).mean().item(),
        "gradient": wrong,
    }


def run(side: str, folder: Path, forced: bool) -> dict[str, float]:
    """What a fresh process with that compiler answers, and its hits of AOTAutogradCache."""
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        side,
        str(folder / "entries"),
        "forced" if forced else "free",
    ]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    answer: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("order", "schedule", "forced"),
    [
        pytest.param(
            ("plain", "ours", "plain"),
            "inductor",
            True,
            id="plain first, swaps through Inductor, cache forced on",
        ),
        pytest.param(
            ("ours", "plain", "ours"), "eager", False, id="ours first, swaps step by step"
        ),
    ],
)
def test_neither_runs_the_other_s_graph(order, schedule, forced, tmp_path):
    net, x = make()
    torch._dynamo.reset()
    answers(
        torch.compile(
            net, backend=PlantingBackend(tmp_path / "entries", add_one_to_output, schedule=schedule)
        ),
        net,
        x,
    )
    torch._dynamo.reset()
    last = {}
    for side in order:
        last[side] = run(side, tmp_path, forced)
        shift = 1.0 if side == "ours" else 0.0
        assert last[side]["inference"] == pytest.approx(shift, abs=1e-5), (side, order)
        assert last[side]["training"] == pytest.approx(shift, abs=1e-5), (side, order)
        assert last[side]["gradient"] < 1e-5, (side, order)
    if order[0] == "plain":
        assert last["plain"]["hits"] >= 1  # the cache does work, or this test would prove nothing


def test_within_one_process_both_live_side_by_side(tmp_path, monkeypatch):
    from torch_cudal1.api.backend import cudal1

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    net, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    with torch.no_grad():
        torch._dynamo.reset()
        torch.compile(net, backend=PlantingBackend(tmp_path, add_one_to_output))(x)
        torch._dynamo.reset()
        served = torch.compile(
            net, backend=cudal1, options={"cache_dir": tmp_path, "strictness": "error"}
        )
        plain = torch.compile(lambda x: net(x))
        for _ in range(2):
            torch.testing.assert_close(served(x), net(x) + 1)
            torch.testing.assert_close(plain(x), net(x))
    torch._dynamo.reset()
