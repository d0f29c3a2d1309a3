"""`cudal1 list`, `show`, `verify`: the entries of the cache, for people and scripts.

It reads files through `store.cache.local_cache` only, and changes none; it runs nothing that an
entry holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_cudal1.cli.commands.signing import (
    count_unchecked_signatures,
    describe_voucher,
    list_bad_signatures,
    list_problems,
)
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.cache.build_files import count_builds
from torch_cudal1.store.cache.local_cache import BrokenFile, EntryFile, LocalCache
from torch_cudal1.store.cache.quarantine import QuarantineRecord, list_quarantined
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.trust_policy import Forbidden, Vouched

__all__ = ["list_entries", "show", "verify"]


_COLUMNS = (
    "key",
    "region",
    "validated on",
    "runs",
    "at least",
    "precision",
    "trusted by",
    "size",
    "created",
)


def list_entries(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """One row an entry. Exit code 0, also for an empty cache."""
    # All caches, also read-only ones: the user wants to see what a look-up would find.
    files = list(_cache(settings).iter_entries())
    readable = [f for f in files if isinstance(f, EntryFile)]
    # Read once for all rows: each look reads a folder.
    quarantined = _read_quarantine(settings)
    if readable:
        screen.table(_COLUMNS, [_list_row(f, quarantined) for f in readable])
    screen.line(
        f"{text.count_text(len(readable), 'entry', 'entries')} in {settings.cache_dir}"
        + _format_broken_note(len(files) - len(readable))
    )
    # Such an entry may be slower than torch.compile, which could not compile when it was tuned.
    if alone := [f for f in readable if f.entry.without_inductor]:
        screen.line(_format_without_inductor_note(len(alone)))
    # Shown because they may take more room than the entries, and `purge` frees it.
    kernels = count_builds(settings.cache_dir)
    if kernels.count:
        screen.line(
            f"{text.count_text(kernels.count, 'compiled kernel')} kept for later searches: {text.size(kernels.size_bytes)}"
        )
    content = {
        "cache_dir": settings.cache_dir,
        "entries": [_encode_entry(f, quarantined) for f in readable],
        "broken": _encode_broken(files),
    }
    screen.json(content | {"compiled": kernels})
    return 0


def show(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """One entry with evidence and everything that was tried. Raises SettingError when `key` fits
    none or several regions.
    """
    entries = _find_matching(settings, args.key)
    keys = sorted({f.entry.region_key for f in entries})
    # Several entries of one region are shown together; a start that fits two regions names neither.
    if len(keys) != 1:
        fits = (
            f"it fits {len(keys)}: {', '.join(key[:16] for key in keys[:6])}"
            if keys
            else "it fits none"
        )
        raise SettingError(
            "KEY", args.key, f"the start of exactly one key of `cudal1 list` ({fits})"
        )
    quarantined = _read_quarantine(settings)
    for each in entries:
        _show_entry(each, quarantined, screen)
    screen.json([_encode_entry_details(f, quarantined) for f in entries])
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
        readable = [f for f in cache.iter_entries() if isinstance(f, EntryFile)]
    entry_count, refused = len(readable), _list_refused(readable)
    if refused:
        screen.table(("refused file", "why"), [[str(path), why] for path, why in refused])
    # A revocation list that cannot be read means that nothing is known to be allowed.
    for problem in (problems := list_problems(settings)):
        screen.problem(problem)
    if broken:
        screen.table(("broken file", "why"), [[str(b.path), b.reason] for b in broken])
    screen.line(
        f"whole: {text.count_text(entry_count, 'entry', 'entries')}; broken: {text.count_text(len(broken), 'file')}"
        + (": `cudal1 purge --broken --yes`" if broken else "")
    )
    vouchers = _count_vouchers(readable)
    screen.line("; ".join(f"{name}: {count}" for name, count in vouchers.items()))
    alone = [
        {"path": f.path, "reason": f.entry.without_inductor}
        for f in readable
        if f.entry.without_inductor
    ]
    if alone:
        screen.line(_format_without_inductor_note(len(alone)))
    screen.json(
        {
            "whole": entry_count,
            "broken": [{"path": b.path, "reason": b.reason} for b in broken],
            "refused": [{"path": path, "reason": why} for path, why in refused],
            "vouched": vouchers,
            "without_inductor": alone,
            "problems": problems,
        }
    )
    # Unsigned entries are no error: `trust` decides what they may do.
    return 1 if broken or refused or problems else 0


def _list_refused(entries: Sequence[EntryFile]) -> list[tuple[Path, str]]:
    """Files that are not to be used, or were altered since they were signed, and why."""
    refused = [(f.path, f.standing.reason) for f in entries if isinstance(f.standing, Forbidden)]
    return refused + [(f.path, why) for f in entries for why in list_bad_signatures(f)]


def _count_vouchers(entries: Sequence[EntryFile]) -> dict[str, int]:
    """How many entries each publisher vouches for, and how many have no voucher."""
    names = [describe_voucher(f).partition(":")[0] for f in entries]
    vouchers = {
        f"vouched for by {name}": names.count(name) for name in sorted(set(names) - {"REFUSED"})
    }
    # Said apart: "not verified" must not read as "fits".
    unchecked = sum(map(count_unchecked_signatures, entries))
    more = (
        {"signatures not verified (`cryptography` is not installed)": unchecked}
        if unchecked
        else {}
    )
    return {
        "signed": sum(bool(f.signatures) for f in entries),
        "refused": names.count("REFUSED"),
        **vouchers,
        **more,
    }


def _list_row(file: EntryFile, quarantined: Sequence[QuarantineRecord]) -> list[str]:
    entry = file.entry
    return [
        # Twelve digits are enough to name an entry; every command takes the start of a key.
        entry.region_key[:12],
        entry.region_name or text.ABSENT,
        f"{entry.target.sku} ({entry.target.arch})",
        entry.choice.label + _format_remarks(file, quarantined),
        text.speedup(entry.speedup),
        entry.contract.precision,
        describe_voucher(file).partition(":")[0],
        text.size(file.path.stat().st_size),
        entry.created[:10],
    ]


def _read_quarantine(settings: Settings) -> tuple[QuarantineRecord, ...]:
    cache = _cache(settings)
    return list_quarantined([cache.root, *cache.read_only])


def _find_quarantine(
    file: EntryFile, quarantined: Sequence[QuarantineRecord]
) -> QuarantineRecord | None:
    """The record that says why the entry's choice must not run, if there is one."""
    entry = file.entry
    return next(
        (r for r in quarantined if r.holds(entry.region_key, entry.choice.digest)),
        None,
    )


