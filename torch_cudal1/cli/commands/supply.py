"""`cudal1 lock`, `export`, `import` and `coverage`: what a deployment is built with, carried and
checked as files.

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
from torch_cudal1.api.recording.replay import RecordedCall, in_mode, read_recording, recorded_calls
from torch_cudal1.cli.commands import device
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import ProgressCallback, Screen
from torch_cudal1.core.errors import NotLowerableError, SettingError, SupplyError, TargetError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import contract_for, target_for
from torch_cudal1.graph.captured import captured_regions
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.bundle.bundle_file import write_bundle
from torch_cudal1.store.bundle.coverage import Coverage, Deployment, Wanted, coverage_of
from torch_cudal1.store.bundle.imported import import_bundle
from torch_cudal1.store.bundle.lockfile import (
    Difference,
    Lock,
    differences,
    lock_of,
    read_lock,
    write_lock,
)
from torch_cudal1.store.cache.inventory import Held, Inventory, take_inventory
from torch_cudal1.store.cache.local_cache import Broken, Found
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.trust_policy import Refused, Rules, Sealed, Vouched, standing

__all__ = ["coverage", "export", "import_", "lock"]

_FOUND_WRONG = 1
_COLUMNS = ("source", "on", "region", "status", "runs", "at least", "why")


def lock(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Write the lock, or compare it with the cache (--check). Exit code 1 for a difference, or a
    region that is not decided.
    """
    if args.check:
        if args.target or args.family:
            raise SettingError(
                "TARGET",
                " ".join([*args.target, *args.family]),
                "nothing beside --check: the lock says what it is of",
            )
        return _check(args.lock, settings, screen)
    with screen.progress() as progress:
        inventory = _inventory(settings, screen, progress)
        wanted = list(_regions_of(args.target, args, progress))
    keys = {key for one in wanted for key in one.keys} if wanted else None
    contract = contract_for(settings)
    chosen = inventory.only(keys, args.family or None, contract if wanted else None)
    families = (
        args.family
        or sorted({held.position.family for held in chosen.entries})
        or [_family_here(args)]
    )
    rows = coverage_of(
        wanted, [Deployment(family, contract) for family in families], chosen, cache_for(settings)
    )
    missing = [one for one in rows if not one.served]
    screen.json({"lock": args.lock, "missing": missing, "written": not missing, **_summary(chosen)})
    if missing:
        screen.table(_COLUMNS, [_row(one) for one in missing])
        screen.problem(
            f"{text.counted(len(missing), 'region')} not decided, so no lock was written; run `cudal1 warmup` there first"
        )
        return _FOUND_WRONG
    write_lock(
        lock_of(chosen, families=args.family, targets={one.source: one.keys for one in wanted}),
        args.lock,
    )
    screen.line(f"{args.lock}: {_counts(chosen)}")
    return _FOUND_WRONG if inventory.broken else 0


