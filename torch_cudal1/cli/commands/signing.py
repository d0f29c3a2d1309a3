"""`cudal1 keys`, `sign` and `revoke`: what a platform team needs to say which kernels its machines
may run.

Keys and lists are files that the team owns; the commands write a private key, signatures into the
own cache's files, and records at the end of the revocation list. They never add to the list of
publishers: that is an editor's work, and a decision.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings, default_key_folder
from torch_cudal1.store.cache.local_cache import EntryFile, LocalCache
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.lists import (
    Publishers,
    RevokedKind,
    append_revocation,
    read_publishers,
    read_revocations,
)
from torch_cudal1.store.trust.signatures import (
    KEY_PREFIX,
    LIBRARY_MISSING,
    create_key,
    load_signer,
    parse_public,
    verify,
)
from torch_cudal1.store.trust.trust_policy import Forbidden, Vouched, find_list_problems

__all__ = [
    "count_unchecked_signatures",
    "describe_voucher",
    "keys",
    "list_bad_signatures",
    "list_problems",
    "revoke",
    "sign",
]

_FOUND_WRONG = 1


def keys(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """`new NAME`: a key pair. `list`: both lists as they hold now; exit code 1 if one cannot be
    used.
    """
    if args.action == "new":
        return _create_key(args, settings, screen)
    # `keys list NAME` looks like a filter and would be ignored.
    if args.name or args.out:
        raise SettingError("NAME", args.name or str(args.out), "nothing beside `keys list`")
    publishers, revoked = read_publishers(settings.publishers), read_revocations(settings.revoked)
    # One list may be usable while the other is not; the problem is shown below.
    if not isinstance(publishers, Refusal):
        screen.table(("publisher", "key"), [[name, key] for key, name in publishers.names.items()])
    if not isinstance(revoked, Refusal):
        records = [
            (kind, digest, reason)
            for kind in ("entry", "program", "key")
            for digest, reason in getattr(revoked, kind).items()
        ]
        screen.table(("revoked", "what", "reason"), [list(record) for record in records])
    screen.json(
        {
            "publishers": publishers,
            "revoked": revoked,
            "problems": list_problems(settings),
        }
    )
    return _FOUND_WRONG if _show_list_problems(settings, screen) else 0


def sign(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Sign the entries named, or everything in the own cache. Exit code 1 if a file could not be
    signed or no entry was named.
    """
    cache = cache_for(settings)
    # A private key inside of a cache would travel with the cache to other machines.
    signer = load_signer(args.keyfile, keep_out_of=(cache.root, *cache.read_only))
    starts = tuple(args.key)
    revoked = read_revocations(settings.revoked)
    # Without a readable list it is not known whether this key is revoked, so nothing is signed.
    if isinstance(revoked, Refusal):
        raise SettingError(
            "revoked", str(settings.revoked), f"a list that can be used: {revoked.reason}"
        )
    # A signature by a revoked key is refused everywhere: signing would look like success.
    if reason := revoked.key.get(signer.public):
        raise SettingError("KEYFILE", str(args.keyfile), f"a key that is not revoked ({reason})")
    # Signatures are written into files of the own cache only.
    signing = cache.sign(
        signer, (lambda entry: entry.region_key.startswith(starts)) if starts else None
    )
    for failed in signing.failed:
        screen.problem(f"{failed.path} is not signed: {failed.reason}")
    # A misspelt key must not end with exit code 0.
    if starts and not (signing.files or signing.unchanged or signing.failed):
        raise SettingError(
            "KEY", " ".join(starts), f"the start of a key of `cudal1 list` in {cache.root}"
        )
    screen.line(
        f"signed with {signer.public}: {text.count_text(len(signing.files), 'file')}; "
        f"signed before: {text.count_text(len(signing.unchanged), 'file')}"
    )
    screen.json(
        {
            "key": signer.public,
            "signed": signing.files,
            "unchanged": signing.unchanged,
            "failed": _encode_failures(signing.failed),
        }
    )
    return _FOUND_WRONG if signing.failed else 0


