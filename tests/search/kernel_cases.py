"""Fusion groups and times that tests of the cost model share: products, and a machine that is unlike the
bound in a way one can learn.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.kernels.features import KernelFeatures, extract_features
from torch_cudal1.kernels.lowering import propose
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.learner import Learner
from torch_cudal1.search.cost_model.timings import KernelTiming, append_timings, make_timing
from torch_cudal1.search.evolution.mutators import filter_legal

# the size that a model is asked about, and not fitted to
HELD_OUT = (4096, 2048, 4096)
SIZES = tuple((m, n, k) for m in (256, 1024, 4096) for n in (512, 2048) for k in (512, 4096))


def product(m: int, n: int, k: int) -> Program:
    specs = (
        TensorSpec("float32", (m, k), (k, 1), "cuda"),
        TensorSpec("float32", (k, n), (n, 1), "cuda"),
    )
    return Program(specs, (Aten("aten.mm.default", (Value(0), Value(1)), (), (2,)),), (2,))


def features_of(m: int, n: int, k: int) -> KernelFeatures:
    features = extract_features(product(m, n, k))
    assert features is not None
    return features


def family(m: int, n: int, k: int, most: int = 24) -> tuple[Proposal, ...]:
    return propose(product(m, n, k), 90, most=most)


def took_us(subject: KernelFeatures, proposal: Proposal) -> float:
    """On this machine what the bound puts first is four times as slow as it has it, and every split
    costs a third.
    """
    slow = 4.0 if "f16x3" in str(proposal.config["method"]) else 1.0
    return (
        subject.lower_bound_us(proposal) * slow * (1.3 if proposal.number("split", 1) > 1 else 1.0)
    )


def timings(sizes: Iterable[tuple[int, int, int]] = SIZES, most: int = 10) -> list[KernelTiming]:
    rows = []
    for size in sizes:
        subject = features_of(*size)
        rows += [
            make_timing(subject, proposal, took_us(subject, proposal))
            for proposal in family(*size, most)
        ]
    return rows


PROGRAM = product(*HELD_OUT)


def make_learner(folder: Path, *, has_timings: bool = True) -> Learner:
    """A learner whose file is in `folder`; `known`: with timings of every size but HELD_OUT."""
    path = folder / "timings" / "one.jsonl"
    if has_timings:
        append_timings(path, timings([size for size in SIZES if size != HELD_OUT]))
    return Learner(path, 90, ())


def keep_legal(proposals: Iterable[Proposal]) -> tuple[Proposal, ...]:
    """The proposals that are legal for HELD_OUT on an H100."""
    return filter_legal(PROGRAM, proposals, 90)
