"""Kernel times measured on this machine, stored beside the decisions: one file for each GPU model,
contract and version of this package.

    <cache>/timings/<digest>.jsonl    a line a kernel: its fusion group's sizes, its config, its bound, microseconds

Lines are appended by one write that begins with a line end, so a process that is killed in the
middle spoils only its own line. A line that does not parse is skipped. A file beyond its limit is
replaced by its newer half; lines that another process appends meanwhile may be lost, which costs a
less informed prediction. The file holds sizes and times, no names and no tensor contents.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.version import __version__
from torch_cudal1.ir.records import Contract, Target
from torch_cudal1.kernels.features import KernelFeatures
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.store.cache.build_files import timings_folder
from torch_cudal1.store.cache.entry_file import digest_of
from torch_cudal1.store.cache.files import Stored, read_file, write_file

__all__ = [
    "Config",
    "KernelTiming",
    "append_timings",
    "make_timing",
    "parse_timings",
    "read_timings",
    "timings_path",
]

Config: TypeAlias = Mapping[str, int | str | bool]

_MAX_FILE_BYTES = 1 << 20  # some 3000 lines
# How the times of a file were measured.
_TIMED = "in chains"


@dataclass(frozen=True)
class KernelTiming:
    """A kernel of a `family` for a fusion group of `sizes` took `us` microseconds. Raises
    ValueError for what is no number.
    """

    family: str
    sizes: Mapping[str, int]
    config: Config
    bound_us: float
    us: float

    def __post_init__(self) -> None:
        if not all(
            # The model takes logarithms, and one NaN in the file would spoil every fit.
            isinstance(number, (int, float)) and 0 < number < math.inf
            for number in (self.bound_us, self.us)
        ):
            raise ValueError(
                f"{self.us!r} us with a bound of {self.bound_us!r}; expected two positive numbers"
            )
        # Lines come from a file that another version or a broken write may have left.
        if not isinstance(self.family, str) or not all(
            _is_size(value) for value in self.sizes.values()
        ):
            raise ValueError(
                f"family {self.family!r}, sizes {self.sizes!r}; expected a name and whole numbers"
            )
        if not all(isinstance(value, str) or _is_size(value) for value in self.config.values()):
            raise ValueError(f"config {self.config!r}; expected words, flags and whole numbers")

    @property
    def group(self) -> tuple[tuple[str, int], ...]:
        """What all timings of one fusion group have in common."""
        # Fusion groups of equal sizes have equal features, so a model cannot tell them apart.
        return tuple(sorted(self.sizes.items()))


def make_timing(group: KernelFeatures, proposal: Proposal, us: float) -> KernelTiming:
    """A measurement as a record of the file. Raises ValueError for a time or bound that is not a
    positive number.
    """
    return KernelTiming(
        group.family,
        group.sizes,
        dict(proposal.config),
        # Tenths of a nanosecond: what is beyond is noise and only makes the file longer.
        round(group.lower_bound_us(proposal), 4),
        round(us, 4),
    )


def timings_path(root: Path, target: Target, contract: Contract) -> Path:
    """The file below a cache's folder. The GPU's name and the contract tell times apart; another
    version has other kernels, or another way of timing.
    """
    parts = [target.device, target.arch, target.sku, contract.digest, __version__, _TIMED]
    name = digest_of(parts)
    return timings_folder(root) / f"{name[:32]}.jsonl"


def append_timings(path: Path, timings: Sequence[KernelTiming]) -> Stored | Refusal:
    """Append to the file; one that grew beyond its limit keeps its newer half."""
    # A line end first: it closes a line that a killed process left open.
    data = b"".join(b"\n" + _encode_line(timing) for timing in timings) + b"\n"
    try:
        # Readable for the user alone, like the rest of the cache.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_APPEND: the kernel moves to the end and writes in one step, so that processes do not
        # overwrite each other.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # One call for all lines. A buffered file might split them.
            os.write(file, data)
            size = os.fstat(file).st_size
        finally:
            os.close(file)
    except OSError as error:
        return Refusal(f"{path} was not written: {type(error).__name__}: {error}")
    # The size after the write, as another process may have appended too.
    return Stored(path) if size <= _MAX_FILE_BYTES else _drop_older_half(path)


def read_timings(path: Path) -> list[KernelTiming]:
    """What the file holds, oldest first; nothing where it is absent or refused."""
    # Twice the limit, because a file may pass it before it is halved.
    data = read_file(path, 2 * _MAX_FILE_BYTES)
    return [] if isinstance(data, Refusal) else parse_timings(data)


def parse_timings(data: bytes) -> list[KernelTiming]:
    """The timings among the lines of `data`; whatever else is there is passed over."""
    return [timing for line in data.splitlines() if (timing := _decode_line(line)) is not None]


def _drop_older_half(path: Path) -> Stored | Refusal:
    timings = read_timings(path)
    while sum(len(_encode_line(timing)) + 1 for timing in timings) > _MAX_FILE_BYTES // 2:
        # An eighth at a time, so that about half of the bytes stay, whatever the lines' lengths.
        timings = timings[(len(timings) + 7) // 8 :]
    # Written beside and renamed: a reader sees the old file or the new one.
    return write_file(path, b"".join(_encode_line(timing) + b"\n" for timing in timings))


def _encode_line(timing: KernelTiming) -> bytes:
    return json.dumps(asdict(timing), separators=(",", ":"), allow_nan=False).encode()


def _decode_line(line: bytes) -> KernelTiming | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        return KernelTiming(
            fields["family"],
            dict(fields["sizes"]),
            dict(fields["config"]),
            fields["bound_us"],
            fields["us"],
        )
    # RecursionError: nested brackets in a broken or hostile line.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 62
