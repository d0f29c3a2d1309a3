"""Evolution with frozen weights: the paper's contrastive prompt and database, and a model that
writes completions and is never trained.

    view of the database -> exemplars -> prompts -> completions, on record -> measured -> committed: one round

A completion is on the disk before it is used, so a run that was killed goes on where it stopped,
and a round that is on record makes no request. Time, tokens and money are counted over all
processes of a run. It stores no kernel for use; the caller may hand the winners on.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.appraise import Appraiser, NamedCompletion
from torch_cudal1.ingest.llm.database import Database, DatabaseView, Success, digest
from torch_cudal1.ingest.llm.endpoint import Completion
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.ingest.llm.records import Codec, Evaluator, Exemplar, Policy
from torch_cudal1.ingest.llm.selectors import Buckets, Selector, select_exemplars
from torch_cudal1.judge.pool.measured import TrainingTask

__all__ = [
    "Budget",
    "CompletionSource",
    "Evolution",
    "EvolutionPlan",
    "Evolved",
    "LocalWriter",
    "Spent",
]

Progress: TypeAlias = Callable[[str, float | None], None]
_CHARS_PER_TOKEN = 4


class CompletionSource(Protocol):
    """Who completes prompts, and says what it took: an `Endpoint`, or a local model behind
    `LocalWriter`.
    """

    @property
    def parallel(self) -> int: ...
    @property
    def name(self) -> str: ...

    def ask_all(
        self, requests: Sequence[tuple[str, int]], *, temperature: float
    ) -> list[Completion | Refusal]:
        """Completions of prompts with their seeds, in order."""
        ...


@dataclass(frozen=True)
class LocalWriter:
    """A `records.Policy` on this machine as a writer. It costs no money; its tokens are counted by
    its own tokenizer, if given.

    `rendered`: a prompt as the model wants it, such as by its chat template.
    """

    policy: Policy
    parallel: int = 16
    tokens: Callable[[str], int] | None = None
    rendered: Callable[[str], str] = str

    @property
    def name(self) -> str:
        """The policy's."""
        return self.policy.name

    def ask_all(
        self, requests: Sequence[tuple[str, int]], *, temperature: float
    ) -> list[Completion | Refusal]:
        """One completion for each prompt, all in one batch under the first one's seed. Raises as
        the policy does.
        """
        count = self.tokens or (lambda text: math.ceil(len(text) / _CHARS_PER_TOKEN))
        prompts = [self.rendered(prompt) for prompt, _ in requests]
        # One batch has one seed: a policy draws all rows of a batch from one generator.
        texts = self.policy.sample(prompts, count=1, temperature=temperature, seed=requests[0][1])
        pairs = zip(prompts, texts, strict=True)
        return [
            Completion(text, count(prompt), count(text), 0.0, self.tokens is None)
            for prompt, (text,) in pairs
        ]


@dataclass(frozen=True)
class Budget:
    """What a task may take, over all processes of a run. None: no limit. A request that was sent is
    finished.
    """

    seconds: float | None = None
    tokens: int | None = None
    money: float | None = None

    def spent_on(self, spent: Spent, ahead: int) -> str:
        """What is used up, or would be by `ahead` more completions of the usual price; "" if
        nothing is.
        """
        if self.seconds is not None and spent.seconds >= self.seconds:
            return f"{spent.seconds:.0f} of {self.seconds:g} seconds"
        # Completions cost what those so far cost on average. Before the first there is nothing to
        # estimate from, and the run starts.
        share = 1 + ahead / spent.answers if spent.answers else 1.0
        if self.tokens is not None and spent.tokens * share > self.tokens:
            return f"{spent.tokens} of {self.tokens} tokens, and {ahead} more completions would exceed them"
        if self.money is not None and spent.money * share > self.money:
            return f"{spent.money:.4f} of {self.money:g} in money, and {ahead} more completions would exceed it"
        return ""


