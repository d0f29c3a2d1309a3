"""The cache on disk: one file per (region, target family, contract), and small decision records
beside them.

    <root>/v1/<family>/<contract digest>/<key[:2]>/<key>.safetensors
    <root>/v1/alias/<family>/<contract digest>/<name[:2]>/<name>.json

One root is written; further roots are only read. A file that is damaged, of another program or in
the wrong place is a miss. A hit judged under another torch, Triton, driver or SKU is returned with
that reason. `trust` decides at every look-up who vouches for a record: a revoked record is a miss
anywhere; outside the own root, a record that no key vouches for is a miss or a hit that says so, by
policy. The cache runs nothing, and takes any process that may write the own root for this user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract, Entry, Region, Target
from torch_cudal1.store.cache.cache_paths import (
    ENTRY_LIMIT_BYTES,
    RECORD_LIMIT_BYTES,
    VERSION_FOLDER,
    entry_path,
    record_path,
)
from torch_cudal1.store.cache.decision_record import (
    DecisionRecord,
    encode_record,
    open_record,
    sign_record,
)
from torch_cudal1.store.cache.entry_file import (
    decode_entry,
    decode_golden,
    encode_entry,
    open_entry,
    sign_entry,
)
from torch_cudal1.store.cache.files import (
    LockState,
    Stored,
    hold_lock,
    iter_files,
    read_file,
    remove_leftovers,
    write_file,
)
from torch_cudal1.store.cache.resolve import Hit
from torch_cudal1.store.trust.signatures import Signature, Signer
from torch_cudal1.store.trust.trust_policy import (
    Forbidden,
    Origin,
    Rules,
    SignedContent,
    Standing,
    Unvouched,
    Vouched,
    check_revoked_program,
    decide_standing,
)

__all__ = [
    "BrokenFile",
    "EntryFile",
    "Hit",
    "LocalCache",
    "PurgeReport",
    "SignReport",
    "Stored",
    "explain_staleness",
]

# The longest wait for a search of the same key to store its decision.
_SIGN_WAIT_S = 30.0


@dataclass(frozen=True)
class EntryFile:
    """A file of the cache, the entry in it with its digest and signatures, and who vouches for it
    now.
    """

    path: Path
    entry: Entry
    digest: str
    signatures: tuple[Signature, ...]
    standing: Standing


@dataclass(frozen=True)
class BrokenFile:
    """A file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class PurgeReport:
    """What `purge` deleted, and what it could not."""

    entries: tuple[Path, ...]
    records: tuple[Path, ...]
    leftovers: tuple[Path, ...]
    failed: tuple[BrokenFile, ...]


@dataclass(frozen=True)
class SignReport:
    """What `sign` signed, what had that signature already, and what could not be signed."""

    files: tuple[Path, ...]
    unchanged: tuple[Path, ...]
    failed: tuple[BrokenFile, ...]


@dataclass(frozen=True)
class _SignLists:
    """The lists of a SignReport while it is being made."""

    signed: list[Path] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)
    failed: list[BrokenFile] = field(default_factory=list)


