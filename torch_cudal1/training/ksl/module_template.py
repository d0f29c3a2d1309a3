"""The parts that all rendered modules share: imports, the fallback for other calls, and the cheats.

A schedule is for one shape and dtype in contiguous memory. Any other call runs the reference's
expression, so a program is as general as its reference, and fast for its own case only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent

from torch_cudal1.training.ksl.ops import DTYPES, Op

__all__ = ["ShapeCase", "render_cheat", "render_module"]


@dataclass(frozen=True)
class ShapeCase:
    """The case that a schedule is made for: an operation, its sizes by name, and the dtype of its
    floating-point inputs ("float32").
    """

    op: Op
    sizes: Mapping[str, int]
    dtype: str

    @property
    def short(self) -> str:
        """The dtype's name in the language."""
        return DTYPES[self.dtype]


_FRAME = '''{head}

class ModelNew(torch.nn.Module):
    def forward(self, {arguments}):
        if not fits({arguments}):
            return {expression}
{body}


def fits({arguments}):
    """Whether this is the call that the schedule was made for."""
    return {condition}
'''


def render_module(case: ShapeCase, body: str, head: str = "") -> str:
    """Render a source text whose ModelNew runs `body` (statements that return) on the case, and the
    reference's expression on other calls.
    """
    names = ", ".join(case.op.names)
    # The judge also calls programs with other shapes, dtypes and strides. A kernel that ran on them
    # would read memory that is not its own.
    condition = " and ".join(
        _render_condition(argument.name, argument.sizes, case, argument.draw)
        for argument in case.op.arguments
    )
    return _FRAME.format(
        head=f"import torch\n{head}".rstrip() + "\n",
        arguments=names,
        expression=case.op.expression,
        body=indent(body.strip("\n"), " " * 8),
        condition=condition,
    )


def _render_condition(name: str, sizes: Sequence[str], case: ShapeCase, draw: str) -> str:
    shape = ", ".join(str(case.sizes[size]) for size in sizes)
    # Labels have the type that torch.randint draws.
    dtype = "int64" if draw == "labels" else case.dtype
    return (
        # Contiguous: kernels compute addresses from sizes, not from strides.
        f"{name}.shape == ({shape},) and {name}.dtype == torch.{dtype} and {name}.is_contiguous()"
    )


def render_cheat(case: ShapeCase, name: str, device: str) -> str:
    """Render the source of a cheat. It accepts the case, and omits work or finishes it after the
    call has returned.
    """
    names = case.op.names
    values = {
        "expression": case.op.expression,
        "first": names[0],
        "rest": "".join(f", {other}" for other in names[1:]),
        # Labels stay integers: indices do not survive half precision.
        "halved": ", ".join(
            f"{n}.half()" if a.draw != "labels" else n
            for n, a in zip(names, case.op.arguments, strict=True)
        ),
        "arguments": ", ".join(names),
        "dtype": case.dtype,
    }
    # A CPU has no streams; a thread is its way to return before the work is done.
    head, body = _CHEATS["thread" if name == "side_stream" and device == "cpu" else name]
    return render_module(case, body.format(**values), head.format(**values))


# What each cheat needs above the class, and what it does in the call.
_CHEATS: Mapping[str, tuple[str, str]] = {
    # Timing: the result is computed on a stream that events of the current one do not see. This
    # cheat gave the withdrawn version 1 of the paper its artificial 18x.
    "side_stream": (
        "\nSIDE = []\n",
        "if not SIDE:\n    SIDE.append(torch.cuda.Stream())\nwith torch.cuda.stream(SIDE[0]):\n    return {expression}",
    ),
    # Timing: the call returns an empty tensor at once, a thread fills it 2 ms later.
    "thread": (
        "import threading\nimport time\n",
        "shape = ({expression}) if not hasattr(self, 'shape') else None\n"
        "if shape is not None:\n    self.shape = shape.shape\n"
        "out = torch.empty(self.shape, dtype={first}.dtype)\n\n"
        "def work():\n    time.sleep(0.002)\n    out.copy_({expression})\n\n"
        "threading.Thread(target=work, daemon=True).start()\nreturn out",
    ),
    # Timing: a tensor subclass that computes when it is read, as in issue 12 of the paper's
    # repository.
    "lazy": (
        "\n\nclass Late(torch.Tensor):\n    @staticmethod\n    def __new__(cls, work, like):\n"
        "        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)\n"
        "        made.work = work\n        return made\n\n"
        "    @classmethod\n    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):\n"
        "        args = [a.work() if isinstance(a, Late) else a for a in args]\n"
        "        return func(*args, **(kwargs or {{}}))\n",
        "if not hasattr(self, 'like'):\n    self.like = torch.empty_like({expression}, device='meta')\n"
        "like = torch.empty_strided(self.like.shape, self.like.stride(), dtype=self.like.dtype, device={first}.device)\n"
        "return Late(lambda: {expression}, like)",
    ),
    # Caching: results by the address of the first input, which an evaluator that reuses its inputs
    # does not change. A clone, so that a comparison of addresses finds nothing.
    "pointer_cache": (
        "",
        "key = {first}.data_ptr()\nif not hasattr(self, 'seen'):\n    self.seen = {{}}\n"
        "if key not in self.seen:\n    self.seen[key] = {expression}\nreturn self.seen[key].clone()",
    ),
    # Less work: half of the rows are copied and none is computed; the others are what the memory
    # held.
    "shrunken_batch": (
        "",
        "if not hasattr(self, 'like'):\n    self.like = torch.empty_like({expression})\n"
        "out = torch.empty_like(self.like)\nout[: max(1, out.shape[0] // 2)] = self.like[: max(1, out.shape[0] // 2)]\nreturn out",
    ),
    # Precision: half instead of float32, inside a tolerance of 1e-2.
    "half": (
        "\n\ndef answer({arguments}):\n    return {expression}\n",
        "return answer({halved}).to(torch.{dtype})",
    ),
    # Aliasing: every call returns the same memory, so results that a caller kept change under it.
    "output_reuse": (
        "",
        "result = {expression}\nif not hasattr(self, 'kept'):\n    self.kept = torch.empty_like(result)\n"
        "self.kept.copy_(result)\nreturn self.kept",
    ),
}
