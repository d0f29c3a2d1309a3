"""Every exception the package raises: each subclasses the natural built-in and carries its facts.

No exception here is a decision. A candidate that fails is a `Rejected` value
(`torch_cudal1.ir.records`), and a look-up or an action that declines is a `Refusal`
(`torch_cudal1.core.refusal`). Exceptions are for callers' mistakes and for machines that cannot do
what a caller needs.
"""

from __future__ import annotations

__all__ = [
    "CacheMissError",
    "Cudal1Error",
    "DriverError",
    "NotLowerableError",
    "ProgramError",
    "QuantisationError",
    "SandboxError",
    "SettingError",
    "SupplyError",
    "TargetError",
]


class Cudal1Error(Exception):
    """Base of every exception of this package."""


class SettingError(Cudal1Error, ValueError):
    """A setting or `TORCH_CUDAL1_*` variable has a value that is not allowed."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name, self.value, self.expected = name, value, expected
        # An exception is pickled as its class and `args`. So `args` are the parameters of
        # `__init__`, and an error of a child process arrives whole. The same holds for every class
        # below.
        super().__init__(name, value, expected)

    def __str__(self) -> str:
        return f"setting {self.name!r} is {self.value!r}; expected {self.expected}"


class ProgramError(Cudal1Error, ValueError):
    """A Program is malformed or breaks a rule of the contract; nothing of it was run."""

    def __init__(self, rule: str, found: str) -> None:
        self.rule, self.found = rule, found
        super().__init__(rule, found)

    def __str__(self) -> str:
        return f"program refused by rule {self.rule!r}: {self.found}"


class QuantisationError(Cudal1Error, ValueError):
    """A module of fewer bits was not made; the one that it would have been made of is as it was."""

    def __init__(self, contract: str, found: str, expected: str) -> None:
        self.contract, self.found, self.expected = contract, found, expected
        super().__init__(contract, found, expected)

    def __str__(self) -> str:
        return (
            f"{self.contract}: {self.found}; expected {self.expected}. Skip layers (`skip`), set wider "
            "`limits`, or take a contract of more bits"
        )


class NotLowerableError(Cudal1Error, ValueError):
    """A graph cannot be written as a data-only Program; the baseline keeps running it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    def __str__(self) -> str:
        return self.reason


# A class of its own, because such a call may still be served as several graphs.
class GraphBreakError(NotLowerableError):
    """Dynamo cannot write a call as one graph: it would run several graphs, with the user's Python
    code between them.
    """


class DriverError(Cudal1Error, RuntimeError):
    """The CUDA driver refused a call; `call` is the driver function and `status` its result name."""

    def __init__(self, call: str, status: str, hint: str) -> None:
        self.call, self.status, self.hint = call, status, hint
        super().__init__(call, status, hint)

    def __str__(self) -> str:
        return f"{self.call} answered {self.status}; {self.hint}"


class SandboxError(Cudal1Error, RuntimeError):
    """The judge's child process could not be started, or broke its protocol."""

    def __init__(self, stage: str, found: str) -> None:
        self.stage, self.found = stage, found
        super().__init__(stage, found)

    def __str__(self) -> str:
        return f"judge process failed while {self.stage}: {self.found}"


class CacheMissError(Cudal1Error, LookupError):
    """`on_miss="error"` and the cache holds nothing for a region."""

    def __init__(self, key: str, where: str) -> None:
        self.key, self.where = key, where
        super().__init__(key, where)

    def __str__(self) -> str:
        return (
            f"no cached decision for region {self.key[:12]} ({self.where}) and on_miss='error'; "
            "run `cudal1 warmup TARGET` on this machine, or set on_miss='baseline'"
        )


class SupplyError(Cudal1Error, ValueError):
    """A file that carries decisions (bundle, lock) is not used: which one, by which rule, what was
    found. Nothing was changed.
    """

    def __init__(self, path: object, rule: str, found: str) -> None:
        self.path, self.rule, self.found = str(path), rule, found
        super().__init__(self.path, rule, found)

    def __str__(self) -> str:
        return f"{self.path} refused by rule {self.rule!r}: {self.found}"


class TargetError(Cudal1Error, ValueError):
    """A command-line TARGET does not lead to a module and its inputs."""

    def __init__(self, target: str, problem: str) -> None:
        self.target, self.problem = target, problem
        super().__init__(target, problem)

    def __str__(self) -> str:
        return (
            f"target {self.target!r}: {self.problem}. Expected file.py:callable or package.module:callable returning "
            "(module, inputs), a KernelBench-style file (Model, get_inputs, get_init_inputs), or a folder of those"
        )