@dataclass(frozen=True)
class LocalCache:
    """A writable cache folder, and read-only folders that are read after it. Holds no state: any
    number of processes may use one folder.

    `rules`: which signatures count for records in the read-only folders. The default trusts no
    publisher. `shipped`: the folder that came with the package, read last. It serves look-ups only,
    and is not locked, exported or listed.
    """

    root: Path
    read_only: Sequence[Path] = field(default=())
    name: str = "local cache"
    rules: Rules = field(default_factory=Rules)
    shipped: Path | None = None

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Refusal:
        """`get` by the region's key: what makes this a `Source`."""
        return self.get(region.key, target, contract)

    def get(self, key: str, target: Target, contract: Contract) -> Hit | Refusal:
        """The first entry that is fresh and vouched for; else a stale entry; else an entry that
        must be judged first; else why there is none.

        Raises ValueError for a bad key.
        """
        # Vouched for, but stale.
        stale: list[Hit] = []
        # No trusted signature.
        unvouched: list[Hit] = []
        reasons: list[str] = []
        for root, origin in self._lookup_roots():
            path = entry_path(root, key, target, contract)
            file = self._read_entry_file(path, root, origin)
            if isinstance(file, Refusal):
                # Absence is the ordinary miss. Anything else is trouble that the user should see.
                reasons += [] if file.reason == "absent" else [f"{path}: {file.reason}"]
                continue
            if isinstance(file.standing, Vouched):
                hit = Hit(
                    file.entry,
                    str(path),
                    explain_staleness(file.entry.target, target),
                    file.standing.by,
                    file.digest,
                )
                if hit.stale is None:
                    # Fresh and vouched for: later folders could not offer more.
                    return hit
                # Kept while later folders are read: a shared folder may hold an entry judged on
                # this machine.
                stale.append(hit)
            elif isinstance(file.standing, Unvouched) and self.rules.policy == "judge":
                # Only where the policy has such an entry judged here first. Under "signed" it is
                # refused.
                unvouched.append(
                    # The reason stands in `stale`, so that no caller runs the entry before it is
                    # judged.
                    Hit(file.entry, str(path), f"{path}: {file.standing.reason}", "", file.digest)
                )
            else:
                reasons.append(f"{path} is refused: {file.standing.reason}")
        return next(iter((*stale, *unvouched)), None) or Refusal("; ".join(reasons) or "absent")

    @property
    def own(self) -> LocalCache:
        """The writable folder alone."""
        return LocalCache(self.root, (), self.name, self.rules)

    def check_revoked(self, program: Program) -> Refusal | None:
        """Why `program`, or one nested in it, may not be used, wherever it comes from."""
        return check_revoked_program(program, self.rules)

    def read_golden(self, hit: Hit) -> dict[str, torch.Tensor] | Refusal:
        """The golden vectors stored with a hit, for re-validation."""
        data = read_file(Path(hit.where), ENTRY_LIMIT_BYTES)
        return data if isinstance(data, Refusal) else decode_golden(data)

    def put(
        self, entry: Entry, golden: Mapping[str, torch.Tensor] | None = None
    ) -> Stored | Refusal:
        """Write `entry`, replacing one of the same key. Refusal where the disk refuses or `get`
        could not read it back.
        """
        try:
            path = entry_path(self.root, entry.region_key, entry.target, entry.contract)
            data = encode_entry(entry, golden)
        except (ProgramError, ValueError) as error:
            return Refusal(str(error))
        # What `get` could not read back is not written.
        unread = decode_entry(data)
        return (
            Refusal(f"would not read back: {unread.reason}")
            if isinstance(unread, Refusal)
            else write_file(path, data)
        )

    @contextlib.contextmanager
    def lock(
        self, key: str, target: Target, contract: Contract, *, timeout_s: float = 3600.0
    ) -> Iterator[LockState]:
        """Exclude other searches of the same key: hold it around get, search and put, and `get`
        again once inside.

        On a folder that cannot hold a lock, or after `timeout_s`, the body runs all the same and
        the state says why it is not held.
        """
        with hold_lock(
            # Not the lock of the file's writes: `put` takes that one while the search holds this
            # one.
            entry_path(self.root, key, target, contract).with_suffix(".search.lock"),
            timeout_s,
        ) as state:
            yield state

    def put_decision_record(
        self, name: str, value: Mapping[str, Any], target: Target, contract: Contract
    ) -> Stored | Refusal:
        """Remember a JSON object under `name` (a hex digest), such as the region keys of a Dynamo
        graph.
        """
        try:
            path = record_path(self.root, name, target, contract)
            data = encode_record(name, value, target, contract)
        except (TypeError, ValueError) as error:
            return Refusal(str(error))
        return write_file(path, data)

    def get_decision_record(
        self, name: str, target: Target, contract: Contract, candidates: Sequence[str] | None = None
    ) -> dict[str, Any] | Refusal:
        """The object of `put_decision_record`, from the first folder with a whole record that is
        vouched for.

        `candidates`: only a record about exactly these (digests, in order); folders for other
        models of a GPU may hold a record about others. Raises ValueError for a bad name.
        """
        reasons: list[str] = []
        for root, origin in self._iter_roots():
            path = record_path(root, name, target, contract)
            record = _read_record(path, root)
            if isinstance(record, Refusal):
                reasons += [] if record.reason == "absent" else [f"{path}: {record.reason}"]
                continue
            stand = decide_standing(
                SignedContent("alias", record.digest, record.signatures), origin, self.rules
            )
            # A record names what runs, and the judge cannot check it: from elsewhere it needs a
            # signature, under every policy.
            if not isinstance(stand, Vouched):
                reasons.append(f"{path} is refused: {stand.reason}")
            elif candidates is not None and record.value.get("candidates") != list(candidates):
                # The measurement of other choices says nothing about these.
                reasons.append(f"{path} speaks of other candidates")
            else:
                return record.value
        return Refusal("; ".join(reasons) or "absent")

    def iter_entries(self) -> Iterator[EntryFile | BrokenFile]:
        """Every entry file of every folder, the writable one first, in path order."""
        for root, origin in self._iter_roots():
            for path in iter_files(root / VERSION_FOLDER, ".safetensors"):
                file = self._read_entry_file(path, root, origin)
                yield BrokenFile(path, file.reason) if isinstance(file, Refusal) else file

    def sign(self, signer: Signer, match: Callable[[Entry], bool] | None = None) -> SignReport:
        """Sign the writable folder's entries that `match`; None signs all, decision records too.
        What is revoked or broken is not signed.

        Each entry is read, checked and replaced under its key's lock. A search that stores a new
        decision makes an unsigned file.
        """
        lists = _SignLists()
        # A list, because signing replaces the files that the walk finds.
        for file in list(self.own.iter_entries()):
            if isinstance(file, BrokenFile):
                lists.failed.extend([file] if match is None else [])
            elif match is None or match(file.entry):
                # Under the key's lock: a search may be storing a newer decision in the same file.
                with self.lock(
                    file.entry.region_key,
                    file.entry.target,
                    file.entry.contract,
                    timeout_s=_SIGN_WAIT_S,
                ):
                    _write_signed(file.path, self._sign_entry_file(file.path, signer), lists)
        for path in (
            # `match` reads entries, and no filter can say which records belong to the matching
            # ones.
            iter_files(self.root / VERSION_FOLDER / "alias", ".json") if match is None else ()
        ):
            _write_signed(path, _sign_record(path, self.root, signer), lists)
        return SignReport(tuple(lists.signed), tuple(lists.unchanged), tuple(lists.failed))

    def verify(self) -> tuple[BrokenFile, ...]:
        """Read every file again, decision records too; the broken ones with their reasons (none:
        all is well).
        """
        broken = [file for file in self.iter_entries() if isinstance(file, BrokenFile)]
        for root in (self.root, *self.read_only):
            records = (
                (path, _read_record(path, root))
                for path in iter_files(root / VERSION_FOLDER / "alias", ".json")
            )
            broken += [
                BrokenFile(path, record.reason)
                for path, record in records
                if isinstance(record, Refusal)
            ]
        return tuple(broken)

    def purge(self, match: Callable[[Entry], bool] | None = None) -> PurgeReport:
        """Delete entries that `match`, unreadable files, and what killed writers left; None deletes
        all, decision records too.

        Only the writable folder is changed. A decision record whose entry is gone stays, and is a
        miss when it is read.
        """
        files = list(self.own.iter_entries())
        to_delete = [
            file.path
            for file in files
            # A broken file is a miss at every look-up, so it goes whatever the filter.
            if match is None or isinstance(file, BrokenFile) or match(file.entry)
        ]
        records = [
            path
            for path in iter_files(self.root / VERSION_FOLDER / "alias", ".json")
            if match is None or isinstance(_read_record(path, self.root), Refusal)
        ]
        failed: list[BrokenFile] = []
        deleted = tuple(path for path in to_delete if _unlink(path, failed))
        deleted_records = tuple(path for path in records if _unlink(path, failed))
        return PurgeReport(
            deleted, deleted_records, remove_leftovers(self.root / VERSION_FOLDER), tuple(failed)
        )

    def _iter_roots(self) -> Iterator[tuple[Path, Origin]]:
        yield self.root, "own"
        for root in self.read_only:
            yield root, "elsewhere"

    def _lookup_roots(self) -> Iterator[tuple[Path, Origin]]:
        yield from self._iter_roots()
        if self.shipped is not None:
            # Last, so that what the user tuned or imported comes before what the package brings.
            yield self.shipped, "shipped"

    def _read_entry_file(self, path: Path, root: Path, origin: Origin) -> EntryFile | Refusal:
        """The entry file at `path` and its standing, or why it cannot be used."""
        data = read_file(path, ENTRY_LIMIT_BYTES)
        opened = data if isinstance(data, Refusal) else open_entry(data)
        if isinstance(opened, Refusal):
            return opened
        entry = opened.entry
        try:
            expected_path = entry_path(root, entry.region_key, entry.target, entry.contract)
        except ValueError as error:
            return Refusal(f"unreadable: {error}")
        # A whole entry copied under another key would be run for that region.
        if expected_path != path:
            return Refusal(f"unreadable: it holds the entry of {expected_path.relative_to(root)}")
        sealed = SignedContent("entry", opened.digest, opened.signatures, entry.choice.program)
        return EntryFile(
            path,
            entry,
            opened.digest,
            opened.signatures,
            decide_standing(sealed, origin, self.rules),
        )

    def _sign_entry_file(self, path: Path, signer: Signer) -> tuple[bytes, bytes] | Refusal:
        """The bytes at `path` before and after signing."""
        file = self._read_entry_file(path, self.root, "own")
        if isinstance(file, Refusal):
            return file
        # A signature over a revoked entry would vouch for it where another list is in use.
        if isinstance(file.standing, Forbidden):
            return Refusal(file.standing.reason)
        data = read_file(path, ENTRY_LIMIT_BYTES)
        signed = data if isinstance(data, Refusal) else sign_entry(data, signer)
        return (
            (data, signed)
            if isinstance(data, bytes) and isinstance(signed, bytes)
            else Refusal(_find_first_reason(data, signed))
        )


