"""Writes docs/measurements.md and the table of README.md from the committed results:
`python -m benchmarks.tables`.

`--check` only compares. The page has every row of every results file, failed ones with their
reason; the README has one line a case, from the newest file that measured it. Nothing is typed by
hand.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernelbench.pages import markdown
from benchmarks.kernelbench.rows import read
from benchmarks.kernelbench.statistics import BEST
from benchmarks.kernelbench.tables import groups, headline
from benchmarks.report import load
from benchmarks.training_tables import evaluated, experiment, landscapes

__all__ = ["main", "render", "summary"]

_ROOT = Path(__file__).resolve().parent.parent
_PLANS = _ROOT / "benchmarks" / "training"
_BEGIN, _END = "<!-- measured tables: begin", "<!-- measured tables: end -->"
_MODELS = (
    "h200-inference-and-train.json",
    "h200-train.json",
    "h200-bert-kernels.json",
    "h200-inference-2.json",
)
_NEWER = "-models-*.json"  # a file for each lane of a run
_WARM = (
    "h200-warm-start.json",
    "h200-warm-start-offline.json",
    "h200-warm-start-offline-2.json",
    "h200-warm-start-offline-earlier.json",
)
_OVERHEAD = (
    "h200-overhead-graph.json",
    "h200-host-guards.json",
    "h200-overhead-dynamo-after-2.json",
    "h200-overhead-dynamo-after.json",
    "h200-overhead-dynamo-before.json",
    "h200-overhead-3.json",
    "h200-overhead-2.json",
    "h200-overhead.json",
    "h200-overhead-earlier.json",
    "h200-host-overhead.json",
    "cpu-overhead.json",
)
_CACHE = ("cpu-cache.json",)
_FLEET = ("h200-fleet.json", "h200-fleet-cold.json", "h200-fleet-one.json")
_RANKS = ("h200-ranks-2.json", "h200-ranks-4.json")
_OURS = "cudal1.accelerate"
_DENOMINATORS = (BEST, "torch.compile", "eager")
_TITLE = "# Measurements\n\nEvery row of every results file, as it was measured; `benchmarks/README.md` is the protocol."


def render(results: Path) -> str:
    """The tables as Markdown."""
    lines: list[str] = []
    for name in _model_files(results, "*"):
        lines += _models(name, load(results / name))
    for name in _WARM:
        lines += _warm(name, load(results / name))
    for name in _OVERHEAD:
        lines += _overhead(name, load(results / name))
    for path in sorted(results.glob("*-repeatability*.json")):
        lines += _repeated(path.name, load(path))
    for name in _CACHE:
        lines += _cache(name, load(results / name))
    for path in sorted(results.glob("*-judge*.json")):
        lines += ["", *_judged(path.name, load(path))]
    for path in sorted(results.glob("*-same-source*.json")):
        lines += ["", *_same_sources(path.name, load(path))]
    lines += _hacking_cases(sorted((results / "adversarial").glob("*.jsonl*")))
    for name in _FLEET:
        lines += ["", *_fleet(name, load(results / name))]
    for name in _RANKS:
        lines += ["", *_ranks(name, load(results / name))]
    for path in sorted(results.glob("h200-gemm*.json")):
        lines += ["", *_products(path.name, load(path))]
    for path in sorted(results.glob("schedule-order*.json")):
        lines += ["", *_orders(path.name, load(path))]
    for path in sorted(results.glob("h200-conv*.json")):
        lines += ["", *_convolutions(path.name, load(path))]
    for path in sorted(results.glob("*-float64.json")):
        lines += ["", *_float64(path.name, load(path))]
    for path in sorted(results.glob("*-families*.json")):
        lines += ["", *_families(path.name, load(path))]
    lines += _training(results)
    for path in _kernelbench(results):
        lines += [
            "",
            f"`benchmarks/results/{path.name}`: made by `python -m benchmarks.kernelbench run`.",
            "",
            markdown(read(path)),
        ]
    return "\n".join(lines)


def _model_files(results: Path, gpu: str) -> list[str]:
    """Of whole models, oldest first."""
    newer = sorted(
        (path.name for path in results.glob(gpu + _NEWER)),
        key=lambda name: load(results / name)["created"],
    )
    return [*_MODELS, *newer]


def _training(results: Path) -> list[str]:
    """The evaluator, landscapes that plans name and the one of the package, and experiments."""
    lines: list[str] = []
    for path in sorted(results.glob("*-evaluator.json")):
        found = load(path)
        lines += ["", *_heading(path.name, found), *evaluated(found)]
    own = _ROOT / "torch_cudal1" / "training" / "data"
    lines += landscapes(
        [*sorted(own.glob("*-landscape.json.gz")), *sorted(_PLANS.glob("*-landscape.json.gz"))]
    )
    for path in sorted(results.glob("*-training-*.json")):
        found = load(path)
        lines += ["", *_heading(path.name, found), *experiment(found)]
    return lines


def _kernelbench(results: Path) -> list[Path]:
    return sorted(results.glob("kernelbench-*.jsonl"))


def _heading(name: str, found: Mapping[str, Any]) -> list[str]:
    where = found["environment"]
    device = (
        f"{where['gpu']}, driver {where['gpu_state']['driver_version']}"
        if where["gpu"]
        else f"{where['cores']} cores of {where['cpu']}"
    )
    machine = f"{device}, torch {where['torch']}, Triton {where['triton']}"
    return [
        f"`benchmarks/results/{name}`: {machine}, Python {where['python']}.",
        f"Made by `{found['command']}`.",
        "",
    ]


def _models(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = _heading(name, found)
    lines += [
        "| model, phase | contender | median, µs | vs eager | vs torch.compile | error / eager's |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        case = f"{row['model']}, {row['phase']}"
        if row["status"] != "ok":
            lines.append(f"| {case} | {row['contender']} | {row['status']} | {row['reason']} | | |")
            continue
        ratio = f"{row['error_ratio']:.2f}" if row["error_ratio"] is not None else ""
        lines.append(
            f"| {case} | {row['contender']} | {row['median_us']:.0f} | {_interval(row['vs_eager'])} "
            f"| {_interval(row['vs_compile'])} | {ratio} |"
        )
    return [*lines, ""]


def _warm(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = _heading(name, found)
    lines += [
        "| model | contender | cold start, s | warm start, s | searched when warm |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        searched = (
            ""
            if "cudal1" not in row["contender"]
            else "nothing"
            if row["status"] == "ok"
            else row["reason"]
        )
        lines.append(
            f"| {row['model']} | {row['contender']} | {row['cold_s']:.1f} | {row['warm_s']:.1f} | {searched} |"
        )
    return [*lines, ""]


def _overhead(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| host time of a call | median, µs | 10 % to 90 %, µs |",
        "|---|---|---|",
    ]
    for row in found["rows"]:
        if row["reason"]:
            lines.append(f"| {row['name']} | | {row['reason']} |")
            continue
        lines.append(
            f"| {row['name']} | {row['median_us']:.2f} | {row['p10_us']:.2f} to {row['p90_us']:.2f} |"
        )
    return [*lines, ""]


def _fleet(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| warm-up workers | tasks | judged | tasks a second | over one worker |",
    ]
    lines.append("|---|---|---|---|---|")
    for row in found["rows"]:
        if row["status"] != "ok":
            lines.append(
                f"| {row['workers']} | {row['tasks']} | {row['judged']} | {row['status']}: {row['reason']} | |"
            )
            continue
        over = found["throughput_over_one"][str(row["workers"])]
        lines.append(
            f"| {row['workers']} | {row['tasks']} | {row['judged']} | {row['tasks_per_s']:.3f} | {over:.2f} |"
        )
    return lines


def _ranks(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| ranks | model | what all run | regions searched, rank by rank | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        searched = ", ".join(map(str, row["searched"]))
        runs = row["reason"] or ", ".join(
            [*row["runs"], *(digest[:12] for digest in row["digests"])]
        )
        seconds = f"{max(row['seconds']):.1f}" if row["seconds"] else ""
        lines.append(
            f"| {row['devices']}, {row['backend']} | {row['scene']} | {runs} | {searched} | {seconds} |"
        )
    return lines


def _repeated(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = _heading(name, found)
    lines += [
        "| kernel | trials, called faster | cold, hot, µs | timed twice: cold, hot apart |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        times = ", ".join(f"{row['us'][kind]:.1f}" for kind in ("cold", "hot"))
        apart = ", ".join(f"{value:.2%}" for value in row["twice"].values())
        lines.append(f"| {row['kernel']} | {row['trials']}, {row['faster']} | {times} | {apart} |")
    return [*lines, ""]


def _cache(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| cache | median, µs | 10 % to 90 %, µs | limit, µs |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        limit = "" if row["limit_us"] is None else f"{row['limit_us']:.0f}"
        lines.append(
            f"| {row['name']} | {row['median_us']:.0f} | {row['p10_us']:.0f} to {row['p90_us']:.0f} | {limit} |"
        )
    return lines


def _judged(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| candidate | form | first, s | next, s | shared, s |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if row["status"] != "ok":
            lines.append(f"| {row['candidate']} | {row['form']} | {row['reason']} | | |")
            continue
        seconds = " | ".join(f"{row[name]:.2f}" for name in ("first_s", "next_s", "shared_s"))
        lines.append(f"| {row['candidate']} | {row['form']} | {seconds} |")
    return lines


def _same_sources(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = _heading(name, found)
    lines += [
        "| source | judged, accepted | over eager: median | least, most | seconds on the clock |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if row["status"] != "ok":
            lines.append(f"| {row['source']} | {row['reason']} | | | |")
            continue
        speedups, seconds = row["speedups"], statistics.median(row["timing_s"])
        told = f"{statistics.median(speedups):.3f} | {min(speedups):.3f}, {max(speedups):.3f} | {seconds:.2f}"
        lines.append(f"| {row['source']} | {row['trials']}, {row['accepted']} | {told} |")
    return lines


def _hacking_cases(paths: Sequence[Path]) -> list[str]:
    """What became of cheats and honest twins, file by file; every line of a file counts."""
    lines = [
        "",
        "`benchmarks/results/adversarial/`: made by `python -m tests.adversarial.matrix`, cheats and their honest twins.",
        "",
    ]
    lines += [
        "| file | cases | judgements | cheats missed | caught by another first | twins refused |",
        "|---|---|---|---|---|---|",
    ]
    of_gpus: list[dict[str, Any]] = []
    elsewhere: set[str] = set()
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows = [json.loads(line) for line in file]
        of_gpus += [] if path.name.startswith("cpu") else rows
        elsewhere |= {row["case"] for row in rows} if path.name.startswith("cpu") else set()
        cheats = [row for row in rows if row["side"] == "cheat"]
        missed = [row["case"] for row in cheats if not row["failed"]]
        other = [
            row["case"] for row in cheats if row["failed"] and row["failed"][0] != row["expected"]
        ]
        refused = [row["case"] for row in rows if row["side"] == "honest" and row["failed"]]
        told = " | ".join(
            ", ".join((str(len(found)), *sorted(set(found)))) for found in (missed, other, refused)
        )
        lines.append(
            f"| {path.name} | {len({row['case'] for row in rows})} | {len(rows)} | {told} |"
        )
    return [*lines, "", _on_gpus_only([row for row in of_gpus if row["case"] not in elsewhere])]


def _on_gpus_only(rows: Sequence[Mapping[str, Any]]) -> str:
    """How often the cases that need a GPU were judged, over all files, and what became of them."""
    counts: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    for row in rows:
        counts[bool(row["failed"]) == (row["side"] == "cheat")][row["case"], row["side"]] += 1
    wrong = ", ".join(
        f"{count} of {case} ({side})" for (case, side), count in sorted(counts[False].items())
    )
    cases, least = len({row["case"] for row in rows}), min(counts[True].values(), default=0)
    told = f"{cases}, each side judged rightly {least} times or more; wrongly: {wrong or 'none'}"
    return f"Cases that need a GPU, over all files: {told}."


def _products(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| matrix product | device, µs | TFLOP/s | rms error | worst error |",
        "|---|---|---|---|---|",
    ]
    finals = [row for row in found["rows"] if row.get("final")]
    for row in (row for row in found["rows"] if not row.get("final")):
        if "failed" in row:
            lines.append(f"| {row['name']} | {row['failed'][:120].replace('|', '/')} | | | |")
            continue
        wrong = "" if row["special"] and not row["wrong"] else f", {row['wrong']} wrong"
        lines.append(
            f"| {row['name']} | {row['device_us']:.1f} | {row['tflops']} | {row['rms']:.2e}{wrong} | {row['worst']:.2e} |"
        )
    lines += [
        "",
        "| matrix product | call, µs | vs cuBLAS fp32 | vs cuBLAS TF32 |",
        "|---|---|---|---|",
    ]
    for row in finals:
        ratios = " | ".join(
            _interval(row["against"].get(base)) for base in ("cublas fp32", "cublas tf32")
        )
        lines.append(f"| {row['name']} | {row['us']:.1f} | {ratios} |")
    return lines


def _orders(name: str, found: Mapping[str, Any]) -> list[str]:
    counts = list(found["means"][0]["mean_share_after"])
    titles = "".join(f" {count} |" for count in counts)
    lines = [
        *_heading(name, found),
        f"| best known time over best measured, after | |{titles}",
        "|---|---|" + "---|" * len(counts),
    ]
    shown = [
        (f"{row['kind']}, mean of {row['cases']}", row["strategy"], row["mean_share_after"])
        for row in found["means"]
    ]
    shown += [
        (f"{row['kind']}: {row['case']}", row["strategy"], row["share_after"])
        for row in found["rows"]
    ]
    for case, strategy, after in shown:
        lines.append(
            f"| {case} | {strategy} | {' | '.join(f'{after[count]:.3f}' for count in counts)} |"
        )
    return lines


def _float64(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| transposed convolution | judge ms | PyTorch ms | largest difference |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        sizes = "{batch} x {inner} x {size} to {outer}, kernel {kernel}, stride {stride}, padding {padding}".format(
            **row["case"]
        )
        if row["reason"]:
            lines.append(f"| {sizes} | {row['reason']} | | |")
        else:
            lines.append(
                f"| {sizes} | {1e3 * row['judge_s']:.2f} | {1e3 * row['library_s']:.2f} | {row['difference']:.1e} |"
            )
    return lines


def _convolutions(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        *_heading(name, found),
        "| convolution | kernel | device, µs | of eager | rms error |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
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


def _families(name: str, found: Mapping[str, Any]) -> list[str]:
    titles = "| kernel family: case | eager, µs | torch.compile, µs | kernel, µs | vs the better | of copy | error / eager's |"
    lines = [*_heading(name, found), titles, "|---|---|---|---|---|---|---|"]
    for row in found["rows"]:
        us = row.get("us", {})
        times = " | ".join(
            f"{us[who]:.0f}" if who in us else "" for who in ("eager", "torch.compile", "kernel")
        )
        figures = f"{row['status']}: {row['reason'][:120].replace('|', '/')} | |"
        if row["status"] == "ok":
            error = "" if row["error_ratio"] is None else f"{row['error_ratio']:.2f}"
            figures = f"{_interval(row['vs_better'])} | {row['of_copy']['speedup']:.2f} | {error}"
        lines.append(f"| {row['family']}: {row['case']} | {times} | {figures} |")
    return lines


def _interval(found: Mapping[str, Any] | None) -> str:
    return f"{found['speedup']:.3f}x [{found['low']:.3f}, {found['high']:.3f}]" if found else ""


def summary(results: Path) -> str:
    """One line for each model and phase: `accelerate` against the better of eager and
    torch.compile.
    """
    newest: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for name in _model_files(results, "h200"):
        rows = load(results / name)["rows"]
        for case in dict.fromkeys(f"{row['model']}, {row['phase']}" for row in rows):
            of_case = {
                row["contender"]: row for row in rows if f"{row['model']}, {row['phase']}" == case
            }
            if case not in newest or of_case[_OURS]["status"] == "ok":
                newest[case] = of_case
    lines = [
        "| model, phase | eager, µs | torch.compile, µs | accelerate, µs | vs the better |",
        "|---|---|---|---|---|",
    ]
    for case, rows in newest.items():
        times = [rows[name]["median_us"] for name in ("eager", "torch.compile", _OURS)]
        if rows[_OURS]["status"] != "ok":
            lines.append(
                f"| {case} | {times[0]:.0f} | {times[1]:.0f} | {rows[_OURS]['status']} | {rows[_OURS]['reason']} |"
            )
            continue
        against = "vs_compile" if times[1] <= times[0] else "vs_eager"
        cells = " | ".join(f"{time:.0f}" for time in times)
        lines.append(f"| {case} | {cells} | {_interval(rows[_OURS][against])} |")
    return "\n".join([*lines, *_headlines(results)])


def _headlines(results: Path) -> list[str]:
    """One line for each complete run of KernelBench; one that is not complete, or whose sizes were
    cut down, has none.
    """
    lines = []
    for group in groups(read(*_kernelbench(results))):
        try:
            found = headline(group)
        except ValueError:
            continue
        cells = " | ".join(f"{found[base]:.2f}x" if base in found else "" for base in _DENOMINATORS)
        lines.append(f"| {group.title} ({group.gpu}) | {len(group.rows)} | {cells} |")
    if not lines:
        return []
    head = "| geometric means over all tasks, a failure counting as 1.0 | tasks | vs the best | vs torch.compile | vs eager |"
    return ["", head, "|---|---|---|---|---|", *lines]


def _replaced(text: str, tables: str) -> str:
    lines = text.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith(_BEGIN))
    end = lines.index(_END)
    return "\n".join([*lines[: begin + 1], tables, *lines[end:]]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite both files, or with --check exit with 1 when one differs from the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    results, readme, page = (
        _ROOT / "benchmarks" / "results",
        _ROOT / "README.md",
        _ROOT / "docs" / "measurements.md",
    )
    wanted = {
        readme: _replaced(readme.read_text(), summary(results)),
        page: f"{_TITLE}\n\n{render(results)}\n",
    }
    if args.check:
        return int(
            any(not path.exists() or path.read_text() != text for path, text in wanted.items())
        )
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
