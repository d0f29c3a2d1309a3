"""From completions to measurements on record: decode, look up, measure what is due, write down.

A sample has a name. A sample whose name the database knows is not measured again, so a run that was
killed pays for nothing twice. `judge.pool.judge_evaluator.MeasurementMemory` decides which programs are measured
again when they come again, for the judge and for replay. It draws no prompts and commits no
generations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.checker import CheckedEvaluator
from torch_cudal1.ingest.llm.database import Database, StoredSample
from torch_cudal1.ingest.llm.records import Codec, Evaluator
from torch_cudal1.judge.pool.judge_evaluator import MeasurementMemory
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask

__all__ = ["Appraiser", "NamedCompletion"]


@dataclass(frozen=True)
class NamedCompletion:
    """One completion to appraise. `name`: unique in the run. `exemplars`: digests of what the
    prompt showed.
    """

    name: str
    task: TrainingTask
    completion: str
    origin: str = ""
    exemplars: tuple[str, ...] = ()


class Appraiser:
    """Codec, evaluator and database of a run. `memory`: what is known of programs, from the
    database on.
    """

    def __init__(self, codec: Codec, evaluator: Evaluator, database: Database) -> None:
        self.codec, self.database = codec, database
        self._evaluator: Any = evaluator
        self.memory = MeasurementMemory()
        measurements = [
            sample.measured
            for sample in database.samples()
            # An undecodable completion holds no program that could come again.
            if sample.measured.outcome != "undecodable"
        ]
        self.memory.learn(measurements)
        evaluator_memory = getattr(evaluator, "memory", None)
        if isinstance(evaluator_memory, MeasurementMemory):
            # The evaluator re-verifies a surprising score, and needs the earlier scores to know
            # which one is.
            evaluator_memory.learn(measurements)
        if isinstance(evaluator, CheckedEvaluator):
            evaluator.learn(list(database.samples()))

    def appraise(self, completions: Sequence[NamedCompletion]) -> list[Measured]:
        """A measurement for each, in order, all on record when this returns. Faults of the
        evaluator raise; nothing is invented.
        """
        # By task, then by the sample's name.
        decoded: dict[str, dict[str, Decoded]] = {}
        tasks: dict[str, TrainingTask] = {}
        names = {completion.name: completion for completion in completions}
        for completion in completions:
            # A run that was killed and goes on: the sample is on record, and is not measured twice.
            if self.database.has(completion.name):
                continue
            program = self.codec.decode(completion.task, completion.completion)
            if isinstance(program, Refusal):
                self._record(
                    completion,
                    Measured(
                        completion.task.id,
                        completion.completion,
                        "undecodable",
                        detail=program.reason,
                    ),
                )
            else:
                decoded.setdefault(completion.task.id, {})[completion.name] = program
                tasks[completion.task.id] = completion.task
        self._measure(tasks, decoded, names)
        return [self._on_record(completion.name) for completion in completions]

    def _measure(
        self,
        tasks: Mapping[str, TrainingTask],
        decoded: Mapping[str, Mapping[str, Decoded]],
        names: Mapping[str, NamedCompletion],
    ) -> None:
        due = {}
        for task, programs in decoded.items():
            due[task] = [
                program
                for _, program, *_ in self.memory.select_due(tasks[task], list(programs.values()))
            ]
        # Several samples of a batch may hold the same program. It is measured once, for the last of
        # them; the others are answered from memory below.
        waiting = {
            (task, program.program): name
            for task, by_name in decoded.items()
            for name, program in by_name.items()
        }

        def record_measurement(measurement: Measured) -> None:
            """Put a measurement on record as it comes."""
            # At once: a kill later in the batch loses nothing that was measured.
            if name := waiting.pop((measurement.task, measurement.program), ""):
                self.memory.take(measurement)
                self._record(names[name], measurement)

        self._ask(
            [(tasks[task], programs) for task, programs in due.items() if programs],
            record_measurement,
        )
        for task, by_name in decoded.items():
            for name, program in by_name.items():
                # The program was measured before, in this batch or in an earlier one: the sample
                # gets what is known of it by now.
                if not self.database.has(name):
                    self._record(
                        # Without buckets: they are runs of one measurement, and this sample had
                        # none of its own.
                        names[name],
                        replace(self.memory.answer(task, program.program), buckets=()),
                    )

    def _ask(
        self,
        questions: Sequence[tuple[TrainingTask, Sequence[Decoded]]],
        measured: Callable[[Measured], None],
    ) -> None:
        """Measure all tasks at once where the evaluator can, which then reports each measurement as
        it comes; else task by task.
        """
        if hasattr(self._evaluator, "measure_all"):
            # Each measurement is handed over as it comes: a kill later in the batch loses none.
            self._evaluator.on_measurement = measured
            answers = self._evaluator.measure_all(questions)
        else:
            answers = (self._evaluator.measure(task, programs) for task, programs in questions)
        for (task, programs), measurements in zip(questions, answers, strict=True):
            # Otherwise `zip` would give programs the measurements of others.
            if len(measurements) != len(programs):
                raise ValueError(
                    f"the evaluator answered {len(measurements)} measurements for "
                    f"{len(programs)} programs of {task.id}"
                )
            # Measurements that were reported already are passed over: `waiting` holds a program
            # until its first answer.
            for measurement in measurements:
                measured(measurement)

    def _record(self, completion: NamedCompletion, measurement: Measured) -> None:
        self.database.add(
            StoredSample(
                completion.name,
                measurement,
                origin=completion.origin,
                exemplars=completion.exemplars,
            )
        )

    def _on_record(self, name: str) -> Measured:
        sample = self.database.get(name)
        if sample is None:
            raise KeyError(f"sample {name!r} was not put on record")
        return sample.measured
