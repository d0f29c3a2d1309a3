"""What races have measured on this machine, kept beside the decisions: one file a GPU model,
contract and version of this package.

    <cache>/timings/<digest>.jsonl    a line a kernel: its island's sizes, its config, its bound, microseconds

A line is appended by one write that begins with a line end, so whoever is killed in the middle
spoils his own line only, and a line that does not parse is passed over. A file beyond its limit is
replaced by its newer half; what somebody adds meanwhile may be lost. Losing a timing costs nothing
but a guess. There are sizes and times in there, no names and nothing of a tensor's content.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch_cudal1.core.version import __version__
from torch_cudal1.ir.records import Contract, Miss, Target
from torch_cudal1.kernels.features import Island
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.store.cache.build_files import timings_home
from torch_cudal1.store.cache.entry_file import digest_of
from torch_cudal1.store.cache.files import NotStored, Stored, read_file, write_file

__all__ = ["Config", "Timing", "add", "parsed", "path_of", "read", "timing_of"]

Config: TypeAlias = Mapping[str, int | str | bool]

_LIMIT_BYTES = 1 << 20  # some 3000 lines


@dataclass(frozen=True)
class Timing:
    """A kernel of a `family` for an island of `sizes` took `us` microseconds. Raises ValueError for
    what is no number.
    """

    family: str
    sizes: Mapping[str, int]
    config: Config
    bound_us: float
    us: float

    def __post_init__(self) -> None:
        if not all(
            isinstance(one, (int, float)) and 0 < one < math.inf for one in (self.bound_us, self.us)
        ):
            raise ValueError(
                f"{self.us!r} us with a bound of {self.bound_us!r}; expected two positive numbers"
            )
        if not isinstance(self.family, str) or not all(
            _is_size(value) for value in self.sizes.values()
        ):
            raise ValueError(
                f"family {self.family!r}, sizes {self.sizes!r}; expected a name and whole numbers"
            )
        if not all(isinstance(value, str) or _is_size(value) for value in self.config.values()):
            raise ValueError(f"config {self.config!r}; expected words, flags and whole numbers")

    @property
    def island(self) -> tuple[tuple[str, int], ...]:
        """What all timings of one island have in common."""
        return tuple(sorted(self.sizes.items()))


def timing_of(island: Island, proposal: Proposal, us: float) -> Timing:
    """A measurement as it is kept. Raises ValueError for what is no time."""
    return Timing(
        island.family,
        island.sizes,
        dict(proposal.config),
        round(island.bound_us(proposal), 4),
        round(us, 4),
    )


def path_of(root: Path, target: Target, contract: Contract) -> Path:
    """The file below a cache's folder. The GPU's name and the contract tell times apart; another
    version has other kernels.
    """
    name = digest_of([target.device, target.arch, target.sku, contract.digest, __version__])
    return timings_home(root) / f"{name[:32]}.jsonl"


def add(path: Path, timings: Sequence[Timing]) -> Stored | NotStored:
    """Append to the file; one that grew beyond its limit keeps its newer half."""
    data = b"".join(b"\n" + _line(one) for one in timings) + b"\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, data)
            size = os.fstat(file).st_size
        finally:
            os.close(file)
    except OSError as error:
        return NotStored(f"{path} was not written: {type(error).__name__}: {error}")
    return Stored(path) if size <= _LIMIT_BYTES else _halved(path)


def read(path: Path) -> list[Timing]:
    """What the file holds, oldest first; nothing where it is absent or refused."""
    data = read_file(path, 2 * _LIMIT_BYTES)
    return [] if isinstance(data, Miss) else parsed(data)


def parsed(data: bytes) -> list[Timing]:
    """The timings among the lines of `data`; whatever else is there is passed over."""
    return [one for line in data.splitlines() if (one := _timing(line)) is not None]


def _halved(path: Path) -> Stored | NotStored:
    kept = read(path)
    while sum(len(_line(one)) + 1 for one in kept) > _LIMIT_BYTES // 2:
        kept = kept[(len(kept) + 7) // 8 :]
    return write_file(path, b"".join(_line(one) + b"\n" for one in kept))


def _line(one: Timing) -> bytes:
    return json.dumps(asdict(one), separators=(",", ":"), allow_nan=False).encode()


def _timing(line: bytes) -> Timing | None:
    try:
        found: dict[str, Any] = json.loads(line)
        return Timing(
            found["family"],
            dict(found["sizes"]),
            dict(found["config"]),
            found["bound_us"],
            found["us"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 62