def explain_staleness(judged: Target, here: Target) -> str | None:
    """Why an entry judged on `judged` must be re-validated on `here`; None when nothing differs."""
    pairs = [(f.name, getattr(judged, f.name), getattr(here, f.name)) for f in fields(Target)]
    changes = [
        f"{name} {was or 'none'!r} -> {now or 'none'!r}" for name, was, now in pairs if was != now
    ]
    return "judged elsewhere: " + ", ".join(changes) if changes else None


def _read_record(path: Path, root: Path) -> DecisionRecord | Refusal:
    data = read_file(path, RECORD_LIMIT_BYTES)
    return data if isinstance(data, Refusal) else open_record(data, _record_segments(path, root))


def _record_segments(path: Path, root: Path) -> tuple[str, ...]:
    return path.relative_to(root / VERSION_FOLDER / "alias").parts


def _sign_record(path: Path, root: Path, signer: Signer) -> tuple[bytes, bytes] | Refusal:
    """The bytes at `path` before and after signing."""
    data = read_file(path, RECORD_LIMIT_BYTES)
    signed = (
        data
        if isinstance(data, Refusal)
        else sign_record(data, _record_segments(path, root), signer)
    )
    return (
        (data, signed)
        if isinstance(data, bytes) and isinstance(signed, bytes)
        else Refusal(_find_first_reason(data, signed))
    )


def _find_first_reason(*answers: bytes | Refusal) -> str:
    return next((answer.reason for answer in answers if isinstance(answer, Refusal)), "")


def _write_signed(
    path: Path, before_after: tuple[bytes, bytes] | Refusal, lists: _SignLists
) -> None:
    """Write what was signed, and put `path` on the list where it belongs."""
    if isinstance(before_after, Refusal):
        lists.failed.append(BrokenFile(path, before_after.reason))
    elif before_after[0] == before_after[1]:
        # Ed25519 signatures are deterministic: the same key makes the same bytes, and nothing is
        # written.
        lists.unchanged.append(path)
    elif isinstance(stored := write_file(path, before_after[1]), Refusal):
        lists.failed.append(BrokenFile(path, stored.reason))
    else:
        lists.signed.append(path)


def _unlink(path: Path, failed: list[BrokenFile]) -> bool:
    try:
        # Another purge may have deleted it already.
        path.unlink(missing_ok=True)
    except OSError as error:
        failed.append(BrokenFile(path, f"{type(error).__name__}: {error}"))
        return False
    return True
