"""The cache on disk: one file per (region, target family, contract), and small alias records beside
them.

    <root>/v1/<family>/<contract digest>/<key[:2]>/<key>.safetensors
    <root>/v1/alias/<family>/<contract digest>/<name[:2]>/<name>.json

One root is written; further roots are only read. A file that is damaged, foreign or in the wrong
place is a miss. A hit judged under another torch, Triton, driver or SKU is returned with that
reason. Every record is asked for who vouches for it (`trust`) at every look-up: what was revoked is
a miss anywhere; what nobody vouches for, outside the own root, is a miss or a hit that says so, by
policy. It runs nothing, and takes whoever may write the own root for this user.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract, Entry, Miss, Region, Target
from torch_cudal1.store.cache.decision_record import (
    Alias,
    decode_alias,
    encode_alias,
    open_alias,
    sign_alias,
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
    NotStored,
    Stored,
    files_under,
    hold,
    read_file,
    remove_leftovers,
    write_file,
)
from torch_cudal1.store.cache.resolve import Hit
from torch_cudal1.store.trust.signatures import Signature, Signer
from torch_cudal1.store.trust.trust_policy import (
    Origin,
    Refused,
    Rules,
    Sealed,
    Standing,
    Unvouched,
    Vouched,
    revoked_program,
    standing,
)

__all__ = [
    "Broken",
    "Found",
    "Hit",
    "LocalCache",
    "LockState",
    "NotStored",
    "Purged",
    "Signed",
    "Stored",
    "decode_alias",
    "stale_reason",
]

_VERSION = "v1"
_ENTRY_LIMIT_BYTES = 4 << 30
_ALIAS_LIMIT_BYTES = 64 << 20
_SIGN_WAIT_S = 30.0  # for a search of the same key to store its decision
_KEY = re.compile(r"[0-9a-f]{16,128}")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class Found:
    """A file of the cache, the entry in it with its digest and signatures, and who vouches for it
    now.
    """

    path: Path
    entry: Entry
    digest: str
    signatures: tuple[Signature, ...]
    standing: Standing


@dataclass(frozen=True)
class Broken:
    """A file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Purged:
    """What `purge` deleted, and what it could not."""

    entries: tuple[Path, ...]
    aliases: tuple[Path, ...]
    leftovers: tuple[Path, ...]
    failed: tuple[Broken, ...]


@dataclass(frozen=True)
class Signed:
    """What `sign` signed, what had that signature already, and what could not be signed."""

    files: tuple[Path, ...]
    unchanged: tuple[Path, ...]
    failed: tuple[Broken, ...]


@dataclass(frozen=True)
class _Lists:
    """The same while it is being done."""

    done: list[Path] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)
    failed: list[Broken] = field(default_factory=list)


