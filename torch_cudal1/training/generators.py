"""Six independent ways to write programs by rule: the first authors of successful programs where no
language model is asked.

Each is a `records.Policy` over prompts of the kernel-schedule language and knows what the prompt
says, nothing else: sizes by their logarithm and divisor, and the exemplars if it shows some. They
differ on purpose, as models do; none has seen a measurement.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_cudal1.training.ksl.grammar import Program, Template
from torch_cudal1.training.ksl.sentence import Sentence, read_prompt, vocabulary
from torch_cudal1.training.ksl.spaces import space, templates_of

__all__ = ["GENERATORS", "Generator", "generator"]

Writer = Callable[[Sentence, random.Random, float], str]
_CAREFUL = {
    "mask": "on",
    "acc": "f32",
    "fuse": "full",
    "axis": "right",
    "carry": "on",
    "epilogue": "fused",
}
_STRAY = 0.15  # how often a rule is not followed in one knob, times the temperature
_BUSY_LOG2 = 9  # programs that fill a large GPU, about
_LANES = 256  # elements a warp of a row or a chain is given
_SLIPS = 0.4


@dataclass(frozen=True)
class Generator:
    """`name`, and how it writes one completion. The same prompt, seed and place in the order give
    the same completion.
    """

    name: str
    write: Writer

    def sample(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> list[list[str]]:
        """`count` completions for each prompt. Raises ValueError for text that is no prompt of the
        language.
        """
        return [
            [self._one(prompt, seed, number, temperature) for number in range(count)]
            for prompt in prompts
        ]

    def _one(self, prompt: str, seed: int, number: int, temperature: float) -> str:
        draw = random.Random(f"{seed} {self.name} {number} {prompt}")
        return f"<code> {self.write(read_prompt(prompt), draw, temperature)}"


def _templates(told: Sentence) -> tuple[Template, ...]:
    return tuple(templates_of(told.device, told.kind).values())


def _strayed(
    template: Template, program: Program, draw: random.Random, temperature: float
) -> Program:
    """Now and then another value than the rule's."""
    knobs = dict(program.knobs)
    for knob in template.knobs:
        if draw.random() < _STRAY * temperature:
            knobs[knob.name] = draw.choice(knob.values)
    return replace(program, knobs=knobs)


def _tutorial(told: Sentence, draw: random.Random, temperature: float) -> str:
    """What every tutorial shows: the defaults, whatever the sizes."""
    template = draw.choice(_templates(told))
    return _strayed(template, template.default, draw, temperature).text


def _ruled(
    told: Sentence,
    draw: random.Random,
    temperature: float,
    rule: Callable[[Sentence, str, Sequence[int]], int],
) -> str:
    """A careful program whose numbers a rule chooses."""
    template = draw.choice(_templates(told))
    knobs = {}
    for knob in template.knobs:
        if all(value.isdigit() for value in knob.values):
            knobs[knob.name] = str(rule(told, knob.name, sorted(map(int, knob.values))))
        else:
            wanted = _CAREFUL.get(knob.name, knob.values[0])
            knobs[knob.name] = wanted if wanted in knob.values else knob.values[0]
    return _strayed(template, Program(template.name, knobs), draw, temperature).text


def _log2(told: Sentence, place: int) -> int:
    """The size of a dimension, -1 the last."""
    return told.sizes[place][0]


def _by_size(told: Sentence, knob: str, values: Sequence[int]) -> int:
    """As compilers do by hints of size: the largest block that a dimension fills, warps to go with
    it, no splitting.
    """
    if knob == "warps":
        return _nearest(values, 2 ** _log2(told, -1) // _LANES)
    if knob in ("block_m", "rows"):
        return _at_most(values, 2 ** _log2(told, 0))
    if knob in ("block", "block_n", "block_k"):
        return _at_most(values, 2 ** _log2(told, -1 if knob != "block_n" else 1))
    return values[0]


def _by_occupancy(told: Sentence, knob: str, values: Sequence[int]) -> int:
    """Many programs first: small blocks while there are too few of them, more warps where there
    are.
    """
    spare = sum(log for log, _ in told.sizes[:2]) - _BUSY_LOG2
    if knob in ("block", "block_n", "block_m", "rows"):
        return _at_most(values, 2 ** max(0, spare // 2 + 2))
    if knob == "split_k":
        return values[-1] if spare < _BUSY_LOG2 else values[0]
    return values[len(values) // 2] if knob in ("warps", "stages") else values[-1]


def _at_most(values: Sequence[int], limit: int) -> int:
    return max((value for value in values if value <= limit), default=values[0])


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: abs(value - wanted))


def _compiler(told: Sentence, draw: random.Random, temperature: float) -> str:
    return _ruled(told, draw, temperature, _by_size)


def _occupancy(told: Sentence, draw: random.Random, temperature: float) -> str:
    return _ruled(told, draw, temperature, _by_occupancy)


def _uniform(told: Sentence, draw: random.Random, temperature: float) -> str:
    """Any honest program with the same chance."""
    return draw.choice(
        [program for program in space(told.device, told.kind) if not program.hack]
    ).text


def _mutant(told: Sentence, draw: random.Random, temperature: float) -> str:
    """One or two knobs of a program that is known to be good: the best one shown, or a careful
    default.
    """
    honest = [(program, score) for program, score in told.exemplars if not program.hack]
    if honest:
        base = max(honest, key=lambda one: one[1])[0]
        template = templates_of(told.device, told.kind)[base.template]
    else:
        template = draw.choice(_templates(told))
        base = template.default
    knobs = dict(base.knobs)
    for knob in draw.sample(template.knobs, min(len(template.knobs), draw.choice((1, 2)))):
        knobs[knob.name] = draw.choice(knob.values)
    return Program(template.name, knobs).text


def _sloppy(told: Sentence, draw: random.Random, temperature: float) -> str:
    """In a hurry: every third or so is no program at all, and masks are left out for speed."""
    template = draw.choice(_templates(told))
    knobs = {knob.name: draw.choice(knob.values) for knob in template.knobs}
    if "mask" in knobs:
        knobs["mask"] = draw.choice(("off", "off", "on"))
    words = Program(template.name, knobs).text.split()
    if draw.random() < _SLIPS:
        place = draw.randrange(len(words))
        words[place : place + 1] = draw.choice(
            ([], [draw.choice(vocabulary())], words[place : place + 1] * 2)
        )
    return " ".join(words)


GENERATORS: Mapping[str, Generator] = {
    name: Generator(name, write)
    for name, write in (
        ("tutorial", _tutorial),
        ("compiler", _compiler),
        ("occupancy", _occupancy),
        ("uniform", _uniform),
        ("mutant", _mutant),
        ("sloppy", _sloppy),
    )
}


def generator(name: str) -> Generator:
    """One of them. Raises ValueError for another name."""
    if name not in GENERATORS:
        raise ValueError(f"expected a generator of {', '.join(GENERATORS)}, got {name!r}")
    return GENERATORS[name]
