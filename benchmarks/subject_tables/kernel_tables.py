"""Results of single kernels as Markdown: kernel families, matrix products, convolutions, and the
order in which a search measures candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import load
from benchmarks.subject_tables.table_text import format_interval, make_heading

__all__ = ["tabulate_kernels"]

# Baselines of the products' benchmark and the titles of their columns: of fp32, and of half types.
_GEMM_BASELINES = {"cublas fp32": "vs cuBLAS fp32", "cublas tf32": "vs cuBLAS TF32"}
_HALF_BASELINES = {
    "cublas": "vs cuBLAS, then PyTorch's own steps",
    "inductor": "vs torch.compile",
}


def tabulate_kernels(results: Path) -> list[str]:
    lines: list[str] = []
    for pattern, table in (
        ("*-families*.json", _tabulate_families),
        ("h200-gemm*.json", _tabulate_products),
        ("h200-conv*.json", _tabulate_convolutions),
        ("*-early-start*.json", _tabulate_early_starts),
        ("schedule-order*.json", _tabulate_orders),
    ):
        for path in sorted(results.glob(pattern)):
            lines += ["", *table(path.name, load(path))]
    return lines


def _tabulate_families(name: str, document: Mapping[str, Any]) -> list[str]:
    titles = "| kernel family: case | eager, µs | torch.compile, µs | kernel, µs | vs the better | of copy | error / eager's |"
    lines = [*make_heading(name, document), titles, "|---|---|---|---|---|---|---|"]
    for row in document["rows"]:
        us = row.get("us", {})
        times = " | ".join(
            f"{us[contender]:.0f}" if contender in us else ""
            for contender in ("eager", "torch.compile", "kernel")
        )
        figures = f"{row['status']}: {row['reason'][:120].replace('|', '/')} | |"
        if row["status"] == "ok":
            error = "" if row["error_ratio"] is None else f"{row['error_ratio']:.2f}"
            figures = (
                f"{format_interval(row['vs_better'])} | {row['of_copy']['speedup']:.2f} | {error}"
            )
        lines.append(f"| {row['family']}: {row['case']} | {times} | {figures} |")
    return lines


def _tabulate_early_starts(name: str, document: Mapping[str, Any]) -> list[str]:
    titles = "| kernels in one CUDA graph | launches | ordinary, µs | early start, µs | speed-up | results |"
    lines = [*make_heading(name, document), titles, "|---|---|---|---|---|---|"]
    for row in document["rows"]:
        lines.append(
            f"| {row['case']} | {row['launches']} | {row['ordinary_us']:.1f} | {row['early_us']:.1f} "
            f"| {format_interval(row)} | {row['status']} |"
        )
    return lines


def _tabulate_products(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| matrix product | device, µs | TFLOP/s | rms error | worst error |",
        "|---|---|---|---|---|",
    ]
    finals = [row for row in document["rows"] if row.get("final")]
    for row in (row for row in document["rows"] if not row.get("final")):
        if "failed" in row:
            lines.append(f"| {row['name']} | {row['failed'][:120].replace('|', '/')} | | | |")
            continue
        wrong = "" if row["special"] and not row["wrong"] else f", {row['wrong']} wrong"
        lines.append(
            f"| {row['name']} | {row['device_us']:.1f} | {row['tflops']} | {row['rms']:.2e}{wrong} | {row['worst']:.2e} |"
        )
    has_half_types = any("inductor" in row["against"] for row in finals)
    baselines = _GEMM_BASELINES | (_HALF_BASELINES if has_half_types else {})
    titles = " | ".join(baselines.values())
    lines += [
        "",
        f"| matrix product | call, µs | {titles} |",
        "|---" * (2 + len(baselines)) + "|",
    ]
    for row in finals:
        ratios = " | ".join(format_interval(row["against"].get(name)) for name in baselines)
        lines.append(f"| {row['name']} | {row['us']:.1f} | {ratios} |")
    return lines


def _tabulate_convolutions(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| convolution | kernel | device, µs | of eager | rms error |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        if "failed" in row:
            lines.append(
                f"| {row['case']} | {row['name']} | {row['failed'][:120].replace('|', '/')} | | |"
            )
            continue
        note = f"floor {row['floor_us']:.0f} µs" if "floor_us" in row else f"{row['speedup']:.2f}x"
        lines.append(
            f"| {row['case']} | {row['name']} | {row['device_us']:.1f} | {note} | {row['rms']:.1e} |"
        )
    return lines


def _tabulate_orders(name: str, document: Mapping[str, Any]) -> list[str]:
    counts = list(document["means"][0]["mean_share_after"])
    titles = "".join(f" {count} |" for count in counts)
    lines = [
        *make_heading(name, document),
        f"| best known time over best measured, after | |{titles}",
        "|---|---|" + "---|" * len(counts),
    ]
    shown = [
        (f"{row['kind']}, mean of {row['cases']}", row["strategy"], row["mean_share_after"])
        for row in document["means"]
    ]
    shown += [
        (f"{row['kind']}: {row['case']}", row["strategy"], row["share_after"])
        for row in document["rows"]
    ]
    for case, strategy, after in shown:
        lines.append(
            f"| {case} | {strategy} | {' | '.join(f'{after[count]:.3f}' for count in counts)} |"
        )
    return lines