@dataclass(frozen=True)
class LocalCache:
    """A writable cache folder, and read-only ones asked after it. Holds no state: any number of
    processes may use one folder.

    `rules`: whom to believe about what lies in the read-only ones. The default believes nobody.
    `shipped`: the folder that came with the package, asked last; it serves look-ups only, and is no
    part of what a user locks, exports or lists as his.
    """

    root: Path
    read_only: Sequence[Path] = field(default=())
    name: str = "local cache"
    rules: Rules = field(default_factory=Rules)
    shipped: Path | None = None

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Miss:
        """`get` by the region's key: what makes this a `Source`."""
        return self.get(region.key, target, contract)

    def get(self, key: str, target: Target, contract: Contract) -> Hit | Miss:
        """The first fresh entry that somebody vouches for; else a stale one; else one that is to be
        judged first; else why not.

        Raises ValueError for a bad key.
        """
        second: list[Hit] = []  # vouched for, but stale
        third: list[Hit] = []  # nobody vouches for it
        reasons: list[str] = []
        for root, origin in self._asked():
            path = entry_path(root, key, target, contract)
            found = self._found(path, root, origin)
            if isinstance(found, Miss):
                reasons += [] if found.reason == "absent" else [f"{path}: {found.reason}"]
                continue
            if isinstance(found.standing, Vouched):
                hit = Hit(
                    found.entry,
                    str(path),
                    stale_reason(found.entry.target, target),
                    found.standing.by,
                    found.digest,
                )
                if hit.stale is None:
                    return hit
                second.append(hit)
            elif isinstance(found.standing, Unvouched) and self.rules.policy == "judge":
                third.append(
                    Hit(
                        found.entry, str(path), f"{path}: {found.standing.reason}", "", found.digest
                    )
                )
            else:
                reasons.append(f"{path} is refused: {found.standing.reason}")
        return next(iter((*second, *third)), None) or Miss("; ".join(reasons) or "absent")

    @property
    def own(self) -> LocalCache:
        """The writable folder alone."""
        return LocalCache(self.root, (), self.name, self.rules)

    def revoked(self, program: Program) -> str:
        """Why `program`, or one nested in it, may not be used, whoever proposes it; "" if nothing
        speaks against it.
        """
        return revoked_program(program, self.rules)

    def golden(self, hit: Hit) -> dict[str, torch.Tensor] | Miss:
        """The golden vectors stored with a hit, for re-validation."""
        data = read_file(Path(hit.where), _ENTRY_LIMIT_BYTES)
        return data if isinstance(data, Miss) else decode_golden(data)

    def put(
        self, entry: Entry, golden: Mapping[str, torch.Tensor] | None = None
    ) -> Stored | NotStored:
        """Write `entry`, replacing one of the same key. NotStored where the disk refuses or `get`
        could not read it back.
        """
        try:
            path = entry_path(self.root, entry.region_key, entry.target, entry.contract)
            data = encode_entry(entry, golden)
        except (ProgramError, ValueError) as error:
            return NotStored(str(error))
        unread = decode_entry(data)
        return (
            NotStored(f"would not read back: {unread.reason}")
            if isinstance(unread, Miss)
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
        with hold(
            entry_path(self.root, key, target, contract).with_suffix(".search.lock"), timeout_s
        ) as state:
            yield state

    def put_alias(
        self, name: str, value: Mapping[str, Any], target: Target, contract: Contract
    ) -> Stored | NotStored:
        """Remember a JSON object under `name` (a hex digest), such as the region keys of a Dynamo
        graph.
        """
        try:
            path = alias_path(self.root, name, target, contract)
            data = encode_alias(name, value, target, contract)
        except (TypeError, ValueError) as error:
            return NotStored(str(error))
        return write_file(path, data)

    def get_alias(
        self, name: str, target: Target, contract: Contract, candidates: Sequence[str] | None = None
    ) -> dict[str, Any] | Miss:
        """The object of `put_alias`, from the first folder that has a whole one that somebody
        vouches for.

        `candidates`: only one about exactly these (digests, in order); folders for other models of
        a GPU may hold one about others. It names what runs, so from elsewhere it needs a signature
        as an entry does; nothing can judge one. Raises ValueError for a bad name.
        """
        reasons: list[str] = []
        for root, origin in self._roots():
            path = alias_path(root, name, target, contract)
            found = _read_alias(path, root)
            if isinstance(found, Miss):
                reasons += [] if found.reason == "absent" else [f"{path}: {found.reason}"]
                continue
            stands = standing(Sealed("alias", found.digest, found.signatures), origin, self.rules)
            if not isinstance(stands, Vouched):
                reasons.append(f"{path} is refused: {stands.reason}")
            elif candidates is not None and found.value.get("candidates") != list(candidates):
                reasons.append(f"{path} speaks of other candidates")
            else:
                return found.value
        return Miss("; ".join(reasons) or "absent")

    def entries(self) -> Iterator[Found | Broken]:
        """Every entry file of every folder, the writable one first, in path order."""
        for root, origin in self._roots():
            for path in files_under(root / _VERSION, ".safetensors"):
                found = self._found(path, root, origin)
                yield Broken(path, found.reason) if isinstance(found, Miss) else found

    def sign(self, signer: Signer, match: Callable[[Entry], bool] | None = None) -> Signed:
        """Sign the writable folder's entries that `match`; None signs all, aliases too. What is
        revoked or broken is not signed.

        Each entry is read, checked and replaced under its key's lock. A search that stores a new
        decision makes an unsigned file.
        """
        into = _Lists()
        for found in list(self.own.entries()):
            if isinstance(found, Broken):
                into.failed.extend([found] if match is None else [])
            elif match is None or match(found.entry):
                with self.lock(
                    found.entry.region_key,
                    found.entry.target,
                    found.entry.contract,
                    timeout_s=_SIGN_WAIT_S,
                ):
                    _write_signed(found.path, self._signed_entry(found.path, signer), into)
        for path in files_under(self.root / _VERSION / "alias", ".json") if match is None else ():
            _write_signed(path, _sign_alias(path, self.root, signer), into)
        return Signed(tuple(into.done), tuple(into.unchanged), tuple(into.failed))

    def verify(self) -> tuple[Broken, ...]:
        """Read every file again, aliases too; the broken ones with their reasons (none: all is
        well).
        """
        broken = [found for found in self.entries() if isinstance(found, Broken)]
        for root in (self.root, *self.read_only):
            aliases = (
                (path, _read_alias(path, root))
                for path in files_under(root / _VERSION / "alias", ".json")
            )
            broken += [
                Broken(path, alias.reason) for path, alias in aliases if isinstance(alias, Miss)
            ]
        return tuple(broken)

    def purge(self, match: Callable[[Entry], bool] | None = None) -> Purged:
        """Delete entries that `match`, unreadable files, and what killed writers left; None deletes
        all, aliases too.

        Only the writable folder is touched. An alias whose entry is gone is the reader's miss.
        """
        found = list(self.own.entries())
        doomed = [f.path for f in found if match is None or isinstance(f, Broken) or match(f.entry)]
        aliases = [
            path
            for path in files_under(self.root / _VERSION / "alias", ".json")
            if match is None or isinstance(_read_alias(path, self.root), Miss)
        ]
        failed: list[Broken] = []
        gone = tuple(path for path in doomed if _unlink(path, failed))
        gone_aliases = tuple(path for path in aliases if _unlink(path, failed))
        return Purged(gone, gone_aliases, remove_leftovers(self.root / _VERSION), tuple(failed))

    def _roots(self) -> Iterator[tuple[Path, Origin]]:
        yield self.root, "own"
        for root in self.read_only:
            yield root, "elsewhere"

    def _asked(self) -> Iterator[tuple[Path, Origin]]:
        yield from self._roots()
        if self.shipped is not None:
            yield self.shipped, "shipped"

    def _found(self, path: Path, root: Path, origin: Origin) -> Found | Miss:
        """The whole file at `path`, and how it stands."""
        data = read_file(path, _ENTRY_LIMIT_BYTES)
        opened = data if isinstance(data, Miss) else open_entry(data)
        if isinstance(opened, Miss):
            return opened
        entry = opened.entry
        try:
            own = entry_path(root, entry.region_key, entry.target, entry.contract)
        except ValueError as error:
            return Miss(f"unreadable: {error}")
        if own != path:
            return Miss(f"unreadable: it holds the entry of {own.relative_to(root)}")
        sealed = Sealed("entry", opened.digest, opened.signatures, entry.choice.program)
        return Found(
            path, entry, opened.digest, opened.signatures, standing(sealed, origin, self.rules)
        )

    def _signed_entry(self, path: Path, signer: Signer) -> tuple[bytes, bytes] | Miss:
        """The bytes at `path` before and after signing."""
        found = self._found(path, self.root, "own")
        if isinstance(found, Miss):
            return found
        if isinstance(found.standing, Refused):
            return Miss(found.standing.reason)
        data = read_file(path, _ENTRY_LIMIT_BYTES)
        signed = data if isinstance(data, Miss) else sign_entry(data, signer)
        return (
            (data, signed)
            if isinstance(data, bytes) and isinstance(signed, bytes)
            else Miss(_why(data, signed))
        )


def entry_path(root: Path, key: str, target: Target, contract: Contract) -> Path:
    """Where an entry lies. Raises ValueError for a key or family that is not a plain name (it would
    leave the folder).
    """
    return (
        root
        / _VERSION
        / _segment(target.family)
        / contract.digest
        / _checked(key)[:2]
        / f"{key}.safetensors"
    )


def alias_path(root: Path, name: str, target: Target, contract: Contract) -> Path:
    """Where an alias lies. Raises ValueError like `entry_path`."""
    return (
        root
        / _VERSION
        / "alias"
        / _segment(target.family)
        / contract.digest
        / _checked(name)[:2]
        / f"{name}.json"
    )


def stale_reason(judged: Target, here: Target) -> str | None:
    """Why an entry judged on `judged` must be re-validated on `here`; None when nothing differs."""
    pairs = [(f.name, getattr(judged, f.name), getattr(here, f.name)) for f in fields(Target)]
    changes = [
        f"{name} {was or 'none'!r} -> {now or 'none'!r}" for name, was, now in pairs if was != now
    ]
    return "judged elsewhere: " + ", ".join(changes) if changes else None


def _read_alias(path: Path, root: Path) -> Alias | Miss:
    data = read_file(path, _ALIAS_LIMIT_BYTES)
    return data if isinstance(data, Miss) else open_alias(data, _alias_place(path, root))


def _alias_place(path: Path, root: Path) -> tuple[str, ...]:
    return path.relative_to(root / _VERSION / "alias").parts


def _sign_alias(path: Path, root: Path, signer: Signer) -> tuple[bytes, bytes] | Miss:
    """The bytes at `path` before and after signing."""
    data = read_file(path, _ALIAS_LIMIT_BYTES)
    signed = data if isinstance(data, Miss) else sign_alias(data, _alias_place(path, root), signer)
    return (
        (data, signed)
        if isinstance(data, bytes) and isinstance(signed, bytes)
        else Miss(_why(data, signed))
    )


def _why(*answers: bytes | Miss) -> str:
    return next((answer.reason for answer in answers if isinstance(answer, Miss)), "")


def _write_signed(path: Path, made: tuple[bytes, bytes] | Miss, into: _Lists) -> None:
    """Write what was signed, and put `path` on the list where it belongs."""
    if isinstance(made, Miss):
        into.failed.append(Broken(path, made.reason))
    elif made[0] == made[1]:
        into.unchanged.append(path)
    elif isinstance(stored := write_file(path, made[1]), NotStored):
        into.failed.append(Broken(path, stored.reason))
    else:
        into.done.append(path)


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}; expected the hex digits of a digest")
    return key


def _segment(name: str) -> str:
    if not _SEGMENT.fullmatch(name):
        raise ValueError(f"target family {name!r}; expected a plain name such as 'cuda-sm_90'")
    return name


def _unlink(path: Path, failed: list[Broken]) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        failed.append(Broken(path, f"{type(error).__name__}: {error}"))
        return False
    return True
