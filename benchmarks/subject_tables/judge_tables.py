"""Results about the judge as Markdown: repeatability of its clock, seconds of an evaluation,
identical sources, float64 references, adversarial cases.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import load
from benchmarks.subject_tables.table_text import make_heading

__all__ = ["tabulate_judge"]


def tabulate_judge(results: Path) -> list[str]:
    lines: list[str] = []
    for path in sorted(results.glob("*-repeatability*.json")):
        lines += _tabulate_repeatability(path.name, load(path))
    for path in sorted(results.glob("*-judge*.json")):
        lines += ["", *_tabulate_durations(path.name, load(path))]
    for path in sorted(results.glob("*-same-source*.json")):
        lines += ["", *_tabulate_same_sources(path.name, load(path))]
    for path in sorted(results.glob("*-float64.json")):
        lines += ["", *_tabulate_float64(path.name, load(path))]
    for path in sorted(results.glob("*-siege-*.json")):
        lines += ["", *_tabulate_siege(path.name, load(path))]
    return lines + _tabulate_adversarial(sorted((results / "adversarial").glob("*.jsonl*")))


def _tabulate_repeatability(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = make_heading(name, document)
    lines += [
        "| kernel | trials, called faster | cold, hot, µs | timed twice: cold, hot apart |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        times = ", ".join(f"{row['us'][kind]:.1f}" for kind in ("cold", "hot"))
        differences = ", ".join(f"{value:.2%}" for value in row["twice"].values())
        lines.append(
            f"| {row['kernel']} | {row['trials']}, {row['faster']} | {times} | {differences} |"
        )
    return [*lines, ""]


def _tabulate_durations(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| candidate | form | first, s | next, s | shared, s |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        if row["status"] != "ok":
            lines.append(f"| {row['candidate']} | {row['form']} | {row['reason']} | | |")
            continue
        seconds = " | ".join(f"{row[name]:.2f}" for name in ("first_s", "next_s", "shared_s"))
        lines.append(f"| {row['candidate']} | {row['form']} | {seconds} |")
    return lines


def _tabulate_same_sources(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = make_heading(name, document)
    lines += [
        "| source | judged, accepted | over eager: median | least, most | seconds on the clock |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        if row["status"] != "ok":
            lines.append(f"| {row['source']} | {row['reason']} | | | |")
            continue
        speedups, seconds = row["speedups"], statistics.median(row["timing_s"])
        figures = f"{statistics.median(speedups):.3f} | {min(speedups):.3f}, {max(speedups):.3f} | {seconds:.2f}"
        lines.append(f"| {row['source']} | {row['trials']}, {row['accepted']} | {figures} |")
    return lines


def _tabulate_float64(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| transposed convolution | judge ms | PyTorch ms | largest difference |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
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


def _tabulate_siege(name: str, document: Mapping[str, Any]) -> list[str]:
    """By kind how many mutants were judged and how many the judge found nothing against, and how
    honest twins fared.
    """
    rows, summary = document["rows"], document["summary"]
    lines = make_heading(name, document)
    mutants = [row for row in rows if not row["is_twin"]]
    if mutants:
        promised = {row["kind"]: row["is_promised"] for row in mutants}
        lines += [
            f"| kind of mutant | refused at `{document['options']['profile']}`, says docs/judge.md | judged | got in |",
            "|---|---|---|---|",
        ]
        for kind in sorted(promised, key=lambda kind: (not promised[kind], kind)):
            counts = summary["kinds"][kind]
            answer = "yes" if promised[kind] else "no, at a later profile"
            lines.append(f"| {kind} | {answer} | {counts['tried']} | {counts['got_in']} |")
        lines += [
            "",
            f"{summary['promised']} mutants of kinds that are refused at this profile, "
            f"{summary['promised_got_in']} got in.",
        ]
    twins = [row for row in rows if row["is_twin"]]
    if twins:
        refused = Counter(row["kind"] for row in twins if row["twin_refused"])
        lines += ["", "| honest twin of | judged | refused |", "|---|---|---|"]
        for kind, judged in sorted(Counter(row["kind"] for row in twins).items()):
            lines.append(f"| {kind} | {judged} | {refused[kind]} |")
        lines += [
            "",
            f"{summary['twins']} judgements of honest twins, {summary['twins_refused']} refused.",
        ]
    return [*lines, f"A judgement took {summary['median_s']:.1f} s (median)."]


def _tabulate_adversarial(paths: Sequence[Path]) -> list[str]:
    """The verdicts on cheats and honest twins, file by file; every line of a file counts."""
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
        counts = " | ".join(
            ", ".join((str(len(case_names)), *sorted(set(case_names))))
            for case_names in (missed, other, refused)
        )
        lines.append(
            f"| {path.name} | {len({row['case'] for row in rows})} | {len(rows)} | {counts} |"
        )
    return [*lines, "", _count_gpu_cases([row for row in of_gpus if row["case"] not in elsewhere])]


def _count_gpu_cases(rows: Sequence[Mapping[str, Any]]) -> str:
    """How often the cases that need a GPU were judged, over all files, and how often wrongly."""
    counts: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    for row in rows:
        counts[bool(row["failed"]) == (row["side"] == "cheat")][row["case"], row["side"]] += 1
    wrong = ", ".join(
        f"{count} of {case} ({side})" for (case, side), count in sorted(counts[False].items())
    )
    cases, least = len({row["case"] for row in rows}), min(counts[True].values(), default=0)
    verdicts = (
        f"{cases}, each side judged rightly {least} times or more; wrongly: {wrong or 'none'}"
    )
    return f"Cases that need a GPU, over all files: {verdicts}."
