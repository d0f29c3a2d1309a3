"""`cudal1 lock`, `export`, `import` and `coverage`: pin, carry and check a deployment's entries as
files.

`lock` without `--check` and `coverage` of a TARGET trace the user's module to learn its regions;
everything else reads and writes files only. Nothing here measures, builds or runs a kernel, and
nothing opens a connection.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_cudal1.api import targets
from torch_cudal1.api.recording.replay import (
    RecordedCall,
    enter_recorded_modes,
    list_recorded_calls,
    read_recording,
)
from torch_cudal1.cli.commands import device
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import ProgressCallback, Screen
from torch_cudal1.core.errors import NotLowerableError, SettingError, SupplyError, TargetError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import contract_for, target_for
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Entry
from torch_cudal1.search.by_blocks import find_blocks_to_tune, list_block_regions
from torch_cudal1.store.bundle.bundle_file import write_bundle
from torch_cudal1.store.bundle.coverage import Coverage, Deployment, Requirement, report_coverage
from torch_cudal1.store.bundle.imported import import_bundle
from torch_cudal1.store.bundle.lockfile import (
    Lock,
    LockDifference,
    diff_lock,
    make_lock,
    read_lock,
    write_lock,
)
from torch_cudal1.store.cache.inventory import CacheFile, Inventory, take_inventory
from torch_cudal1.store.cache.local_cache import BrokenFile, EntryFile
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.trust_policy import (
    Forbidden,
    Rules,
    SignedContent,
    Vouched,
    decide_standing,
)

__all__ = ["coverage", "export", "import_", "lock"]

_FOUND_WRONG = 1
_COLUMNS = ("source", "on", "region", "status", "runs", "at least", "why")


def lock(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Write the lock, or compare it with the cache (--check). Exit code 1 for a difference, or a
    region that is not decided.
    """
    if args.check:
        # The lock itself says what it is of; other targets beside it would be ignored.
        if args.target or args.family:
            raise SettingError(
                "TARGET",
                " ".join([*args.target, *args.family]),
                "nothing beside --check: the lock says what it is of",
            )
        return _check_lock(args.lock, settings, screen)
    with screen.progress() as progress:
        inventory = _read_inventory(settings, screen, progress)
        targets = list(_iter_regions(args.target, args, progress))
    # No targets: None selects every key.
    keys = {key for row in targets for key in row.keys} if targets else None
    # A lock of targets is of one precision: two entries of a region would not say which one is
    # used.
    contract = contract_for(settings)
    # Without targets everything in the cache is locked, under whatever contract it was made.
    chosen = inventory.select(keys, args.family or None, contract if targets else None)
    families = (
        args.family
        or sorted({file.cache_path.family for file in chosen.entries})
        # An empty cache has no families, and a lock of nothing must be reported as missing.
        or [_find_own_family(args)]
    )
    rows = report_coverage(
        targets, [Deployment(family, contract) for family in families], chosen, cache_for(settings)
    )
    missing = [row for row in rows if not row.served]
    screen.json(
        {"lock": args.lock, "missing": missing, "written": not missing, **_format_summary(chosen)}
    )
    # A lock with holes would let a deployment start that searches, or runs baselines, in
    # production.
    if missing:
        screen.table(_COLUMNS, [_make_row(row) for row in missing])
        screen.problem(
            f"{text.count_text(len(missing), 'region')} not decided, so no lock was written; run `cudal1 warmup` there first"
        )
        return _FOUND_WRONG
    write_lock(
        make_lock(chosen, families=args.family, targets={row.source: row.keys for row in targets}),
        args.lock,
    )
    screen.line(f"{args.lock}: {_count_text(chosen)}")
    # The lock is whole, but a file was left out of the cache that it was made from.
    return _FOUND_WRONG if inventory.broken else 0


