"""Token by token: `python -m benchmarks.real_models.generate --out generate.json`.

`model.generate` of a Llama with random weights and a static cache, greedy, in each way in a process of
its own: as transformers runs it eagerly, as it compiles the decoding step itself, and with the module
accelerated, untuned. The rate is that of the new tokens of a whole call, prefill included. Tokens are
compared with those of the eager way: where two logits are close, half precision may choose another
one, and all tokens behind it differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report
from benchmarks.real_models.own_process import run_measurement
from torch_cudal1.judge.benchmark.clock import synchronise

__all__ = ["WAYS", "count_equal", "generate_tokens", "main"]

WAYS = ("eager", "transformers", "accelerate")
# 1.1 billion parameters, and what a CPU can try out.
_SIZES = {
    "full": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every way; exit code 1 if one failed."""
    args = _parser().parse_args(argv)
    if args.one is not None:
        print(json.dumps(generate_tokens(args.one, args)))
        return 0
    rows: list[dict[str, Any]] = []
    for way in args.ways:
        with tempfile.TemporaryDirectory(prefix="generate-") as caches:
            rows.append({"way": way, **_run_process(way, Path(caches), args)})
        expected = next((row["tokens"] for row in rows if "tokens" in row), [])
        if "tokens" in rows[-1]:
            rows[-1]["equal_tokens"] = count_equal(rows[-1]["tokens"], expected)
        print({name: value for name, value in rows[-1].items() if name != "tokens"}, flush=True)
        options = {name: getattr(args, name) for name in ("size", "prompt", "new", "batch", "runs")}
        shown = [{key: row[key] for key in row if key != "tokens"} for row in rows]
        document = report.make_document(
            "real_models.generate", options, shown, environment=report.environment()
        )
        command = document["command"].replace("benchmarks.bench_real", "benchmarks.real")
        report.save(args.out, {**document, "command": command})
    return 1 if any("failed" in row for row in rows) else 0


def count_equal(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """How many tokens of all sequences stand before the first one that differs."""
    count = 0
    for ours, theirs in zip(tokens, expected, strict=True):
        for token, other in zip(ours, theirs, strict=True):
            if token != other:
                break
            count += 1
    return count


def _run_process(way: str, caches: Path, args: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--out", str(args.out), "--one", way]
    for name in ("size", "prompt", "new", "batch", "runs", "device"):
        arguments += [f"--{name}", str(getattr(args, name))]
    return run_measurement("benchmarks.real_models.generate", arguments, caches, args.limit_s)


@torch.no_grad()
def generate_tokens(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first call, tokens a second of the later ones, and the tokens."""
    import transformers

    device = torch.device(args.device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES[args.size]))
    module = module.eval().to(dtype)
    ids = torch.randint(3, module.config.vocab_size, (args.batch, args.prompt), device=device)
    if way == "accelerate":
        import cudal1

        module = cudal1.accelerate(module)
    options: dict[str, Any] = {
        "max_new_tokens": args.new,
        "min_new_tokens": args.new,
        "do_sample": False,
        "cache_implementation": "static",
        "attention_mask": torch.ones_like(ids),
        # Where it may, transformers compiles the decoding step of a static cache by itself.
        "disable_compile": way != "transformers",
    }

    def call() -> tuple[float, torch.Tensor]:
        synchronise(device)
        started_s = time.perf_counter()
        tokens = module.generate(ids, **options)
        synchronise(device)
        return time.perf_counter() - started_s, tokens

    first_s, tokens = call()
    # What is prepared when a signature comes again is no part of the rate.
    call()
    seconds = [call()[0] for _ in range(args.runs)]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())
    return {
        "first_s": first_s,
        "tokens_per_s": args.batch * args.new / median(seconds),
        "weights_bytes": weights,
        "tokens": tokens[:, args.prompt :].tolist(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_models.generate", description=__doc__
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="results file (JSON)")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--size", choices=sorted(_SIZES), default="full")
    add("--prompt", type=int, default=512, help="tokens of the prompt")
    add("--new", type=int, default=128, help="tokens to generate")
    add("--batch", type=int, default=1)
    add("--runs", type=int, default=5, help="timed calls")
    add("--limit-s", type=float, default=200.0, help="of each way's process")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--one", choices=WAYS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
