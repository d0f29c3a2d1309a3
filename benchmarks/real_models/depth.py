"""What the depth of a model costs a search: `python -m benchmarks.real_models.depth --out depth.json`.

Each depth is tuned in a process of its own with caches of its own; then a model with the same layers,
but another depth and no head, in a process that has the caches of the deepest. Nothing else runs
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.real_models.column_process import relative_difference
from benchmarks.real_models.own_process import run_measurement
from torch_cudal1.core import telemetry
from torch_cudal1.judge.benchmark.clock import synchronise

__all__ = ["build_llama", "main", "tune_model"]

# Of Llama 2 of 7 billion parameters.
_WIDTHS = {
    "full": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
    },
}
_COUNTERS = ("regions_tuned", "candidates_built", "candidates_judged", "entries_reused")


def main(argv: Sequence[str] | None = None) -> int:
    """Tune every depth, then the second model. Exit code 1 if one failed."""
    args = _parser().parse_args(argv)
    if args.one is not None:
        print(json.dumps(tune_model(args.one, args)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="depth-") as scratch:
        runs = [(f"{depth} layers", depth, True, str(depth)) for depth in args.depths]
        deepest = str(max(args.depths))
        runs.append((f"{args.second} layers, no head", args.second, False, deepest))
        for label, depth, has_head, caches in runs:
            facts = _run_process(depth, has_head, Path(scratch) / caches, args)
            rows.append({"model": label, "layers": depth, "has_head": has_head, **facts})
            print(rows[-1], flush=True)
            options = {name: getattr(args, name) for name in ("width", "tokens", "budget_s")}
            document = report.make_document(
                "real_models.depth", options, rows, environment=report.environment()
            )
            command = document["command"].replace("benchmarks.bench_real", "benchmarks.real")
            report.save(args.out, {**document, "command": command})
    return 1 if any("failed" in row for row in rows) else 0


def _run_process(
    depth: int, has_head: bool, caches: Path, args: argparse.Namespace
) -> dict[str, Any]:
    arguments = ["--out", str(args.out), "--one", str(depth)]
    arguments += ["--cache-dir", str(caches / "entries")]
    for name in ("width", "tokens", "budget_s", "device"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    arguments += [] if has_head else ["--no-head"]
    return run_measurement("benchmarks.real_models.depth", arguments, caches, args.limit_s)


def build_llama(
    depth: int, width: str, tokens: int, *, has_head: bool, device: torch.device
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A Llama with random weights, bf16 on a GPU, and the arguments of one call."""
    import transformers

    config = transformers.LlamaConfig(**_WIDTHS[width], num_hidden_layers=depth)
    torch.manual_seed(0)
    # On the device: drawing seven billion weights takes a CPU minutes. In the final dtype: in fp32
    # they would take twice the memory.
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with device:
        module = (transformers.LlamaForCausalLM if has_head else transformers.LlamaModel)(config)
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(3, config.vocab_size, (1, tokens), device=device)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    return module.eval().to(device), arguments


@torch.no_grad()
def tune_model(depth: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds that `accelerate(on_miss="tune")` takes for the model, and what it decided."""
    import cudal1

    device = torch.device(args.device)
    module, arguments = build_llama(
        depth, args.width, args.tokens, has_head=not args.no_head, device=device
    )
    expected = module(**arguments)[0].clone()
    own_us = _time_call(module, arguments, device)
    started_s = time.perf_counter()
    accelerated = cudal1.accelerate(
        module,
        arguments,
        on_miss="tune",
        budget_s=args.budget_s,
        cache_dir=args.cache_dir,
    )
    output = accelerated(**arguments)[0]
    synchronise(device)
    seconds = time.perf_counter() - started_s
    explanation = cudal1.explain(accelerated)
    counters: Mapping[str, int] = telemetry.report().counters
    return {
        "seconds": seconds,
        "difference": relative_difference([output], [expected]),
        "own_us": own_us,
        "us": _time_call(accelerated, arguments, device),
        "runs": sorted({region.runs for region in explanation.regions}),
        "gate": list(explanation.gate),
        "undone": explanation.undone,
        "left_out": list(explanation.left_out),
        "counters": {name: counters.get(name, 0) for name in _COUNTERS},
        "searches": [
            {"name": event.facts.get("name", ""), "what": event.what, **_keep_seconds(event.facts)}
            for event in telemetry.report().events
            if event.what in ("seconds", "blocks")
        ],
    }


def _keep_seconds(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: facts[key] for key in ("baselines", "candidates", "occurrences") if key in facts}


def _time_call(module: Any, arguments: Mapping[str, Any], device: torch.device) -> float:
    """Microseconds of a call, the median of twenty."""
    samples = []
    for _ in range(20):
        synchronise(device)
        started_s = time.perf_counter()
        module(**arguments)
        synchronise(device)
        samples.append(1e6 * (time.perf_counter() - started_s))
    return sorted(samples)[len(samples) // 2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_models.depth", description=__doc__
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="results file (JSON)")
    add("--depths", type=int, nargs="+", default=[2, 32], help="layers")
    add("--second", type=int, default=24, help="layers of the second model")
    add("--width", choices=sorted(_WIDTHS), default="full")
    add("--tokens", type=int, default=1024)
    add("--budget-s", type=float, default=60.0, help="of each search")
    add("--limit-s", type=float, default=300.0, help="of each model's process")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--one", type=int, help=argparse.SUPPRESS)
    add("--cache-dir", type=Path, help=argparse.SUPPRESS)
    add("--no-head", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
