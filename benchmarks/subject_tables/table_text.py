"""What tables of every subject share: the lines above a table, and a speed-up with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["format_interval", "make_heading"]


def make_heading(name: str, document: Mapping[str, Any]) -> list[str]:
    where = document["environment"]
    device = (
        f"{where['gpu']}, driver {where['gpu_state']['driver_version']}"
        if where["gpu"]
        else f"{where['cores']} cores of {where['cpu']}"
    )
    machine = f"{device}, torch {where['torch']}, Triton {where['triton']}"
    return [
        f"`benchmarks/results/{name}`: {machine}, Python {where['python']}.",
        f"Made by `{document['command']}`.",
        "",
    ]


def format_interval(ratio: Mapping[str, Any] | None) -> str:
    return f"{ratio['speedup']:.3f}x [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else ""