def _format_remarks(file: EntryFile, quarantined: Sequence[QuarantineRecord]) -> str:
    """What a reader must know of the choice beside its name."""
    # Both change what a reader may conclude from the speed-up in the same row.
    marks = (
        ("quarantined", _find_quarantine(file, quarantined)),
        ("tuned without Inductor", file.entry.without_inductor),
    )
    return "".join(f" ({name})" for name, applies in marks if applies)


def _format_without_inductor_note(count: int) -> str:
    counted = text.count_text(count, "entry was", "entries were")
    return f"{counted} tuned without Inductor and never measured beside it: `cudal1 show KEY` says why, `cudal1 warmup` tries again"


def _show_entry(file: EntryFile, quarantined: Sequence[QuarantineRecord], screen: Screen) -> None:
    entry, record = file.entry, _find_quarantine(file, quarantined)
    facts = (
        ("region", f"{entry.region_name or 'unnamed'} {entry.region_key}"),
        ("runs", f"{entry.choice.label} (from {entry.choice.origin})"),
        *([("quarantined", record.reason)] if record is not None else []),
        *([("tuned without Inductor", why)] if (why := entry.without_inductor) else []),
        ("speed-up", f"at least {text.speedup(entry.speedup)} over the best baseline"),
        (
            "validated on",
            ", ".join(f"{name} {value}" for name, value in vars(entry.target).items() if value),
        ),
        ("contract", ", ".join(f"{name} {value}" for name, value in vars(entry.contract).items())),
        ("created", f"{entry.created} by torch-cudal1 {entry.package}"),
        ("validated by", _describe_attestation(entry)),
        ("trusted by", describe_voucher(file)),
        *[("signed with", signature.key) for signature in file.signatures],
        ("digest", f"entry:{file.digest}"),
        ("", f"program:{entry.choice.program.digest}"),
        ("file", f"{file.path} ({text.size(file.path.stat().st_size)})"),
    )
    screen.table(("entry", ""), [list(fact) for fact in facts])
    screen.line("")
    # Evidence comes from a file that another version may have written, so none of its keys is sure.
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
                    str(candidate.get(name) or text.ABSENT)
                    for name in ("label", "decision", "detector", "reason")
                ]
                for candidate in entry.tried
            ],
        )
        screen.line("")


def _describe_attestation(entry: Entry) -> str:
    """What the evidence says about its own making."""
    attestation = entry.evidence.get("attestation")
    return (
        ", ".join(f"{name} {value}" for name, value in attestation.items())
        # The attestation is part of the evidence, which another version may have written.
        if isinstance(attestation, Mapping)
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


def _find_matching(settings: Settings, start: str) -> list[EntryFile]:
    return [
        f
        for f in _cache(settings).iter_entries()
        if isinstance(f, EntryFile) and f.entry.region_key.startswith(start)
    ]


def _format_broken_note(count: int) -> str:
    return (
        f"; {text.count_text(count, 'file')} cannot be read (see `cudal1 verify`)" if count else ""
    )


def _encode_broken(files: list[EntryFile | BrokenFile]) -> list[dict[str, Any]]:
    return [{"path": f.path, "reason": f.reason} for f in files if isinstance(f, BrokenFile)]


def _encode_entry(file: EntryFile, quarantined: Sequence[QuarantineRecord]) -> dict[str, Any]:
    entry, record = file.entry, _find_quarantine(file, quarantined)
    return {
        "key": entry.region_key,
        "region": entry.region_name,
        "target": entry.target,
        "contract": entry.contract,
        "runs": entry.choice.label,
        "quarantined": "" if record is None else record.reason,
        "without_inductor": entry.without_inductor,
        "vouched_by": file.standing.by if isinstance(file.standing, Vouched) else None,
        "standing": describe_voucher(file),
        "signatures": [signature.key for signature in file.signatures],
        "digest": file.digest,
        "origin": entry.choice.origin,
        "techniques": entry.choice.techniques,
        "speedup_at_least": entry.speedup,
        "created": entry.created,
        "path": file.path,
        "size_bytes": file.path.stat().st_size,
    }


def _encode_entry_details(
    file: EntryFile, quarantined: Sequence[QuarantineRecord]
) -> dict[str, Any]:
    entry = file.entry
    details = {
        "evidence": entry.evidence,
        "tried": entry.tried,
        "program": entry.choice.program.to_json(),
    }
    return _encode_entry(file, quarantined) | details
