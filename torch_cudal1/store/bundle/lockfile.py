"""`cudal1.lock`: which decisions a deployment was built with, one fact a line, and how a cache
differs from that.

Entries are pinned by the digest that signatures and revocation lists name too: it covers Program,
payloads and evidence, so two caches that agree with a lock run the same kernels, and signing an
entry changes no lock. Gains are quoted from the entries' evidence for the reader of a diff; nothing
is measured here, and nothing but files is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from torch_cudal1.core.errors import SupplyError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.cache.files import read_file, write_atomically
from torch_cudal1.store.cache.inventory import CacheFile, Inventory

__all__ = [
    "Lock",
    "LockDifference",
    "LockedEntry",
    "LockedRecord",
    "diff_lock",
    "make_lock",
    "read_lock",
    "write_lock",
]

FORMAT = 1
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True)
class LockedEntry:
    """One decision. `speedup` and `low` are None where a baseline runs, or a kernel was never timed
    alone.
    """

    family: str
    # The contract's digest.
    contract: str
    key: str
    sku: str
    digest: str
    region: str
    runs: str
    precision: str
    torch: str
    triton: str
    driver: str
    package: str
    speedup: float | None = None
    low: float | None = None
    saved_us: float | None = None

    @property
    def purpose(self) -> tuple[str, ...]:
        """What it decides: two entries of one purpose are versions of each other."""
        return self.family, self.contract, self.key, self.sku


@dataclass(frozen=True)
class LockedRecord:
    """One remembered measurement of a whole call, or of a graph."""

    family: str
    contract: str
    name: str
    # Digest of the candidates that were measured; "" for the record of a graph.
    candidates: str
    digest: str

    @property
    def purpose(self) -> tuple[str, ...]:
        """What it records: two records of one purpose are versions of each other."""
        return self.family, self.contract, self.name, self.candidates


@dataclass(frozen=True)
class Lock:
    """Everything pinned. `targets`: region keys by TARGET, none when the whole cache was locked;
    `families`: none means all.
    """

    entries: tuple[LockedEntry, ...]
    records: tuple[LockedRecord, ...]
    families: tuple[str, ...] = ()
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> frozenset[str] | None:
        """The keys of the regions that it pins; None: of all regions."""
        return (
            frozenset(key for keys in self.targets.values() for key in keys)
            if self.targets
            else None
        )


@dataclass(frozen=True)
class LockDifference:
    """One line of `lock --check`."""

    kind: Literal["missing", "changed", "extra"]
    family: str
    key: str
    name: str
    detail: str


def make_lock(
    inventory: Inventory,
    *,
    families: Sequence[str] = (),
    targets: Mapping[str, tuple[str, ...]] | None = None,
) -> Lock:
    """The lock of what is in `inventory`, in a stable order."""
    # Sorted, because the lock is committed: a diff shows what changed and nothing else.
    entries = sorted((_lock_entry(file) for file in inventory.entries), key=lambda pin: pin.purpose)
    records = sorted(
        (_lock_record(file) for file in inventory.records), key=lambda pin: pin.purpose
    )
    return Lock(tuple(entries), tuple(records), tuple(sorted(families)), dict(targets or {}))


def diff_lock(lock: Lock, inventory: Inventory) -> tuple[LockDifference, ...]:
    """What the folders lack, hold in another version, or hold beside the lock; none: they agree.

    A decision record that the lock does not know is not reported: it is about a graph or a set of
    choices that the lock does not have.
    """
    present = make_lock(inventory.select(lock.keys, lock.families or None))
    rows: list[LockDifference] = []
    unlocked = {row.purpose: row for row in present.entries}
    # A lock of named targets is made under one precision: entries of other contracts in the same
    # folder are not "extra".
    if lock.targets:
        contracts = {entry.contract for entry in lock.entries}
        unlocked = {purpose: row for purpose, row in unlocked.items() if row.contract in contracts}
    for entry in lock.entries:
        present_entry = unlocked.pop(entry.purpose, None)
        if present_entry is None:
            rows.append(
                LockDifference(
                    "missing",
                    entry.family,
                    entry.key,
                    entry.region,
                    f"{entry.runs}, judged on {entry.sku}",
                )
            )
        elif present_entry.digest != entry.digest:
            # The digest covers Program, payloads and evidence, but no signature: signing changes no
            # lock.
            rows.append(
                LockDifference(
                    "changed", entry.family, entry.key, entry.region, _diff(entry, present_entry)
                )
            )
    for extra in unlocked.values():
        rows.append(
            LockDifference(
                "extra",
                extra.family,
                extra.key,
                extra.region,
                f"{extra.runs}, judged on {extra.sku}",
            )
        )
    records = {row.purpose: row.digest for row in present.records}
    for record in lock.records:
        digest = records.get(record.purpose)
        if digest != record.digest:
            kind: Literal["missing", "changed"] = "missing" if digest is None else "changed"
            label = "the measured whole call" if record.candidates else "the remembered graph"
            rows.append(
                LockDifference(
                    kind, record.family, record.name, label, "a start measures or traces it again"
                )
            )
    return tuple(sorted(rows, key=lambda row: (row.kind, row.family, row.key)))


def write_lock(lock: Lock, path: Path) -> None:
    """Write `path` in one step, the same text for the same content.

    Raises SupplyError when `path` holds something else than a lock, or the disk refuses.
    """
    body = {
        "format": FORMAT,
        "families": list(lock.families),
        "targets": {name: list(keys) for name, keys in lock.targets.items()},
        "entries": [asdict(entry) for entry in lock.entries],
        "aliases": [asdict(record) for record in lock.records],
    }
    if path.exists():
        # A mistyped path must not cost a user's file: only a lock is replaced.
        read_lock(path)
    with write_atomically(path) as file:
        # One fact a line, so that version control shows one line for one change.
        file.write((json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read_lock(path: Path) -> Lock:
    """The lock in `path`. Raises SupplyError for a file that is not one."""
    data = read_file(path, _LIMIT_BYTES)
    if isinstance(data, Refusal):
        raise SupplyError(path, "form", f"{data.reason}; `cudal1 lock` writes it")
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise SupplyError(
                path, "format", f"format {body['format']!r}, this version reads {FORMAT}"
            )
        lock = Lock(
            tuple(LockedEntry(**_check_fields(LockedEntry, pin)) for pin in body["entries"]),
            tuple(LockedRecord(**_check_fields(LockedRecord, pin)) for pin in body["aliases"]),
            tuple(map(_require_text, body["families"])),
            {name: tuple(map(_require_text, keys)) for name, keys in body["targets"].items()},
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # SupplyError has a ValueError among its bases, and already says what is wrong.
        if isinstance(error, SupplyError):
            raise
        raise SupplyError(
            path, "form", f"not a lock of `cudal1 lock`: {type(error).__name__}: {error}"
        ) from error
    for pins in (lock.entries, lock.records):
        # A merge of two branches may keep both versions of a line, and neither is known to be
        # deployed.
        if len({pin.purpose for pin in pins}) != len(pins):
            raise SupplyError(
                path,
                "names",
                "it pins one decision twice, as after a merge; write it again with `cudal1 lock`",
            )
    return lock


def _lock_entry(file: CacheFile) -> LockedEntry:
    entry = file.content
    if not isinstance(entry, Entry):
        raise TypeError(f"{file.relative_path} holds no entry")
    timing = entry.evidence.get("timing") or {}
    if entry.choice.origin == "baseline" or entry.evidence.get("granularity") == "island":
        # A baseline gains nothing, and a kernel of a fusion group was never timed alone: their
        # ratios would read as gains of a call.
        timing = {}
    before, after = timing.get("baseline_us"), timing.get("candidate_us")
    return LockedEntry(
        family=file.cache_path.family,
        contract=file.cache_path.contract,
        key=entry.region_key,
        sku=entry.target.sku,
        digest=file.digest,
        region=entry.region_name,
        runs=entry.choice.label,
        precision=entry.contract.precision,
        torch=entry.target.torch,
        triton=entry.target.triton,
        driver=entry.target.driver,
        package=entry.package,
        speedup=_round(timing.get("speedup")),
        low=_round(timing.get("low")),
        saved_us=_round(before - after)
        if isinstance(before, (int, float)) and isinstance(after, (int, float))
        else None,
    )


def _lock_record(file: CacheFile) -> LockedRecord:
    return LockedRecord(
        file.cache_path.family,
        file.cache_path.contract,
        file.cache_path.name,
        file.made_for,
        file.digest,
    )


def _diff(locked: LockedEntry, present: LockedEntry) -> str:
    """The facts that differ, for a reader. Equal facts under another digest: another run of the
    judge.
    """
    names = [
        fact.name
        for fact in fields(LockedEntry)
        if fact.name != "digest" and getattr(locked, fact.name) != getattr(present, fact.name)
    ]
    changes = ", ".join(
        f"{name} {getattr(locked, name)} -> {getattr(present, name)}" for name in names
    )
    return changes or "the same choice, judged again"


def _round(value: Any) -> float | None:
    """Four digits: the digest pins the exact numbers, a diff is for people."""
    return float(f"{value:.4g}") if isinstance(value, (int, float)) else None


def _check_fields(kind: type[LockedEntry | LockedRecord], record: Any) -> dict[str, Any]:
    """`record` with exactly the fields of `kind`, texts and numbers where they belong."""
    if not isinstance(record, dict):
        raise TypeError(f"{record!r}, expected an object")
    for column in fields(kind):
        number = column.name in ("speedup", "low", "saved_us")
        value = record[column.name]
        # `type(...) in`, because bool is an int in Python.
        if not (value is None or type(value) in (int, float) if number else isinstance(value, str)):
            raise TypeError(
                f"{column.name} is {value!r}, expected {'a number' if number else 'text'}"
            )
    return record


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r}, expected text")
    return value
