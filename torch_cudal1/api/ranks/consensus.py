"""Ranks agree: under `torch.distributed`, ranks that run the same graph run the same choice,
decided once.

    every rank: "here I am, with this graph" ──> all came ──> the lowest rank with that graph decides, from its cache or by a
    search, and tells the entries ──> each other rank: "I can" or "I cannot, because" ──> one verdict: all use it, or all baseline

Everything goes through the store that the process group was set up with: no collective is called,
so none can hang, and none of the user's is disturbed. Each wait ends after `ranks_timeout_s`, and
the one for the leader when it has given no sign of life for `ranks_heartbeat_s`, or lives and has
not decided in `ranks_deciding_s`. What then counts is the first verdict in the store, which every
rank reads, also one that comes later. After a meeting that not all came to, or whose leader was
given up, a process waits a second at the most until one succeeds.

The n-th binding of a rank meets the n-th bindings of the others. A rank that brings another graph
is named in the log and in the report; ranks with equal graphs agree among themselves. Bytes of an
entry from another rank are used, and not written to a cache. What it does not do: notice that
ranks' weights or inputs differ, or keep them in step at later calls. A store that falls silent
between answer and verdict (its host was stopped just then) may leave one rank with its baseline and
the others without.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from torch_cudal1.api.ranks.store_channel import Line
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Entry, Miss, Region
from torch_cudal1.store.cache.entry_file import decode_entry, encode_entry
from torch_cudal1.store.cache.local_cache import stale_reason
from torch_cudal1.store.cache.quarantine import reason_for
from torch_cudal1.store.context import Place

if TYPE_CHECKING:
    from torch_cudal1.search.tune import (
        Choice,
    )  # brings the judge, which a warm look-up can do without

__all__ = ["Apart", "Told", "agreed", "choices_from", "has_ranks"]

T = TypeVar("T")
_IMPATIENT_S = 1.0
_CHUNK, _LIMIT_BYTES = 1 << 20, 64 << 20  # TCPStore refuses values of more than 8 MiB
_ALL, _USE = "all came", "use it"
_numbers = itertools.count()
_meeting = threading.RLock()  # bindings of two threads are two meetings, one after the other
_kept_waiting = False
_silent = False


@dataclass(frozen=True)
class Apart:
    """The ranks did not agree on a choice, so each runs its baseline; and why."""

    reason: str


@dataclass(frozen=True)
class Told:
    """What the deciding rank tells the others: what runs as a whole, a sentence about it, and the
    entries of the regions.
    """

    runs: str
    note: str = ""
    entries: tuple[Entry, ...] = ()


def agreed(
    graphs: Sequence[str],
    place: Place,
    *,
    decide: Callable[[], tuple[T, Told | Apart]],
    follow: Callable[[Told], T],
) -> T | Apart:
    """`decide()`'s result where this process is alone or leads; else `follow(...)` of what the
    leader told; or Apart.

    `graphs` are digests that are equal on ranks with equal graphs. `decide` may say Apart, such as
    for a cache that knows nothing: then its own result stands, and the others are Apart. What it
    raises is raised after the others were told.
    """
    store = _store() if place.settings.ranks_agree else None
    if store is None:
        return decide()[0]
    global _silent
    with _meeting:
        try:
            found = _met(_Meeting(store, graphs, place), decide, follow)
            _silent = False
            return found
        except (
            dist.DistError
        ) as error:  # the store's host is gone or stopped: the process group is about to fail too
            _silent = True
            return _disagreed(f"the store of the process group failed: {error}")


def has_ranks(settings: Settings) -> bool:
    """Whether other ranks must run what this one runs."""
    return settings.ranks_agree and _store() is not None


def choices_from(told: Told, regions: Sequence[Region], place: Place) -> tuple[Choice, ...]:
    """The leader's entries as this rank's choices. KeyError for a region that the leader told
    nothing about.
    """
    from torch_cudal1.search.tune import Choice

    known = {entry.region_key: entry for entry in told.entries}
    found = [known[region.key] for region in regions]
    return tuple(
        Choice(region, entry.choice, entry, "as another rank decided")
        for region, entry in zip(regions, found, strict=True)
    )


def _met(
    meeting: _Meeting, decide: Callable[[], tuple[T, Told | Apart]], follow: Callable[[Told], T]
) -> T | Apart:
    absent = meeting.gather()
    if absent:
        return _disagreed(absent)
    if meeting.leads:
        with meeting.deciding(), _others_told_of_a_failure(meeting):
            own, telling = decide()
        told_others = meeting.tell(telling)
        if isinstance(told_others, Apart):
            return own if isinstance(telling, Apart) else _disagreed(told_others.reason)
        verdict = meeting.settle("", told_others)
        return own if verdict == _USE else _disagreed(verdict)
    told = meeting.hear()
    if isinstance(told, Apart):
        telemetry.record("ranks", "baseline", reason=told.reason)
        return told
    if isinstance(told, str):
        return _disagreed(meeting.settle(told, Told("")))
    verdict = meeting.settle(meeting.objection(told), told)
    return follow(told) if verdict == _USE else _disagreed(verdict)


@contextmanager
def _others_told_of_a_failure(meeting: _Meeting) -> Iterator[None]:
    """Where deciding raises, whatever it is, nobody waits for what does not come."""
    decided = False
    try:
        yield
        decided = True
    finally:
        if not decided:
            meeting.tell(
                Apart(f"it failed with {getattr(sys.exc_info()[0], '__name__', 'an exception')}")
            )


def _disagreed(reason: str) -> Apart:
    telemetry.record("ranks", "disagreed", reason=reason)
    telemetry.log.warning("cudal1: ranks do not agree, so the baseline runs: %s", reason)
    return Apart(f"ranks do not agree: {reason}")


class _Meeting:
    """One agreement, seen from one rank."""

    def __init__(self, store: Any, graphs: Sequence[str], place: Place) -> None:
        self._place, self._heartbeat_s = place, place.settings.ranks_heartbeat_s
        patience_s = min(self._heartbeat_s, _IMPATIENT_S) if _silent else self._heartbeat_s
        self._line = Line(store, f"torch_cudal1/{next(_numbers)}", patience_s)
        self._graph = hashlib.sha256("|".join(graphs).encode()).hexdigest()
        self.rank, self._size, self._leader = dist.get_rank(), dist.get_world_size(), 0
        self._group: tuple[int, ...] = ()
        searched = (
            place.settings.budget_s + place.settings.candidate_timeout_s
            if place.settings.on_miss == "tune"
            else 0.0
        )
        self._deciding_s = place.settings.ranks_deciding_s + 2 * searched * len(graphs)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == self._leader

    def deciding(self) -> AbstractContextManager[None]:
        """Leader: while this lasts the others see that it lives."""
        return self._line.beating(f"beat/{self._leader}", self._heartbeat_s)

    def gather(self) -> str:
        """Wait for all ranks, and find those with the same graph. Why there is no agreement, "" if
        there may be one.
        """
        global _kept_waiting
        patience = self._place.settings.ranks_timeout_s
        patience = min(patience, _IMPATIENT_S) if _kept_waiting else patience
        self._line.set(f"at/{self.rank}", self._graph)
        came = self._line.wait([f"at/{rank}" for rank in range(self._size)], "closed", patience)
        outcome = self._line.first("closed", _ALL if came else self._absent(patience))
        _kept_waiting = outcome != _ALL
        if _kept_waiting:
            return outcome
        graphs = [self._line.get(f"at/{rank}") for rank in range(self._size)]
        self._group = tuple(rank for rank, graph in enumerate(graphs) if graph == self._graph)
        self._leader = self._group[0]
        others = [rank for rank in range(self._size) if rank not in self._group]
        if others:
            telemetry.record(
                "ranks", "graphs_differ", rank=self.rank, same=self._group, others=others
            )
            telemetry.log.warning(
                "cudal1: ranks %s run another graph than rank %d; they agree among themselves",
                others,
                self.rank,
            )
        return ""

    def tell(self, telling: Told | Apart) -> Told | Apart:
        """Leader: tell the others; what they are told. Nobody answers to Apart: it is final."""
        if len(self._group) == 1:
            return telling
        bodies = (
            [encode_entry(entry) for entry in telling.entries] if isinstance(telling, Told) else []
        )
        if (size := sum(map(len, bodies))) > _LIMIT_BYTES:
            telling = Apart(
                f"its entries have {size} bytes, at most {_LIMIT_BYTES} are handed to other ranks"
            )
        if isinstance(telling, Apart):
            self._line.set(f"told/{self._leader}", json.dumps({"apart": telling.reason}))
            return telling
        body = json.dumps([base64.b64encode(data).decode() for data in bodies])
        chunks = [body[start : start + _CHUNK] for start in range(0, len(body), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._line.set(f"bytes/{self._leader}/{number}", chunk)
        self._line.set(
            f"told/{self._leader}",
            json.dumps({"runs": telling.runs, "note": telling.note, "chunks": len(chunks)}),
        )
        return telling

    def hear(self) -> Told | Apart | str:
        """Others: what the leader decided; a text says why it was not understood."""
        told_at, verdict, beat = (f"{name}/{self._leader}" for name in ("told", "verdict", "beat"))
        global _kept_waiting
        if ended := self._line.wait_while_beating(
            told_at, verdict, beat, (self._heartbeat_s, self._deciding_s)
        ):
            _kept_waiting = True  # it will hardly come to the next meeting either
            return f"rank {self._leader} {ended} while the others waited for its decision"
        if not self._line.has([told_at]):
            return f"rank {self._leader} was given up before it told its decision"
        told = json.loads(self._line.get(f"told/{self._leader}"))
        if "apart" in told:
            return Apart(f"rank {self._leader} decides, and has none: {told['apart']}")
        body = "".join(
            self._line.get(f"bytes/{self._leader}/{number}") for number in range(told["chunks"])
        )
        entries = [decode_entry(base64.b64decode(text)) for text in json.loads(body)]
        unread = next((entry for entry in entries if isinstance(entry, Miss)), None)
        if unread is not None:
            return f"rank {self.rank}: an entry of rank {self._leader} is {unread.reason}"
        return Told(
            told["runs"],
            told["note"],
            tuple(entry for entry in entries if isinstance(entry, Entry)),
        )

    def objection(self, told: Told) -> str:
        """Why this rank cannot run what another one decided, "" if it can."""
        for entry in told.entries:
            if entry.contract.digest != self._place.contract.digest:
                return f"rank {self.rank} works under another precision contract"
            if entry.choice.program.digest == entry.region_key:
                continue  # a baseline is PyTorch's own work, which runs anywhere
            if entry.target.family != self._place.target.family or (
                stale := stale_reason(entry.target, self._place.target)
            ):
                return f"rank {self.rank}: {stale or 'judged on ' + entry.target.family}"
            cache, choice = self._place.cache, entry.choice
            held = reason_for((cache.root, *cache.read_only), entry.region_key, choice.digest)
            if reason := cache.revoked(choice.program) or held:
                return f"rank {self.rank}: {reason}"
        return ""

    def settle(self, problem: str, told: Told) -> str:
        """Answer, wait for the answers of the group, and the verdict: `_USE`, or why all take the
        baseline.
        """
        answers = [f"answer/{rank}" for rank in self._group]
        self._line.set(f"answer/{self.rank}", problem or "yes")
        patience = self._place.settings.ranks_timeout_s
        own = problem  # one that cannot is enough: nobody waits for the others' answers then
        if not problem and self._line.wait(answers, f"verdict/{self._leader}", patience):
            own = next(
                (answer for name in answers if (answer := self._line.get(name)) != "yes"), _USE
            )
        verdict = self._line.first(
            f"verdict/{self._leader}", own or f"a rank did not answer within {patience:g} s"
        )
        if verdict == _USE:
            digests = [entry.choice.digest for entry in told.entries]
            telemetry.record(
                "ranks",
                "agreed",
                ranks=self._group,
                leader=self._leader,
                runs=told.runs,
                digests=digests,
            )
            if self.leads:
                self._forget_bytes()
        return verdict

    def _forget_bytes(self) -> None:
        """Every member has answered, so has read: the store need not keep the entries."""
        number = 0
        while self._line.has([f"bytes/{self._leader}/{number}"]):
            self._line.forget(f"bytes/{self._leader}/{number}")
            number += 1

    def _absent(self, patience: float) -> str:
        came = [rank for rank in range(self._size) if self._line.has([f"at/{rank}"])]
        return f"only ranks {came} of {self._size} came within {patience:g} s"


def _store() -> Any:
    """The store of the default process group; None where this process is alone."""
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() < 2
        or dist.get_backend() == "fake"
    ):
        return None
    return dist.distributed_c10d._get_default_store()
