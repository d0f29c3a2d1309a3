"""A Hub repository as a source of entries, read through: what a region needs is fetched once and
found on the disk from then on.

A revision becomes a commit once. The pin is recorded beside the files (`pins/<revision>.json`) and
every later process keeps to it until `cudal1 pull` moves it: a fleet that restarts does not change
what it runs. Entries come from the folder of the target that is closest to this machine. They lie
outside the writable cache, and `store.cache.local_cache` reads them like any folder that others
filled: whom to believe about them is asked there, at every look-up.

It raises nothing and never waits long: what fails is a `Miss` with the reason. It does not decide
whether an entry is used.
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
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract, Miss, Region, Target
from torch_cudal1.store.cache.files import NotStored, Stored, hold, read_file, write_file
from torch_cudal1.store.cache.local_cache import Hit, LocalCache
from torch_cudal1.store.hub.hub_client import Client, Repo, Unread
from torch_cudal1.store.hub.hub_layout import Kind, by_closeness
from torch_cudal1.store.hub.hub_mirror import Gate, Mirror
from torch_cudal1.store.trust.trust_policy import Rules

__all__ = ["Hub", "HubSource", "hub_for", "mirrored_roots", "open_hub"]

_TARGETS_ASKED = 4  # an entry of a more distant target would be judged again anyway
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIN_LIMIT_BYTES = 1 << 16
_WAITS = 6  # a start waits for the Hub this many times `hub_timeout_s` in all
_T = TypeVar("_T")


@dataclass
class Hub:
    """A repository as one process sees it for one cache folder: its commit, and whether it may be
    asked. Threads may share it.
    """

    repo: Repo
    client: Client
    folder: Path
    gate: Gate = field(default_factory=Gate)
    _mirror: Mirror | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pinned(self) -> Mirror | Unread:
        """The repository at the commit that was recorded; where none was, at the commit that the
        revision is now, recorded then.
        """
        with self._lock:
            if self._mirror is None:
                commit = self.pin() or self._resolved()
                if isinstance(commit, Unread):
                    return commit
                self._mirror = self._at(commit)
            return self._mirror

    def refreshed(self) -> Mirror | Unread:
        """The repository at the commit that its revision is now, asked anew. The pin is not moved:
        `record` does that.
        """
        if (closed := self.gate.closed()) is not None:
            return closed
        commit = self.client.commit_of(self.repo)
        patient = Gate(self.gate.shut)  # who pulls waits as long as it takes
        return commit if isinstance(commit, Unread) else replace(self._at(commit), gate=patient)

    def record(self, mirror: Mirror) -> Stored | NotStored:
        """Make `mirror`'s commit the one that this revision stands for on this machine."""
        with self._lock:
            self._mirror = mirror
        return self._record(mirror.repo.revision)

    def pin(self) -> str | None:
        """The commit that is recorded for the revision; a commit is its own. None where there is no
        whole record.
        """
        if self.repo.is_pinned:
            return self.repo.revision
        data = read_file(self._pin_file, _PIN_LIMIT_BYTES)
        try:
            body = {} if isinstance(data, Miss) else json.loads(data)
            own = (body.get("repo"), body.get("revision")) == (self.repo.name, self.repo.revision)
            commit = body.get("commit") if own else None
        except (
            ValueError,
            AttributeError,
            RecursionError,
        ):  # a damaged record is no record: it is asked for and written again
            return None
        return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None

    @property
    def _pin_file(self) -> Path:
        return self.folder / "pins" / f"{quote(self.repo.revision, safe='')}.json"

    def _at(self, commit: str) -> Mirror:
        return Mirror(Repo(self.repo.name, commit), self.client, self.folder / commit, self.gate)

    def _resolved(self) -> str | Unread:
        """Ask what the revision is, one process of this machine at a time, so that all of them pin
        the same commit.
        """
        if (closed := self.gate.closed()) is not None:
            return closed
        with hold(self._pin_file.with_suffix(".resolve.lock"), self.client.timeout_s):
            if (commit := self.pin()) is not None:
                return commit
            started = time.monotonic()
            found = self.client.commit_of(self.repo)
            if isinstance(found, Unread):
                self.gate.note(
                    Unread("unreachable", found.reason), time.monotonic() - started
                )  # without a commit nothing else can be asked
                return found
            self._record(found)
        telemetry.record(
            "hub", "pinned", repo=self.repo.name, revision=self.repo.revision, commit=found
        )
        return found

    def _record(self, commit: str) -> Stored | NotStored:
        body = {"repo": self.repo.name, "revision": self.repo.revision, "commit": commit}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return write_file(
            self._pin_file, json.dumps({**body, "resolved": at}, sort_keys=True).encode()
        )


