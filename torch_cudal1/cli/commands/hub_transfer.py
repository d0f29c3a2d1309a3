"""`cudal1 push` and `pull`: entries to and from a Hub repository.

`push` reads the writable cache and nothing that came from elsewhere; `pull` writes beside it, never
into it. The work is in `store.hub.hub_push` and `store.hub.hub_pull`; nothing here runs what an
entry holds, and tokens are the business of the Hub's library.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import target_for
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.cache import quarantine
from torch_cudal1.store.cache.inventory import Held, Inventory, take_inventory
from torch_cudal1.store.cache.local_cache import Broken, LocalCache
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.hub.hub_client import Unread
from torch_cudal1.store.hub.hub_pull import Pulled
from torch_cudal1.store.hub.hub_pull import pull as pull_from
from torch_cudal1.store.hub.hub_push import offers_of
from torch_cudal1.store.hub.hub_push import push as push_to
from torch_cudal1.store.hub.hub_source import open_hub

__all__ = ["pull", "push"]

_FOUND_WRONG = 1


def push(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """One commit with what is whole. Exit code 1 if a file was left out or the Hub did not take it;
    nothing is pushed in halves.
    """
    hub = open_hub(args.repo, settings)
    if hub.repo.is_pinned:
        raise SettingError("REPO", args.repo, "a branch to push to, not a commit")
    if screen.quiet:
        disable_progress_bars()  # the library's own
    with screen.progress() as progress:
        progress(f"reading {settings.cache_dir}", None)
        inventory, left_out = _usable(cache_for(settings).own)
        offers = offers_of(inventory, args.family or None)
        if not offers:
            raise SettingError(
                "--cache-dir",
                str(settings.cache_dir),
                "a cache with at least one whole entry to push",
            )
        progress(f"pushing {len(offers)} files to {hub.repo}", None)
        made = hub.gate.closed() or (hub.client.create(hub.repo) if args.create else "")
        done = (
            made
            if isinstance(made, Unread)
            else push_to(hub.client, hub.repo, offers, message=args.message)
        )
    if isinstance(done, Unread):
        screen.json({"repo": str(hub.repo), "pushed": None, "problem": done.reason})
        screen.problem(f"push failed: {done.reason}")
        return _FOUND_WRONG
    left_out += list(done.left_out)
    for broken in left_out:
        screen.problem(f"left out: {broken.path}: {broken.reason}")
    screen.line(
        f"{hub.repo} at {done.commit[:12]}: {text.counted(done.entries, 'entry', 'entries')} and "
        f"{text.counted(done.aliases, 'alias', 'aliases')} pushed, {done.unchanged} there already"
        + (f", {done.kept} newer there and kept" if done.kept else "")
    )
    rows = [{"path": broken.path, "reason": broken.reason} for broken in left_out]
    screen.json(
        {"repo": str(hub.repo), "pushed": {**asdict(done), "left_out": rows}, "problem": ""}
    )
    return _FOUND_WRONG if left_out else 0


def pull(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Every entry for some families here. Exit code 1 if a file was refused or did not come; what
    came is kept.
    """
    hub = open_hub(args.repo, settings)
    with screen.progress() as progress:
        done = pull_from(
            hub, None if "all" in args.family else args.family or _families_here(), progress
        )
    if isinstance(done, Unread):
        screen.json({"repo": str(hub.repo), "pulled": None, "problem": done.reason})
        screen.problem(f"nothing was pulled: {done.reason}")
        return _FOUND_WRONG
    for reason in done.refused:
        screen.problem(f"refused: {reason}")
    if done.problem:
        screen.problem(done.problem)
    _tell(done, args.repo, screen)
    screen.json({"repo": str(hub.repo), "pulled": asdict(done), "problem": done.problem})
    return _FOUND_WRONG if done.refused or done.problem else 0


def _tell(done: Pulled, name: str, screen: Screen) -> None:
    screen.line(
        f"{name} is {done.commit}: {text.counted(done.entries, 'entry', 'entries')} and "
        f"{text.counted(done.aliases, 'alias', 'aliases')} here, for {text.counted(len(done.folders), 'target')}"
    )
    screen.line("\n".join(str(folder) for folder in done.folders))
    if not done.problem:
        screen.line(
            f"use them: --hub {name}, the setting 'hub', or read_only_caches with these folders"
        )


def _usable(own: LocalCache) -> tuple[Inventory, list[Broken]]:
    """What is whole and may be used here, and the rest: broken files, revoked Programs, what
    production put in quarantine.
    """
    found = take_inventory(own)
    left_out = list(found.broken)

    def objection(held: Held) -> str:
        if not isinstance(held.content, Entry):
            return ""
        choice = held.content.choice
        return own.revoked(choice.program) or quarantine.reason_for(
            (own.root,), held.position.name, choice.digest
        )

    kept = []
    for held in found.entries:
        if reason := objection(held):
            left_out.append(Broken(held.path, reason))
        else:
            kept.append(held)
    return Inventory(tuple(kept), found.aliases, ()), left_out


def _families_here() -> list[str]:
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return sorted({target_for(torch.device(device)).family for device in devices})
