"""Takes a bundle into the cache folder, beside the user's own entries and never among them.

    <cache>/imported/<digest of the bundle>/<layer>/v1/...      read-only caches from then on, the latest import first
    <cache>/imported/.incoming-<digest>/                        a bundle on its way in; no look-up reads it

Every file is checked for its digest, decoded and compared with its path *before* it is written, and
the folder gets its name by one rename when all are there: a refused bundle leaves nothing, and a
killed import leaves files that the next import continues from. Whether an imported entry is trusted
is decided at every look-up (`store.cache.local_cache`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cudal1.core.errors import SupplyError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.bundle.bundle_file import Bundle, Manifest, Member, open_bundle
from torch_cudal1.store.cache.files import hold_lock, iter_files, read_file, write_file
from torch_cudal1.store.cache.inventory import decode_file

__all__ = [
    "IMPORT_LOCK",
    "ImportReport",
    "import_bundle",
    "list_imported_bundles",
    "list_imported_roots",
    "list_interrupted",
]

IMPORT_LOCK = "import.lock"

_FOLDER, _INCOMING, _OLD = "imported", ".incoming-", ".old-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LAYER = re.compile(r"\d{1,2}")
_LOCK_S = 600.0
# Two seconds, the coarsest modification times of a file system in use (FAT): two imports within one
# tick would have no order.
_TICK_NS = 2 * 10**9


@dataclass(frozen=True)
class ImportReport:
    """A bundle that is in the cache folder now; `already`: it was there, whole."""

    digest: str
    root: Path
    entries: int
    records: int
    families: tuple[str, ...]
    size_bytes: int
    already: bool

    def to_json(self) -> dict[str, Any]:
        """For `--json`, whose key for decision records is "aliases", as their folder is named."""
        return {
            "aliases" if name == "records" else name: value for name, value in vars(self).items()
        }


def list_imported_bundles(cache_dir: Path) -> tuple[Path, ...]:
    """The folders of imported bundles, the latest import first."""
    return tuple(
        sorted(
            _iter_folders(cache_dir / _FOLDER, _DIGEST),
            # The name second, so that processes agree on the order of imports with equal stamps.
            key=lambda folder: (-folder.stat().st_mtime_ns, folder.name),
        )
    )


def list_imported_roots(cache_dir: Path) -> tuple[Path, ...]:
    """What is in those folders, for `LocalCache.read_only`: the latest import first, its layers in
    order.
    """
    bundles = list_imported_bundles(cache_dir)
    return tuple(
        layer
        for bundle in bundles
        # As numbers: as text "10" would come before "2".
        for layer in sorted(_iter_folders(bundle, _LAYER), key=lambda folder: int(folder.name))
    )


def list_interrupted(cache_dir: Path) -> tuple[Path, ...]:
    """What killed imports left. One that is at work holds the lock `IMPORT_LOCK`."""
    return tuple(
        _iter_folders(
            cache_dir / _FOLDER, re.compile(rf"({re.escape(_INCOMING)}|{re.escape(_OLD)}).*")
        )
    )


def import_bundle(
    path: Path, cache_dir: Path, progress: Callable[[str, float | None], None] | None = None
) -> ImportReport:
    """Check the bundle `path` and make it readable from `cache_dir`. All of it or nothing; doing it
    twice changes nothing.

    Raises SupplyError for a bundle that breaks a rule or a disk that refuses, OSError where `path`
    cannot be read.
    """
    say = progress or (lambda step, fraction: None)
    with open_bundle(path) as bundle:
        manifest, home = bundle.manifest, cache_dir / _FOLDER
        if not manifest.members:
            raise SupplyError(
                path, "count", "it holds no entry; export with keys that `cudal1 list` shows"
            )
        with hold_lock(home / IMPORT_LOCK, _LOCK_S) as lock:
            final = home / manifest.digest
            if lock.held:
                # Its own incoming folder stays: the import goes on from the files that are whole in
                # it.
                _sweep(home, keep=_INCOMING + manifest.digest)
            already = (
                final.is_dir()
                # `is_dir` follows a link, and what a link leads to was not written by an import.
                and not final.is_symlink()
                and all(_holds_member(final, member) for member in manifest.members)
            )
            if not already:
                # Where nothing can be locked a name of its own keeps two imports apart.
                _bring_in(
                    bundle,
                    home / (_INCOMING + manifest.digest + ("" if lock.held else f"-{os.getpid()}")),
                    final,
                    say,
                )
            # Also where it was there already: the latest import is asked first.
            _stamp_as_latest(final)
    records = sum(member.relative_path.startswith("v1/alias/") for member in manifest.members)
    return ImportReport(
        manifest.digest,
        final,
        len(manifest.members) - records,
        records,
        manifest.families,
        manifest.size_bytes,
        already,
    )


def _bring_in(
    bundle: Bundle, incoming: Path, final: Path, say: Callable[[str, float | None], None]
) -> None:
    try:
        # An import makes no links. Another process put them there, and a write through one would
        # leave the cache.
        if _holds_links(incoming):
            _remove(incoming)
        # Before the first file: a disk that fills up at the last one would have cost the whole
        # import.
        _check_space(bundle.path, incoming.parent, bundle.manifest, incoming)
        _stage(bundle, incoming, say)
        _publish(incoming, final)
    except SupplyError:
        # A bundle that breaks a rule leaves nothing, also none of the files that were good.
        _remove(incoming)
        raise
    except OSError as error:
        _remove(incoming)
        raise SupplyError(
            bundle.path, "disk", f"{type(error).__name__}: {error}; nothing was imported"
        ) from error


def _stage(bundle: Bundle, incoming: Path, say: Callable[[str, float | None], None]) -> None:
    read_bytes, total = 0, bundle.manifest.size_bytes
    for member, data in bundle.iter_files():
        say(f"importing {member.name}", read_bytes / total)
        read_bytes += member.size_bytes
        if _holds_member(incoming, member):
            # Checked and written by an import that was killed.
            continue
        # Digest, decoding and path are checked before the write, so no file of the folder is
        # unchecked.
        file = decode_file(data, member.relative_path, incoming / member.name)
        if isinstance(file, Refusal):
            raise SupplyError(bundle.path, "content", f"{member.name}: {file.reason}")
        stored = write_file(incoming / member.name, data)
        if isinstance(stored, Refusal):
            raise SupplyError(
                bundle.path,
                "disk",
                f"{stored.reason}; nothing was imported, make room and run the command again",
            )


def _publish(incoming: Path, final: Path) -> None:
    # Locks of the writes; an imported folder is read-only and needs none.
    for lock in list(iter_files(incoming, ".lock")):
        lock.unlink(missing_ok=True)
    old = final.with_name(_OLD + final.name)
    # A folder that is there was found damaged by `import_bundle`. It is renamed first: a directory
    # that is not empty can not be replaced by a rename.
    if os.path.lexists(final):
        os.replace(final, old)
    # One rename makes all files visible at once: no look-up sees half a bundle.
    os.replace(incoming, final)
    _remove(old)


def _stamp_as_latest(final: Path) -> None:
    """Stamp the folder later than every other import, also where a clock was ahead or the file
    system's ticks are coarse.
    """
    stamps = [
        folder.stat().st_mtime_ns
        for folder in _iter_folders(final.parent, _DIGEST)
        if folder != final
    ]
    stamp = max(time.time_ns(), max(stamps, default=0) + _TICK_NS)
    # The folder may be read-only now, such as one in a container image: the order stays as it was
    # shipped.
    with contextlib.suppress(OSError):
        os.utime(final, ns=(stamp, stamp))


def _check_space(path: Path, home: Path, manifest: Manifest, incoming: Path) -> None:
    there = sum(file.stat().st_size for file in iter_files(incoming, ""))
    free = shutil.disk_usage(home).free
    if free + there < manifest.size_bytes:
        raise SupplyError(
            path,
            "disk",
            f"it needs {manifest.size_bytes} bytes, {home} has {free} free; nothing was imported",
        )


def _holds_member(folder: Path, member: Member) -> bool:
    path = folder / member.name
    if path.is_symlink() or not path.is_file() or path.stat().st_size != member.size_bytes:
        return False
    data = read_file(path, member.size_bytes)
    return not isinstance(data, Refusal) and hashlib.sha256(data).hexdigest() == member.sha256


def _sweep(home: Path, *, keep: str) -> None:
    """Remove what killed imports of other bundles left. Only under the lock, so no process is at
    work on it.
    """
    for folder in list(home.iterdir()):
        if folder.name.startswith((_INCOMING, _OLD)) and folder.name != keep:
            _remove(folder)


def _holds_links(folder: Path) -> bool:
    walked = os.walk(folder)
    return folder.is_symlink() or any(
        os.path.islink(os.path.join(at, name))
        for at, folders, names in walked
        for name in (*folders, *names)
    )


def _remove(folder: Path) -> None:
    """Delete a folder of this package, or the link in its place, as far as the disk lets us; what
    stays is swept at the next import.
    """
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _iter_folders(home: Path, name: re.Pattern[str]) -> Iterator[Path]:
    """Real folders of `home` whose name fits; links are not followed, a missing home has none."""
    try:
        with os.scandir(home) as entries:
            yield from [
                Path(entry.path)
                for entry in entries
                if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return
