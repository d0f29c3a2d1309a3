"""A Hub repository as a source of entries, read through: what a region needs is fetched once and
found on the disk from then on.

A revision becomes a commit once. The pin is recorded beside the files (`pins/<revision>.json`) and
every later process keeps to it until `cudal1 pull` moves it: a fleet that restarts does not change
what it runs. Entries come from the folder of the target that is closest to this machine. They lie
outside the writable cache, and `store.cache.local_cache` reads them like any folder of another
user: it decides at every look-up whether they are trusted.

It raises nothing and never waits long: what fails is a `Refusal` with the reason. It does not
decide whether an entry is used.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract, Region, Target
from torch_cudal1.store.cache.files import Stored, hold_lock, read_file, write_file
from torch_cudal1.store.cache.local_cache import Hit, LocalCache
from torch_cudal1.store.hub.hub_client import Client, HubFailure, Repo
from torch_cudal1.store.hub.hub_layout import Kind, sort_by_closeness
from torch_cudal1.store.hub.hub_mirror import CircuitBreaker, Mirror
from torch_cudal1.store.trust.trust_policy import Rules

__all__ = ["Hub", "HubSource", "list_mirrored_roots", "open_hub", "open_hub_source"]

# An entry of a more distant target would be judged again anyway.
_TARGETS_ASKED = 4
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIN_LIMIT_BYTES = 1 << 16
# A start waits for the Hub this many times `hub_timeout_s` in all.
_WAITS = 6
_T = TypeVar("_T")


@dataclass
class Hub:
    """A repository as one process sees it for one cache folder: its commit, and whether requests
    may be made. Threads may share it.
    """

    repo: Repo
    client: Client
    folder: Path
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    _mirror: Mirror | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open_pinned(self) -> Mirror | HubFailure:
        """The repository at the commit that was recorded; where none was, at the commit that the
        revision is now, recorded then.
        """
        with self._lock:
            # Once a process: all look-ups are of one commit, also when a pull moves the pin
            # meanwhile.
            if self._mirror is None:
                # The recorded commit first: a fleet that restarts must not change what it runs.
                commit = self.read_pin() or self._resolve_commit()
                if isinstance(commit, HubFailure):
                    return commit
                self._mirror = self._open_mirror(commit)
            return self._mirror

    def open_latest(self) -> Mirror | HubFailure:
        """The repository at the commit that its revision is now, by a new request. The pin is not
        moved: `record_pin` does that.
        """
        if (failure := self.breaker.check()) is not None:
            return failure
        commit = self.client.commit_of(self.repo)
        # A user who pulls waits as long as it takes; the budget is for starts.
        unlimited = CircuitBreaker(self.breaker.disabled)
        return (
            commit
            if isinstance(commit, HubFailure)
            else replace(self._open_mirror(commit), breaker=unlimited)
        )

    def record_pin(self, mirror: Mirror) -> Stored | Refusal:
        """Make `mirror`'s commit the one that this revision stands for on this machine."""
        with self._lock:
            self._mirror = mirror
        return self._record(mirror.repo.revision)

    def read_pin(self) -> str | None:
        """The commit that is recorded for the revision; a commit is its own. None where there is no
        whole record.
        """
        if self.repo.is_pinned:
            return self.repo.revision
        data = read_file(self._pin_file, _PIN_LIMIT_BYTES)
        try:
            body = {} if isinstance(data, Refusal) else json.loads(data)
            is_about_this = (body.get("repo"), body.get("revision")) == (
                self.repo.name,
                self.repo.revision,
            )
            commit = body.get("commit") if is_about_this else None
        except (
            ValueError,
            AttributeError,
            RecursionError,
        ):
            # A damaged pin counts as none: the commit is asked for and the pin written again.
            return None
        # The commit becomes a folder's name and part of an address.
        return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None

    @property
    def _pin_file(self) -> Path:
        # Quoted, because a branch's name may hold slashes.
        return self.folder / "pins" / f"{quote(self.repo.revision, safe='')}.json"

    def _open_mirror(self, commit: str) -> Mirror:
        return Mirror(Repo(self.repo.name, commit), self.client, self.folder / commit, self.breaker)

    def _resolve_commit(self) -> str | HubFailure:
        """Resolve the revision to a commit and record it as the pin."""
        if (failure := self.breaker.check()) is not None:
            return failure
        # One process at a time, so that all processes of this machine pin the same commit.
        with hold_lock(self._pin_file.with_suffix(".resolve.lock"), self.client.timeout_s):
            # Another process may have recorded the pin while this one waited for the lock.
            if (commit := self.read_pin()) is not None:
                return commit
            started = time.monotonic()
            commit_now = self.client.commit_of(self.repo)
            if isinstance(commit_now, HubFailure):
                # Without a commit nothing else can be asked.
                self.breaker.record_answer(
                    HubFailure(commit_now.reason, "unreachable"), time.monotonic() - started
                )
                return commit_now
            self._record(commit_now)
        telemetry.record(
            "hub", "pinned", repo=self.repo.name, revision=self.repo.revision, commit=commit_now
        )
        return commit_now

    def _record(self, commit: str) -> Stored | Refusal:
        body = {"repo": self.repo.name, "revision": self.repo.revision, "commit": commit}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return write_file(
            self._pin_file, json.dumps({**body, "resolved": at}, sort_keys=True).encode()
        )


