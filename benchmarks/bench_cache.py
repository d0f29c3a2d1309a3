"""What the cache costs: a look-up among many entries, and the first look-up of a process in a
read-only folder such as the package ships.

    python -m benchmarks.bench_cache [--entries 100000] [--out cache.json]

Entries are files as a search leaves them (each with its lock file): small regions of a few steps,
and one region of a whole model. Keys are looked up in random order, so that neither the folder's
order nor the previous answer helps; every answer is compared with the entry that was written. Files
are in the page cache, as on a machine that has just unpacked them; a cold disk adds its own time.
New processes are started with `python`: their time runs from torch being imported to the first
entry.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import report
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Contract, Entry, Target
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.store.cache.cache_paths import entry_path
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.resolve import Hit

__all__ = ["LookupRow", "main"]

_TARGET, _CONTRACT = Target("cpu", "x86_64", "benchmark", "", "2", "3"), Contract()
_LOOKUP_LIMIT_US, _OPEN_LIMIT_US = 1_000.0, 20_000.0
_NEW_PROCESS_SCRIPT = """
import sys, time, torch
from pathlib import Path
before = time.perf_counter_ns()
from torch_cudal1.ir.records import Contract, Target
from torch_cudal1.store.cache.local_cache import LocalCache
target = Target("cpu", "x86_64", "benchmark", "", "2", "3")
begin = time.perf_counter_ns()
hit = LocalCache(Path(sys.argv[1]), (Path(sys.argv[2]),)).get(sys.argv[3], target, Contract())
assert hit.entry.region_key == sys.argv[3], hit
print((begin - before) / 1e3, (time.perf_counter_ns() - begin) / 1e3)
"""


@dataclass(frozen=True)
class LookupRow:
    """One kind of look-up: microseconds, and the limit it should stay under (None: for
    comparison only).
    """

    name: str
    median_us: float
    p10_us: float
    p90_us: float
    limit_us: float | None


def make_program(steps: int) -> Program:
    """A region with that many steps: x * 1 * 1 ..."""
    spec = TensorSpec("float32", (4, 4), (4, 1), "cpu")
    return Program(
        (spec,),
        tuple(Aten("aten.mul.Tensor", (Value(i), 1.0), (), (i + 1,)) for i in range(steps)),
        outputs=(steps,),
    )


def make_entry(key: str, steps: int) -> Entry:
    """An entry with the evidence that a judged candidate has, about a dozen checks."""
    checks = [
        {"name": f"check {i}", "passed": True, "value": 0.5, "limit": 2.0, "detail": "as eager"}
        for i in range(12)
    ]
    timing = {
        "speedup": 1.3,
        "low": 1.2,
        "high": 1.4,
        "candidate_us": 10.0,
        "baseline_us": 13.0,
        "baseline": "eager",
    }
    choice = Candidate(make_program(steps), EAGER, "builtin", ("benchmark",))
    evidence = {
        "timing": timing,
        "checks": checks,
        "granularity": "whole",
        "baselines_us": {"eager": 13.0},
    }
    return Entry(
        key, "benchmark", _TARGET, _CONTRACT, choice, evidence, (), "2026-01-01T00:00:00+00:00", "0"
    )


def write_entries(root: Path, count: int, steps: int, generator: random.Random) -> list[str]:
    """Write `count` entries under `root`, without the syncs of `put`; returns their keys."""
    keys = [f"{generator.getrandbits(256):064x}" for _ in range(count)]
    example = make_entry(keys[0], steps) if keys else None
    for key in keys:
        assert example is not None
        path = entry_path(root, key, _TARGET, _CONTRACT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_entry(replace(example, region_key=key)))
        path.with_suffix(".lock").touch()
    return keys


def time_lookups(cache: LocalCache, keys: Sequence[str], *, there: bool) -> Iterator[float]:
    """Microseconds of each look-up. Raises ValueError when an answer is not the entry that was
    written.
    """
    for key in keys:
        begin = time.perf_counter_ns()
        answer = cache.get(key, _TARGET, _CONTRACT)
        end = time.perf_counter_ns()
        right = (
            isinstance(answer, Hit) and answer.entry.region_key == key
            if there
            else answer == Refusal("absent")
        )
        if not right:
            raise ValueError(f"look-up of {key} answered {answer!r}")
        yield (end - begin) / 1e3


def time_new_process(cache_folder: Path, shipped: Path, key: str) -> tuple[float, float]:
    """Microseconds in a new process that has imported torch: to import the cache's code, and then
    to open a read-only folder and read its first entry.
    """
    completed = subprocess.run(
        [sys.executable, "-c", _NEW_PROCESS_SCRIPT, cache_folder, shipped, key],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    imports_us, open_us = map(float, completed.stdout.split())
    return imports_us, open_us


def make_row(name: str, limit_us: float | None, samples: Sequence[float]) -> LookupRow:
    """The row of these samples."""
    deciles = [round(cut, 1) for cut in statistics.quantiles(samples, n=10)]
    return LookupRow(name, round(statistics.median(samples), 1), deciles[0], deciles[-1], limit_us)


def measure_lookups(
    root: Path, entries: int, look_up_count: int, processes: int
) -> list[LookupRow]:
    """All rows, from folders that are made below `root`."""
    generator = random.Random(0)
    cache = LocalCache(root / "many")
    few = LocalCache(root / "few")
    keys, few_keys = (
        write_entries(cache.root, entries, 8, generator),
        write_entries(few.root, 100, 8, generator),
    )
    (model,) = write_entries(few.root, 1, 400, generator)
    absent = [f"{generator.getrandbits(256):064x}" for _ in range(look_up_count)]
    list(time_lookups(cache, generator.choices(keys, k=100), there=True))
    process_times = [
        time_new_process(root / "own", cache.root, key)
        for key in generator.choices(keys, k=processes)
    ]
    return [
        make_row(
            f"warm key among {entries} entries",
            _LOOKUP_LIMIT_US,
            list(time_lookups(cache, generator.choices(keys, k=look_up_count), there=True)),
        ),
        make_row(
            "warm key among 100 entries",
            _LOOKUP_LIMIT_US,
            list(time_lookups(few, generator.choices(few_keys, k=look_up_count), there=True)),
        ),
        make_row(
            f"absent key among {entries} entries",
            _LOOKUP_LIMIT_US,
            list(time_lookups(cache, absent, there=False)),
        ),
        make_row(
            "warm key, a whole model of 400 steps",
            None,
            list(time_lookups(few, [model] * 50, there=True)),
        ),
        make_row(
            "new process: open the shipped folder, first entry",
            _OPEN_LIMIT_US,
            [open_us for _, open_us in process_times],
        ),
        make_row(
            "new process: import of the cache's code after torch",
            None,
            [import_us for import_us, _ in process_times],
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every kind of look-up; 0 if every median is under its limit."""
    parser = argparse.ArgumentParser(prog="bench_cache", description=__doc__)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--look-ups", type=int, default=5_000)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("cache.json"))
    args = parser.parse_args(argv)
    environment = report.environment()
    with tempfile.TemporaryDirectory(prefix="cudal1-bench-") as folder:
        rows = measure_lookups(Path(folder), args.entries, args.look_ups, args.processes)
    for row in rows:
        print(
            f"{row.name:52} {row.median_us:10.1f} us  [{row.p10_us:.1f}, {row.p90_us:.1f}]",
            flush=True,
        )
    over = [row.name for row in rows if row.limit_us is not None and row.median_us >= row.limit_us]
    options = {"entries": args.entries, "look_ups": args.look_ups, "processes": args.processes}
    summary = {"over_limit": over}
    report.save(
        args.out,
        report.make_document(
            "cache",
            options,
            [asdict(row) for row in rows],
            environment=environment,
            summary=summary,
        ),
    )
    print(json.dumps({"out": args.out.name, "summary": summary}))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
