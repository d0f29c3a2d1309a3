"""Prompts and answers as sentences of a closed vocabulary, and back: what a model reads, and what
its analysis claims.

    <task> cpu row op=max ... <shape> size=10 div=64 ... <dtype> f32 <ex> tpl=row.two ... score=14 <go>
    <pa> better=2 diff=block <ad> block:up mask:keep2 <code> tpl=row.two block=1024 ...

A shape is shown as the floor of the base-2 logarithm of each size and the largest power of two that
divides it, up to 1024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.ksl.grammar import HACKS, Device, KslProgram, parse_program
from torch_cudal1.training.ksl.ops import DIMS, DTYPES, OPS, Op, resolve_task
from torch_cudal1.training.ksl.spaces import SPACES, get_templates

__all__ = [
    "EOS",
    "SPECIAL",
    "Sentence",
    "format_score",
    "list_vocabulary",
    "parse_score",
    "read_prompt",
    "write_prompt",
]

EOS, _PAD, _UNKNOWN = "<eos>", "<pad>", "<unk>"
SPECIAL = (_PAD, EOS, _UNKNOWN)
_MARKS = ("<task>", "<shape>", "<dtype>", "<ex>", "<go>", "<pa>", "<ad>", "<code>")
_DIVISORS = tuple(2**power for power in range(11))
_SIZES = range(25)
# Bins of scores, of equal width in the logarithm: 24 words from 0.25x to 8x, neighbours a factor of
# 1.16 apart.
_BINS, _LOW, _HIGH = 24, 0.25, 8.0
_INTENTS = ("keep1", "keep2", "up", "down", "new")
_BETTER = ("1", "2", "none")


@dataclass(frozen=True)
class Sentence:
    """A parsed prompt: everything that a policy may know about a task. `sizes`: (log2, divisor) of
    each dimension.
    """

    device: Device
    kind: str
    graph: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    dtype: str
    exemplars: tuple[tuple[KslProgram, int], ...] = ()


def write_prompt(task: TrainingTask, exemplars: Sequence[Exemplar], device: Device) -> str:
    """Write the sentence of a task. Raises ValueError for a task or an exemplar that the language
    has no words for.
    """
    resolved = resolve_task(task)
    if isinstance(resolved, Refusal):
        raise ValueError(resolved.reason)
    op, sizes = resolved
    words = ["<task>", device, op.kind, *(f"op={name}" for name in op.graph), "<shape>"]
    # Logarithm and divisor instead of the number: a shape that was never seen is made of words that
    # were. The divisor says whether a program without its mask can be right.
    for size in sizes.values():
        words += [f"size={min(size.bit_length() - 1, _SIZES[-1])}", f"div={_find_divisor(size)}"]
    words += ["<dtype>", DTYPES[task.dtype]]
    for exemplar in exemplars:
        # Parsed and written again: a prompt has canonical texts only.
        program = parse_program(exemplar.program.split(), get_templates(device, op.kind))
        if isinstance(program, Refusal):
            raise ValueError(f"{task.id}: an exemplar that is no program: {program}")
        words += ["<ex>", *program.text.split(), format_score(exemplar.score)]
    return " ".join([*words, "<go>"])


def read_prompt(prompt: str) -> Sentence:
    """Parse a prompt. Raises ValueError for text that `write_prompt` did not write."""
    try:
        head, *exemplar_texts = prompt.removesuffix(" <go>").split(" <ex> ")
        task, rest = head.removeprefix("<task> ").split(" <shape> ")
        shape, dtype = rest.split(" <dtype> ")
        name, kind, *graph = task.split()
        device = next(name_of_device for name_of_device in SPACES if name_of_device == name)
        numbers = [int(word.partition("=")[2]) for word in shape.split()]
    # A missing mark fails to unpack, an unknown device finds no next item.
    except (ValueError, StopIteration) as error:
        raise ValueError(
            f"expected a prompt of the kernel-schedule language, got {prompt[:120]!r}"
        ) from error
    exemplars = tuple(_parse_exemplar(words.split(), device, kind) for words in exemplar_texts)
    sizes = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    return Sentence(
        device, kind, tuple(word.removeprefix("op=") for word in graph), sizes, dtype, exemplars
    )


def _parse_exemplar(words: Sequence[str], device: Device, kind: str) -> tuple[KslProgram, int]:
    program = parse_program(words[:-1], get_templates(device, kind))
    if isinstance(program, Refusal):
        raise ValueError(f"an exemplar that is no program: {program}")
    return program, int(words[-1].partition("=")[2])


def _find_divisor(size: int) -> int:
    # size & -size is the lowest set bit: the largest power of two that divides.
    return int(min(size & -size, _DIVISORS[-1]))


def format_score(score: float) -> str:
    """The word of a speed-up's bin: 24 bins of equal width in the logarithm from 0.25 to 8. The
    outermost bins hold all scores beyond them.
    """
    place = math.log(score / _LOW) / math.log(_HIGH / _LOW)
    # Scores beyond the ends go into the outermost bins: a prompt must have a word for every score.
    return f"score={min(_BINS - 1, max(0, int(place * _BINS)))}"


def parse_score(word: str) -> float:
    """The middle of a bin, as a speed-up."""
    place = (int(word.partition("=")[2]) + 0.5) / _BINS
    return float(_LOW * (_HIGH / _LOW) ** place)


@cache
def list_vocabulary() -> tuple[str, ...]:
    """All words in a fixed order, the same for all devices. `<pad>`, `<eos>` and `<unk>` come
    first.
    """
    # Without duplicates and in a fixed order: a word's place is its token id, which models on disk
    # depend on. A set would have another order in each process.
    return tuple(dict.fromkeys(_iterate_words()))


def _iterate_words() -> Iterator[str]:
    # First, so that their ids are 0, 1 and 2 whatever else is added later.
    yield from SPECIAL
    yield from _MARKS
    # Words of all devices: one tokenizer serves both.
    yield from SPACES
    yield from DIMS
    yield from DTYPES.values()
    yield from sorted({f"op={name}" for op in OPS.values() for name in op.graph})
    yield from (f"size={size}" for size in _SIZES)
    yield from (f"div={divisor}" for divisor in _DIVISORS)
    yield from (f"score={number}" for number in range(_BINS))
    templates = [template for listed in SPACES.values() for template in listed]
    yield from (f"tpl={template.name}" for template in templates)
    yield from (f"hack={name}" for name in HACKS)
    knobs = [knob for template in templates for knob in template.knobs]
    yield from sorted({f"{knob.name}={value}" for knob in knobs for value in knob.values})
    names = ["tpl", *sorted({knob.name for knob in knobs})]
    yield from (f"better={which}" for which in _BETTER)
    yield from (f"diff={name}" for name in names)
    yield from (f"{name}:{intent}" for name in names for intent in _INTENTS)


def find_op(sentence: Sentence) -> Op | None:
    """The operation that a prompt is about; None if its graph names none or several."""
    named = [op for op in OPS.values() if op.kind == sentence.kind and op.graph == sentence.graph]
    # Two operations may have one graph; guessing between them would render another task's kernel.
    return named[0] if len(named) == 1 else None
