"""`cudal1 purge`: deletes entries, quarantines and folders of the cache.

It deletes through `store.cache` only, and nothing without --yes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.cache.build_files import timings_folder
from torch_cudal1.store.cache.gc import (
    UnusedFolder,
    find_build_folders,
    find_folder,
    find_unused,
    remove_folder,
)
from torch_cudal1.store.cache.local_cache import BrokenFile, LocalCache
from torch_cudal1.store.cache.quarantine import QuarantineRecord, lift_quarantine, list_quarantined

__all__ = ["purge"]


@dataclass(frozen=True)
class _Selection:
    """The entries to delete: all, or those whose key begins with one of `starts`; of no start, none."""

    starts: tuple[str, ...]
    everything: bool

    def includes(self, region_key: str) -> bool:
        # An empty tuple is a start of no key.
        return self.everything or region_key.startswith(self.starts)


def purge(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Delete the entries named, the broken ones, or all, each with what held its candidates in
    quarantine.

    All means what is kept for later searches too: kernels, and their times. With --quarantined only
    the quarantine goes: the entries may run again. With --unused only folders that nothing leads
    to. Without --yes it says what would go. Exit code 1 if a file or a folder stayed.
    """
    # The writable cache alone: read-only ones belong to others.
    cache = LocalCache(settings.cache_dir)
    starts = tuple(args.key)
    # An option of its own, because lifting a quarantine runs a kernel again that was found wrong.
    if args.quarantined:
        return _lift_quarantine(cache, starts, args.yes, screen)
    if args.unused:
        return _purge_unused(args, settings, screen)
    # Checked before anything is deleted.
    _require_known_keys(cache, starts)
    selection = _Selection(starts, everything=not starts and not args.broken)
    # Only with everything: kernels and times are not kept by key.
    folders = _list_kernel_folders(cache) if selection.everything else []
    # Deleting cannot be undone, and each entry costs a search to make again.
    if not args.yes:
        return _list_doomed(cache, selection, folders, screen)
    return _delete(cache, selection, folders, screen)


def _list_kernel_folders(cache: LocalCache) -> list[UnusedFolder]:
    timings = find_folder(timings_folder(cache.root), "times of kernels measured here")
    return [*find_build_folders(cache.root), *timings]


def _list_doomed(
    cache: LocalCache, selection: _Selection, folders: Sequence[UnusedFolder], screen: Screen
) -> int:
    """Say what --yes would delete."""
    doomed = [
        file.path
        for file in cache.iter_entries()
        # Broken files always go: no look-up can use them.
        if isinstance(file, BrokenFile) or selection.includes(file.entry.region_key)
    ]
    screen.line("\n".join(map(str, doomed)))
    screen.line(
        f"{text.count_text(len(doomed), 'file')} would be deleted (broken ones always are); add --yes to do it"
    )
    _remove_folders(folders, False, screen)
    screen.json({"would_delete": [*doomed, *(folder.path for folder in folders)], "deleted": []})
    return 0


def _delete(
    cache: LocalCache, selection: _Selection, folders: Sequence[UnusedFolder], screen: Screen
) -> int:
    """Delete the selected entries with their quarantines, and `folders`. Exit code 1 if one stayed."""
    # Entries first, then the quarantine: a candidate must not run again in between.
    purged = cache.purge(
        # None means decision records too.
        None if selection.everything else lambda entry: selection.includes(entry.region_key)
    )
    # A quarantine without its entry would hold back a candidate that a later search validates anew.
    lift_quarantine(cache.root, lambda record: selection.includes(record.region_key))
    for failed in purged.failed:
        screen.problem(f"{failed.path} stays: {failed.reason}")
    screen.line(
        f"deleted from {cache.root}: {text.count_text(len(purged.entries), 'entry', 'entries')}, "
        f"{text.count_text(len(purged.records), 'decision record')}, {text.count_text(len(purged.leftovers), 'leftover')}"
    )
    removed = _remove_folders(folders, True, screen)
    paths = [*purged.entries, *purged.records, *purged.leftovers, *(f.path for f in removed)]
    screen.json({"would_delete": [], "deleted": paths})
    return 1 if purged.failed or len(removed) < len(folders) else 0


def _require_known_keys(cache: LocalCache, starts: Sequence[str]) -> None:
    """Raises SettingError for the start of a key that fits no entry and nothing in quarantine: a
    misspelt key is no success.
    """
    if not starts:
        return
    region_keys = {
        # A broken file still has its key as its name, so it can be purged by key.
        file.path.stem if isinstance(file, BrokenFile) else file.entry.region_key
        for file in cache.iter_entries()
    }
    # A key may be in quarantine only, its entry deleted before.
    region_keys |= {record.region_key for record in list_quarantined([cache.root])}
    for start in starts:
        if not any(key.startswith(start) for key in region_keys):
            raise SettingError("KEY", start, "the start of a key of `cudal1 list`")


def _lift_quarantine(
    cache: LocalCache, starts: tuple[str, ...], confirmed: bool, screen: Screen
) -> int:
    """Lift quarantines: of the keys named, or all."""

    def is_selected(record: QuarantineRecord) -> bool:
        return not starts or record.region_key.startswith(starts)

    quarantined = [record for record in list_quarantined([cache.root]) if is_selected(record)]
    for record in quarantined:
        screen.line(f"{record.region_key[:12]}: {record.reason} ({record.at or 'time unknown'})")
    lifted = lift_quarantine(cache.root, is_selected) if confirmed else ()
    # A running process has read the quarantine once and does not look again.
    effect = (
        "lifted; processes that run keep them until they end"
        if confirmed
        else "would be lifted; add --yes to do it"
    )
    screen.line(
        f"{text.count_text(len(lifted) if confirmed else len(quarantined), 'quarantine')} {effect}"
    )
    screen.json(
        {"would_lift": [] if confirmed else quarantined, "lifted": quarantined if confirmed else []}
    )
    return 0


def _purge_unused(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Delete folders that nothing leads to any more; the line says what was freed. Exit code 1 if one
    stayed.
    """
    # Folders hold entries of many keys, so a key beside --unused would be ignored.
    if args.key or args.broken:
        raise SettingError(
            "--unused",
            " ".join(args.key) or "--broken",
            "nothing beside it: it deletes whole folders, no entries",
        )
    folders = list(find_unused(settings.cache_dir, settings.hub))
    removed = _remove_folders(folders, args.yes, screen)
    summary = f"{text.count_text(len(removed), 'folder')} with {text.size(sum(folder.size_bytes for folder in removed))}"
    screen.line(f"{summary} {'freed' if args.yes else 'would be freed; add --yes to do it'}")
    paths = [folder.path for folder in removed]
    freed = sum(folder.size_bytes for folder in removed) if args.yes else 0
    screen.json(
        {
            "would_delete": [] if args.yes else paths,
            "deleted": paths if args.yes else [],
            "freed_bytes": freed,
        }
    )
    return 1 if len(removed) < len(folders) else 0


def _remove_folders(
    folders: Sequence[UnusedFolder], confirmed: bool, screen: Screen
) -> list[UnusedFolder]:
    """Name each folder and, if `confirmed`, delete it; those that went, or would go."""
    removed = []
    for folder in folders:
        screen.line(f"{folder.path}: {folder.why} ({text.size(folder.size_bytes)})")
        # A folder that cannot be deleted is named, and the others still go.
        if confirmed and (reason := remove_folder(folder)):
            screen.problem(f"{folder.path} stays: {reason}")
        else:
            removed.append(folder)
    return removed
