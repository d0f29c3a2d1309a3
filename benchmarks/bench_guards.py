"""Host microseconds that the guards of a call cost: Dynamo's guards, and the records that
`accelerate` compares instead.

    python -m benchmarks.bench_guards [--calls 2000] [--out guards.json]

The models are small transformers of two layers with random weights, on the CPU: guards look at
objects and not at values, so size and device do not matter. Both checks are timed in turns on the
module that was captured, and both must find it unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks import report
from benchmarks.bench_overhead import OverheadRow, measure
from torch_cudal1.core import native
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.dynamo import capture_call
from torch_cudal1.graph.dynamo_guards import GuardSplit
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_builder import record_module

Check: TypeAlias = Callable[[], Any]
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_IMAGE = {name: _TEXT[name] for name in _TEXT if name != "vocab_size"} | {
    "image_size": 32,
    "patch_size": 8,
}


def make_models() -> Iterator[tuple[str, torch.nn.Module, dict[str, torch.Tensor]]]:
    """Name, module and keyword arguments of each model."""
    import transformers as hf

    ids = {"input_ids": torch.randint(0, 96, (2, 12))}
    yield "BERT", hf.BertModel(hf.BertConfig(**_TEXT)), ids
    yield "Llama", hf.LlamaModel(hf.LlamaConfig(**_TEXT, num_key_value_heads=2)), ids
    yield (
        "Gemma 2",
        hf.Gemma2Model(hf.Gemma2Config(**_TEXT, num_key_value_heads=2, head_dim=8)),
        ids,
    )
    yield (
        "T5 encoder",
        hf.T5EncoderModel(
            hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
        ids,
    )
    yield "ViT", hf.ViTModel(hf.ViTConfig(**_IMAGE)), {"pixel_values": torch.randn(2, 3, 32, 32)}


def make_checks(
    module: torch.nn.Module, kwargs: dict[str, torch.Tensor]
) -> tuple[Check, Check, int, int]:
    """Dynamo's check and the package's, how many guards Dynamo made, and how many of them the
    package leaves to Dynamo. Raises ValueError for a module whose state cannot be recorded.
    """
    with torch.no_grad():
        record = record_module(module)
        if isinstance(record, Refusal):
            raise ValueError(record.reason)
        capture = capture_call(module, (), kwargs)
    split, guard_count = GuardSplit(capture, record), 0

    def count(entries: Any) -> list[bool]:
        nonlocal guard_count
        guard_count = len(entries)
        return split.keep(entries)

    remaining, full_check = capture.guards(count), capture.guards()
    call = {"module": module, "args": (), "kwargs": kwargs}
    guard, has_remaining = ModuleGuard(split.merge_records()), bool(split.kept_guards)

    def check_records() -> bool:
        return guard.holds() and (not has_remaining or remaining(call))

    return (lambda: full_check(call)), check_records, guard_count, len(split.kept_guards)


def main() -> int:
    """Measure, print and save; 1 where a check says that an unchanged module changed."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split()))
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[OverheadRow] = []
    wrong = 0
    for name, module, kwargs in make_models():
        with torch.no_grad():
            dynamo_check, package_check, guard_count, remaining = make_checks(module.eval(), kwargs)
            wrong += not (dynamo_check() and package_check())
            timings = measure((dynamo_check, package_check), options.calls, lambda: None)
        labels = (
            f"guards of {name}: all {guard_count} of Dynamo's",
            f"guards of {name}: records, {remaining} left to Dynamo",
        )
        rows += [
            OverheadRow(label, *figures) for label, figures in zip(labels, timings, strict=True)
        ]
        print("\n".join(f"{row.median_us:8.2f} us  {row.name}" for row in rows[-2:]))
    if options.out:
        more = {
            "command": f"python -m benchmarks.bench_guards --calls {options.calls}",
            "environment": {**report.environment(), "extension": native.status()[1] or "used"},
            "summary": {},
        }
        how = {"device": "cpu", "calls": options.calls}
        report.save(
            options.out,
            report.make_document("overhead", how, [asdict(row) for row in rows], **more),
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