@dataclass(frozen=True)
class HubSource:
    """The entries and aliases of a repository, under the rules of whom to believe."""

    hub: Hub
    rules: Rules = field(default_factory=Rules)
    name: str = "hub"

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Miss:
        """The entry of the closest target that has one: what makes this a `Source`."""
        return self._first(
            "entry",
            region.key,
            target,
            contract,
            lambda held: held.get(region.key, target, contract),
        )

    def alias(self, name: str, target: Target, contract: Contract) -> dict[str, Any] | Miss:
        """The object of `LocalCache.put_alias` that was pushed under `name`."""
        return self._first(
            "alias", name, target, contract, lambda held: held.get_alias(name, target, contract)
        )

    def _first(
        self,
        kind: Kind,
        key: str,
        here: Target,
        contract: Contract,
        read: Callable[[LocalCache], _T | Miss],
    ) -> _T | Miss:
        """What `read` finds in the folder of the closest target, which is given the file first if
        it lacks it.
        """
        mirror = self.hub.pinned()
        root = mirror if isinstance(mirror, Unread) else mirror.index()
        if isinstance(mirror, Unread) or isinstance(root, Unread):
            return _missed(key, [root.reason] if isinstance(root, Unread) else [])
        reasons: list[str] = []
        for name, judged in by_closeness(root, here)[:_TARGETS_ASKED]:
            folder = mirror.folder(name)
            held = LocalCache(
                folder / "none", (folder,), self.name, self.rules
            )  # nothing in it is this user's own
            found = read(held)
            if isinstance(found, Miss):
                brought = mirror.bring(kind, key, judged, contract, root.targets[name][1])
                if isinstance(brought, Unread):
                    reasons += [] if brought.kind == "absent" else [brought.reason]
                    continue
                found = read(held)
            if not isinstance(found, Miss):
                return found
            reasons.append(found.reason)
        return _missed(key, reasons)


def hub_for(settings: Settings) -> HubSource | None:
    """The repository of `settings.hub`, with one `Hub` for a process; None where none is set."""
    return HubSource(open_hub(settings.hub, settings), Rules.of(settings)) if settings.hub else None


def open_hub(repo: str, settings: Settings) -> Hub:
    """The repository `REPO[@revision]`, mirrored under the cache folder of `settings`. Raises
    SettingError for another text.
    """
    from huggingface_hub import constants

    shut = "the setting 'offline' is on" if settings.offline else ""
    shut = shut or ("offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "")
    return _opened(
        Repo.parse(repo), settings.cache_dir, constants.ENDPOINT, settings.hub_timeout_s, shut
    )


def mirrored_roots(settings: Settings) -> tuple[Path, ...]:
    """The cache folders that are on this disk of the repository of `settings.hub`, at its pin. Asks
    nobody.
    """
    if not settings.hub:
        return ()
    hub = open_hub(settings.hub, settings)
    commit = hub.pin()
    folder = hub.folder / commit / "targets" if commit else hub.folder / "none"
    return (
        tuple(sorted(path for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
    )


@cache
def _opened(repo: Repo, cache_dir: Path, endpoint: str, timeout_s: float, shut: str) -> Hub:
    host = quote(urlsplit(endpoint).netloc or "hub", safe="")
    folder = cache_dir / "hub" / host / repo.name.replace("/", "--")
    return Hub(repo, Client(timeout_s, endpoint), folder, Gate(shut, timeout_s * _WAITS))


def _missed(key: str, reasons: list[str]) -> Miss:
    if not reasons:
        return Miss("absent")
    telemetry.record("hub", "missed", key, reason="; ".join(reasons))
    return Miss("; ".join(reasons))
