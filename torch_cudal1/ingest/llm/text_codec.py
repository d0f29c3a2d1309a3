"""Codec `text`: prompts in Markdown, answers in three sections, programs as KernelBench-style
source. For real language models.

The structure is that of the CUDA-L1 paper (section 2.4, table 3), the wording this package's. A
change of the wording is a new `VERSION`. Decoding runs nothing and trusts nothing; the judge finds
out whether the source compiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask

__all__ = ["VERSION", "TextCodec"]

# Rewards measured under one wording say little about another, so a change of a text below is a new
# version.
VERSION = 1
# At the start of a line: the judge cannot construct a `ModelNew` inside a function.
_ENTRY = re.compile(r"^(?:class|def)\s+ModelNew\b|^ModelNew\s*=", re.MULTILINE)
# As CommonMark has it: up to three spaces, then three or more backticks or tildes.
_FENCE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
# In characters; the longest published kernels have about 40,000.
_MOST_SOURCE = 200_000

_TASK = """\
# Task

You write GPU kernels. Below is a PyTorch module `Model` with the functions that make its inputs. Write `ModelNew`, a module that \
takes the same constructor arguments and the same inputs and returns the same results, and takes less time on {device}.
"""
_COMPARE = """\

Before you write anything, compare the earlier versions: each is correct, and its speed-up over `Model` was measured.
"""
_REFERENCE = """
# Reference

{code}
"""
_EARLIER = """
# Earlier versions

"""
_EXEMPLAR = """\
## Version {number}: {score:.2f}x

{code}

"""
_ANSWER = """
# Answer

Write exactly these three sections, with these headings.

## Analysis

{questions}

## Design

The algorithm and the plan of the kernel: what is computed where, tile sizes, memory traffic, what is fused.

## Code

One Python code block with the whole module: imports, kernels, `ModelNew`. No test code and no text after it.

# Rules

1. `ModelNew` returns what `Model` returns, for every input of this shape and not only for the ones shown. A wrong result scores 0.
2. It must run as it is: no placeholders, nothing left out.
3. Every call computes its result anew from its inputs and parameters. Keeping results, or anything that depends on them, between \
calls scores 0.
4. Batch size, dimensions, dtypes and the precision of the arithmetic stay as they are in `Model`.
5. All work is done when the call's own stream is done: no threads and no unjoined streams.
"""
_QUESTIONS = """\
Where does the time of `Model` go: arithmetic, memory traffic or launches? Which part has the most to gain, and what technique \
suits it?"""
_CONTRAST = """\
Which of the versions is fastest, and what makes it so? What holds each of them back? Which of their ideas are worth combining, \
which technique did none of them use, and where is the most left to gain?"""


@dataclass(frozen=True)
class TextCodec:
    """Fills `records.Codec`. `device`: what the prompt names. `most_chars`: of a prompt; beyond it
    the slowest exemplars go.
    """

    device: str = "the GPU it runs on"
    most_chars: int = 60_000
    name: str = f"text-{VERSION}"
    marker: str = "## Code"

    def prompt(self, task: TrainingTask, exemplars: Sequence[Exemplar] = ()) -> str:
        """Task, reference, earlier versions with their speed-ups, the form of the answer, the
        rules.
        """
        shown = list(exemplars)
        while True:
            text = self._render(task, shown)
            # Without exemplars the prompt stays as it is: a reference that is cut would be another
            # task.
            if len(text) <= self.most_chars or not shown:
                return text
            shown.remove(min(shown, key=lambda exemplar: exemplar.score))

    def decode(self, task: TrainingTask, completion: str) -> Decoded | Refusal:
        """The last whole code block that defines `ModelNew`, in canonical form; the text before it
        is the analysis.
        """
        # Reasoning often holds drafts of the program, which are not the answer.
        answer = _THOUGHT.sub("", completion)
        # Only an unclosed one is left: the answer was cut off before it began.
        if "<think>" in answer:
            return Refusal("the answer ends inside its reasoning")
        blocks, cut = _find_code_blocks(answer)
        fitting = [block for block in blocks if _ENTRY.search(block.text)]
        if not fitting:
            return Refusal(_describe_missing_code(answer, len(blocks), cut))
        # The open block defines `ModelNew` too, so it was to replace the last whole one.
        if cut and _ENTRY.search(answer[fitting[-1].end :]):
            return Refusal("its last code block is not closed: the answer was cut off")
        # The last block that fits, because a model may write drafts before it.
        source = _normalise_text(fitting[-1].text)
        if len(source) > _MOST_SOURCE:
            return Refusal(f"its code has {len(source)} characters; at most {_MOST_SOURCE}")
        return Decoded(source, source, answer[: fitting[-1].start].strip())

    def _render(self, task: TrainingTask, shown: Sequence[Exemplar]) -> str:
        parts = [_TASK.format(device=self.device)]
        if shown:
            parts.append(_COMPARE)
        parts.append(_REFERENCE.format(code=_fence(task.reference)))
        if shown:
            parts.append(_EARLIER)
        for number, exemplar in enumerate(shown, start=1):
            parts.append(
                _EXEMPLAR.format(number=number, score=exemplar.score, code=_fence(exemplar.program))
            )
        parts.append(
            _ANSWER.format(questions=_CONTRAST if len(shown) > 1 else _QUESTIONS).removeprefix(
                "\n" if shown else ""
            )
        )
        return "".join(parts)


@dataclass(frozen=True)
class _Block:
    text: str
    start: int
    end: int


def _find_code_blocks(answer: str) -> tuple[list[_Block], bool]:
    """The closed code blocks of a Markdown text, and whether one is left open at its end."""
    blocks: list[_Block] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(answer):
        mark = fence.group(1)
        if opened is None:
            opened = fence
        elif mark.startswith(opened.group(1)) and not fence.group(2).strip():
            # A closing fence is at least as long as the opening one and has no text behind it.
            blocks.append(
                _Block(answer[opened.end() + 1 : fence.start()], opened.start(), fence.end())
            )
            opened = None
    return blocks, opened is not None


def _describe_missing_code(answer: str, blocks: int, cut: bool) -> str:
    if not answer.strip():
        return "the answer is empty"
    if cut:
        return "its code block is not closed: the answer was cut off"
    if not blocks:
        return "the answer holds no code block"
    return f"none of its {blocks} code blocks defines ModelNew at the top level"


def _normalise_text(text: str) -> str:
    """The text with plain line ends, and without white space at the ends of lines or blank lines at
    both ends.
    """
    # Programs are compared by their text: white space must not make a program new.
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    return "\n".join(lines).strip("\n") + "\n"


def _fence(code: str) -> str:
    """`code` as a Markdown code block."""
    # Longer than any run in the code, so that no exemplar can end its own block.
    longest = max((len(run) for run in re.findall(r"`{3,}", code)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}python\n{_normalise_text(code)}{fence}"
