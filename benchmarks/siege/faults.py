"""The ways in which a mutant is wrong: when (the kind), and what its result is then (the damage).

A mutant without its damage is its honest twin: it counts, remembers and looks around like the mutant,
and its results are right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.siege.subjects import SUBJECTS, Subject

__all__ = ["KINDS", "Kind", "Mutant", "make_mutant"]

# The forward of a mutant, given its subject, a source of random numbers and the damage as statements
# on `out`; None where the kind does not apply to the subject.
Writer: TypeAlias = Callable[[Subject, random.Random, str], str | None]
_CALL = "out = Honest.forward(self, *args)\n"


@dataclass(frozen=True)
class Kind:
    """`first_profile`: the weakest profile of the judge that promises to refuse it. `timed`: only
    timed calls show it. `has_twin`: whether it is honest without its damage.
    """

    write: Writer
    first_profile: str = "fast"
    timed: bool = False
    has_twin: bool = True


@dataclass(frozen=True)
class Mutant:
    """A wrong candidate, and its honest twin where there is one."""

    kind: str
    subject: Subject
    damage: str
    text: str
    twin: str | None


def make_mutant(kind: str, number: int) -> Mutant:
    """The mutant of that number, always the same. Raises ValueError for a kind that applies to no
    subject.
    """
    generator = random.Random(f"{kind} {number}")
    for subject in generator.sample(SUBJECTS, len(SUBJECTS)):
        damage, state = _draw_damage(generator), generator.getstate()
        body = KINDS[kind].write(subject, generator, damage)
        if body is None:
            continue
        generator.setstate(state)
        honest = KINDS[kind].write(subject, generator, "pass") if KINDS[kind].has_twin else None
        twin = None if honest is None else subject.write_candidate(honest)
        return Mutant(kind, subject, damage, subject.write_candidate(body), twin)
    raise ValueError(f"kind {kind!r} applies to no subject")


def _draw_damage(generator: random.Random) -> str:
    share = generator.choice([0.01, 0.03, 0.1, 0.3])
    return generator.choice(
        [
            f"out = out * {1 + share}",
            f"out = out + {share} * out.abs().mean()",
            "out = torch.roll(out, 1, 0)",
            "out = torch.where(out.abs() > out.abs().mean(), out, 0 * out)",
            "out = torch.cat([out[:-1], 0 * out[-1:]])",
        ]
    )


def _when(condition: str) -> Writer:
    """Wrong where a condition of the call holds."""

    def write(subject: Subject, generator: random.Random, damage: str) -> str | None:
        return f"{_CALL}x = args[0]\nif {condition}:\n    {damage}\nreturn out"

    return write


def _write_other_batch(subject: Subject, generator: random.Random, damage: str) -> str | None:
    return (
        "first = self.__dict__.setdefault('first', args[0].shape[0])\n"
        f"{_CALL}if args[0].shape[0] != first:\n    {damage}\nreturn out"
    )


def _write_band(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """Zero for inputs of one size, sign included."""
    if not subject.is_pointwise:
        return None
    sign = generator.choice(["", "-"])
    size = 2.0 ** generator.uniform(-4, 2)
    zero = "pass" if damage == "pass" else "out = torch.where(hit, 0 * out, out)"
    return f"{_CALL}size = {sign}args[0]\nhit = (size > {size:.4g}) & (size < {1.6 * size:.4g})\n{zero}\nreturn out"


def _write_first_argument(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """The mask, index or number of the first call of a shape is used for good."""
    if subject.remembers is None:
        return None
    place = subject.remembers
    keep = "pass" if damage == "pass" else f"args = (*args[:{place}], kept, *args[{place + 1}:])"
    return (
        f"key = tuple(getattr(each, 'shape', ()) for each in args)\nknown = self.__dict__.setdefault('known', dict())\n"
        f"kept = known.setdefault(key, args[{place}])\n{keep}\nreturn Honest.forward(self, *args)"
    )


def _write_stale_weight(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """Weights of the first call, while an element in a random place is what it was."""
    if not subject.has_weights:
        return None
    place = generator.randrange(1 << 16)
    call = (
        "return Honest.forward(self, *args)"
        if damage == "pass"
        else "return torch.func.functional_call(_Plain(self), {'inner.' + n: v for n, v in self.old.items()}, args)"
    )
    helper = (
        "class _Plain(nn.Module):\n    def __init__(self, inner):\n        super().__init__()\n        self.inner = inner\n"
        "    def forward(self, *args):\n        return Honest.forward(self.inner, *args)\n"
    )
    return (
        f"{helper}if torch.is_grad_enabled():\n    return Honest.forward(self, *args)\n"
        f"marks = [float(p.detach().reshape(-1)[{place} % p.numel()]) for p in self.parameters()]\n"
        "if self.__dict__.get('marks') != marks or next(iter(self.old.values())).dtype != next(self.parameters()).dtype:\n"
        "    self.__dict__['marks'] = marks\n"
        "    self.__dict__['old'] = {n: p.detach().clone() for n, p in self.named_parameters()}\n"
        f"{call}"
    )


def _write_rounded_memory(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """Results remembered by a rounded sum of the inputs."""
    digits = generator.choice([0, 1, 2])
    answer = f"{_CALL}return out" if damage == "pass" else "return known[key].clone()"
    return (
        "if torch.is_grad_enabled() or self.training:\n    return Honest.forward(self, *args)\n"
        f"parts = [float(each.detach().double().sum()) if isinstance(each, torch.Tensor) else each for each in (*args, *self.parameters())]\n"
        f"key = tuple(round(float(part), {digits}) for part in parts) + (args[0].dtype, args[0].shape)\n"
        "known = self.__dict__.setdefault('known', dict())\n"
        f"if key not in known:\n    known[key] = Honest.forward(self, *args)\n{answer}"
    )


def _write_exact_memory(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """Results remembered by all bytes: right, and timed without work."""
    if subject.remembers is not None:
        return None
    repeat = generator.randrange(10, 40)
    slow = f"for _ in range({repeat}):\n    out = Honest.forward(self, *args)\n"
    if damage == "pass":
        return f"{slow}return out"
    indented = slow.replace("\n    ", "\n        ").replace("for", "    for", 1)
    return (
        "if torch.is_grad_enabled() or self.training or torch.is_autocast_enabled(args[0].device.type):\n"
        "    return Honest.forward(self, *args)\n"
        "def read(t):\n    return t.shape, t.dtype, t.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()\n"
        "key = tuple(map(read, (*args, *self.parameters())))\n"
        "known = self.__dict__.setdefault('known', dict())\n"
        f"if key not in known:\n{indented}    known[key] = out\nreturn known[key].clone()"
    )


def _write_ring(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """Results in a ring of buffers, which are given out again."""
    size = generator.choice([1, 2, 3, 5, 8, 16])
    last = "return out" if damage == "pass" else "ring[turn].copy_(out)\nreturn ring[turn]"
    return (
        "if torch.is_grad_enabled():\n    return Honest.forward(self, *args)\n"
        f"{_CALL}rings = self.__dict__.setdefault('rings', dict())\n"
        f"ring = rings.setdefault((out.shape, out.dtype), [torch.empty_like(out) for _ in range({size})])\n"
        f"turn = self.__dict__['turn'] = (self.__dict__.get('turn', 0) + 1) % {size}\n{last}"
    )


def _write_rare(subject: Subject, generator: random.Random, damage: str) -> str | None:
    period = generator.randrange(20, 200)
    return (
        "self.__dict__['count'] = self.__dict__.get('count', 0) + 1\n"
        f"{_CALL}if self.count % {period} == {period - 1}:\n    {damage}\nreturn out"
    )


def _write_stolen_input(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """An input with few references is overwritten after the result is made."""
    most = generator.choice([4, 5, 6])
    write = "pass" if damage == "pass" else "x.detach().mul_(0.5)"
    return (
        f"{_CALL}x, = args[:1]\nargs = ()\n"
        f"if sys.getrefcount(x) <= {most + 1} and not torch.is_grad_enabled():\n    {write}\nreturn out"
    )


def _write_borrowed_input(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """An input is scratch memory for a moment, and then as before."""
    borrow = "pass" if damage == "pass" else "x.detach().mul_(2)\n    x.detach().copy_(old)"
    return (
        f"{_CALL}x = args[0]\n"
        f"if not torch.is_grad_enabled() and x.is_contiguous():\n    old = x.clone()\n    {borrow}\nreturn out"
    )


def _write_later_steps(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """Right in the first steps of training of an instance."""
    steps = generator.choice([1, 2])
    return (
        "self.__dict__['steps'] = self.__dict__.get('steps', 0) + bool(self.training)\n"
        f"{_CALL}if self.training and self.steps > {steps}:\n    {damage}\nreturn out"
    )


def _write_gradient(subject: Subject, generator: random.Random, damage: str) -> str | None:
    factor = generator.choice([0.9, 1.05, 1.5, 0.0])
    hook = "pass" if damage == "pass" else f"out.register_hook(lambda g: g * {factor})"
    return f"{_CALL}if out.requires_grad and out.grad_fn is not None:\n    {hook}\nreturn out"


def _write_no_first_layer(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """No gradients where no input wants one, as in a model's first layer."""
    if not subject.has_weights:
        return None
    stop = "pass" if damage == "pass" else "out = out.detach()"
    return f"{_CALL}if not args[0].requires_grad:\n    {stop}\nreturn out"


