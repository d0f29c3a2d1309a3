"""Many processes on one cold cache build each key once and lose nothing; killed writers never leave
half a file.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.entries import entry_for
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Entry, Region
from torch_cudal1.search import tune
from torch_cudal1.store.cache.cache_paths import entry_path, record_path
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.files import iter_files, write_file
from torch_cudal1.store.cache.local_cache import BrokenFile, EntryFile
from torch_cudal1.store.cache.resolve import Hit
from torch_cudal1.store.context import make_context

FORK = multiprocessing.get_context(
    "fork"
)  # the children touch files only; starting a fresh torch would cost seconds each
PROCESSES, KEYS, KILLS, WRITERS = 64, 6, 200, 8
HANGS_S = 900  # on no machine, however busy, does a process take as long that has not stopped


def region(number: int) -> Region:
    """x * number: a region of its own for each number."""
    spec = TensorSpec("float32", (4,), (1,), "cpu")
    return Region(
        Program((spec,), (Aten("aten.mul.Tensor", (Value(0), number), (), (1,)),), (1,)), ("input",)
    )


def run_all(works: Sequence[Callable[[], None]]) -> list[int | None]:
    """Run each in a process of its own, beginning when all are there; their exit codes."""
    go = FORK.Event()
    processes = [FORK.Process(target=lambda work=work: go.wait() and work()) for work in works]
    for process in processes:
        process.start()
    go.set()
    for process in processes:
        process.join(HANGS_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def test_64_processes_on_a_cold_cache_build_each_key_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", on_miss="tune")
    place, regions = (
        make_context(torch.device("cpu"), settings),
        [region(number) for number in range(KEYS)],
    )
    log, chosen = tmp_path / "built", tmp_path / "chosen"

    def build_entry(searched_region: Region, *args: object, **kwargs: object) -> Entry:
        """Stands for a search: as long as it takes, nobody else searches this key."""
        with open(log, "a") as file:
            file.write(f"{searched_region.key}\n")
        time.sleep(0.02)
        decision = entry_for(
            searched_region,
            Candidate(searched_region.program, "eager", "rewrites", ("planted",)),
            settings,
        )
        return dataclasses.replace(decision, package=str(os.getpid()))

    monkeypatch.setattr(tune, "tune", build_entry)

    def starts(seed: int) -> Callable[[], None]:
        def work() -> None:
            for each in random.Random(seed).sample(regions, len(regions)):
                entry = tune.choose(each, place).entry
                assert entry is not None
                with open(chosen, "a") as file:
                    file.write(f"{each.key} {entry.package}\n")

        return work

    assert run_all([starts(seed) for seed in range(PROCESSES)]) == [0] * PROCESSES
    assert Counter(log.read_text().split()) == {each.key: 1 for each in regions}
    rows = [line.split() for line in chosen.read_text().splitlines()]
    assert len(rows) == PROCESSES * KEYS
    assert len({tuple(pair) for pair in rows}) == KEYS, (
        "two processes ran different entries of one key"
    )
    assert {
        cached.entry.region_key
        for cached in place.cache.iter_entries()
        if isinstance(cached, EntryFile)
    } == {r.key for r in regions}
    assert place.cache.verify() == ()
    assert list(iter_files(settings.cache_dir, ".tmp")) == []


def test_processes_that_write_different_keys_at_once_lose_none(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    place = make_context(torch.device("cpu"), settings)
    regions = [region(number) for number in range(16 * 4)]
    files = [
        (
            r,
            encode_entry(
                entry_for(r, Candidate(r.program, "eager", "rewrites", ("planted",)), settings)
            ),
        )
        for r in regions
    ]

    def writes(part: int) -> Callable[[], None]:
        def work() -> None:
            for each, content in files[part::16]:
                write_file(
                    entry_path(place.cache.root, each.key, place.target, place.contract), content
                )

        return work

    assert run_all([writes(part) for part in range(16)]) == [0] * 16
    assert all(
        isinstance(place.cache.find(each, place.target, place.contract), Hit) for each in regions
    )


def test_200_kills_at_random_moments_leave_every_entry_whole_or_absent(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    place = make_context(torch.device("cpu"), settings)
    regions = [region(number) for number in range(WRITERS)]
    blob = torch.arange(20_000, dtype=torch.int32)
    entries = [
        entry_for(
            r,
            Candidate(r.program.with_constant("blob", blob), "eager", "rewrites", ("planted",)),
            settings,
        )
        for r in regions
    ]
    files = [
        (entry_path(place.cache.root, r.key, place.target, place.contract), encode_entry(entry))
        for r, entry in zip(regions, entries, strict=True)
    ]
    name = regions[0].key
    place.cache.put_decision_record(
        name, {"regions": list(range(2000))}, place.target, place.contract
    )
    record = record_path(place.cache.root, name, place.target, place.contract)
    record_data = record.read_bytes()

    writing = FORK.Semaphore(0)

    def writes(path: Path, content: bytes) -> Callable[[], None]:
        def work() -> None:
            writing.release()
            while True:
                write_file(path, content)
                write_file(record, record_data)
                os.unlink(path)

        return work

    generator, abandoned, killed = random.Random(1), 0, 0
    while killed < KILLS or not abandoned:  # a kill between two writes shows nothing
        assert killed < 10 * KILLS, "no kill hit a write: the test showed nothing"
        killed += WRITERS
        before = set(iter_files(tmp_path, ".tmp"))
        processes = [FORK.Process(target=writes(path, content)) for path, content in files]
        for process in processes:
            process.start()
        assert all(writing.acquire(timeout=HANGS_S) for _ in processes)
        for process in generator.sample(processes, len(processes)):
            time.sleep(generator.uniform(0.0, 0.01))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
            assert process.exitcode == -signal.SIGKILL
        abandoned += len(set(iter_files(tmp_path, ".tmp")) - before)
        assert [file for file in place.cache.iter_entries() if isinstance(file, BrokenFile)] == []
        assert isinstance(place.cache.get_decision_record(name, place.target, place.contract), dict)
    for path, content in files:
        write_file(path, content)
    write_file(record, record_data)
    assert list(iter_files(tmp_path, ".tmp")) == [], (
        "the next writer of a name removes what was left of it"
    )
    assert all(
        isinstance(place.cache.find(each, place.target, place.contract), Hit) for each in regions
    )