@dataclass(frozen=True)
class Spent:
    """What a run took. `estimated`: some server did not say how many tokens."""

    seconds: float = 0.0
    tokens: int = 0
    money: float = 0.0
    answers: int = 0
    estimated: bool = False


@dataclass(frozen=True)
class EvolutionPlan:
    """Rounds, `samples` of a round, and how they are drawn; every sample has its own exemplars."""

    rounds: int = 8
    samples: int = 8
    temperature: float = 0.8
    seed: int = 0
    selector: Selector = field(default_factory=Buckets)
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        if min(self.rounds, self.samples) < 1 or not self.temperature > 0:
            raise ValueError(
                f"expected rounds and samples of at least 1 and a temperature above 0; came {self}"
            )


@dataclass(frozen=True)
class Evolved:
    """Where a run stands. `stopped`: why it ended before its rounds did, "" if it did not.
    `outcomes`: of all samples.
    """

    task: str
    rounds: int
    best: float | None
    winners: tuple[Success, ...]
    outcomes: dict[str, int]
    spent: Spent
    stopped: str = ""


class Evolution:
    """One task's run in a folder. Use it as a context manager: it holds the folder's lock."""

    def __init__(
        self,
        task: TrainingTask,
        writer: CompletionSource,
        codec: Codec,
        evaluator: Evaluator,
        folder: Path,
    ) -> None:
        """Open or go on with the run of that folder. Raises SettingError for one that another
        process has.
        """
        self.task, self.writer, self.codec = task, writer, codec
        # First: its lock keeps another process from the journal too.
        self.database = Database(folder / "samples.jsonl")
        self.journal = SampleJournal(folder / "completions.jsonl")
        self._appraiser = Appraiser(codec, evaluator, self.database)

    def __enter__(self) -> Evolution:
        return self

    def __exit__(self, *raised: object) -> None:
        self.database.close()

    @property
    def spent(self) -> Spent:
        """What all processes of this run took."""
        rows = [row for key in self.journal.keys() if (row := self.journal.get(key))]  # noqa: SIM118  no mapping
        answers = [row for row in rows if "completion" in row]
        return Spent(
            sum(float(row.get("seconds", 0.0)) for row in rows),
            sum(int(row["tokens"]) for row in answers),
            sum(float(row["money"]) for row in answers),
            len(answers),
            any(bool(row["estimated"]) for row in answers),
        )

    def run(
        self, plan: EvolutionPlan, progress: Progress = lambda activity, fraction: None
    ) -> Evolved:
        """Rounds until they are done, the budget is spent or the writer is silent. Raises
        TargetError, SandboxError.
        """
        stopped = ""
        # The number of committed generations is the number of finished rounds, so a run that was
        # killed goes on at its round.
        while not stopped and self.database.generation < plan.rounds:
            number = self.database.generation
            progress(f"{self.task.id}: round {number + 1} of {plan.rounds}", number / plan.rounds)
            stopped = self._round(plan, number)
        return self._summarise(stopped)

    def _round(self, plan: EvolutionPlan, number: int) -> str:
        """One round, committed once all of it is on record; why there should be no further one, or
        "".
        """
        began = time.monotonic()
        # From the view of the committed generation: after a kill the same prompts are drawn again.
        shown = [self._draw_exemplars(plan, number, i) for i in range(plan.samples)]
        stopped = self._ask_missing(plan, number, shown)
        answered = [
            i for i in range(plan.samples) if self.journal.get(self._name(number, i)) is not None
        ]
        # All that was answered, also what an earlier process of the run had asked for and not
        # measured.
        self._appraiser.appraise([self._asking(number, i, shown[i]) for i in answered])
        # The seconds that this process spent on the round. The key counts the journal's records, so
        # no two processes of a run share one.
        self.journal.add(
            f"{self.task.id}/{number}/life {len(self.journal.keys())}",
            {"seconds": time.monotonic() - began},
        )
        # A round that was cut short is not committed: it is finished when there is more budget.
        if not stopped:
            self.database.commit()
        return stopped

    def _ask_missing(
        self, plan: EvolutionPlan, number: int, shown: Sequence[tuple[Exemplar, ...]]
    ) -> str:
        """Request the completions of the round that are not on record, `parallel` at a time. Why
        that ended early, or "".
        """
        # A completion on record was paid for, and is not requested again.
        missing = [
            i for i in range(plan.samples) if self.journal.get(self._name(number, i)) is None
        ]
        before, began = self.spent.seconds, time.monotonic()
        silent: list[Refusal] = []
        for start in range(0, len(missing), self.writer.parallel):
            part = missing[start : start + self.writer.parallel]
            # The journal does not have this round's seconds yet.
            spent = replace(self.spent, seconds=before + time.monotonic() - began)
            # Asked before each part, because a request that was sent is paid for.
            if reason := plan.budget.spent_on(spent, len(part)):
                return f"the budget is spent: {reason}"
            requests = [
                (self.codec.prompt(self.task, shown[i]), self._seed(plan, number, i)) for i in part
            ]
            for i, answer in zip(
                part, self.writer.ask_all(requests, temperature=plan.temperature), strict=True
            ):
                # Each answer is on the disk before the next part is requested.
                if isinstance(answer, Completion):
                    self._keep(number, i, answer)
                else:
                    silent.append(answer)
        if silent:
            telemetry.record(
                "generate", "no_answer", self.task.id, prompts=len(silent), reason=silent[0].reason
            )
        # One answer is enough: the round goes on with fewer samples. A server that answers no
        # prompt at all is down.
        none_came = missing and len(silent) == len(missing)
        return (
            f"{self.writer.name} gave no answer to {len(missing)} prompts: {silent[0].reason}"
            if none_came
            else ""
        )

    def _keep(self, number: int, index: int, answer: Completion) -> None:
        tokens = answer.prompt_tokens + answer.completion_tokens
        row = {
            "completion": answer.text,
            "tokens": tokens,
            "money": answer.money,
            "estimated": answer.estimated,
        }
        self.journal.add(self._name(number, index), {**row, "writer": self.writer.name})

    def _asking(self, number: int, index: int, shown: Sequence[Exemplar]) -> NamedCompletion:
        row = self.journal.get(self._name(number, index))
        assert row is not None
        digests = tuple(digest(exemplar.program) for exemplar in shown)
        return NamedCompletion(
            self._name(number, index),
            self.task,
            str(row["completion"]),
            str(row["writer"]),
            digests,
        )

    def _draw_exemplars(self, plan: EvolutionPlan, number: int, index: int) -> tuple[Exemplar, ...]:
        return select_exemplars(
            plan.selector, self._seed(plan, number, index), self.task.id, self.database.view(number)
        )

    def _name(self, number: int, index: int) -> str:
        return f"{self.task.id}/{number}/{index}"

    def _seed(self, plan: EvolutionPlan, number: int, index: int) -> int:
        # By name and not by a running number: a sample has the same seed in a process that goes on
        # with the run.
        return int(digest(f"{plan.seed}/{self._name(number, index)}"), 16) % (1 << 31)

    def _summarise(self, stopped: str) -> Evolved:
        outcomes = Counter[str](sample.measured.outcome for sample in self.database.samples())
        # Also of the round that was cut short: what was paid for and measured is not lost to the
        # user.
        winners = tuple(reversed(_read_all_samples(self.database).entries(self.task.id)))
        best = winners[0].score if winners else None
        return Evolved(
            self.task.id,
            self.database.generation,
            best,
            winners,
            dict(outcomes),
            self.spent,
            stopped,
        )


def _read_all_samples(database: Database) -> DatabaseView:
    """All samples, those of a round that was cut short too."""
    # A copy in memory, because a commit in the journal would count as a finished round.
    copy = Database(None)
    for sample in database.samples():
        copy.add(sample)
    copy.commit()
    return copy.view()
