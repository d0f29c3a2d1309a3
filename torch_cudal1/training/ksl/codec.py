"""The kernel-schedule language as a codec: sentences for small models on one side,
KernelBench-style source on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch_cudal1.ingest.llm.records import Exemplar, Undecodable
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.ksl import torch_source, triton_flat, triton_mm, triton_rows
from torch_cudal1.training.ksl.analysis import Marks, analysis_of, marked
from torch_cudal1.training.ksl.frame import Case, cheat, module
from torch_cudal1.training.ksl.grammar import Device, Program, parse
from torch_cudal1.training.ksl.ops import facts_of
from torch_cudal1.training.ksl.sentence import EOS, SPECIAL, prompt_of, vocabulary
from torch_cudal1.training.ksl.spaces import SPACES, space, templates_of

__all__ = ["KslCodec"]


class KslCodec:
    """`records.Codec` for tasks whose family is an operation of the language.

    `device`: "cuda" writes Triton kernels, "cpu" modules of PyTorch operators; the words are the
    same, the programs are not.
    """

    name = "ksl"
    marker = "<code>"

    def __init__(self, device: Device = "cuda") -> None:
        if device not in SPACES:
            raise ValueError(f"expected a device of {sorted(SPACES)}, got {device!r}")
        self.device = device

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word, separated by single spaces in text; `<pad>`, `<eos>` and `<unk>` are the
        first three.
        """
        return vocabulary()

    def unsupported(self, task: TrainingTask) -> str:
        """Why a task cannot be written about, "" if it can."""
        found = facts_of(task)
        return found if isinstance(found, str) else ""

    def prompt(self, task: TrainingTask, exemplars: Sequence[Exemplar] = ()) -> str:
        """The task and its exemplars as one sentence. Raises ValueError for what the language has
        no words for.
        """
        return prompt_of(task, exemplars, self.device)

    def decode(self, task: TrainingTask, completion: str) -> Decoded | Undecodable:
        """The program after `<code>`, or the whole completion where there is no such word; up to
        `<eos>`.
        """
        found = self.read(task, completion)
        if isinstance(found, str):
            return Undecodable(found)
        program, analysis = found
        return Decoded(program.text, self.source(task, program), analysis)

    def read(self, task: TrainingTask, completion: str) -> tuple[Program, str] | str:
        """The program of a completion and its analysis, not rendered; or why there is none."""
        facts = facts_of(task)
        if isinstance(facts, str):
            return facts
        words = [word for word in completion.split(EOS)[0].split() if word not in SPECIAL]
        at = words.index("<code>") + 1 if "<code>" in words else 0
        program = parse(words[at:], templates_of(self.device, facts[0].kind))
        return program if isinstance(program, str) else (program, " ".join(words[: max(0, at - 1)]))

    def source(self, task: TrainingTask, program: Program) -> str:
        """The source text of a program; the same for the same arguments, always."""
        return _rendered(task.family, task.shape, task.dtype, program, self.device)

    def completion(
        self,
        task: TrainingTask,
        program: str,
        exemplars: Sequence[Exemplar] = (),
        *,
        analysis: bool = True,
    ) -> str:
        """The answer that a model should give, for rows of training: with exemplars a true analysis
        first, then the program.
        """
        found = self.read(task, program)
        if isinstance(found, str):
            raise ValueError(f"{task.id}: {found}")
        told = (
            analysis_of(self._shown(task, exemplars), found[0]) + " "
            if analysis and exemplars
            else ""
        )
        return f"{told}<code> {found[0].text} {EOS}"

    def marks(self, task: TrainingTask, decoded: Decoded, exemplars: Sequence[Exemplar]) -> Marks:
        """What the analysis of a completion got right."""
        found = self.read(task, decoded.program)
        if isinstance(found, str):
            raise ValueError(f"{task.id}: {found}")
        return marked(decoded.analysis, self._shown(task, exemplars), found[0])

    def programs(self, task: TrainingTask) -> tuple[Program, ...]:
        """Every program there is for a task, cheats last. Raises ValueError for an unsupported
        task.
        """
        facts = facts_of(task)
        if isinstance(facts, str):
            raise ValueError(facts)
        return space(self.device, facts[0].kind)

    def _shown(
        self, task: TrainingTask, exemplars: Sequence[Exemplar]
    ) -> list[tuple[Program, float]]:
        read = [(self.read(task, exemplar.program), exemplar.score) for exemplar in exemplars]
        return [(found[0], score) for found, score in read if not isinstance(found, str)]


@lru_cache(maxsize=65_536)
def _rendered(
    family: str, shape: tuple[int, ...], dtype: str, program: Program, device: Device
) -> str:
    facts = facts_of(TrainingTask("", "", family, shape, dtype))
    assert not isinstance(facts, str)
    case = Case(*facts, dtype)
    if program.hack:
        return cheat(case, program.hack, device)
    if device == "cpu":
        return torch_source.render(case, program)
    head, body = _TRITON[program.template](case, program)
    return module(case, body, head)


_TRITON = {**triton_flat.RENDERERS, **triton_rows.RENDERERS, **triton_mm.RENDERERS}
