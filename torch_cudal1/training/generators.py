"""Six independent policies that write programs by rule: the first authors of successful programs
where no language model is used.

Each is a `records.Policy` over prompts of the kernel-schedule language and knows only what the
prompt says: the logarithm and divisor of each size, and exemplars if there are any. They differ on
purpose, as language models do; none was made from measurements.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_cudal1.training.ksl.grammar import KslProgram, KslTemplate
from torch_cudal1.training.ksl.sentence import Sentence, list_vocabulary, read_prompt
from torch_cudal1.training.ksl.spaces import get_templates, list_programs

__all__ = ["GENERATORS", "Generator", "get_generator"]

Writer = Callable[[Sentence, random.Random, float], str]
# What is right for every shape: masks on, float32 sums, factors along the right axis. Speed is left
# to the numbers.
_CAREFUL_VALUES = {
    "mask": "on",
    "acc": "f32",
    "fuse": "full",
    "axis": "right",
    "carry": "on",
    "epilogue": "fused",
}
# How often one knob does not follow the rule, times the temperature.
_DEVIATION_PROBABILITY = 0.15
# About as many programs (512) as fill a large GPU: an H100 has 132 multiprocessors.
_SATURATING_PROGRAMS_LOG2 = 9
# The elements of a row or a chain for one warp: eight for each of its threads.
_ELEMENTS_PER_WARP = 256
_SLIP_PROBABILITY = 0.4


@dataclass(frozen=True)
class Generator:
    """A policy by rule: `name`, and how it writes one completion. The same prompt, seed and number
    give the same completion.
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
        # Seeded by the text of the prompt: a completion does not depend on the batch in which its
        # prompt comes, so an attempt that is repeated task by task has the same answers. The name
        # keeps generators independent of each other.
        draw = random.Random(f"{seed} {self.name} {number} {prompt}")
        return f"<code> {self.write(read_prompt(prompt), draw, temperature)}"


def _get_templates(sentence: Sentence) -> tuple[KslTemplate, ...]:
    return tuple(get_templates(sentence.device, sentence.kind).values())


def _deviate(
    template: KslTemplate, program: KslProgram, draw: random.Random, temperature: float
) -> KslProgram:
    """Give each knob another value than the rule's with a small probability."""
    # Without deviations a rule writes one program for a task, and `collect` wants two different
    # ones.
    knobs = dict(program.knobs)
    for knob in template.knobs:
        if draw.random() < _DEVIATION_PROBABILITY * temperature:
            knobs[knob.name] = draw.choice(knob.values)
    return replace(program, knobs=knobs)


def _write_tutorial(sentence: Sentence, draw: random.Random, temperature: float) -> str:
    """Write a template's defaults, which are the values of tutorials, whatever the sizes."""
    template = draw.choice(_get_templates(sentence))
    return _deviate(template, template.default, draw, temperature).text


def _write_by_rule(
    sentence: Sentence,
    draw: random.Random,
    temperature: float,
    rule: Callable[[Sentence, str, Sequence[int]], int],
) -> str:
    """Write a careful program whose numbers a rule chooses."""
    template = draw.choice(_get_templates(sentence))
    knobs = {}
    for knob in template.knobs:
        # Numbers are for the rule; words have one careful value.
        if all(value.isdigit() for value in knob.values):
            knobs[knob.name] = str(rule(sentence, knob.name, sorted(map(int, knob.values))))
        else:
            value = _CAREFUL_VALUES.get(knob.name, knob.values[0])
            # A knob of that name need not have that value in every template, such as `axis` or
            # `fuse`.
            knobs[knob.name] = value if value in knob.values else knob.values[0]
    return _deviate(template, KslProgram(template.name, knobs), draw, temperature).text


def _get_log2_size(sentence: Sentence, place: int) -> int:
    """The base-2 logarithm of a dimension's size; `place` -1 is the last dimension."""
    return sentence.sizes[place][0]