def export(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Write a bundle with the entries asked for and the decision records that lead to them. Exit
    code 1 if something could not be taken.
    """
    with screen.progress() as progress:
        inventory = _read_inventory(settings, screen, progress)
        pinned = read_lock(args.lock) if args.lock else None
        chosen = inventory.select(_select_keys(args.key, inventory), args.family or None)
        # After the choice of keys and families: what the lock names must all be among them.
        if pinned is not None:
            chosen = _select_locked(pinned, args.lock, chosen)
        # An empty bundle would be imported with success and serve nothing.
        if not chosen.entries:
            raise SettingError(
                "KEY",
                " ".join(args.key) or "(all)",
                f"at least one entry of `cudal1 list` in {settings.cache_dir}",
            )
        progress(f"writing {args.bundle}", None)
        manifest = write_bundle(args.bundle, chosen)
    screen.line(
        f"{args.bundle}: {_count_text(chosen)}, {text.size(args.bundle.stat().st_size)}; bundle {manifest.digest[:16]}"
    )
    screen.json(
        {
            "bundle": args.bundle,
            "digest": manifest.digest,
            "files": manifest.members,
            **_format_summary(chosen),
        }
    )
    return _FOUND_WRONG if inventory.broken else 0


def import_(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Take a bundle in, or refuse it and change nothing. Exit code 1 for a bundle that breaks a
    rule.
    """
    with screen.progress() as progress:
        # Beside the cache, never into it: entries made here win over imported ones.
        imported = import_bundle(args.bundle, settings.cache_dir, progress)
    entries, records = (
        text.count_text(imported.entries, "entry", "entries"),
        text.count_text(imported.records, "decision record"),
    )
    how = (
        "was there already"
        if imported.already
        else f"{entries}, {records}, {text.size(imported.size_bytes)}"
    )
    screen.line(f"{imported.root}: {how}; for {', '.join(imported.families)}")
    # Said at once: the user would otherwise wonder why an imported entry is not used.
    if unsigned := _count_unsigned(imported.root, settings):
        count = text.count_text(unsigned, "entry", "entries")
        unsigned_entries = (
            f"{count} without a signature that counts here: not used before `cudal1 warmup`"
        )
        screen.line(
            f"{unsigned_entries} has validated them; `cudal1 sign` before `export` and a list of publishers here spare that"
        )
    screen.json(imported.to_json())
    return 0


def coverage(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """What TARGETs or locks will have on each family. Exit code 1 if a region will have no decision
    there.
    """
    with screen.progress() as progress:
        inventory = _read_inventory(settings, screen, progress)
        targets = list(_find_requirements(args, progress))
        families = (
            args.family
            or sorted({file.cache_path.family for file in inventory.entries})
            or [_find_own_family(args)]
        )
        contract = contract_for(settings)
        deployments = [
            Deployment(family, contract, args.sku or "", args.torch or "") for family in families
        ]
        rows = report_coverage(targets, deployments, inventory, cache_for(settings))
    screen.table(_COLUMNS, [_make_row(row) for row in rows])
    missing = sum(not row.served for row in rows)
    regions = sum(bool(row.key) for row in rows)
    screen.line(
        f"{regions - missing} of {text.count_text(regions, 'region')} served; {missing} missing"
    )
    screen.json({"coverage": rows, "missing": missing, "served": regions - missing})
    if missing:
        screen.problem(
            f"{text.count_text(missing, 'region')} without a usable decision; run `cudal1 warmup` on such a machine"
        )
    # For a build script: a deployment with holes must fail before it is shipped.
    return _FOUND_WRONG if missing else 0


def _count_unsigned(root: Path, settings: Settings) -> int:
    entries = (
        entry
        for entry in cache_for(settings).iter_entries()
        if isinstance(entry, EntryFile) and entry.path.is_relative_to(root)
    )
    return sum(not isinstance(entry.standing, Vouched) for entry in entries)


def _check_lock(path: Path, settings: Settings, screen: Screen) -> int:
    pinned = read_lock(path)
    with screen.progress() as progress:
        inventory = _read_inventory(settings, screen, progress)
    deviations = diff_lock(pinned, inventory)
    if deviations:
        screen.table(
            ("what", "on", "key", "region", "detail"),
            [_make_difference_row(deviation) for deviation in deviations],
        )
        screen.problem(
            f"{path} and the cache differ in {text.count_text(len(deviations), 'place')}"
        )
    else:
        screen.line(f"{path}: {text.count_text(len(pinned.entries), 'entry', 'entries')} as locked")
    screen.json(
        {
            "lock": path,
            "differences": deviations,
            "entries": len(pinned.entries),
            "aliases": len(pinned.records),
        }
    )
    return _FOUND_WRONG if deviations else 0


def _read_inventory(settings: Settings, screen: Screen, progress: ProgressCallback) -> Inventory:
    """What the folders hold, without what is broken or revoked; each of those is reported, and is
    among `broken` of the answer.
    """
    progress("reading entries", None)
    contents, rules = take_inventory(cache_for(settings)), Rules.of(settings)
    # What was revoked is neither locked nor exported: it must not reach other machines.
    revoked = {
        file: forbidden.reason
        for file in (*contents.entries, *contents.records)
        if (forbidden := _find_revocation(file, rules))
    }
    # Revoked files are reported like broken ones: both are missing from what is locked or exported.
    out = (*contents.broken, *(BrokenFile(file.path, reason) for file, reason in revoked.items()))
    for broken in out:
        screen.problem(f"{broken.path} is left out: {broken.reason}")
    entries, records = (
        tuple(file for file in file if file not in revoked)
        for file in (contents.entries, contents.records)
    )
    return Inventory(entries, records, out)


def _find_revocation(file: CacheFile, rules: Rules) -> Forbidden | None:
    """Why `file` must not be used anywhere, if a list says so. Whether a publisher vouches for it
    is asked where it is used.
    """
    program = file.content.choice.program if isinstance(file.content, Entry) else None
    stands = decide_standing(
        # Signatures are left out: whether a publisher vouches for a file is a matter of the machine
        # that uses it. A revocation holds everywhere. "alias" is the name on disk of a decision
        # record.
        SignedContent("alias" if file.cache_path.is_record else "entry", file.digest, (), program),
        "own",
        rules,
    )
    return stands if isinstance(stands, Forbidden) else None


def _iter_regions(
    names: Sequence[str], args: argparse.Namespace, progress: ProgressCallback
) -> Iterator[Requirement]:
    """The regions of each TARGET or of each recorded call of it, as `accelerate` would find them;
    one target in memory.
    """
    # Only asked where something is traced: locks need no GPU.
    chosen = device.choose(args.device) if names else ""
    recording = read_recording(args.recorded) if args.recorded is not None else None
    for name in (single for target in names for single in targets.expand(target)):
        progress(f"tracing {name}", None)
        # One target at a time, so that a folder of large models needs the memory of one.
        (loaded,) = targets.load(name, device=chosen)
        # Inputs that do not fit are the target's problem, and are reported as such.
        targets.try_call(loaded)
        if recording is None:
            yield _trace_requirements(name, loaded.module, loaded.inputs, args.training)
            continue
        met: Counter[str] = Counter()
        for call in list_recorded_calls(loaded, recording):
            if call.problem:
                raise TargetError(call.loaded.name, call.problem)
            # The label has no number of calls: a lock must not change with the traffic.
            label = f"{name} ({_describe_call(call)})"
            # Two recorded calls may have the same shapes and differ in a flag.
            met[label] += 1
            with enter_recorded_modes(call):
                label += f" #{met[label]}" if met[label] > 1 else ""
                yield _trace_requirements(
                    label, call.loaded.module, call.loaded.inputs, call.mode.grad
                )


def _trace_requirements(
    name: str, module: torch.nn.Module, inputs: Any, training: bool
) -> Requirement:
    """What one call of the module needs; `inputs` by place, or by name."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        # A training step has other regions than inference, with keys of their own.
        with torch.set_grad_enabled(training):
            regions = capture_regions(module, args, kwargs)
    # Such a call needs no decision: the module's own forward runs, and nothing is missing.
    except NotLowerableError as problem:
        return Requirement(name, (), left_out=f"the module's own forward runs: {problem.reason}")
    blocks = {
        region.key: [(block.key, count) for block, count in list_block_regions(region, partition)]
        for region in regions
        if (partition := find_blocks_to_tune(region)) is not None
    }
    return Requirement(
        name,
        tuple(region.key for region in regions),
        tuple(region.name for region in regions),
        blocks=blocks,
    )


def _describe_call(call: RecordedCall) -> str:
    tensors = (
        leaf for leaf in pytree.tree_leaves(call.loaded.inputs) if isinstance(leaf, torch.Tensor)
    )
    shapes = ", ".join(
        f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors
    )
    return shapes + (", grad" if call.mode.grad else "")


def _find_requirements(
    args: argparse.Namespace, progress: ProgressCallback
) -> Iterator[Requirement]:
    """Locks as they are, TARGETs traced."""
    for name in args.target:
        if not name.endswith(".lock"):
            yield from _iter_regions([name], args, progress)
            continue
        pinned = read_lock(Path(name))
        all_keys = tuple(dict.fromkeys(entry.key for entry in pinned.entries))
        names = {entry.key: entry.region for entry in pinned.entries}
        # A lock of a whole cache has no targets: it counts as one source.
        for source, keys in (pinned.targets or {name: all_keys}).items():
            yield Requirement(
                source,
                keys,
                tuple(names.get(key, "") for key in keys),
                is_call=bool(pinned.targets),
            )


def _select_keys(starts: Sequence[str], inventory: Inventory) -> set[str] | None:
    """The keys that `starts` name; None for all. Raises SettingError for a start that fits
    nothing.
    """
    region_keys = {file.cache_path.name for file in inventory.entries}
    for start in starts:
        # A misspelt key must not end in a smaller bundle.
        if not any(key.startswith(start) for key in region_keys):
            raise SettingError("KEY", start, "the start of a key of `cudal1 list`; it fits none")
    return {key for key in region_keys if key.startswith(tuple(starts))} if starts else None


def _select_locked(pinned: Lock, path: Path, inventory: Inventory) -> Inventory:
    """What the lock names and nothing else. Raises SupplyError where the cache lacks some of it."""
    # Entries beyond the lock are simply not exported; missing or changed ones would break its
    # promise.
    lacking = [item for item in diff_lock(pinned, inventory) if item.kind != "extra"]
    if lacking:
        first = f"{lacking[0].kind}: {lacking[0].name} {lacking[0].key[:12]} on {lacking[0].family}"
        problem = f"{len(lacking)} of what it names cannot be exported ({first}); see `cudal1 lock --check`"
        raise SupplyError(path, "lock", problem)
    # By digest, not by key: an entry that was replaced since has the same key.
    named = {item.digest for item in pinned.entries} | {item.digest for item in pinned.records}
    entries = tuple(file for file in inventory.entries if file.digest in named)
    return Inventory(
        entries, tuple(file for file in inventory.records if file.digest in named), inventory.broken
    )


def _find_own_family(args: argparse.Namespace) -> str:
    return target_for(torch.device(device.choose(args.device))).family


def _count_text(inventory: Inventory) -> str:
    entries, records = (len(file) for file in (inventory.entries, inventory.records))
    families = sorted({file.cache_path.family for file in inventory.entries})
    counts = f"{text.count_text(entries, 'entry', 'entries')} and {text.count_text(records, 'decision record')}"
    return f"{counts} for {', '.join(families) or 'no target'}"


def _format_summary(inventory: Inventory) -> dict[str, object]:
    families = sorted({file.cache_path.family for file in inventory.entries})
    return {
        "entries": len(inventory.entries),
        "aliases": len(inventory.records),
        "families": families,
    }


def _make_difference_row(difference: LockDifference) -> list[str]:
    return [
        difference.kind,
        difference.family,
        difference.key[:12],
        difference.name or text.ABSENT,
        difference.detail,
    ]


def _make_row(row: Coverage) -> list[str]:
    gain = text.speedup(row.at_least)
    return [
        row.source,
        row.family,
        row.name or row.key[:12] or text.ABSENT,
        row.status,
        row.runs or text.ABSENT,
        gain,
        row.detail,
    ]
