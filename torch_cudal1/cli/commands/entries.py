"""`cudal1 list`, `show`, `verify`, `purge`: the entries of the cache, for people and scripts.

It reads and deletes files through `store.cache.local_cache` only; it runs nothing that an entry
holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_cudal1.cli.commands.signing import (
    bad_signatures,
    list_problems,
    unchecked_signatures,
    vouching,
)
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.cache.build_files import kept_under, timings_home
from torch_cudal1.store.cache.gc import Unused, compiled, remove, unused, whole
from torch_cudal1.store.cache.local_cache import Broken, Found, LocalCache
from torch_cudal1.store.cache.quarantine import Quarantined, lift, records
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.trust_policy import Refused, Vouched

__all__ = ["list_entries", "purge", "show", "verify"]


def list_entries(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """One row an entry. Exit code 0, also for an empty cache."""
    found = list(_cache(settings).entries())
    whole = [f for f in found if isinstance(f, Found)]
    held = _held(settings)
    rows = [
        [
            f.entry.region_key[:12],
            f.entry.region_name or text.ABSENT,
            f"{f.entry.target.sku} ({f.entry.target.arch})",
            f.entry.choice.label + _marks(f, held),
            text.speedup(f.entry.speedup),
            f.entry.contract.precision,
            vouching(f).partition(":")[0],
            text.size(f.path.stat().st_size),
            f.entry.created[:10],
        ]
        for f in whole
    ]
    if rows:
        screen.table(
            (
                "key",
                "region",
                "judged on",
                "runs",
                "at least",
                "precision",
                "vouched by",
                "size",
                "made",
            ),
            rows,
        )
    screen.line(
        f"{text.counted(len(rows), 'entry', 'entries')} in {settings.cache_dir}"
        + _broken_note(len(found) - len(whole))
    )
    if alone := [f for f in whole if f.entry.without_inductor]:
        screen.line(_tuned_alone(len(alone)))
    kernels = kept_under(settings.cache_dir)
    if kernels.count:
        screen.line(
            f"{text.counted(kernels.count, 'compiled kernel')} kept for later searches: {text.size(kernels.size_bytes)}"
        )
    told = {
        "cache_dir": settings.cache_dir,
        "entries": [_brief(f, held) for f in whole],
        "broken": _broken_json(found),
    }
    screen.json(told | {"compiled": kernels})
    return 0


def show(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """One entry with evidence and everything that was tried. Raises SettingError when `key` fits
    none or several regions.
    """
    found = _matching(settings, args.key)
    keys = sorted({f.entry.region_key for f in found})
    if len(keys) != 1:
        fits = (
            f"it fits {len(keys)}: {', '.join(key[:16] for key in keys[:6])}"
            if keys
            else "it fits none"
        )
        raise SettingError(
            "KEY", args.key, f"the start of exactly one key of `cudal1 list` ({fits})"
        )
    held = _held(settings)
    for each in found:
        _show_one(each, held, screen)
    screen.json([_whole(f, held) for f in found])
    return 0


def verify(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Read every entry: schema, digests, the Program's rules, signatures, revocations, and the
    lists that say whose count.

    Exit code 1 if any is broken, refused or carries a signature that does not fit; an entry without
    one is only counted.
    """
    cache = _cache(settings)
    with screen.progress() as progress:
        progress("reading entries", None)
        broken = cache.verify()
        found = [f for f in cache.entries() if isinstance(f, Found)]
    whole, refused = len(found), _refused(found)
    if refused:
        screen.table(("refused file", "why"), [[str(path), why] for path, why in refused])
    for problem in (problems := list_problems(settings)):
        screen.problem(problem)
    if broken:
        screen.table(("broken file", "why"), [[str(b.path), b.reason] for b in broken])
    screen.line(
        f"whole: {text.counted(whole, 'entry', 'entries')}; broken: {text.counted(len(broken), 'file')}"
        + (": `cudal1 purge --broken --yes`" if broken else "")
    )
    told = _vouched_for(found)
    screen.line("; ".join(f"{name}: {count}" for name, count in told.items()))
    alone = [
        {"path": f.path, "reason": f.entry.without_inductor}
        for f in found
        if f.entry.without_inductor
    ]
    if alone:
        screen.line(_tuned_alone(len(alone)))
    screen.json(
        {
            "whole": whole,
            "broken": [{"path": b.path, "reason": b.reason} for b in broken],
            "refused": [{"path": path, "reason": why} for path, why in refused],
            "vouched": told,
            "without_inductor": alone,
            "problems": problems,
        }
    )
    return 1 if broken or refused or problems else 0


