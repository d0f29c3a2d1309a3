"""The cache gives back whole entries or says why not, whatever the disk, other processes or a kill
did in between.
"""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.store.conftest import CONTRACT, HERE, make_entry, program
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Candidate, Contract, Entry, Region, Target
from torch_cudal1.store.cache import files
from torch_cudal1.store.cache.cache_paths import entry_path, record_path
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.files import Stored, read_file, write_file
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import (
    BrokenFile,
    EntryFile,
    LocalCache,
    explain_staleness,
)
from torch_cudal1.store.cache.resolve import Hit, resolve
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.trust_policy import SHIPPED

KEY = make_entry().region_key
NAME = "cd" * 32
HANGS_S = 900  # on no machine, however busy, does a process take as long that has not stopped
FORK = multiprocessing.get_context(
    "fork"
)  # the children only write files; starting a fresh torch would cost seconds each


@pytest.fixture
def cache(tmp_path: Path) -> LocalCache:
    return LocalCache(tmp_path / "cache")


def find_hit(cache: LocalCache, target: Target = HERE, contract: Contract = CONTRACT) -> Hit:
    hit = cache.get(KEY, target, contract)
    assert isinstance(hit, Hit), hit
    return hit


def find_miss(cache: LocalCache, target: Target = HERE, contract: Contract = CONTRACT) -> str:
    miss = cache.get(KEY, target, contract)
    assert isinstance(miss, Refusal), miss
    return miss.reason


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name.endswith(".tmp")]


# Put and get
# -------------------------------------------------------------------------------------------------------------------


def test_what_was_put_is_found(cache: LocalCache, entry: Entry) -> None:
    assert find_miss(cache) == "absent"
    stored = cache.put(entry)
    path = cache.root / "v1" / "cpu-x86_64" / CONTRACT.digest / "ab" / f"{KEY}.safetensors"
    assert stored == Stored(path)
    hit = find_hit(cache)
    assert (hit.where, hit.stale) == (str(path), None)
    assert hit.entry.choice == entry.choice
    assert leftovers(cache.root) == []


def test_a_later_put_replaces_the_entry(cache: LocalCache) -> None:
    cache.put(make_entry(package="1"))
    cache.put(make_entry(package="2"))
    assert find_hit(cache).entry.package == "2"
    assert len(list(cache.iter_entries())) == 1


def test_golden_vectors_are_found_with_the_hit(cache: LocalCache, entry: Entry) -> None:
    cache.put(entry, {"in0": torch.ones(3)})
    golden = cache.read_golden(find_hit(cache))
    assert isinstance(golden, dict)
    assert torch.equal(golden["in0"], torch.ones(3))


def test_the_cache_is_a_source(cache: LocalCache) -> None:
    region = Region(program(), ("input",))
    assert resolve(region, [cache], HERE, CONTRACT).misses[0].reason == "absent"
    cache.put(make_entry(region_key=region.key))
    assert resolve(region, [cache], HERE, CONTRACT).hit is not None


@pytest.mark.parametrize(
    "change",
    [{"precision": "strict"}, {"rights": ("conv",)}, {"assume_finite": True}, {"version": 99}],
)
def test_another_contract_is_absent(cache: LocalCache, entry: Entry, change: dict) -> None:
    cache.put(entry)
    assert find_miss(cache, contract=dataclasses.replace(CONTRACT, **change)) == "absent"


def test_another_family_is_absent(cache: LocalCache, entry: Entry) -> None:
    cache.put(entry)
    assert find_miss(cache, dataclasses.replace(HERE, device="cuda", arch="sm_90")) == "absent"


@pytest.mark.parametrize("field", ["sku", "driver", "torch", "triton"])
def test_another_machine_of_the_family_is_stale_and_says_why(
    cache: LocalCache, entry: Entry, field: str
) -> None:
    cache.put(entry)
    stale = find_hit(cache, dataclasses.replace(HERE, **{field: "9.9"})).stale
    assert stale == f"judged elsewhere: {field} {getattr(HERE, field) or 'none'!r} -> '9.9'"
    assert explain_staleness(HERE, HERE) is None


def test_read_only_caches_are_asked_in_order(tmp_path: Path) -> None:
    shared, shipped = LocalCache(tmp_path / "shared"), LocalCache(tmp_path / "shipped")
    cache = LocalCache(tmp_path / "own", (shared.root, shipped.root))
    shipped.put(make_entry(package="shipped"))
    assert find_hit(cache).entry.package == "shipped"
    shared.put(make_entry(package="shared"))
    assert find_hit(cache).entry.package == "shared"
    cache.put(make_entry(package="own"))
    assert find_hit(cache).entry.package == "own"


