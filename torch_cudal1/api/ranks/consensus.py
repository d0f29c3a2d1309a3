"""Ranks agree: under `torch.distributed`, ranks that run the same graph run the same choice,
decided once.

    every rank: "here I am, with this graph" ──> all came ──> the lowest rank with that graph
    decides, from its cache or by a search, and broadcasts the entries ──> each other rank: "I can"
    or "I cannot, because" ──> one verdict: all use it, or all run the baseline

Everything goes through the store that the process group was set up with: no collective is called,
so none can hang, and no collective of
the user is disturbed. Each wait ends after `ranks_timeout_s`, and
the one for the leader when it has given no sign of life for `ranks_heartbeat_s`, or lives and has
not decided in `ranks_deciding_s`. What then counts is the first verdict in the store, which every
rank reads, also one that comes later. After a meeting that some
ranks missed, or whose leader was given up, a process waits a second at the most until a meeting
succeeds.

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

from torch_cudal1.api.ranks.store_channel import StoreChannel
from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Entry, Region
from torch_cudal1.store.cache.entry_file import decode_entry, encode_entry
from torch_cudal1.store.cache.local_cache import explain_staleness
from torch_cudal1.store.cache.quarantine import find_quarantine_reason
from torch_cudal1.store.context import TuneContext

if TYPE_CHECKING:
    # The import brings the judge, which a warm look-up does without.
    from torch_cudal1.search.tune import Choice

__all__ = ["Broadcast", "NoConsensus", "has_ranks", "reach_consensus", "read_broadcast_choices"]

T = TypeVar("T")
MAX_WAIT_AFTER_TIMEOUT_S = 1.0
# TCPStore refuses values of more than 8 MiB, so entries travel in chunks. One host keeps all of
# them in memory until every rank has read them.
CHUNK_BYTES, MAX_BROADCAST_BYTES = 1 << 20, 64 << 20
ALL_ARRIVED, USE_IT = "all came", "use it"
# Part of every name, so that an old message is never taken for a new one.
_MEETING_NUMBERS = itertools.count()
# Two threads of a rank must not mix their meetings: the n-th of this rank meets the n-th of others.
_MEETING_LOCK = threading.RLock()
# Ranks that missed one meeting may miss the next ones too. Without this memory each of a model's
# graphs would wait for the whole time-out again.
_last_meeting_timed_out = False
_store_was_silent = False


@dataclass(frozen=True)
class NoConsensus(Refusal):
    """The ranks did not agree on a choice, so each runs its baseline; and why."""


@dataclass(frozen=True)
class Broadcast:
    """The decision of the leading rank: what runs as a whole, a sentence about it, and the entries of
    the regions.
    """

    runs: str
    note: str = ""
    entries: tuple[Entry, ...] = ()


def reach_consensus(
    graphs: Sequence[str],
    context: TuneContext,
    *,
    decide: Callable[[], tuple[T, Broadcast | NoConsensus]],
    follow: Callable[[Broadcast], T],
) -> T | NoConsensus:
    """`decide()`'s result where this process is alone or leads; else `follow(broadcast)` of what the
    leader decided; or NoConsensus.

    `graphs` are digests that are equal on ranks with equal graphs. `decide` may return
    NoConsensus, such as for a cache without an entry: then its own result stands, and the other
    ranks get NoConsensus. An exception of `decide` is raised after the other ranks were informed.
    """
    store = _store() if context.settings.ranks_agree else None
    if store is None:
        return decide()[0]
    global _store_was_silent
    with _MEETING_LOCK:
        try:
            result = _run_meeting(_Meeting(store, graphs, context), decide, follow)
            _store_was_silent = False
            return result
        except dist.DistError as error:
            # The store's host is gone or stopped, and the process group is about to fail too. The
            # rank
            # goes on with its baseline until then.
            _store_was_silent = True
            return _record_disagreement(f"the store of the process group failed: {error}")


def has_ranks(settings: Settings) -> bool:
    """Whether other ranks must run what this one runs."""
    return settings.ranks_agree and _store() is not None


def read_broadcast_choices(
    broadcast: Broadcast, regions: Sequence[Region], context: TuneContext
) -> tuple[Choice, ...]:
    """The leader's entries as this rank's choices. KeyError for a region that the broadcast
    lacks.
    """
    from torch_cudal1.search.tune import Choice

    entries = {entry.region_key: entry for entry in broadcast.entries}
    chosen = [entries[region.key] for region in regions]
    return tuple(
        Choice(region, entry.choice, entry, "as another rank decided")
        for region, entry in zip(regions, chosen, strict=True)
    )


def _run_meeting(
    meeting: _Meeting,
    decide: Callable[[], tuple[T, Broadcast | NoConsensus]],
    follow: Callable[[Broadcast], T],
) -> T | NoConsensus:
    absent = meeting.gather_ranks()
    if absent is not None:
        return _record_disagreement(absent.reason)
    if meeting.leads:
        # A search takes long. Without heartbeats the other ranks could not distinguish it from a
        # dead leader.
        with meeting.send_heartbeats(), _broadcast_failure(meeting):
            result, message = decide()
        delivered = meeting.broadcast(message)
        if isinstance(delivered, NoConsensus):
            return (
                result
                if isinstance(message, NoConsensus)
                else _record_disagreement(delivered.reason)
            )
        verdict = meeting.agree_on_verdict(None, delivered)
        return result if verdict == USE_IT else _record_disagreement(verdict)
    broadcast = meeting.receive()
    # NoConsensus of the leader is final: it has gone on without waiting for answers.
    if isinstance(broadcast, NoConsensus):
        telemetry.record("ranks", "baseline", reason=broadcast.reason)
        return broadcast
    # This rank must still answer: the others would wait for it.
    if isinstance(broadcast, Refusal):
        return _record_disagreement(meeting.agree_on_verdict(broadcast, Broadcast("")))
    verdict = meeting.agree_on_verdict(meeting.find_objection(broadcast), broadcast)
    return follow(broadcast) if verdict == USE_IT else _record_disagreement(verdict)


@contextmanager
def _broadcast_failure(meeting: _Meeting) -> Iterator[None]:
    """Where deciding raises, send the reason to the other ranks, which would run into a time-out."""
    decided = False
    try:
        yield
        decided = True
    finally:
        if not decided:
            meeting.broadcast(
                NoConsensus(
                    f"it failed with {getattr(sys.exc_info()[0], '__name__', 'an exception')}"
                )
            )


def _record_disagreement(reason: str) -> NoConsensus:
    telemetry.record("ranks", "disagreed", reason=reason)
    telemetry.log.warning("cudal1: ranks do not agree, so the baseline runs: %s", reason)
    return NoConsensus(f"ranks do not agree: {reason}")


class _Meeting:
    """One agreement, seen from one rank. Ranks write and read names of the channel: `at/RANK` (which
    graph), `told/LEADER` and `bytes/LEADER/N` (the decision), `answer/RANK`, `verdict/LEADER`.
    """

    def __init__(self, store: Any, graphs: Sequence[str], context: TuneContext) -> None:
        self._context, self._heartbeat_s = context, context.settings.ranks_heartbeat_s
        silence_s = (
            min(self._heartbeat_s, MAX_WAIT_AFTER_TIMEOUT_S)
            if _store_was_silent
            else self._heartbeat_s
        )
        self._channel = StoreChannel(store, f"torch_cudal1/{next(_MEETING_NUMBERS)}", silence_s)
        self._graph = hashlib.sha256("|".join(graphs).encode()).hexdigest()
        self.rank, self._size, self._leader = dist.get_rank(), dist.get_world_size(), 0
        self._group: tuple[int, ...] = ()
        # The leader may search each graph for its whole budget and once more for a candidate's
        # time-out. The limit is twice that.
        search_s = (
            context.settings.budget_s + context.settings.candidate_timeout_s
            if context.settings.on_miss == "tune"
            else 0.0
        )
        self._deciding_s = context.settings.ranks_deciding_s + 2 * search_s * len(graphs)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == self._leader

    def send_heartbeats(self) -> AbstractContextManager[None]:
        """Leader: show the other ranks that this process lives, until the context ends."""
        return self._channel.send_heartbeats(f"beat/{self._leader}", self._heartbeat_s)

    def gather_ranks(self) -> Refusal | None:
        """Wait for all ranks, and find the ranks with the same graph. A Refusal if some did not come."""
        global _last_meeting_timed_out
        timeout_s = self._context.settings.ranks_timeout_s
        timeout_s = (
            min(timeout_s, MAX_WAIT_AFTER_TIMEOUT_S) if _last_meeting_timed_out else timeout_s
        )
        # Only a digest travels before all ranks are there.
        self._channel.set(f"at/{self.rank}", self._graph)
        arrived = self._channel.wait(
            [f"at/{rank}" for rank in range(self._size)], "closed", timeout_s
        )
        # The first rank to give up, or to see all, decides for every rank, also for one that comes
        # later.
        outcome = self._channel.set_once(
            "closed", ALL_ARRIVED if arrived else self._describe_absent(timeout_s)
        )
        _last_meeting_timed_out = outcome != ALL_ARRIVED
        if _last_meeting_timed_out:
            return Refusal(outcome)
        graphs = [self._channel.get(f"at/{rank}") for rank in range(self._size)]
        self._group = tuple(rank for rank, graph in enumerate(graphs) if graph == self._graph)
        # The lowest rank of the group: every rank finds the same one without a message.
        self._leader = self._group[0]
        different_ranks = [rank for rank in range(self._size) if rank not in self._group]
        if different_ranks:
            telemetry.record(
                "ranks", "graphs_differ", rank=self.rank, same=self._group, others=different_ranks
            )
            telemetry.log.warning(
                "cudal1: ranks %s run another graph than rank %d; they agree among themselves",
                different_ranks,
                self.rank,
            )
        return None

    def broadcast(self, message: Broadcast | NoConsensus) -> Broadcast | NoConsensus:
        """Leader: send the decision; the answer is what was sent. NoConsensus is final: no rank answers
        to it.
        """
        # No other rank has this graph, so none waits for a message.
        if len(self._group) == 1:
            return message
        bodies = (
            [encode_entry(entry) for entry in message.entries]
            if isinstance(message, Broadcast)
            else []
        )
        # Refused before anything is written: the store lies in the memory of one host.
        if (size := sum(map(len, bodies))) > MAX_BROADCAST_BYTES:
            message = NoConsensus(
                f"its entries have {size} bytes, at most {MAX_BROADCAST_BYTES} are handed to other ranks"
            )
        if isinstance(message, NoConsensus):
            self._channel.set(f"told/{self._leader}", json.dumps({"apart": message.reason}))
            return message
        body = json.dumps([base64.b64encode(data).decode() for data in bodies])
        chunks = [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._channel.set(f"bytes/{self._leader}/{number}", chunk)
        # After the chunks: a rank that sees this name must find all of them.
        self._channel.set(
            f"told/{self._leader}",
            json.dumps({"runs": message.runs, "note": message.note, "chunks": len(chunks)}),
        )
        return message

    def receive(self) -> Broadcast | NoConsensus | Refusal:
        """Other ranks: what the leader decided; a Refusal says why this rank has no decision."""
        message_name, verdict, heartbeat = (
            f"{name}/{self._leader}" for name in ("told", "verdict", "beat")
        )
        global _last_meeting_timed_out
        if reason := self._channel.wait_while_alive(
            message_name, verdict, heartbeat, (self._heartbeat_s, self._deciding_s)
        ):
            # A rank that was given up will hardly come to the next meeting in time.
            _last_meeting_timed_out = True
            return Refusal(f"rank {self._leader} {reason} while the others waited for its decision")
        if not self._channel.has([message_name]):
            return Refusal(f"rank {self._leader} was given up before it sent its decision")
        message = json.loads(self._channel.get(f"told/{self._leader}"))
        if "apart" in message:
            return NoConsensus(f"rank {self._leader} decides, and has none: {message['apart']}")
        body = "".join(
            self._channel.get(f"bytes/{self._leader}/{number}")
            for number in range(message["chunks"])
        )
        # The same decoder as for files: it checks digests and the Program's rules. Nothing of the
        # sender is trusted more than a file would be.
        entries = [decode_entry(base64.b64decode(text)) for text in json.loads(body)]
        damaged = next((entry for entry in entries if isinstance(entry, Refusal)), None)
        if damaged is not None:
            return Refusal(f"rank {self.rank}: an entry of rank {self._leader} is {damaged.reason}")
        return Broadcast(
            message["runs"],
            message["note"],
            tuple(entry for entry in entries if isinstance(entry, Entry)),
        )

    def find_objection(self, broadcast: Broadcast) -> Refusal | None:
        """Why this rank cannot run what the leader decided; None if it can."""
        for entry in broadcast.entries:
            # A kernel that is right under one contract may be too inexact under another.
            if entry.contract.digest != self._context.contract.digest:
                return Refusal(f"rank {self.rank} works under another precision contract")
            if entry.choice.program.digest == entry.region_key:
                # A baseline is PyTorch's own work, which runs on every machine.
                continue
            if entry.target.family != self._context.target.family or (
                stale := explain_staleness(entry.target, self._context.target)
            ):
                reason = stale or "validated on " + entry.target.family
                return Refusal(f"rank {self.rank}: {reason}")
            # A kernel that went wrong on this machine, or was revoked here, does not come back from
            # another rank.
            cache, choice = self._context.cache, entry.choice
            quarantine_reason = find_quarantine_reason(
                (cache.root, *cache.read_only), entry.region_key, choice.digest
            )
            if refusal := cache.check_revoked(choice.program) or quarantine_reason:
                return Refusal(f"rank {self.rank}: {refusal}")
        return None

    def agree_on_verdict(self, problem: Refusal | None, broadcast: Broadcast) -> str:
        """Answer, wait for the answers of the group, and the verdict: `USE_IT`, or why all take the
        baseline.
        """
        names = [f"answer/{rank}" for rank in self._group]
        self._channel.set(f"answer/{self.rank}", str(problem or "yes"))
        timeout_s = self._context.settings.ranks_timeout_s
        # One rank that cannot is enough: it proposes the verdict without waiting for the others.
        proposal = str(problem or f"a rank did not answer within {timeout_s:g} s")
        if problem is None and self._channel.wait(names, f"verdict/{self._leader}", timeout_s):
            answers = map(self._channel.get, names)
            proposal = next((answer for answer in answers if answer != "yes"), USE_IT)
        # The first proposal wins, so a rank that was given up takes the baseline with the others.
        verdict = self._channel.set_once(f"verdict/{self._leader}", proposal)
        if verdict == USE_IT:
            digests = [entry.choice.digest for entry in broadcast.entries]
            telemetry.record(
                "ranks",
                "agreed",
                ranks=self._group,
                leader=self._leader,
                runs=broadcast.runs,
                digests=digests,
            )
            if self.leads:
                self._forget_bytes()
        return verdict

    def _forget_bytes(self) -> None:
        """Every member has answered, so has read: the store need not keep the entries."""
        number = 0
        # The leader counts by asking, as it is the only one that deletes.
        while self._channel.has([f"bytes/{self._leader}/{number}"]):
            self._channel.delete(f"bytes/{self._leader}/{number}")
            number += 1

    def _describe_absent(self, timeout_s: float) -> str:
        arrived = [rank for rank in range(self._size) if self._channel.has([f"at/{rank}"])]
        return f"only ranks {arrived} of {self._size} came within {timeout_s:g} s"


def _store() -> Any:
    """The store of the default process group; None where this process is alone."""
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() < 2
        # The fake backend has one process that plays every rank: no other rank would come.
        or dist.get_backend() == "fake"
    ):
        return None
    return dist.distributed_c10d._get_default_store()
