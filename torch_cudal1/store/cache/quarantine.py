"""What production found wrong: records beside the cache that keep a candidate from running again,
in this and every later process.

    <root>/v1/quarantine/<key[:2]>/<key>.<first 16 digits of the candidate's digest>.json

One record a candidate of a region, whatever the target or the contract: what was wrong once is not
trusted elsewhere. The presence of the file is what counts, so a record that is damaged still holds
its candidate back. It finds nothing out: `shadow` does that.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.cache.files import Stored, iter_files, read_file, write_file

__all__ = [
    "QuarantineRecord",
    "find_quarantine_reason",
    "lift_quarantine",
    "list_quarantined",
    "quarantine_candidate",
]

_FOLDER = Path("v1", "quarantine")
_LIMIT_BYTES = 1 << 20
# 64 bits of the digest: enough to tell a region's candidates apart, and short in a file name.
_DIGITS = 16


@dataclass(frozen=True)
class QuarantineRecord:
    """A candidate that must not run: of which region, why, since when (ISO 8601, UTC), and seen on
    which machine.
    """

    region_key: str
    # The candidate's digest, or its start where only the file's name could be read.
    candidate: str
    reason: str
    at: str = ""
    seen_on: str = ""

    def holds(self, region_key: str, candidate: str) -> bool:
        """Whether this record is about that candidate of that region."""
        return self.region_key == region_key and candidate[:_DIGITS] == self.candidate[:_DIGITS]


def quarantine_candidate(root: Path, record: QuarantineRecord) -> Stored | Refusal:
    """Write `record` for every later process. Refusal where the file system refuses: then it
    holds in this process only.
    """
    # Through a rename: a reader in another process sees the whole record or none.
    return write_file(
        _record_path(root, record.region_key, record.candidate),
        json.dumps(asdict(record), sort_keys=True).encode(),
    )


def find_quarantine_reason(
    roots: Sequence[Path], region_key: str, candidate: str
) -> Refusal | None:
    """Why that candidate must not run, by the first folder that says so."""
    # Any folder may forbid: a record in a shared folder counts although the own one has none.
    for root in roots:
        record = _read(_record_path(root, region_key, candidate))
        if record is not None:
            return Refusal(f"quarantined: {record.reason}")
    return None


def list_quarantined(roots: Sequence[Path]) -> tuple[QuarantineRecord, ...]:
    """Every record of the folders, in path order."""
    read_records = (_read(path) for root in roots for path in iter_files(root / _FOLDER, ".json"))
    return tuple(record for record in read_records if record is not None)


def lift_quarantine(root: Path, match: Callable[[QuarantineRecord], bool]) -> tuple[Path, ...]:
    """Delete the records of one folder that `match`; the files deleted. Processes that run keep
    what they know.
    """
    deleted = []
    for path in list(iter_files(root / _FOLDER, ".json")):
        record = _read(path)
        if record is not None and match(record):
            # Another process lifted it.
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                deleted.append(path)
    return tuple(deleted)


def _record_path(root: Path, region_key: str, candidate: str) -> Path:
    # No target and no contract in the path: what was wrong once is not trusted elsewhere.
    return root / _FOLDER / region_key[:2] / f"{region_key}.{candidate[:_DIGITS]}.json"


def _read(path: Path) -> QuarantineRecord | None:
    data = read_file(path, _LIMIT_BYTES)
    # Only absence frees a candidate. Damage, or a folder that may not be read, must not.
    if isinstance(data, Refusal) and data.reason == "absent":
        return None
    # A record that cannot be read still holds its candidate back: its name says which one.
    key, _, candidate = path.name.removesuffix(".json").partition(".")
    if isinstance(data, Refusal):
        return QuarantineRecord(key, candidate, f"the record {path} is {data.reason}")
    try:
        record = QuarantineRecord(**json.loads(data))
    except (ValueError, TypeError) as error:
        return QuarantineRecord(
            key, candidate, f"the record {path} is unreadable: {type(error).__name__}: {error}"
        )
    # A record copied to another name would free the candidate that the name stands for.
    if not record.holds(key, candidate) or not all(
        isinstance(value, str) for value in asdict(record).values()
    ):
        return QuarantineRecord(
            key, candidate, f"the record {path} is unreadable: it is about another candidate"
        )
    return record