def test_a_fresh_entry_is_preferred_to_a_stale_one_before_it(tmp_path: Path) -> None:
    shared = LocalCache(tmp_path / "shared")
    cache = LocalCache(tmp_path / "own", shipped=shared.root)  # vouched for without a key
    cache.put(make_entry(target=dataclasses.replace(HERE, torch="2.11"), package="old"))
    assert find_hit(cache).stale is not None
    shared.put(make_entry(package="fresh"))
    assert find_hit(cache).entry.package == "fresh"


def test_what_came_with_the_package_is_asked_last_and_is_nobody_s_own(tmp_path: Path) -> None:
    shared, shipped = LocalCache(tmp_path / "shared"), LocalCache(tmp_path / "shipped")
    cache = LocalCache(tmp_path / "own", (shared.root,), shipped=shipped.root)
    shipped.put(make_entry(package="shipped"))
    hit = find_hit(cache)
    assert (hit.entry.package, hit.vouched_by, hit.stale) == ("shipped", "torch-cudal1", None)
    assert take_inventory(cache).entries == ()
    assert cache.own.shipped is None
    cache.put(make_entry(package="own"))
    assert find_hit(cache).entry.package == "own"


def test_the_setting_leaves_out_what_came_with_the_package(tmp_path: Path) -> None:
    assert cache_for(Settings(cache_dir=tmp_path)).shipped == SHIPPED
    assert cache_for(Settings(cache_dir=tmp_path, shipped=False)).shipped is None


def test_a_broken_local_file_does_not_hide_a_shared_one(tmp_path: Path) -> None:
    shared = LocalCache(tmp_path / "shared")
    cache = LocalCache(tmp_path / "own", (shared.root,))
    for each in (shared, cache):
        each.put(make_entry())
    entry_path(cache.root, KEY, HERE, CONTRACT).write_bytes(b"garbage")
    assert find_hit(cache).where.startswith(str(shared.root))
    shared.purge()
    assert "unreadable: " in find_miss(cache)