def _choose_by_size(sentence: Sentence, knob: str, values: Sequence[int]) -> int:
    """Choose as compilers do from hints of size: the largest block that a dimension fills, as many
    warps as fit to it, no splitting.
    """
    if knob == "warps":
        # Prompts show sizes as floors of their logarithms, so this is exact to a factor of 2.
        return _find_nearest(values, 2 ** _get_log2_size(sentence, -1) // _ELEMENTS_PER_WARP)
    if knob in ("block_m", "rows"):
        return _largest_at_most(values, 2 ** _get_log2_size(sentence, 0))
    if knob in ("block", "block_n", "block_k"):
        return _largest_at_most(
            values, 2 ** _get_log2_size(sentence, -1 if knob != "block_n" else 1)
        )
    return values[0]


def _choose_by_occupancy(sentence: Sentence, knob: str, values: Sequence[int]) -> int:
    """Choose for many programs: small blocks while there are too few programs, more warps where
    there are enough.
    """
    # In logarithms: how many elements each of 2**9 programs would have.
    spare = sum(log for log, _ in sentence.sizes[:2]) - _SATURATING_PROGRAMS_LOG2
    if knob in ("block", "block_n", "block_m", "rows"):
        return _largest_at_most(values, 2 ** max(0, spare // 2 + 2))
    if knob == "split_k":
        return values[-1] if spare < _SATURATING_PROGRAMS_LOG2 else values[0]
    return values[len(values) // 2] if knob in ("warps", "stages") else values[-1]


def _largest_at_most(values: Sequence[int], limit: int) -> int:
    # A dimension smaller than every block still needs one.
    return max((value for value in values if value <= limit), default=values[0])


def _find_nearest(values: Sequence[int], target: int) -> int:
    return min(values, key=lambda value: abs(value - target))


def _write_like_compiler(sentence: Sentence, draw: random.Random, temperature: float) -> str:
    return _write_by_rule(sentence, draw, temperature, _choose_by_size)


def _write_for_occupancy(sentence: Sentence, draw: random.Random, temperature: float) -> str:
    return _write_by_rule(sentence, draw, temperature, _choose_by_occupancy)


def _write_uniformly(sentence: Sentence, draw: random.Random, temperature: float) -> str:
    """Write any honest program, all with the same probability."""
    return draw.choice(
        # No generator writes a cheat: only the red team has one that does.
        [program for program in list_programs(sentence.device, sentence.kind) if not program.hack]
    ).text


def _mutate(sentence: Sentence, draw: random.Random, temperature: float) -> str:
    """Change one or two knobs of a good program: the best exemplar, or a template's default."""
    # An exemplar may be a cheat where a naive evaluator gave it a score.
    honest = [(program, score) for program, score in sentence.exemplars if not program.hack]
    if honest:
        base = max(honest, key=lambda pair: pair[1])[0]
        template = get_templates(sentence.device, sentence.kind)[base.template]
    else:
        template = draw.choice(_get_templates(sentence))
        base = template.default
    knobs = dict(base.knobs)
    for knob in draw.sample(template.knobs, min(len(template.knobs), draw.choice((1, 2)))):
        knobs[knob.name] = draw.choice(knob.values)
    return KslProgram(template.name, knobs).text


def _write_sloppily(sentence: Sentence, draw: random.Random, temperature: float) -> str:
    """Write with slips: about every third completion is no program, and masks are often left out."""
    template = draw.choice(_get_templates(sentence))
    knobs = {knob.name: draw.choice(knob.values) for knob in template.knobs}
    # Two of three: on ragged shapes these programs are wrong, and stages 1 and 2 need wrong
    # programs to have something to learn.
    if "mask" in knobs:
        knobs["mask"] = draw.choice(("off", "off", "on"))
    words = KslProgram(template.name, knobs).text.split()
    # One word is left out, replaced or doubled, as in text that a model cut or repeated.
    if draw.random() < _SLIP_PROBABILITY:
        place = draw.randrange(len(words))
        words[place : place + 1] = draw.choice(
            ([], [draw.choice(list_vocabulary())], words[place : place + 1] * 2)
        )
    return " ".join(words)


GENERATORS: Mapping[str, Generator] = {
    name: Generator(name, write)
    for name, write in (
        ("tutorial", _write_tutorial),
        ("compiler", _write_like_compiler),
        ("occupancy", _write_for_occupancy),
        ("uniform", _write_uniformly),
        ("mutant", _mutate),
        ("sloppy", _write_sloppily),
    )
}


def get_generator(name: str) -> Generator:
    """Return the generator of that name. Raises ValueError for an unknown name."""
    if name not in GENERATORS:
        raise ValueError(f"expected a generator of {', '.join(GENERATORS)}, got {name!r}")
    return GENERATORS[name]