def purge(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Delete the entries named, the broken ones, or all, each with what held its candidates in
    quarantine.

    All means what is kept for later searches too: kernels, and their times. With --quarantined only
    the quarantine goes: the entries may run again. With --unused only folders that nothing leads
    to. Without --yes it says what would go. Exit code 1 if a file or a folder stayed.
    """
    cache = LocalCache(settings.cache_dir)
    starts = tuple(args.key)
    if args.quarantined:
        return _lift(cache, starts, args.yes, screen)
    if args.unused:
        return _purge_unused(args, settings, screen)
    everything = not starts and not args.broken
    _demand_known(cache, starts)

    def named(entry: Entry) -> bool:
        return entry.region_key.startswith(starts) if starts else False

    folders = (
        [*compiled(cache.root), *whole(timings_home(cache.root), "times of kernels measured here")]
        if everything
        else []
    )
    if not args.yes:
        found = list(cache.entries())
        doomed = [f.path for f in found if everything or isinstance(f, Broken) or named(f.entry)]
        screen.line("\n".join(map(str, doomed)))
        screen.line(
            f"{text.counted(len(doomed), 'file')} would be deleted (broken ones always are); add --yes to do it"
        )
        _remove_folders(folders, False, screen)
        screen.json({"would_delete": [*doomed, *(one.path for one in folders)], "deleted": []})
        return 0
    done = cache.purge(None if everything else named)
    lift(
        cache.root,
        lambda record: everything or (bool(starts) and record.region_key.startswith(starts)),
    )
    for failed in done.failed:
        screen.problem(f"{failed.path} stays: {failed.reason}")
    screen.line(
        f"deleted from {cache.root}: {text.counted(len(done.entries), 'entry', 'entries')}, "
        f"{text.counted(len(done.aliases), 'alias', 'aliases')}, {text.counted(len(done.leftovers), 'leftover')}"
    )
    gone = _remove_folders(folders, True, screen)
    paths = [one.path for one in gone]
    screen.json(
        {"would_delete": [], "deleted": [*done.entries, *done.aliases, *done.leftovers, *paths]}
    )
    return 1 if done.failed or len(gone) < len(folders) else 0


def _demand_known(cache: LocalCache, starts: Sequence[str]) -> None:
    """Raises SettingError for the start of a key that fits no entry and nothing in quarantine: a
    misspelt key is no success.
    """
    if not starts:
        return
    known = {
        found.path.stem if isinstance(found, Broken) else found.entry.region_key
        for found in cache.entries()
    }
    known |= {record.region_key for record in records([cache.root])}
    for start in starts:
        if not any(key.startswith(start) for key in known):
            raise SettingError("KEY", start, "the start of a key of `cudal1 list`")


def _refused(found: Sequence[Found]) -> list[tuple[Path, str]]:
    """Files that are not to be used, or were altered since somebody signed them, and why."""
    refused = [(f.path, f.standing.reason) for f in found if isinstance(f.standing, Refused)]
    return refused + [(f.path, why) for f in found for why in bad_signatures(f)]


def _vouched_for(found: Sequence[Found]) -> dict[str, int]:
    """How many entries each one vouches for, nobody included."""
    names = [vouching(f).partition(":")[0] for f in found]
    told = {
        f"vouched for by {name}": names.count(name) for name in sorted(set(names) - {"REFUSED"})
    }
    unchecked = sum(map(unchecked_signatures, found))
    more = (
        {"signatures not verified (`cryptography` is not installed)": unchecked}
        if unchecked
        else {}
    )
    return {
        "signed": sum(bool(f.signatures) for f in found),
        "refused": names.count("REFUSED"),
        **told,
        **more,
    }


def _lift(cache: LocalCache, starts: tuple[str, ...], sure: bool, screen: Screen) -> int:
    """Lift quarantines: of the keys named, or all."""

    def named(record: Quarantined) -> bool:
        return not starts or record.region_key.startswith(starts)

    found = [record for record in records([cache.root]) if named(record)]
    for record in found:
        screen.line(f"{record.region_key[:12]}: {record.reason} ({record.at or 'time unknown'})")
    gone = lift(cache.root, named) if sure else ()
    told = (
        "lifted; processes that run keep them until they end"
        if sure
        else "would be lifted; add --yes to do it"
    )
    screen.line(f"{text.counted(len(gone) if sure else len(found), 'quarantine')} {told}")
    screen.json({"would_lift": [] if sure else found, "lifted": found if sure else []})
    return 0


def _purge_unused(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Delete folders that nothing leads to any more; what was freed is told. Exit code 1 if one
    stayed.
    """
    if args.key or args.broken:
        raise SettingError(
            "--unused",
            " ".join(args.key) or "--broken",
            "nothing beside it: it deletes whole folders, no entries",
        )
    found = list(unused(settings.cache_dir, settings.hub))
    gone = _remove_folders(found, args.yes, screen)
    told = (
        f"{text.counted(len(gone), 'folder')} with {text.size(sum(one.size_bytes for one in gone))}"
    )
    screen.line(f"{told} {'freed' if args.yes else 'would be freed; add --yes to do it'}")
    paths = [one.path for one in gone]
    freed = sum(one.size_bytes for one in gone) if args.yes else 0
    screen.json(
        {
            "would_delete": [] if args.yes else paths,
            "deleted": paths if args.yes else [],
            "freed_bytes": freed,
        }
    )
    return 1 if len(gone) < len(found) else 0


def _remove_folders(found: Sequence[Unused], sure: bool, screen: Screen) -> list[Unused]:
    """Name each folder and, if `sure`, delete it; those that went, or would go."""
    gone = []
    for one in found:
        screen.line(f"{one.path}: {one.why} ({text.size(one.size_bytes)})")
        if sure and (reason := remove(one)):
            screen.problem(f"{one.path} stays: {reason}")
        else:
            gone.append(one)
    return gone


def _held(settings: Settings) -> tuple[Quarantined, ...]:
    cache = _cache(settings)
    return records([cache.root, *cache.read_only])


def _why(found: Found, held: Sequence[Quarantined]) -> str:
    """Why the entry's choice must not run, "" if it may."""
    entry = found.entry
    return next(
        (record.reason for record in held if record.holds(entry.region_key, entry.choice.digest)),
        "",
    )


def _marks(found: Found, held: Sequence[Quarantined]) -> str:
    """What a reader must know of the choice beside its name."""
    marks = (
        ("quarantined", _why(found, held)),
        ("tuned without Inductor", found.entry.without_inductor),
    )
    return "".join(f" ({name})" for name, applies in marks if applies)


def _tuned_alone(count: int) -> str:
    counted = text.counted(count, "entry was", "entries were")
    return f"{counted} tuned without Inductor and never measured beside it: `cudal1 show KEY` says why, `cudal1 warmup` tries again"


def _show_one(found: Found, held: Sequence[Quarantined], screen: Screen) -> None:
    entry = found.entry
    facts = (
        ("region", f"{entry.region_name or 'unnamed'} {entry.region_key}"),
        ("runs", f"{entry.choice.label} (from {entry.choice.origin})"),
        *([("quarantined", why)] if (why := _why(found, held)) else []),
        *([("tuned without Inductor", why)] if (why := entry.without_inductor) else []),
        ("speed-up", f"at least {text.speedup(entry.speedup)} over the best baseline"),
        (
            "judged on",
            ", ".join(f"{name} {value}" for name, value in vars(entry.target).items() if value),
        ),
        ("contract", ", ".join(f"{name} {value}" for name, value in vars(entry.contract).items())),
        ("made", f"{entry.created} by torch-cudal1 {entry.package}"),
        ("judged by", _attested(entry)),
        ("vouched by", vouching(found)),
        *[("signed with", signature.key) for signature in found.signatures],
        ("digest", f"entry:{found.digest}"),
        ("", f"program:{entry.choice.program.digest}"),
        ("file", f"{found.path} ({text.size(found.path.stat().st_size)})"),
    )
    screen.table(("entry", ""), [list(fact) for fact in facts])
    screen.line("")
    checks = entry.evidence.get("checks") or ()
    if checks:
        screen.table(("check", "passed", "value", "limit", "detail"), [_check(c) for c in checks])
        screen.line("")
    if entry.tried:
        columns = ("tried", "decision", "found by", "why")
        screen.table(
            columns,
            [
                [
                    str(one.get(name) or text.ABSENT)
                    for name in ("label", "decision", "detector", "reason")
                ]
                for one in entry.tried
            ],
        )
        screen.line("")


def _attested(entry: Entry) -> str:
    """What the evidence says about its own making."""
    told = entry.evidence.get("attestation")
    return (
        ", ".join(f"{name} {value}" for name, value in told.items())
        if isinstance(told, Mapping)
        else text.ABSENT
    )


def _check(check: Any) -> list[str]:
    numbers = [
        text.ABSENT if check.get(name) is None else f"{check[name]:.3g}"
        for name in ("value", "limit")
    ]
    return [
        str(check.get("name", "")),
        "yes" if check.get("passed") else "NO",
        *numbers,
        str(check.get("detail") or ""),
    ]


def _cache(settings: Settings) -> LocalCache:
    return cache_for(settings)


def _matching(settings: Settings, start: str) -> list[Found]:
    return [
        f
        for f in _cache(settings).entries()
        if isinstance(f, Found) and f.entry.region_key.startswith(start)
    ]


def _broken_note(count: int) -> str:
    return f"; {text.counted(count, 'file')} cannot be read (see `cudal1 verify`)" if count else ""


def _broken_json(found: list[Found | Broken]) -> list[dict[str, Any]]:
    return [{"path": f.path, "reason": f.reason} for f in found if isinstance(f, Broken)]


def _brief(found: Found, held: Sequence[Quarantined]) -> dict[str, Any]:
    entry = found.entry
    return {
        "key": entry.region_key,
        "region": entry.region_name,
        "target": entry.target,
        "contract": entry.contract,
        "runs": entry.choice.label,
        "quarantined": _why(found, held),
        "without_inductor": entry.without_inductor,
        "vouched_by": found.standing.by if isinstance(found.standing, Vouched) else None,
        "standing": vouching(found),
        "signatures": [signature.key for signature in found.signatures],
        "digest": found.digest,
        "origin": entry.choice.origin,
        "techniques": entry.choice.techniques,
        "speedup_at_least": entry.speedup,
        "created": entry.created,
        "path": found.path,
        "size_bytes": found.path.stat().st_size,
    }


def _whole(found: Found, held: Sequence[Quarantined]) -> dict[str, Any]:
    entry = found.entry
    more = {
        "evidence": entry.evidence,
        "tried": entry.tried,
        "program": entry.choice.program.to_json(),
    }
    return _brief(found, held) | more
