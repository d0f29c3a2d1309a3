"""What the package decides for a fixed set of inputs, as short digests:
`python -m tests.golden.record` writes `golden.json`.

A change that is meant to change nothing (a move, a rename, another structure) must leave every
value as it is. One that is meant to change kernels or decisions writes the file anew, and the diff
shows how far it reaches. No section measures anything.

- `kernels`: region keys, proposals and the text of each kernel, for the cases of `tests/kernels`
  and large products
- `cubins`: machine code of one Program a family, compared where the same versions of Triton and
  PyTorch are installed
- `graphs`: region keys, rewritten forms and fusion groups of the benchmark models, in inference and
  in a training step
- `decisions`: what a search stores under an evaluator with scripted answers, as the bytes of the
  entry
- `shipped`: every entry of `kernels_cache/`, opened and encoded again
- `files`: entries, decision records, locks and bundles, made from fixed values
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton

from benchmarks import models
from tests.fake_gpu import on_the_gpu
from tests.kernels import cases, compare_attention, compare_products
from tests.kernels.traced_programs import trace_program
from torch_cudal1 import judge
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import partition
from torch_cudal1.graph.propose import (
    find_minor_product_groups,
    find_product_groups,
    rewrite_region,
)
from torch_cudal1.ir.program import Program, canonical_json
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    CheckResult,
    Region,
    Rejected,
    Target,
    Timing,
    Verdict,
)
from torch_cudal1.kernels import build, propose
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.proposal import KernelSource
from torch_cudal1.search.tune import tune
from torch_cudal1.store.bundle.bundle_file import write_bundle
from torch_cudal1.store.bundle.lockfile import make_lock, write_lock
from torch_cudal1.store.cache.decision_record import encode_record
from torch_cudal1.store.cache.entry_file import encode_entry, open_entry
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.context import make_context

__all__ = ["GOLDEN", "SECTIONS"]

GOLDEN = Path(__file__).with_name("golden.json")
_SHIPPED = Path(__file__).parents[2] / "kernels_cache"
_TARGET = Target("cuda", "sm_90", "NVIDIA H200", "13.0", "2.11.0", "3.6.0")
_MOMENT, _VERSION = "2026-01-01T00:00:00+00:00", "0"


def _digest(value: Any) -> str:
    content = (
        value
        if isinstance(value, bytes)
        else json.dumps(value, sort_keys=True, default=str).encode()
    )
    return hashlib.sha256(content).hexdigest()[:16]


def _facts_of(kernel: KernelSource) -> list[Any]:
    """What a compiler is given; positions instead of names, which may change."""
    cuda = kernel.cuda and [kernel.cuda.defines, kernel.cuda.shared_bytes, kernel.cuda.cluster]
    return [
        kernel.symbol,
        kernel.text,
        kernel.arguments,
        kernel.grid,
        kernel.warps,
        kernel.stages,
        kernel.registers,
        cuda,
    ]


def _kernels_of(program: Program) -> dict[str, Any]:
    """The proposals and kernel texts of one Program for several architectures; with TF32 allowed on
    the last.
    """
    digests: dict[str, Any] = {"key": _digest(program.digest)}
    for name, sm, tf32_ops in (
        ("80", 80, ()),
        ("90", 90, ()),
        ("90 tf32", 90, ("matmul", "conv")),
        ("100", 100, ()),
    ):
        proposals = propose(program, sm, tf32_ops)
        kernels = [
            (proposal.to_json(), [_facts_of(kernel) for kernel in lower(program, proposal).kernels])
            for proposal in proposals
        ]
        digests[name] = [len(proposals), _digest(kernels)]
    return digests


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _large_cases() -> dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]]:
    """Sizes at which tables of tiles and lower bounds on time decide, without memory."""
    large: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in (
            (4096, 4096, 4096),
            (1, 4096, 11008),
            (64, 512, 51200),
            (32768, 1024, 1024),
        ):
            x, w, b = _meta(m, k, dtype=dtype), _meta(n, k, dtype=dtype), _meta(n, dtype=dtype)
            large[f"linear {m}x{k}x{n} {dtype}"] = (
                lambda x, w, b: F.gelu(F.linear(x, w, b)),
                (x, w, b),
            )
    for channels, size, kernel, stride in ((64, 112, 3, 1), (256, 56, 1, 2), (3, 224, 7, 2)):
        x, w = _meta(16, channels, size, size), _meta(128, channels, kernel, kernel)
        large[f"conv {channels}x{size} {kernel} {stride}"] = (
            lambda x, w, stride=stride: torch.ops.aten.convolution(
                x, w, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1
            ),
            (x, w),
        )
    x, w = _meta(16, 64, 112, 112), _meta(64, 1, 3, 3)
    large["depthwise"] = (
        lambda x, w: torch.ops.aten.convolution(
            x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 64
        ),
        (x, w),
    )
    large["softmax 4096x131072"] = (lambda x: x.softmax(-1), (_meta(4096, 131072),))
    large["layer norm 8192x4096 bf16"] = (
        lambda x, w: F.layer_norm(x, (4096,), w, w),
        (_meta(8192, 4096, dtype=torch.bfloat16), _meta(4096, dtype=torch.bfloat16)),
    )
    return large


def kernels() -> dict[str, Any]:
    """Region keys, proposals and kernel texts."""
    tables = {
        "": cases.all_cases(),
        "product: ": compare_products.CASES,
        "large: ": _large_cases(),
    }
    digests = {
        f"{prefix}{name}": _kernels_of(trace_program(function, inputs))
        for prefix, table in tables.items()
        for name, (function, inputs) in table.items()
    }
    for name, case in compare_attention.CASES.items():
        digests[f"attention: {name}"] = _kernels_of(trace_program(*case))
    return digests


def cubins() -> dict[str, Any]:
    """Machine code of one small Program a family, and what compiled it: other versions give other
    bytes.
    """
    x, w = torch.rand(64, 1000), torch.rand(1000)
    cases: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]] = {
        "softmax": (lambda x: (x * 0.5).softmax(-1), (x.half(),)),
        "norm": (lambda x, w: F.layer_norm(x, (1000,), w, w), (x, w)),
        "element-wise": (lambda x, w: F.silu(x) * w, (x, w)),
        "product": (lambda x: F.relu(x @ x.t()), (x.bfloat16(),)),
        "CUDA C++": (lambda x, w: F.gelu(F.linear(x, w)), (_meta(4096, 1024), _meta(1024, 1024))),
    }
    digests: dict[str, Any] = {"compilers": [triton.__version__, torch.__version__]}
    for name, (function, inputs) in cases.items():
        program = trace_program(function, inputs)
        built = build(program, propose(program, 90)[0], 90)
        digests[name] = _digest(built.digest)
    return digests


def _regions(name: str, *, train: bool) -> tuple[Region, ...]:
    torch.manual_seed(0)
    workload = models.build(name, sizes="small", device="cpu")
    module = workload.module.train(train)
    with torch.set_grad_enabled(train):
        try:
            return capture_regions(module, workload.inputs)
        except NotLowerableError:
            return ()  # an LSTM in training, which Dynamo does not trace


def _find_groups(region: Region) -> list[Any]:
    on_gpu = replace(region, program=on_the_gpu(region.program))
    groups = [
        *partition(on_gpu, products=True).groups,
        *partition(on_gpu).groups,
        *find_product_groups(on_gpu),
    ]
    return [
        (group.region.key, group.region.name, group.inputs)
        for group in (*groups, *find_minor_product_groups(on_gpu))
    ]


def graphs() -> dict[str, Any]:
    """Region keys, rewritten forms, fusion groups."""
    digests: dict[str, Any] = {}
    for name in models.MODELS:
        for train in (False, True):
            for region in _regions(name, train=train):
                variant = rewrite_region(region, assume_finite=False)
                label = f"{name} {'training' if train else 'inference'} {region.kind}"
                digests[label] = {
                    "key": _digest(region.key),
                    "rewritten": None
                    if variant is None
                    else [_digest(variant.program.digest), "+".join(variant.techniques)],
                    "islands": _digest(_find_groups(region)),
                }
    return digests


class _Scripted:
    """An evaluator whose answers are computed from names alone: the same in every process."""

    def rank_baselines(
        self, region: Region, schedules: Sequence[Any], job: Any
    ) -> judge.BaselineRanking:
        medians = {name: 100.0 + len(name) for name in schedules}
        return judge.BaselineRanking(
            Candidate(region.program, min(medians, key=medians.__getitem__), "baseline"),
            medians,
            {},
        )

    def judge(
        self, region: Region, candidate: Candidate, ranking: Any, job: Any
    ) -> judge.Evaluation:
        verdict = Verdict((CheckResult("numerics", True, 1.0, 2.0),))
        share = int(candidate.digest[:4], 16) / 0xFFFF
        if share < 0.2:
            return judge.Evaluation(
                candidate,
                Rejected("scripted", "numerics"),
                Verdict((CheckResult("numerics", False),)),
            )
        gain = 1.1 + share
        return judge.Evaluation(
            candidate,
            Accepted(Timing(verdict, "eager", 100 / gain, 100.0, gain, gain, gain, 14)),
            verdict,
        )


def _diagonal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.diag(a) @ b


class _Function(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


_SEARCHED: Mapping[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "diagonal": (_diagonal, ((64,), (64, 64))),
    "sum of a product": (lambda x, w: (x @ w).sum(-1), ((256, 64), (64, 512))),
    "nothing to rewrite": (lambda x: torch.tanh(x) * 2, ((32, 32),)),
}


def _without_moment_and_machine(entry: Any) -> Any:
    """The entry without what depends on the moment and the machine."""
    evidence = {name: value for name, value in entry.evidence.items() if name != "attestation"}
    return replace(entry, target=_TARGET, created=_MOMENT, package=_VERSION, evidence=evidence)


def decisions() -> dict[str, Any]:
    """What a search stores under scripted answers."""
    digests: dict[str, Any] = {}
    scripted = _Scripted()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(judge, "rank_baselines", scripted.rank_baselines),
        mock.patch.object(judge, "evaluate_candidate", scripted.judge),
        mock.patch.object(judge, "prestart_worker", return_value=None),
    ):
        place = make_context(torch.device("cpu"), Settings(cache_dir=Path(folder), shipped=False))
        for name, (function, shapes) in _SEARCHED.items():
            inputs = tuple(torch.zeros(shape) for shape in shapes)
            with torch.no_grad():
                (region,) = capture_regions(_Function(function), inputs)
            entry = tune(region, place)
            digests[name] = {
                "key": entry.region_key[:16],
                "choice": entry.choice.label,
                "entry": _digest(encode_entry(_without_moment_and_machine(entry))),
            }
    return digests


def digest_shipped() -> dict[str, Any]:
    """Every shipped entry, opened and encoded again."""
    paths = sorted(_SHIPPED.rglob("*.safetensors"))
    digests: dict[str, list[Any]] = {}
    for path in paths:
        entry = open_entry(path.read_bytes())
        again = encode_entry(entry.entry)
        value = [
            entry.entry.region_key,
            entry.entry.choice.label,
            hashlib.sha256(again).hexdigest(),
            entry.digest,
        ]
        digests.setdefault(path.parent.parent.name, []).append(value)
    return {place: [len(values), _digest(values)] for place, values in digests.items()}


def files() -> dict[str, Any]:
    """Decision records, locks and bundles of a cache with fixed entries."""
    paths = sorted(_SHIPPED.rglob("*.safetensors"))[:5]
    with tempfile.TemporaryDirectory() as folder:
        cache = LocalCache(Path(folder) / "cache")
        for path in paths:
            cache.put(open_entry(path.read_bytes()).entry)
        places = sorted(
            str(path.relative_to(cache.root)) for path in cache.root.rglob("*.safetensors")
        )
        inventory = take_inventory(cache)
        write_bundle(Path(folder) / "cache.bundle", inventory)
        write_lock(make_lock(inventory), Path(folder) / "cudal1.lock")
        entry = open_entry(paths[0].read_bytes()).entry
        return {
            "places": _digest(places),
            "bundle": _digest((Path(folder) / "cache.bundle").read_bytes()),
            "lock": _digest((Path(folder) / "cudal1.lock").read_bytes()),
            "decision record": _digest(
                encode_record("ab" * 32, {"regions": ["cd" * 32]}, entry.target, entry.contract)
            ),
            "json": _digest(canonical_json({"b": (1, 2.5), "a": None})),
        }


SECTIONS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "kernels": kernels,
    "cubins": cubins,
    "graphs": graphs,
    "decisions": decisions,
    "shipped": digest_shipped,
    "files": files,
}

if __name__ == "__main__":
    golden = {name: section() for name, section in SECTIONS.items()}
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