@pytest.mark.parametrize("key", ["", "../../etc", "AB" * 32, "a/b", "ab" * 32 + "\n", "xyz"])
def test_a_key_that_is_no_digest_is_refused(cache: LocalCache, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        cache.get(key, HERE, CONTRACT)
    assert isinstance(cache.put(make_entry(region_key=key)), Refusal)


@pytest.mark.parametrize("arch", ["../../up", "a/b", "a\0b", "/../..", "sm_90\n"])
def test_an_entry_cannot_leave_the_folder_by_its_target(
    cache: LocalCache, tmp_path: Path, arch: str
) -> None:
    answer = cache.put(make_entry(target=dataclasses.replace(HERE, arch=arch)))
    assert isinstance(answer, Refusal)
    assert "family" in answer.reason
    assert list(tmp_path.iterdir()) == []


def test_an_entry_under_another_name_is_a_miss(cache: LocalCache, entry: Entry) -> None:
    cache.put(entry)
    right = entry_path(cache.root, KEY, HERE, CONTRACT)
    other = entry_path(cache.root, "ef" * 32, HERE, CONTRACT)
    other.parent.mkdir()
    other.write_bytes(right.read_bytes())
    miss = cache.get("ef" * 32, HERE, CONTRACT)
    assert isinstance(miss, Refusal)
    assert "it holds the entry of" in miss.reason


def test_what_could_not_be_read_back_is_not_stored(cache: LocalCache) -> None:
    writes = dataclasses.replace(program(), outputs=(99,))
    answer = cache.put(make_entry(choice=Candidate(writes, "eager", "rewrites")))
    assert isinstance(answer, Refusal)
    assert "outputs" in answer.reason
    assert not cache.root.exists()


def test_new_folders_are_the_owners_alone(cache: LocalCache, entry: Entry) -> None:
    cache.put(entry)
    assert cache.root.stat().st_mode & 0o077 == 0


# Disks that refuse
# -------------------------------------------------------------------------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Let one system call of a write fail, as a read-only or full disk does."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    if call == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fail)
    elif call == "open":
        monkeypatch.setattr(files, "open", fail, raising=False)
    else:
        monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get
)
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "replace"])
def test_a_disk_that_refuses_gives_a_reason_and_leaves_nothing(
    cache: LocalCache, entry: Entry, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    with monkeypatch.context() as patch:
        refuse(patch, call, number)
        answer = cache.put(entry)
        assert isinstance(answer, Refusal)
        assert os.strerror(number) in answer.reason
        assert isinstance(cache.put_decision_record(NAME, {}, HERE, CONTRACT), Refusal)
    assert find_miss(cache) == "absent"
    assert leftovers(cache.root) == []
    assert isinstance(cache.put(entry), Stored)


def test_a_full_disk_keeps_the_older_entry(
    cache: LocalCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(make_entry(package="old"))
    with monkeypatch.context() as patch:
        refuse(patch, "fsync", errno.ENOSPC)
        assert isinstance(cache.put(make_entry(package="new")), Refusal)
    assert find_hit(cache).entry.package == "old"


def test_a_file_where_the_folder_should_be(tmp_path: Path, entry: Entry) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        cache = LocalCache(root)
        assert isinstance(cache.put(entry), Refusal)
        assert find_miss(cache) == "absent"
        assert list(cache.iter_entries()) == []
        with cache.lock(KEY, HERE, CONTRACT) as state:
            assert not state.held
            assert state.reason


def test_a_folder_where_the_file_should_be(cache: LocalCache, entry: Entry) -> None:
    entry_path(cache.root, KEY, HERE, CONTRACT).mkdir(parents=True)
    assert "IsADirectoryError" in find_miss(cache)
    assert isinstance(cache.put(entry), Refusal)
    assert leftovers(cache.root) == []


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_file(tmp_path / "f", 5) == b"12345"
    assert read_file(tmp_path / "f", 4) == Refusal("unreadable: 5 bytes, expected at most 4")


# Several processes
# -------------------------------------------------------------------------------------------------------------


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """Run `work` in a forked process; yields its id and kills what is left of it."""
    process = FORK.Process(target=work)
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


def test_two_processes_writing_one_key_leave_one_whole_entry(cache: LocalCache) -> None:
    path = entry_path(cache.root, KEY, HERE, CONTRACT)
    versions = [encode_entry(make_entry(package=name)) for name in ("one", "two")]

    def writer(content: bytes) -> Callable[[], None]:
        def write() -> None:
            while True:  # until it is killed
                write_file(path, content)

        return write

    with child(writer(versions[0])), child(writer(versions[1])):
        packages = set()
        deadline = time.monotonic() + HANGS_S
        while len(packages) < 2 and time.monotonic() < deadline:
            hit = cache.get(KEY, HERE, CONTRACT)
            assert isinstance(hit, Hit) or hit.reason == "absent", hit
            packages |= {hit.entry.package} if isinstance(hit, Hit) else set()
    assert packages == {"one", "two"}


def test_two_processes_search_a_key_once(cache: LocalCache, tmp_path: Path) -> None:
    log, content = tmp_path / "log", encode_entry(make_entry())

    def warm() -> None:
        with cache.lock(KEY, HERE, CONTRACT) as state:
            path = entry_path(cache.root, KEY, HERE, CONTRACT)
            if state.held and isinstance(read_file(path, 1 << 30), Refusal):
                with open(log, "a") as file:
                    file.write("searched\n")
                time.sleep(0.3)
                write_file(path, content)

    processes = [FORK.Process(target=warm) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS_S)
        assert process.exitcode == 0
    assert log.read_text() == "searched\n"
    assert isinstance(cache.get(KEY, HERE, CONTRACT), Hit)


def test_putting_inside_the_search_lock_and_nesting_it_work(
    cache: LocalCache, entry: Entry
) -> None:
    with cache.lock(KEY, HERE, CONTRACT) as outer, cache.lock(KEY, HERE, CONTRACT) as inner:
        assert outer.held
        assert inner.held
        assert isinstance(cache.put(entry), Stored)


def test_a_lock_that_is_taken_too_long_is_reported_and_a_dead_holder_frees_it(
    cache: LocalCache, tmp_path: Path
) -> None:
    def sit() -> None:
        with cache.lock(KEY, HERE, CONTRACT):
            (tmp_path / "held").touch()
            signal.pause()

    with child(sit) as pid:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        with cache.lock(KEY, HERE, CONTRACT, timeout_s=0.1) as state:
            assert not state.held
            assert "Timeout" in state.reason
        os.kill(pid, signal.SIGKILL)
        with cache.lock(KEY, HERE, CONTRACT, timeout_s=HANGS_S) as state:
            assert state.held


def die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["fsync", "replace", "unlink"])
def test_a_kill_at_each_step_leaves_the_old_entry_or_the_new(
    cache: LocalCache, moment: str
) -> None:
    path = entry_path(cache.root, KEY, HERE, CONTRACT)
    cache.put(make_entry(package="old"))
    content = encode_entry(make_entry(package="new"))

    def write() -> None:
        setattr(Path if moment == "unlink" else os, moment, die)
        write_file(path, content)

    process = FORK.Process(target=write)
    process.start()
    process.join(HANGS_S)
    assert process.exitcode == -signal.SIGKILL
    assert find_hit(cache).entry.package == ("new" if moment == "unlink" else "old")
    assert len(leftovers(cache.root)) == (0 if moment == "unlink" else 1)
    assert len(list(cache.iter_entries())) == 1
    assert len(cache.purge(lambda entry: False).leftovers) == (0 if moment == "unlink" else 1)
    assert leftovers(cache.root) == []
    assert isinstance(cache.put(make_entry(package="again")), Stored)


def test_purge_leaves_the_temporary_file_of_a_living_writer(
    cache: LocalCache, tmp_path: Path
) -> None:
    path = entry_path(cache.root, KEY, HERE, CONTRACT)

    def write_slowly() -> None:
        def slow(descriptor: int) -> None:
            (tmp_path / "writing").touch()
            while not (tmp_path / "looked").exists():
                time.sleep(0.01)

        os.fsync = slow  # type: ignore[assignment]
        write_file(path, encoded)

    encoded = encode_entry(make_entry())
    process = FORK.Process(target=write_slowly)
    process.start()
    while not (tmp_path / "writing").exists():
        time.sleep(0.01)
    assert len(leftovers(cache.root)) == 1
    assert cache.purge().leftovers == ()
    (tmp_path / "looked").touch()
    process.join(HANGS_S)
    assert isinstance(cache.get(KEY, HERE, CONTRACT), Hit)


# List, verify, purge
# -----------------------------------------------------------------------------------------------------------


def fill_cache(cache: LocalCache) -> list[Path]:
    for index in range(4):
        cache.put(make_entry(region_key=f"{index:02x}" * 32, region_name=f"r{index}"))
    cache.put_decision_record(NAME, {"regions": ["a"]}, HERE, CONTRACT)
    return [entry_path(cache.root, f"{index:02x}" * 32, HERE, CONTRACT) for index in range(4)]


def test_entries_are_listed_with_the_broken_ones_marked(cache: LocalCache) -> None:
    paths = fill_cache(cache)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    listed = list(cache.iter_entries())
    assert [each.path for each in listed] == paths
    assert [type(each) for each in listed] == [EntryFile, EntryFile, BrokenFile, EntryFile]
    assert listed[0].entry.region_name == "r0"  # type: ignore[union-attr]


def test_verify_names_each_broken_file_with_its_reason(cache: LocalCache) -> None:
    paths = fill_cache(cache)
    assert cache.verify() == ()
    flipped = bytearray(paths[1].read_bytes())
    flipped[-1] ^= 1
    paths[1].write_bytes(flipped)
    record = record_path(cache.root, NAME, HERE, CONTRACT)
    record.write_text(record.read_text().replace('"a"', '"b"'))
    broken = cache.verify()
    assert [each.path for each in broken] == [paths[1], record]
    assert "digest" in broken[0].reason
    assert "digest" in broken[1].reason


def test_purge_deletes_what_matches_and_what_is_unreadable(cache: LocalCache) -> None:
    paths = fill_cache(cache)
    paths[3].write_bytes(b"")
    purged = cache.purge(lambda entry: entry.region_name == "r0")
    assert purged.entries == (paths[0], paths[3])
    assert purged.records == ()
    assert [path.exists() for path in paths] == [False, True, True, False]
    assert isinstance(cache.get_decision_record(NAME, HERE, CONTRACT), dict)


def test_purge_without_a_filter_deletes_all_of_the_own_folder_only(tmp_path: Path) -> None:
    shared = LocalCache(tmp_path / "shared")
    fill_cache(shared)
    cache = LocalCache(tmp_path / "own", (shared.root,))
    paths = fill_cache(cache)
    purged = cache.purge()
    assert (purged.entries, len(purged.records), purged.failed) == (tuple(paths), 1, ())
    assert list(LocalCache(cache.root).iter_entries()) == []
    assert len(list(shared.iter_entries())) == 4


def test_purge_reports_what_it_cannot_delete(
    cache: LocalCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = fill_cache(cache)
    refuse(monkeypatch, "unlink", errno.EROFS)
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: os.unlink(self))
    purged = cache.purge()
    assert purged.entries == ()
    assert {each.path for each in purged.failed} >= set(paths)