def export(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Write a bundle with the entries asked for and the aliases that lead to them. Exit code 1 if
    something could not be taken.
    """
    with screen.progress() as progress:
        inventory = _inventory(settings, screen, progress)
        pinned = read_lock(args.lock) if args.lock else None
        chosen = inventory.only(_keys(args.key, inventory), args.family or None)
        if pinned is not None:
            chosen = _exactly(pinned, args.lock, chosen)
        if not chosen.entries:
            raise SettingError(
                "KEY",
                " ".join(args.key) or "(all)",
                f"at least one entry of `cudal1 list` in {settings.cache_dir}",
            )
        progress(f"writing {args.bundle}", None)
        manifest = write_bundle(args.bundle, chosen)
    screen.line(
        f"{args.bundle}: {_counts(chosen)}, {text.size(args.bundle.stat().st_size)}; bundle {manifest.digest[:16]}"
    )
    screen.json(
        {
            "bundle": args.bundle,
            "digest": manifest.digest,
            "files": manifest.members,
            **_summary(chosen),
        }
    )
    return _FOUND_WRONG if inventory.broken else 0


def import_(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Take a bundle in, or refuse it and change nothing. Exit code 1 for a bundle that breaks a
    rule.
    """
    with screen.progress() as progress:
        done = import_bundle(args.bundle, settings.cache_dir, progress)
    entries, aliases = (
        text.counted(done.entries, "entry", "entries"),
        text.counted(done.aliases, "alias", "aliases"),
    )
    how = (
        "was there already"
        if done.already
        else f"{entries}, {aliases}, {text.size(done.size_bytes)}"
    )
    screen.line(f"{done.root}: {how}; for {', '.join(done.families)}")
    if unsigned := _not_vouched_for(done.root, settings):
        told = f"{text.counted(unsigned, 'entry', 'entries')} without a signature that counts here: not used before `cudal1 warmup`"
        screen.line(
            f"{told} has judged them; `cudal1 sign` before `export` and a list of publishers here spare that"
        )
    screen.json(done)
    return 0


def coverage(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """What TARGETs or locks will have on each family. Exit code 1 if a region will have no decision
    there.
    """
    with screen.progress() as progress:
        inventory = _inventory(settings, screen, progress)
        wanted = list(_wanted(args, progress))
        families = (
            args.family
            or sorted({held.position.family for held in inventory.entries})
            or [_family_here(args)]
        )
        contract = contract_for(settings)
        places = [
            Deployment(family, contract, args.sku or "", args.torch or "") for family in families
        ]
        rows = coverage_of(wanted, places, inventory, cache_for(settings))
    screen.table(_COLUMNS, [_row(one) for one in rows])
    missing = sum(not one.served for one in rows)
    regions = sum(bool(one.key) for one in rows)
    screen.line(
        f"{regions - missing} of {text.counted(regions, 'region')} served; {missing} missing"
    )
    screen.json({"coverage": rows, "missing": missing, "served": regions - missing})
    if missing:
        screen.problem(
            f"{text.counted(missing, 'region')} without a usable decision; run `cudal1 warmup` on such a machine"
        )
    return _FOUND_WRONG if missing else 0


def _not_vouched_for(root: Path, settings: Settings) -> int:
    found = (
        one
        for one in cache_for(settings).entries()
        if isinstance(one, Found) and one.path.is_relative_to(root)
    )
    return sum(not isinstance(one.standing, Vouched) for one in found)


def _check(path: Path, settings: Settings, screen: Screen) -> int:
    pinned = read_lock(path)
    with screen.progress() as progress:
        inventory = _inventory(settings, screen, progress)
    found = differences(pinned, inventory)
    if found:
        screen.table(("what", "on", "key", "region", "detail"), [_difference(one) for one in found])
        screen.problem(f"{path} and the cache differ in {text.counted(len(found), 'place')}")
    else:
        screen.line(f"{path}: {text.counted(len(pinned.entries), 'entry', 'entries')} as locked")
    screen.json(
        {
            "lock": path,
            "differences": found,
            "entries": len(pinned.entries),
            "aliases": len(pinned.aliases),
        }
    )
    return _FOUND_WRONG if found else 0


def _inventory(settings: Settings, screen: Screen, progress: ProgressCallback) -> Inventory:
    """What the folders hold, without what is broken or revoked; that is told, and is among `broken`
    of the answer.
    """
    progress("reading entries", None)
    found, rules = take_inventory(cache_for(settings)), Rules.of(settings)
    revoked = {
        held: reason
        for held in (*found.entries, *found.aliases)
        if (reason := _revoked(held, rules))
    }
    out = (*found.broken, *(Broken(held.path, reason) for held, reason in revoked.items()))
    for broken in out:
        screen.problem(f"{broken.path} is left out: {broken.reason}")
    entries, aliases = (
        tuple(one for one in held if one not in revoked) for held in (found.entries, found.aliases)
    )
    return Inventory(entries, aliases, out)


def _revoked(held: Held, rules: Rules) -> str:
    """Why `held` must not be used anywhere; "" if no list says so. Whether somebody vouches for it
    is asked where it is used.
    """
    program = held.content.choice.program if isinstance(held.content, Entry) else None
    stands = standing(
        Sealed("alias" if held.position.is_alias else "entry", held.digest, (), program),
        "own",
        rules,
    )
    return stands.reason if isinstance(stands, Refused) else ""


def _regions_of(
    names: Sequence[str], args: argparse.Namespace, progress: ProgressCallback
) -> Iterator[Wanted]:
    """The regions of each TARGET or of each recorded call of it, as `accelerate` would find them;
    one target in memory.
    """
    chosen = device.choose(args.device) if names else ""
    recording = read_recording(args.recorded) if args.recorded is not None else None
    for name in (single for target in names for single in targets.expand(target)):
        progress(f"tracing {name}", None)
        (loaded,) = targets.load(name, device=chosen)
        targets.try_call(loaded)
        if recording is None:
            yield _traced(name, loaded.module, loaded.inputs, args.training)
            continue
        met: Counter[str] = Counter()
        for call in recorded_calls(loaded, recording):
            if call.problem:
                raise TargetError(call.loaded.name, call.problem)
            # without the number of calls: a lock must not change with it
            label = f"{name} ({_form_of(call)})"
            met[label] += 1
            with in_mode(call):
                label += f" #{met[label]}" if met[label] > 1 else ""
                yield _traced(label, call.loaded.module, call.loaded.inputs, call.mode.grad)


def _traced(name: str, module: torch.nn.Module, inputs: Any, training: bool) -> Wanted:
    """What one call of the module needs; `inputs` by place, or by name."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        with torch.set_grad_enabled(training):
            regions = captured_regions(module, args, kwargs)
    except NotLowerableError as problem:
        return Wanted(name, (), left_out=f"the module's own forward runs: {problem.reason}")
    return Wanted(
        name, tuple(region.key for region in regions), tuple(region.name for region in regions)
    )


def _form_of(call: RecordedCall) -> str:
    tensors = (
        leaf for leaf in pytree.tree_leaves(call.loaded.inputs) if isinstance(leaf, torch.Tensor)
    )
    shapes = ", ".join(
        f"{'x'.join(map(str, one.shape)) or 'scalar'} {str(one.dtype).removeprefix('torch.')}"
        for one in tensors
    )
    return shapes + (", grad" if call.mode.grad else "")


def _wanted(args: argparse.Namespace, progress: ProgressCallback) -> Iterator[Wanted]:
    """Locks as they are, TARGETs traced."""
    for name in args.target:
        if not name.endswith(".lock"):
            yield from _regions_of([name], args, progress)
            continue
        pinned = read_lock(Path(name))
        everything = tuple(dict.fromkeys(entry.key for entry in pinned.entries))
        names = {entry.key: entry.region for entry in pinned.entries}
        for source, keys in (pinned.targets or {name: everything}).items():
            yield Wanted(
                source,
                keys,
                tuple(names.get(key, "") for key in keys),
                is_call=bool(pinned.targets),
            )


def _keys(starts: Sequence[str], inventory: Inventory) -> set[str] | None:
    """The keys that `starts` name; None for all. Raises SettingError for a start that fits nothing."""
    known = {held.position.name for held in inventory.entries}
    for start in starts:
        if not any(key.startswith(start) for key in known):
            raise SettingError("KEY", start, "the start of a key of `cudal1 list`; it fits none")
    return {key for key in known if key.startswith(tuple(starts))} if starts else None


def _exactly(pinned: Lock, path: Path, inventory: Inventory) -> Inventory:
    """What the lock names and nothing else. Raises SupplyError where the cache lacks some of it."""
    lacking = [one for one in differences(pinned, inventory) if one.kind != "extra"]
    if lacking:
        first = f"{lacking[0].kind}: {lacking[0].name} {lacking[0].key[:12]} on {lacking[0].family}"
        found = f"{len(lacking)} of what it names cannot be exported ({first}); see `cudal1 lock --check`"
        raise SupplyError(path, "lock", found)
    named = {one.digest for one in pinned.entries} | {one.digest for one in pinned.aliases}
    entries = tuple(held for held in inventory.entries if held.digest in named)
    return Inventory(
        entries, tuple(held for held in inventory.aliases if held.digest in named), inventory.broken
    )


def _family_here(args: argparse.Namespace) -> str:
    return target_for(torch.device(device.choose(args.device))).family


def _counts(inventory: Inventory) -> str:
    entries, aliases = (len(held) for held in (inventory.entries, inventory.aliases))
    families = sorted({held.position.family for held in inventory.entries})
    counted = f"{text.counted(entries, 'entry', 'entries')} and {text.counted(aliases, 'alias', 'aliases')}"
    return f"{counted} for {', '.join(families) or 'no target'}"


def _summary(inventory: Inventory) -> dict[str, object]:
    families = sorted({held.position.family for held in inventory.entries})
    return {
        "entries": len(inventory.entries),
        "aliases": len(inventory.aliases),
        "families": families,
    }


def _difference(one: Difference) -> list[str]:
    return [one.kind, one.family, one.key[:12], one.name or text.ABSENT, one.detail]


def _row(one: Coverage) -> list[str]:
    gain = text.speedup(one.at_least)
    return [
        one.source,
        one.family,
        one.name or one.key[:12] or text.ABSENT,
        one.status,
        one.runs or text.ABSENT,
        gain,
        one.detail,
    ]
