"""`cudal1 push` and `pull`: entries to and from a Hub repository.

`push` reads the writable cache and nothing that came from elsewhere; `pull` writes beside it, never
into it. The work is in `store.hub.hub_push` and `store.hub.hub_pull`; nothing here runs what an
entry holds, and tokens are the business of the Hub's library.
"""

from __future__ import annotations

import argparse

import torch
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import target_for
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.cache import quarantine
from torch_cudal1.store.cache.inventory import CacheFile, Inventory, take_inventory
from torch_cudal1.store.cache.local_cache import BrokenFile, LocalCache
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.hub.hub_client import HubFailure
from torch_cudal1.store.hub.hub_pull import PullReport
from torch_cudal1.store.hub.hub_pull import pull as pull_from
from torch_cudal1.store.hub.hub_push import list_offers
from torch_cudal1.store.hub.hub_push import push as push_to
from torch_cudal1.store.hub.hub_source import open_hub

__all__ = ["pull", "push"]

_FOUND_WRONG = 1


def push(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """One commit with what is whole. Exit code 1 if a file was left out or the Hub did not take it;
    nothing is pushed in halves.
    """
    hub = open_hub(args.repo, settings)
    # A commit cannot be pushed to.
    if hub.repo.is_pinned:
        raise SettingError("REPO", args.repo, "a branch to push to, not a commit")
    if screen.quiet:
        # huggingface_hub draws its own bars, which --quiet must silence too.
        disable_progress_bars()
    with screen.progress() as progress:
        progress(f"reading {settings.cache_dir}", None)
        # `own`: what came from elsewhere stays under its publisher's name, and is not pushed on.
        inventory, left_out = _select_usable(cache_for(settings).own)
        offers = list_offers(inventory, args.family or None)
        # An empty push would make a commit with nothing in it, or a repository with --create.
        if not offers:
            raise SettingError(
                "--cache-dir",
                str(settings.cache_dir),
                "a cache with at least one whole entry to push",
            )
        progress(f"pushing {len(offers)} files to {hub.repo}", None)
        # The circuit breaker is asked first: a Hub that failed a moment ago is not asked again.
        creation = hub.breaker.check() or (hub.client.create(hub.repo) if args.create else "")
        pushed = (
            creation
            if isinstance(creation, HubFailure)
            else push_to(hub.client, hub.repo, offers, message=args.message)
        )
    # A push is one commit, so a failure left nothing half done in the repository.
    if isinstance(pushed, HubFailure):
        screen.json({"repo": str(hub.repo), "pushed": None, "problem": pushed.reason})
        screen.problem(f"push failed: {pushed.reason}")
        return _FOUND_WRONG
    left_out += list(pushed.left_out)
    for broken in left_out:
        screen.problem(f"left out: {broken.path}: {broken.reason}")
    screen.line(
        f"{hub.repo} at {pushed.commit[:12]}: {text.count_text(pushed.entries, 'entry', 'entries')} and "
        f"{text.count_text(pushed.records, 'decision record')} pushed, {pushed.unchanged} there already"
        + (f", {pushed.kept} newer there and kept" if pushed.kept else "")
    )
    rows = [{"path": broken.path, "reason": broken.reason} for broken in left_out]
    screen.json(
        {"repo": str(hub.repo), "pushed": {**pushed.to_json(), "left_out": rows}, "problem": ""}
    )
    return _FOUND_WRONG if left_out else 0


def pull(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Every entry for some families here. Exit code 1 if a file was refused or did not come; what
    came is kept.
    """
    hub = open_hub(args.repo, settings)
    with screen.progress() as progress:
        pulled = pull_from(
            # By default only what this machine can use: entries of other families would only take
            # space.
            hub,
            None if "all" in args.family else args.family or _families_here(),
            progress,
        )
    if isinstance(pulled, HubFailure):
        screen.json({"repo": str(hub.repo), "pulled": None, "problem": pulled.reason})
        screen.problem(f"nothing was pulled: {pulled.reason}")
        return _FOUND_WRONG
    # What was refused is named, and the whole files that came are kept.
    for reason in pulled.refused:
        screen.problem(f"refused: {reason}")
    # The pull stopped half-way: what came is whole and is kept.
    if pulled.problem:
        screen.problem(pulled.problem)
    _show_pulled(pulled, args.repo, screen)
    screen.json({"repo": str(hub.repo), "pulled": pulled.to_json(), "problem": pulled.problem})
    return _FOUND_WRONG if pulled.refused or pulled.problem else 0


def _show_pulled(pulled: PullReport, name: str, screen: Screen) -> None:
    screen.line(
        f"{name} is {pulled.commit}: {text.count_text(pulled.entries, 'entry', 'entries')} and "
        f"{text.count_text(pulled.records, 'decision record')} here, for {text.count_text(len(pulled.folders), 'target')}"
    )
    screen.line("\n".join(str(folder) for folder in pulled.folders))
    if not pulled.problem:
        screen.line(
            f"use them: --hub {name}, the setting 'hub', or read_only_caches with these folders"
        )


def _select_usable(cache: LocalCache) -> tuple[Inventory, list[BrokenFile]]:
    """What is whole and may be used here, and the rest: broken files, revoked Programs, what
    production put in quarantine.
    """
    inventory = take_inventory(cache)
    left_out = list(inventory.broken)

    def objection(file: CacheFile) -> Refusal | None:
        if not isinstance(file.content, Entry):
            return None
        choice = file.content.choice
        # A kernel that is not to run here must not reach other machines from here.
        return cache.check_revoked(choice.program) or quarantine.find_quarantine_reason(
            (cache.root,), file.cache_path.name, choice.digest
        )

    usable = []
    for file in inventory.entries:
        if reason := objection(file):
            left_out.append(BrokenFile(file.path, reason.reason))
        else:
            usable.append(file)
    return Inventory(tuple(usable), inventory.records, ()), left_out


def _families_here() -> list[str]:
    # A host may have GPUs of different families.
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return sorted({target_for(torch.device(device)).family for device in devices})
