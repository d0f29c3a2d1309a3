"""The kernel-schedule language as a codec: sentences for small models on one side,
KernelBench-style source on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.ksl import torch_source, triton_flat, triton_mm, triton_rows
from torch_cudal1.training.ksl.answer_analysis import AnalysisMarks, mark_analysis, write_analysis
from torch_cudal1.training.ksl.grammar import Device, KslProgram, parse_program
from torch_cudal1.training.ksl.module_template import ShapeCase, render_cheat, render_module
from torch_cudal1.training.ksl.ops import resolve_task
from torch_cudal1.training.ksl.sentence import EOS, SPECIAL, list_vocabulary, write_prompt
from torch_cudal1.training.ksl.spaces import SPACES, get_templates, list_programs

__all__ = ["KslCodec"]


class KslCodec:
    """A `records.Codec` for tasks whose family is an operation of the language.

    `device`: "cuda" renders Triton kernels, "cpu" modules of PyTorch operators. Both have the same
    vocabulary and different programs.
    """

    name = "ksl"
    marker = "<code>"

    def __init__(self, device: Device = "cuda") -> None:
        if device not in SPACES:
            raise ValueError(f"expected a device of {sorted(SPACES)}, got {device!r}")
        self.device = device

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All words, which text separates by single spaces. `<pad>`, `<eos>` and `<unk>` are the
        first three.
        """
        return list_vocabulary()

    def prompt(self, task: TrainingTask, exemplars: Sequence[Exemplar] = ()) -> str:
        """Write the task and its exemplars as one sentence. Raises ValueError for a task or
        exemplar that the language has no words for.
        """
        return write_prompt(task, exemplars, self.device)

    def decode(self, task: TrainingTask, completion: str) -> Decoded | Refusal:
        """Decode the program after `<code>` and before `<eos>`; the whole completion where there is
        no `<code>`.
        """
        parsed = self.parse(task, completion)
        if isinstance(parsed, Refusal):
            return parsed
        program, analysis = parsed
        return Decoded(program.text, self.source(task, program), analysis)

    def parse(self, task: TrainingTask, completion: str) -> tuple[KslProgram, str] | Refusal:
        """Parse a completion into its program and its analysis, without rendering source."""
        resolved = resolve_task(task)
        if isinstance(resolved, Refusal):
            return resolved
        op, _ = resolved
        # A model that was not stopped writes on after its end token, and a batch pads shorter
        # completions.
        words = [word for word in completion.split(EOS)[0].split() if word not in SPECIAL]
        # The first marker: a second one makes the program unreadable, as words between them are no
        # knobs. Programs of the database come without a marker.
        start = words.index(self.marker) + 1 if self.marker in words else 0
        # Templates of this kind alone: a row template for a product is a mistake of the model,
        # found here at no cost.
        program = parse_program(words[start:], get_templates(self.device, op.kind))
        if isinstance(program, Refusal):
            return program
        return program, " ".join(words[: max(0, start - 1)])

    def source(self, task: TrainingTask, program: KslProgram) -> str:
        """Render the source text of a program. The same arguments always give the same text."""
        return _render_source(task.family, task.shape, task.dtype, program, self.device)

    def completion(
        self,
        task: TrainingTask,
        program: str,
        exemplars: Sequence[Exemplar] = (),
        *,
        analysis: bool = True,
    ) -> str:
        """Write the answer that a model should give, for rows of fine-tuning: the true analysis if
        there are exemplars, then the program.
        """
        parsed_program = self._parse_program(task, program)
        analysis_text = ""
        if analysis and exemplars:
            analysis_text = write_analysis(self._parse_exemplars(task, exemplars), parsed_program)
            analysis_text += " "
        # The canonical text, not the caller's: equal programs must be equal answers.
        return f"{analysis_text}<code> {parsed_program.text} {EOS}"

    def marks(
        self, task: TrainingTask, decoded: Decoded, exemplars: Sequence[Exemplar]
    ) -> AnalysisMarks:
        """Compare the analysis of a completion with the true one."""
        program = self._parse_program(task, decoded.program)
        return mark_analysis(decoded.analysis, self._parse_exemplars(task, exemplars), program)

    def programs(self, task: TrainingTask) -> tuple[KslProgram, ...]:
        """All programs of a task, cheats last. Raises ValueError for an unsupported task."""
        resolved = resolve_task(task)
        if isinstance(resolved, Refusal):
            raise ValueError(resolved.reason)
        op, _ = resolved
        return list_programs(self.device, op.kind)

    def _parse_program(self, task: TrainingTask, text: str) -> KslProgram:
        parsed = self.parse(task, text)
        if isinstance(parsed, Refusal):
            raise ValueError(f"{task.id}: {parsed}")
        return parsed[0]

    def _parse_exemplars(
        self, task: TrainingTask, exemplars: Sequence[Exemplar]
    ) -> list[tuple[KslProgram, float]]:
        """Parse the exemplars into programs with their scores. Exemplars that are not programs are
        left out.
        """
        parsed = [(self.parse(task, exemplar.program), exemplar.score) for exemplar in exemplars]
        return [
            (program_and_analysis[0], score)
            for program_and_analysis, score in parsed
            if not isinstance(program_and_analysis, Refusal)
        ]


# A policy repeats itself. Keyed by values, without the reference's text; the bound is above the
# programs of all tasks together (21,860 on a GPU).
@lru_cache(maxsize=65_536)
def _render_source(
    family: str, shape: tuple[int, ...], dtype: str, program: KslProgram, device: Device
) -> str:
    resolved = resolve_task(TrainingTask("", "", family, shape, dtype))
    # Callers have resolved the same family, shape and dtype.
    assert not isinstance(resolved, Refusal)
    case = ShapeCase(*resolved, dtype)
    # Before templates: a cheat stands in place of its template's schedule.
    if program.hack:
        return render_cheat(case, program.hack, device)
    if device == "cpu":
        return torch_source.render_torch_module(case, program)
    head, body = _TRITON[program.template](case, program)
    return render_module(case, body, head)


_TRITON = {**triton_flat.RENDERERS, **triton_rows.RENDERERS, **triton_mm.RENDERERS}
