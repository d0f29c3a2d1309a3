"""The grammar of the kernel-schedule language: templates, their knobs, and programs as values. It
does not say what a template computes; the renderers do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch_cudal1.core.refusal import Refusal

__all__ = [
    "HACKS",
    "Device",
    "Knob",
    "KslProgram",
    "KslTemplate",
    "enumerate_programs",
    "parse_program",
]

Device: TypeAlias = Literal["cuda", "cpu"]

# Cheats of the red-team run, each a program of its own on the default knobs of its template.
HACKS = ("side_stream", "lazy", "pointer_cache", "shrunken_batch", "half", "output_reuse")


@dataclass(frozen=True)
class Knob:
    """One choice of a template. The first value is the one that tutorials use."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class KslTemplate:
    """An algorithm for a kind of operation. `kind`: see `ops`."""

    name: str
    kind: str
    knobs: tuple[Knob, ...]

    @property
    def default(self) -> KslProgram:
        """The first value of every knob."""
        return KslProgram(self.name, {knob.name: knob.values[0] for knob in self.knobs})

    def size(self) -> int:
        """How many combinations of its knobs there are."""
        count = 1
        for knob in self.knobs:
            count *= len(knob.values)
        return count


@dataclass(frozen=True)
class KslProgram:
    """A template with a value for each knob; or a cheat, with the template's default values."""

    template: str
    knobs: Mapping[str, str] = field(default_factory=dict)
    hack: str = ""

    @property
    def text(self) -> str:
        """The canonical text of the program."""
        # A cheat has default knobs, which its text leaves out: one text for one program.
        if self.hack:
            return f"tpl={self.template} hack={self.hack}"
        return " ".join(
            # In the order of the template's knobs: texts are keys of landscapes and databases.
            [f"tpl={self.template}", *(f"{name}={value}" for name, value in self.knobs.items())]
        )

    def __hash__(self) -> int:
        # The generated hash of a frozen dataclass would hash the dictionary of knobs, which cannot
        # be hashed.
        return hash(self.text)

    def __getitem__(self, knob: str) -> str:
        return self.knobs[knob]

    def number(self, knob: str) -> int:
        """The value of a numeric knob."""
        return int(self.knobs[knob])


def parse_program(
    words: Sequence[str], templates: Mapping[str, KslTemplate]
) -> KslProgram | Refusal:
    """Parse words into a program, or a Refusal with the reason."""
    # Refusals are values, not exceptions: most completions of an untrained model are no program,
    # and each reason is kept with its sample.
    if not words or not words[0].startswith("tpl="):
        first = words[0] if words else "nothing"
        return Refusal(f"expected a program to begin with tpl=NAME, got {first!r}")
    template = templates.get(words[0].removeprefix("tpl="))
    if template is None:
        return Refusal(
            f"{words[0]} is no template of this kind of task; "
            f"expected one of {', '.join(sorted(templates))}"
        )
    settings = words[1:]
    if len(settings) == 1 and settings[0].startswith("hack="):
        return _parse_cheat(template, settings[0], next(iter(templates)))
    # All knobs in their order, none twice: each program has one spelling, so that equal programs
    # are counted once.
    if len(settings) != len(template.knobs):
        return Refusal(f"{template.name} takes {len(template.knobs)} knobs, got {len(settings)}")
    knobs = {}
    for knob, word in zip(template.knobs, settings, strict=True):
        name, _, value = word.partition("=")
        if name != knob.name or value not in knob.values:
            return Refusal(f"expected {knob.name}={'|'.join(knob.values)}, got {word!r}")
        knobs[name] = value
    return KslProgram(template.name, knobs)


def _parse_cheat(template: KslTemplate, word: str, first: str) -> KslProgram | Refusal:
    name = word.removeprefix("hack=")
    # Only on the first template of a kind: a cheat ignores its schedule, and on others it would be
    # the same program under more names.
    if name not in HACKS or template.name != first:
        return Refusal(
            f"{word} is no cheat of {template.name}; expected one of {', '.join(HACKS)} on {first}"
        )
    return KslProgram(template.name, template.default.knobs, name)


def enumerate_programs(
    templates: Sequence[KslTemplate], *, hacks: bool = True
) -> Iterator[KslProgram]:
    """Every program of these templates in a fixed order; the cheats last, on the first template."""
    for template in templates:
        # The order of templates, knobs and values is that of landscapes and surveys.
        for values in itertools.product(*(knob.values for knob in template.knobs)):
            yield KslProgram(
                template.name,
                dict(zip((knob.name for knob in template.knobs), values, strict=True)),
            )
    for name in HACKS if hacks else ():
        yield KslProgram(templates[0].name, templates[0].default.knobs, name)
