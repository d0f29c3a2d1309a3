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

from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.ksl.grammar import HACKS, Device, Program, parse
from torch_cudal1.training.ksl.ops import DIMS, DTYPES, OPS, Op, facts_of
from torch_cudal1.training.ksl.spaces import SPACES, templates_of

__all__ = [
    "EOS",
    "SPECIAL",
    "Sentence",
    "prompt_of",
    "read_prompt",
    "score_of",
    "score_word",
    "vocabulary",
]

EOS, _PAD, _UNKNOWN = "<eos>", "<pad>", "<unk>"
SPECIAL = (_PAD, EOS, _UNKNOWN)
_MARKS = ("<task>", "<shape>", "<dtype>", "<ex>", "<go>", "<pa>", "<ad>", "<code>")
_DIVISORS = tuple(2**power for power in range(11))
_SIZES = range(25)
_BINS, _LOW, _HIGH = 24, 0.25, 8.0  # log-spaced bins of scores
_INTENTS = ("keep1", "keep2", "up", "down", "new")
_BETTER = ("1", "2", "none")


@dataclass(frozen=True)
class Sentence:
    """A prompt as it was read: what any policy, however simple, may know of a task. `sizes`: (log2,
    divisor) of each dimension.
    """

    device: Device
    kind: str
    graph: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    dtype: str
    exemplars: tuple[tuple[Program, int], ...] = ()


def prompt_of(task: TrainingTask, exemplars: Sequence[Exemplar], device: Device) -> str:
    """The sentence of a task. Raises ValueError for a task or an exemplar that the language has no
    words for.
    """
    found = facts_of(task)
    if isinstance(found, str):
        raise ValueError(found)
    op, sizes = found
    words = ["<task>", device, op.kind, *(f"op={name}" for name in op.graph), "<shape>"]
    for size in sizes.values():
        words += [f"size={min(size.bit_length() - 1, _SIZES[-1])}", f"div={_divisor(size)}"]
    words += ["<dtype>", DTYPES[task.dtype]]
    for shown in exemplars:
        program = parse(shown.program.split(), templates_of(device, op.kind))
        if isinstance(program, str):
            raise ValueError(f"{task.id}: an exemplar that is no program: {program}")
        words += ["<ex>", *program.text.split(), score_word(shown.score)]
    return " ".join([*words, "<go>"])


def read_prompt(prompt: str) -> Sentence:
    """What a prompt says. Raises ValueError for text that `prompt_of` did not write."""
    try:
        head, *shown = prompt.removesuffix(" <go>").split(" <ex> ")
        task, rest = head.removeprefix("<task> ").split(" <shape> ")
        shape, dtype = rest.split(" <dtype> ")
        name, kind, *graph = task.split()
        device = next(one for one in SPACES if one == name)
        numbers = [int(word.partition("=")[2]) for word in shape.split()]
    except (ValueError, StopIteration) as error:
        raise ValueError(
            f"expected a prompt of the kernel-schedule language, got {prompt[:120]!r}"
        ) from error
    exemplars = tuple(_shown(words.split(), device, kind) for words in shown)
    sizes = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    return Sentence(
        device, kind, tuple(word.removeprefix("op=") for word in graph), sizes, dtype, exemplars
    )


def _shown(words: Sequence[str], device: Device, kind: str) -> tuple[Program, int]:
    program = parse(words[:-1], templates_of(device, kind))
    if isinstance(program, str):
        raise ValueError(f"an exemplar that is no program: {program}")
    return program, int(words[-1].partition("=")[2])


def _divisor(size: int) -> int:
    return int(min(size & -size, _DIVISORS[-1]))


def score_word(score: float) -> str:
    """The bin of a speed-up: 24 of equal width in its logarithm from 0.25 to 8, ends included."""
    place = math.log(score / _LOW) / math.log(_HIGH / _LOW)
    return f"score={min(_BINS - 1, max(0, int(place * _BINS)))}"


def score_of(word: str) -> float:
    """The middle of a bin as a speed-up."""
    place = (int(word.partition("=")[2]) + 0.5) / _BINS
    return float(_LOW * (_HIGH / _LOW) ** place)


@cache
def vocabulary() -> tuple[str, ...]:
    """Every word, the same for all devices, in a fixed order; `<pad>`, `<eos>` and `<unk>` first."""
    return tuple(dict.fromkeys(_words()))


def _words() -> Iterator[str]:
    yield from SPECIAL
    yield from _MARKS
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


def op_of(sentence: Sentence) -> Op | None:
    """The operation a prompt is about, if its graph names just one."""
    named = [op for op in OPS.values() if op.kind == sentence.kind and op.graph == sentence.graph]
    return named[0] if len(named) == 1 else None
