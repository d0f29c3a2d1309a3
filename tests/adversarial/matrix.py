"""The detection matrix: every case, both sides, all detectors to the end. `python -m tests.adversarial.matrix --out M.jsonl`.

Each line of the output is one side of one case in one repeat: the checks that failed, in order. Lines that are there already are
not made again, so an interrupted run goes on where it stopped. At the end it prints the cheats that were missed or caught by
another detector, the twins that were refused, and which detectors no case needs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tests.adversarial.case import DETECTORS, PROFILES, CaseFile, Profile, case_files
from tests.adversarial.fork_server import fork_children
from tests.adversarial.judging import Side, TooBusy, bench, failures
from torch_cudal1.ir.records import CheckResult

Line: TypeAlias = dict[str, Any]
Job: TypeAlias = tuple[str, Side, int]  # case id, side, repeat

_LARGE_AT_ONCE = 5  # their large calls take turns, by the judge's lock; what the processes hold besides leaves room for one
_benches: list[Any] = []  # of this worker process; it ends with it


def main() -> int:
    """Make what is missing, then tell. 0 when every cheat was caught as expected and no twin refused."""
    options = _options()
    number, parts = options.part
    files = {
        file.id: file
        for file in [file for file in case_files() if _applies(file, options)][number - 1 :: parts]
    }
    lines = list(_lines(options.out))
    finished = {(line["case"], line["side"], line["repeat"]) for line in lines}
    sides: tuple[Side, ...] = ("cheat", "honest")
    jobs: list[Job] = [
        (i, side, n)
        for n in range(options.repeats)
        for i in files
        for side in sides
        if (i, side, n) not in finished
    ]
    large = {
        i
        for i, file in files.items()
        if options.device == "cuda" and "gpu_memory" in file.case.needs
    }
    with options.out.open("a") as out:
        few = min(_LARGE_AT_ONCE, options.jobs)
        for group, processes in (
            ([j for j in jobs if j[0] not in large], options.jobs),
            ([j for j in jobs if j[0] in large], few),
        ):
            for line in _run_jobs(group, options, processes):
                out.write(json.dumps(line) + "\n")
                out.flush()
                lines.append(line)
    return _print_summary([line for line in lines if line["case"] in files], files)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.matrix", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines, continued if it exists"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        help="processes, each with an oracle and up to two candidates",
    )
    parser.add_argument(
        "--profile", choices=PROFILES, help="default: the first that must catch the case"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start every process from nothing, in place of forking it",
    )
    parser.add_argument(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="N/M",
        help="every M-th case from the N-th on: for M GPUs",
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--own",
        action="store_true",
        help="cases written for this device, not those that run on it too",
    )
    options = parser.parse_args()
    options.out.touch()
    return options


def _part(text: str) -> tuple[int, int]:
    try:
        number, parts = map(int, text.split("/"))
    except ValueError:
        number, parts = 0, 0
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"expected N/M with N from 1 to M, as 2/4; came {text!r}")
    return number, parts


def _applies(file: CaseFile, options: argparse.Namespace) -> bool:
    case = file.case
    moves = case.form == "source" and "cpu" not in case.needs  # to a GPU
    fits = case.device == options.device or (options.device == "cuda" and moves)
    here = "two_gpus" not in case.needs or torch.cuda.device_count() > 1
    here = here and (options.device == "cpu" or "host_memory" not in case.needs)
    here = here and (case.device == options.device or not options.own)
    return fits and here and case.form != "runtime" and options.only in file.id


def _lines(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines():
        if text.endswith("}"):
            yield json.loads(text)


def _run_jobs(jobs: list[Job], options: argparse.Namespace, processes: int) -> Iterator[Line]:
    """Apart, those that need much of a GPU's memory: what the processes of the others hold would leave too little."""
    began = time.monotonic()
    share = fair_share(len(os.sched_getaffinity(0)), processes)
    with ProcessPoolExecutor(
        processes, get_context("spawn"), _open, (options.device, options.fresh, share)
    ) as pool:
        running = [pool.submit(_run_job, job, options.profile) for job in jobs]
        for number, future in enumerate(as_completed(running), 1):
            try:
                line = future.result()
            except BaseException:
                pool.shutdown(
                    wait=False, cancel_futures=True
                )  # or it would judge all the others first, and say nothing
                raise
            print(
                f"{number}/{len(jobs)} {time.monotonic() - began:.0f}s",
                line["side"],
                line["case"],
                *line["failed"],
                flush=True,
            )
            yield line