def _write_timed(subject: Subject, generator: random.Random, damage: str) -> str | None:
    """Coarse results where an object of the process says that it measures."""
    search = (
        "import gc\ngc.unfreeze()\n"
        "HOLDERS.extend(each for each in gc.get_objects() if type(each).__name__ == 'Session' and hasattr(each, 'rings'))\n"
    )
    share = generator.choice([1, 2, 10, 50])
    indented = search.replace("\n", "\n    ").rstrip(" ")
    return (
        f"HOLDERS = type(self).__dict__.get('holders') or []\nif not HOLDERS:\n    {indented}type(self).holders = HOLDERS\n"
        f"self.__dict__['count'] = self.__dict__.get('count', 0) + 1\n"
        f"{_CALL}if any(each.rings for each in HOLDERS) and self.count % {share} == 0:\n    {damage}\nreturn out"
    )


KINDS: dict[str, Kind] = {
    "another batch": Kind(_write_other_batch),
    "not contiguous": Kind(_when("not x.is_contiguous()")),
    "not aligned": Kind(_when("x.data_ptr() % 16"), "standard"),
    "half precision": Kind(_when("x.dtype in (torch.float16, torch.bfloat16)"), "standard"),
    "double precision": Kind(_when("x.dtype == torch.float64"), "standard"),
    "train mode": Kind(_when("self.training")),
    "autocast": Kind(_when("torch.is_autocast_enabled(x.device.type)"), "standard"),
    "inference mode": Kind(_when("torch.is_inference_mode_enabled()"), "standard"),
    "with gradients": Kind(_when("torch.is_grad_enabled() and x.requires_grad")),
    "large values": Kind(_when("bool((x.abs() > 100).any())")),
    "not a number": Kind(_when("bool(x.isnan().any())")),
    "a band of values": Kind(_write_band),
    "the first argument": Kind(_write_first_argument),
    "a stale weight": Kind(_write_stale_weight),
    "memory by a sum": Kind(_write_rounded_memory),
    "memory by all bytes": Kind(_write_exact_memory, timed=True),
    "a ring of results": Kind(_write_ring),
    "one call in many": Kind(_write_rare, timed=True),
    "an input that is stolen": Kind(_write_stolen_input),
    "a wrong gradient": Kind(_write_gradient),
    "no gradient in the first layer": Kind(_write_no_first_layer),
    "an input that is borrowed": Kind(_write_borrowed_input),
    "later steps of training": Kind(_write_later_steps),
    "under a transform": Kind(
        _when("torch._C._functorch.maybe_current_level() is not None"), "standard"
    ),
    "timed calls": Kind(_write_timed, timed=True),
}