def revoke(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Add records to the revocation list: a region's entries with their Programs, one digest, or a
    publisher's key.
    """
    # There is no default path: a list that no process reads would protect against nothing.
    if settings.revoked is None:
        raise SettingError(
            "revoked",
            None,
            "the path of the revocation list: --revoked PATH, or TORCH_CUDAL1_REVOKED",
        )
    cache = cache_for(settings)
    records = [
        record
        for argument in args.what
        for record in _find_records(argument, cache, read_publishers(settings.publishers))
    ]
    # All arguments were resolved before the first record is written: a wrong one changes nothing.
    for kind, digest, name in records:
        append_revocation(settings.revoked, kind, digest, args.reason)
        screen.line(f"revoked {kind} {digest}{name}")
    screen.line(
        f"in {settings.revoked}; it holds from the next look-up on, what a process runs already stays until it ends"
    )
    screen.json(
        {
            "list": settings.revoked,
            "revoked": [{"kind": kind, "what": digest} for kind, digest, _ in records],
        }
    )
    return 0


def describe_voucher(file: EntryFile) -> str:
    """The publisher that vouches for an entry, or why none does, in a few words."""
    if isinstance(file.standing, Vouched):
        return file.standing.by
    return (
        f"{'REFUSED' if isinstance(file.standing, Forbidden) else 'nobody'}: {file.standing.reason}"
    )


def list_bad_signatures(file: EntryFile) -> list[str]:
    """The signatures of a file that do not fit it, wherever it lies; none where the library to
    verify them is missing.
    """
    checked = (
        (signature, verify(signature, "entry", file.digest)) for signature in file.signatures
    )
    return [
        f"{signature.key[:20]}…: {bad.reason}"
        for signature, bad in checked
        # Without `cryptography` nothing is known of a signature, which is not the same as a bad
        # one.
        if bad is not None and bad.reason != LIBRARY_MISSING
    ]


def count_unchecked_signatures(file: EntryFile) -> int:
    """How many signatures of a file could not be verified at all, for want of the library."""
    answers = (verify(signature, "entry", file.digest) for signature in file.signatures)
    return sum(answer is not None and answer.reason == LIBRARY_MISSING for answer in answers)


def list_problems(settings: Settings) -> tuple[str, ...]:
    """What is wrong with the two lists of the settings."""
    return find_list_problems(cache_for(settings).rules)


def _show_list_problems(settings: Settings, screen: Screen) -> bool:
    problems_of_lists = list_problems(settings)
    for problem in problems_of_lists:
        screen.problem(problem)
    return bool(problems_of_lists)


def _create_key(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    if not args.name:
        raise SettingError("NAME", None, "the publisher's name, such as 'platform-team'")
    # Not beside the cache, which is copied to other machines.
    path: Path = args.out or default_key_folder() / f"{args.name}.pem"
    cache = cache_for(settings)
    # The key is never written below a cache folder, which is copied to other machines.
    public = create_key(args.name, path, keep_out_of=(cache.root, *cache.read_only))
    screen.line(
        # Printed as TOML for an editor: adding a publisher is a decision of a person, not of this
        # command.
        f'# The private key is {path}: keep it. For the list of publishers:\n[[publisher]]\nname = "{args.name}"\nkey = "{public}"'
    )
    screen.json({"name": args.name, "key": public, "private_key": path})
    return 0


def _find_records(
    argument: str, cache: LocalCache, publishers: Publishers | Refusal
) -> Iterator[tuple[RevokedKind, str, str]]:
    """Kind, digest or key, and a note for people. Raises SettingError for what names nothing."""
    if argument.startswith(KEY_PREFIX):
        key = parse_public(argument)
        # A shortened key would revoke nothing, and look as if it had.
        if isinstance(key, Refusal):
            raise SettingError("WHAT", argument, f"a whole public key ({key.reason})")
        # A key may be revoked although no list names it.
        name = publishers.names.get(key) if isinstance(publishers, Publishers) else None
        yield "key", key, f" of publisher {name!r}" if name else ""
        return
    kind, _, digest = argument.partition(":")
    if kind in ("entry", "program") and digest:
        yield "entry" if kind == "entry" else "program", digest, ""
        return
    files = [
        file
        for file in cache.iter_entries()
        if isinstance(file, EntryFile) and argument and file.entry.region_key.startswith(argument)
    ]
    if not files:
        raise SettingError(
            "WHAT",
            argument,
            "the start of a key of `cudal1 list`, entry:DIGEST, program:DIGEST, or a public key",
        )
    # Entry and Program both: the same kernel may be in an entry of another machine.
    for file in files:
        name = (
            f" ({file.entry.region_name or file.entry.region_key[:12]}: {file.entry.choice.label})"
        )
        yield "entry", file.digest, name
        # An entry for a baseline holds the region's own Program, which is the user's model and no
        # kernel. Revoking it would refuse every decision for that region.
        if file.entry.choice.program.digest != file.entry.region_key:
            yield "program", file.entry.choice.program.digest, name


def _encode_failures(failed: Any) -> list[dict[str, Any]]:
    return [{"path": file.path, "reason": file.reason} for file in failed]
