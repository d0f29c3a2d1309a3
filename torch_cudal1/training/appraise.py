"""From completions to measurements on record: decode, look up, measure what is new, write down.

A sample has a name; one that the database knows is not measured again, so a run that was killed pays for nothing twice. Programs
that came before cost nothing either, except that a success is measured a second time when it is met again, so that one lucky
measurement is not believed for ever. It draws no prompts and commits no generations.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch_cudal1.training.database import Database, Sample
from torch_cudal1.training.records import Codec, Decoded, Evaluator, Measured, TrainingTask, Undecodable

__all__ = ["Appraiser", "Asked"]

_MEASUREMENTS = 2  # of a success; after that its median is used


@dataclass(frozen=True)
class Asked:
    """One completion to appraise. `name`: unique in the run. `exemplars`: digests of what the prompt showed."""

    name: str
    task: TrainingTask
    completion: str
    origin: str = ""
    exemplars: tuple[str, ...] = ()


class Appraiser:
    """Codec, evaluator and database of a run. `measurements` counts what the evaluator was asked for, `repeats` what it was not."""

    def __init__(self, codec: Codec, evaluator: Evaluator, database: Database) -> None:
        self.codec, self.database = codec, database
        self._evaluator = evaluator
        self._known: dict[tuple[str, str], list[Measured]] = {}
        self.measurements = self.repeats = 0
        for sample in database.samples():
            self._learn(sample.measured)

    def appraise(self, asked: Sequence[Asked]) -> list[Measured]:
        """A measurement for each, in order, all on record when this returns. Faults of the evaluator raise; nothing is invented."""
        decoded: dict[int, Decoded] = {}
        for index, one in enumerate(asked):
            if self.database.has(one.name):
                continue
            found = self.codec.decode(one.task, one.completion)
            if isinstance(found, Undecodable):
                self._record(one, Measured(one.task.id, one.completion, "undecodable", detail=found.reason))
            else:
                decoded[index] = found
        for task, programs in self._new(asked, decoded).items():
            self._measure(asked, decoded, task, programs)
        return [self._on_record(one.name) for one in asked]

    def seen(self, task: str, program: str) -> bool:
        """Whether this program of this task was ever measured."""
        return (task, program) in self._known

    def _new(self, asked: Sequence[Asked], decoded: Mapping[int, Decoded]) -> dict[str, dict[str, Decoded]]:
        """Programs by task, each once; also those that are known already, which `_measure` tells apart."""
        found: dict[str, dict[str, Decoded]] = {}
        for index, one in decoded.items():
            found.setdefault(asked[index].task.id, {}).setdefault(one.program, one)
        return found

    def _measure(self, asked: Sequence[Asked], decoded: Mapping[int, Decoded], task: str, programs: Mapping[str, Decoded]) -> None:
        members = [index for index in decoded if asked[index].task.id == task]
        wanted = [one for program, one in programs.items() if self._settled(task, program) is None]
        if wanted:
            fresh = self._evaluator.measure(asked[members[0]].task, wanted)
            self.measurements += len(wanted)
            if len(fresh) != len(wanted):
                raise ValueError(f"the evaluator answered {len(fresh)} measurements for {len(wanted)} programs of {task}")
            answers = {one.program: found for one, found in zip(wanted, fresh, strict=True)}
        else:
            answers = {}
        for index in members:
            program = decoded[index].program
            found = answers.pop(program, None)
            if found is None:
                self.repeats += 1
                known = self._settled(task, program) or self._known[task, program][-1]
                found = replace(known, buckets=())  # what marks a repetition on record: it is no further measurement
            self._record(asked[index], found)

    def _settled(self, task: str, program: str) -> Measured | None:
        """What is known well enough; None for what should be measured (again). A score without buckets is exact."""
        known = self._known.get((task, program), [])
        failures = [one for one in known if one.outcome not in ("ok", "unstable")]
        if failures or not known:
            return failures[0] if failures else None
        if len(known) < _MEASUREMENTS and (known[0].buckets or known[0].outcome == "unstable"):
            return None
        scores = [one.score for one in known if one.score is not None]
        return Measured(task, program, "ok", statistics.median(scores)) if scores else known[-1]

    def _record(self, one: Asked, found: Measured) -> None:
        self.database.add(Sample(one.name, found, origin=one.origin, exemplars=one.exemplars))
        self._learn(found)

    def _on_record(self, name: str) -> Measured:
        sample = self.database.get(name)
        if sample is None:
            raise KeyError(f"sample {name!r} was not put on record")
        return sample.measured

    def _learn(self, found: Measured) -> None:
        known = self._known.setdefault((found.task, found.program), [])
        if found.buckets or not known:
            known.append(found)