@dataclass(frozen=True)
class HubSource:
    """The entries and decision records of a repository, under the rules of whom to believe."""

    hub: Hub
    rules: Rules = field(default_factory=Rules)
    name: str = "hub"

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Refusal:
        """The entry of the closest target that has one: what makes this a `Source`."""
        return self._read_from_closest(
            "entry",
            region.key,
            target,
            contract,
            lambda cache: cache.get(region.key, target, contract),
        )

    def find_decision_record(
        self, name: str, target: Target, contract: Contract
    ) -> dict[str, Any] | Refusal:
        """The object of `LocalCache.put_decision_record` that was pushed under `name`."""
        return self._read_from_closest(
            "alias",
            name,
            target,
            contract,
            lambda cache: cache.get_decision_record(name, target, contract),
        )

    def _read_from_closest(
        self,
        kind: Kind,
        key: str,
        machine: Target,
        contract: Contract,
        read: Callable[[LocalCache], _T | Refusal],
    ) -> _T | Refusal:
        """What `read` finds in the folder of the closest target, which is given the file first if
        it lacks it.
        """
        mirror = self.hub.open_pinned()
        root = mirror if isinstance(mirror, HubFailure) else mirror.index()
        if isinstance(mirror, HubFailure) or isinstance(root, HubFailure):
            return _report_miss(key, [root.reason] if isinstance(root, HubFailure) else [])
        reasons: list[str] = []
        for name, judged in sort_by_closeness(root, machine)[:_TARGETS_ASKED]:
            folder = mirror.folder(name)
            # The own folder is a name that does not exist: what came from the Hub must not count as
            # this user's own, which needs no signature.
            cache = LocalCache(folder / "none", (folder,), self.name, self.rules)
            answer = read(cache)
            # The disk first: a file of this commit that is here needs no request.
            if isinstance(answer, Refusal):
                fetched = mirror.bring(kind, key, judged, contract, root.targets[name][1])
                if isinstance(fetched, HubFailure):
                    reasons += [] if fetched.kind == "absent" else [fetched.reason]
                    continue
                answer = read(cache)
            if not isinstance(answer, Refusal):
                return answer
            reasons.append(answer.reason)
        return _report_miss(key, reasons)


def open_hub_source(settings: Settings) -> HubSource | None:
    """The repository of `settings.hub`, with one `Hub` for a process; None where none is set."""
    return HubSource(open_hub(settings.hub, settings), Rules.of(settings)) if settings.hub else None


def open_hub(repo: str, settings: Settings) -> Hub:
    """The repository `REPO[@revision]`, mirrored under the cache folder of `settings`. Raises
    SettingError for another text.
    """
    # Imported here: a process without a Hub repository never loads the library.
    from huggingface_hub import constants

    disabled = "the setting 'offline' is on" if settings.offline else ""
    disabled = disabled or (
        "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    )
    return _open(
        Repo.parse(repo), settings.cache_dir, constants.ENDPOINT, settings.hub_timeout_s, disabled
    )


def list_mirrored_roots(settings: Settings) -> tuple[Path, ...]:
    """The cache folders that are on this disk of the repository of `settings.hub`, at its pin.
    Makes no request.
    """
    if not settings.hub:
        return ()
    hub = open_hub(settings.hub, settings)
    commit = hub.read_pin()
    folder = hub.folder / commit / "targets" if commit else hub.folder / "none"
    return (
        tuple(sorted(path for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
    )


# One `Hub` a process for equal arguments, so that all regions share one breaker and one budget.
@cache
def _open(repo: Repo, cache_dir: Path, endpoint: str, timeout_s: float, disabled: str) -> Hub:
    host = quote(urlsplit(endpoint).netloc or "hub", safe="")
    folder = cache_dir / "hub" / host / repo.name.replace("/", "--")
    return Hub(
        repo, Client(timeout_s, endpoint), folder, CircuitBreaker(disabled, timeout_s * _WAITS)
    )


def _report_miss(key: str, reasons: list[str]) -> Refusal:
    if not reasons:
        return Refusal("absent")
    telemetry.record("hub", "missed", key, reason="; ".join(reasons))
    return Refusal("; ".join(reasons))
