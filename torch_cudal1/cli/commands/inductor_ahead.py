"""`cudal1 warmup --with-inductor`: what Inductor compiles when a target first runs, collected in a
fresh process and stored.

The process gets an empty folder as Inductor's cache and starts the target as a server would: every
decision from the cache, one call. What lies in the folder then is what a start needs. Run by this
module as `python -m torch_cudal1.cli.commands.inductor_ahead TARGET`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cudal1
from torch_cudal1.api.fleet.warmup_task import WarmupOrder
from torch_cudal1.api.targets import load
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import process_environment
from torch_cudal1.search import inductor_artifacts
from torch_cudal1.store.context import make_context

__all__ = ["collect"]

# A target whose start hangs must not hold up the others for ever.
MAX_START_S = 1800.0
# A user's file may print anything to stdout: the answer is the last line that starts like this.
_REGIONS_LINE = "regions of this target: "


def collect(targets: Sequence[str], order: WarmupOrder) -> dict[str, str]:
    """Store, target by target, what Inductor compiled. Returns the reason for each target without
    stored files.
    """
    place, problems = make_context(torch.device(order.device), order.settings), {}
    for target in targets:
        with tempfile.TemporaryDirectory(prefix="cudal1-inductor-") as scratch:
            folder = Path(scratch) / "inductor"
            # Empty, so that what lies there afterwards is exactly what this start compiled.
            folder.mkdir()
            # A fresh process, which starts the target as a server would.
            keys = _start_process(target, order, folder)
            refusal = (
                keys
                if isinstance(keys, Refusal)
                else inductor_artifacts.store_artifacts(keys, folder, place)
            )
            if refusal is not None:
                problems[target] = refusal.reason
    return problems


def _start_process(target: str, order: WarmupOrder, folder: Path) -> list[str] | Refusal:
    """The keys of the regions that a fresh process built, or why it did not."""
    environment = {**process_environment(), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    # Inductor sets this variable too, but later: Triton has built its own library by then,
    # elsewhere.
    environment["TRITON_CACHE_DIR"] = str(folder / inductor_artifacts.TRITON_PREFIX)
    # The child must import this very package, also from a source tree.
    environment["PYTHONPATH"] = ":".join(
        filter(None, [str(Path(cudal1.__file__).parent), environment.get("PYTHONPATH", "")])
    )
    command = [sys.executable, "-m", "torch_cudal1.cli.commands.inductor_ahead", target]
    try:
        process = subprocess.run(
            command,
            env=environment,
            input=json.dumps(order.to_json()),
            capture_output=True,
            text=True,
            timeout=MAX_START_S,
        )
    except subprocess.TimeoutExpired:
        return Refusal(f"its start took longer than {MAX_START_S:g} s")
    lines = [line for line in process.stdout.splitlines() if line.startswith(_REGIONS_LINE)]
    # A target's file may exit with 0 before it said anything.
    if process.returncode or not lines:
        last = (process.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Refusal(f"its start ended with code {process.returncode}: {last[:300]}")
    keys: list[str] = json.loads(lines[-1].removeprefix(_REGIONS_LINE))
    return keys or Refusal("no region of it has a stored decision, so nothing is compiled ahead")


def main(target: str) -> int:
    """Start `target` under the order on stdin, and say which regions were built."""
    order = WarmupOrder.from_json(json.load(sys.stdin))
    (loaded,) = load(target, device=order.device)
    inputs: Any = loaded.inputs
    settings = order.settings.but(
        # `on_miss="error"` and `strictness="error"`: files of a fallback must not be stored as the
        # decision's. Without ranks, because this process is alone.
        on_miss="error",
        inductor_files=True,
        strictness="error",
        ranks_agree=False,
    )
    with torch.set_grad_enabled(order.training):
        module = cudal1.accelerate(loaded.module, inputs, settings=settings)
        # The first call: what is compiled lazily is compiled now.
        module(*inputs)
        print(_REGIONS_LINE + json.dumps([region.key for region in cudal1.explain(module).regions]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