def fair_share(cores: int, jobs: int) -> int:
    """How many threads one team of OpenMP's may have beside those of the other jobs."""
    return max(1, cores // jobs)


def limit_threads(share: int) -> None:
    """Of the children that this process starts; a limit that the user has set stays.

    They compute with one thread, but OpenMP knows that of the thread that said so only: each further one of a candidate called from
    four threads at once gets a team as large as the machine, 128 threads on 32 cores.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(share))


def _open(device: str, fresh: bool, share: int) -> None:
    limit_threads(share)
    stack = ExitStack()
    if not fresh:
        stack.enter_context(fork_children())
    _benches.append(
        (
            stack,
            stack.enter_context(
                bench(torch.device(device, 0) if device == "cuda" else torch.device(device))
            ),
        )
    )
    atexit.register(stack.close)
    _benches.append({file.id: file for file in case_files()})


def _run_job(job: Job, profile: Profile | None) -> Line:
    case, side, repeat = job
    (_, running_bench), files = _benches
    file: CaseFile = files[case]
    profile = profile or file.case.first_profile
    began = time.monotonic()
    try:
        checks = running_bench.judge(file, side, profile, to_the_end=True)
    except TooBusy as error:
        checks = [CheckResult("too busy to time", False, detail=str(error))]
    failed = failures(checks)
    details = {check.name: check.detail for check in reversed(checks) if not check.passed}
    seconds = round(time.monotonic() - began, 2)
    line: Line = {"case": case, "side": side, "repeat": repeat, "profile": profile}
    line |= {"expected": file.case.expected, "seconds": seconds}
    not_applicable = {
        check.name: check.detail
        for check in checks
        if check.passed and check.detail.startswith(("not applicable", "could not"))
    }
    names = sorted({check.name for check in checks})
    return line | {"failed": failed, "details": details, "aside": not_applicable, "asked": names}


def _print_summary(lines: list[Line], files: dict[str, CaseFile]) -> int:
    cheats = [line for line in lines if line["side"] == "cheat"]
    missed = [line for line in cheats if not line["failed"]]
    by_another = [
        line for line in cheats if line["failed"] and line["failed"][0] != line["expected"]
    ]
    refused = [line for line in lines if line["side"] == "honest" and line["failed"]]
    for title, group_lines in (
        ("missed", missed),
        ("caught by another detector", by_another),
        ("twins refused", refused),
    ):
        print(f"{title}: {len(group_lines)}")
        for line in group_lines:
            print(
                " ",
                line["case"],
                f"repeat {line['repeat']}",
                line["expected"],
                "<>",
                line["details"],
            )
    needed = {line["failed"][0] for line in cheats if len(line["failed"]) == 1}
    print("caught by one detector only:", ", ".join(name for name in DETECTORS if name in needed))
    print("detectors that no case here needs:", ", ".join(_list_unneeded(cheats, needed)))
    print(
        f"{len(files)} cases, {len(lines)} lines, {sum(line['seconds'] for line in lines):.0f} s of judging"
    )
    return (
        1 if missed or refused else 0
    )  # which detector speaks first is luck of the draw where several see it


def _list_unneeded(cheats: Iterable[Line], needed: set[str]) -> list[str]:
    return sorted({name for line in cheats for name in line["asked"]} - needed)


if __name__ == "__main__":
    raise SystemExit(main())
