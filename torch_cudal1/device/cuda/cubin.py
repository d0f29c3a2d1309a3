"""Reads a cubin (ELF64) without tools or a GPU: its architecture, its kernels' parameters, and what
would make it impure.

`check_launch` compares a Launch with the machine code it names and refuses what does not fit
(detector `cubin_scan`). Every read is bounded: hostile bytes give ProgramError, nothing else. It
does not disassemble: addresses, races and loops are the judge's. The record layout was read off
cubins of Triton, nvcc and NVRTC for sm_80 to sm_120; NVIDIA does not document it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import Launch

__all__ = ["PARAM_BYTES", "Cubin", "Kernel", "check_launch", "inspect_cubin"]

PARAM_BYTES: Mapping[str, int] = {
    "ptr": 8,
    "null": 8,
    "i64": 8,
    "i32": 4,
    "fp32": 4,
}  # LaunchArg.kind -> size of the parameter

_EM_CUDA = 190
_SYMTAB, _NOBITS = 2, 8  # section types
_WRITE, _EXECUTE = 0x1, 0x4  # section flags
_NOTYPE, _FUNC = 0, 2  # symbol types
_ENTRY = 0x10  # st_other of a kernel, as opposed to a device function
# Bounds the search for the end of a name in hostile bytes.
_NAME_LIMIT = 4096
# Attributes of .nv.info records
_REGCOUNT, _FRAME_SIZE, _KPARAM_INFO, _PARAM_SIZE, _REQNTID, _MAX_THREADS, _CLUSTER = (
    0x2F,
    0x11,
    0x17,
    0x19,
    0x10,
    0x05,
    0x3D,
)

_Three = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """One entry point. `required_block`, `max_block` and `cluster` are None where the machine code
    does not state them.
    """

    symbol: str
    # Bytes, in order. The driver works the offsets out.
    param_sizes: tuple[int, ...]
    required_block: _Three | None
    max_block: _Three | None
    cluster: _Three | None
    registers: int  # per thread
    stack_bytes: int  # per thread: spills, local arrays


@dataclass(frozen=True)
class Cubin:
    """The facts that a static scan finds. `sm` is 90 for sm_90 and sm_90a."""

    sm: int
    kernels: tuple[Kernel, ...]
    undefined_functions: tuple[str, ...]  # vprintf, malloc, device-side launch, ...
    writable_globals: tuple[str, ...]  # sections a kernel could keep state in
    # Tables of the user and of the compiler, without the parameters (.nv.constant0).
    constant_sections: tuple[str, ...]
    # Instructions by section (.text.<kernel>).
    code: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    # Kernel -> bytes, including what newer compilers reserve.
    static_shared: Mapping[str, int] = field(default_factory=dict)
    functions: tuple[str, ...] = ()  # device functions inside, beside the kernels


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    body: bytes
    link: int
    size: int  # in memory: a NOBITS section has no body


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    other: int
    section: int


def inspect_cubin(data: bytes) -> Cubin:
    """Parse `data`. Raises ProgramError("cubin", ...) for anything that is not a well-formed cubin."""
    _require(
        data[:7] == b"\x7fELF\x02\x01\x01",
        f"starts with {data[:7]!r}, expected a 64-bit little-endian ELF (PTX is not accepted)",
    )
    sections = _read_sections(data)
    symbols = _read_symbols(sections)
    by_name: dict[str, _Section] = {}
    for section in sections:
        # Of two sections with one name this reader might check one and the driver load the other.
        _require(
            section.name == "" or section.name not in by_name,
            f"two sections named {section.name!r}",
        )
        by_name[section.name] = section
    module = _read_module_facts(by_name)
    kernels = [
        (i, s)
        for i, s in enumerate(symbols)
        if s.kind == _FUNC and s.section != 0 and s.other & _ENTRY
    ]
    names = [symbol.name for _, symbol in kernels]
    # The same for kernels: the driver looks a kernel up by its name.
    _require(len(set(names)) == len(names), f"kernel names {names} repeat")
    return Cubin(
        sm=_read_architecture(data),
        kernels=tuple(
            _read_kernel(symbol.name, by_name, module.get(index, {})) for index, symbol in kernels
        ),
        undefined_functions=tuple(
            s.name for s in symbols if s.section == 0 and s.name and s.kind in (_FUNC, _NOTYPE)
        ),
        writable_globals=tuple(s.name for s in sections if _keeps_state(s)),
        constant_sections=tuple(
            n
            for n in by_name
            if n.startswith(".nv.constant") and not n.startswith(".nv.constant0.")
        ),
        code=tuple((s.name, s.body) for s in sections if s.flags & _EXECUTE),
        functions=tuple(
            s.name for s in symbols if s.kind == _FUNC and s.section != 0 and not s.other & _ENTRY
        ),
        static_shared={
            s.name.removeprefix(".nv.shared."): s.size
            for s in sections
            if s.name.startswith(".nv.shared.")
        },
    )


def check_launch(cubin: Cubin, launch: Launch, sm: int) -> Kernel:
    """The kernel `launch` starts, if it may run on architecture `sm` (90 for sm_90). Raises
    ProgramError saying what differs.
    """
    if cubin.sm != sm:
        raise ProgramError(
            "cubin_sm",
            f"machine code for sm_{cubin.sm}, expected sm_{sm}: build it for this device",
        )
    # vprintf, malloc and launches from the device have effects that no comparison of results sees.
    if cubin.undefined_functions:
        raise ProgramError(
            "cubin_scan",
            f"calls {', '.join(cubin.undefined_functions)}; expected no call out of the kernel",
        )
    # State that outlives a call would let a kernel answer with what an earlier call left there.
    if cubin.writable_globals:
        raise ProgramError(
            "cubin_scan",
            f"has {', '.join(cubin.writable_globals)}; expected no memory that outlives the call",
        )
    kernel = next((k for k in cubin.kernels if k.symbol == launch.symbol), None)
    if kernel is None:
        raise ProgramError(
            "cubin_symbol",
            f"no kernel {launch.symbol!r}; there are {[k.symbol for k in cubin.kernels]}",
        )
    unknown = [arg.kind for arg in launch.args if arg.kind not in PARAM_BYTES]
    if unknown:
        raise ProgramError(
            "cubin_params", f"argument kinds {unknown}, expected some of {sorted(PARAM_BYTES)}"
        )
    # The driver copies as many bytes as the cubin states, from wherever the parameters point: a
    # plan with fewer or smaller ones would have it read past them.
    planned = tuple(PARAM_BYTES[arg.kind] for arg in launch.args)
    if planned != kernel.param_sizes:
        raise ProgramError(
            "cubin_params",
            f"{launch.symbol} takes parameters of {kernel.param_sizes} bytes, the plan has {planned}",
        )
    _check_geometry(kernel, launch)
    return kernel


def _check_geometry(kernel: Kernel, launch: Launch) -> None:
    block = (launch.block, 1, 1)
    if kernel.required_block not in (None, block):
        raise ProgramError(
            "cubin_block",
            f"{kernel.symbol} requires a block of {kernel.required_block}, the plan has {block}",
        )
    limit = kernel.max_block
    if limit is not None and launch.block > limit[0] * limit[1] * limit[2]:
        raise ProgramError(
            "cubin_block",
            f"{kernel.symbol} allows a block of at most {limit}, the plan has {block}",
        )
    if (kernel.cluster or (1, 1, 1)) != (launch.cluster, 1, 1):
        raise ProgramError(
            "cubin_cluster",
            f"{kernel.symbol} is built for {kernel.cluster or (1, 1, 1)}, plan has {launch.cluster}",
        )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ProgramError("cubin", problem)


def _unpack(layout: str, data: bytes, offset: int) -> tuple[Any, ...]:
    end = offset + struct.calcsize(layout)
    _require(
        offset >= 0 and end <= len(data),
        f"needs bytes {offset} to {end} of {len(data)}: truncated or damaged",
    )
    return struct.unpack_from(layout, data, offset)


def _name(table: bytes, offset: int) -> str:
    _require(0 <= offset < max(len(table), 1), f"name at {offset} of a {len(table)}-byte table")
    end = table.find(b"\0", offset, offset + _NAME_LIMIT)
    _require(end >= 0 or not table, f"name at {offset} has no end")
    return table[offset:end].decode("ascii", "backslashreplace") if table else ""


def _read_architecture(data: bytes) -> int:
    abi, (flags,) = data[7], _unpack("<I", data, 48)
    _require(
        abi in (51, 65),
        f"ELF ABI {abi}, expected 51 or 65 (a CUDA toolkit newer than this reader?)",
    )
    # Where e_flags holds the architecture depends on the ABI version.
    return int(flags & 0xFF if abi == 51 else flags >> 8 & 0xFF)


def _read_sections(data: bytes) -> list[_Section]:
    (machine,) = _unpack("<H", data, 18)
    _require(machine == _EM_CUDA, f"ELF machine {machine}, expected {_EM_CUDA} (CUDA)")
    (start,) = _unpack("<Q", data, 40)
    size, count, names_at = _unpack("<HHH", data, 58)
    _require(
        size == 64 and names_at < count,
        f"{count} section headers of {size} bytes, names in number {names_at}",
    )
    headers = [_unpack("<IIQQQQIIQQ", data, start + index * size) for index in range(count)]
    stored = sum(h[5] for h in headers if h[1] != _NOBITS)
    # Every section is copied. 65535 headers that all name the whole file would fill the memory.
    _require(stored <= 4 * len(data), f"sections of {stored} bytes in {len(data)} bytes")
    bodies = [b"" if h[1] in (0, _NOBITS) else _slice(data, h[4], h[5]) for h in headers]
    names = bodies[names_at]
    return [
        _Section(_name(names, h[0]), h[1], h[2], body, h[6], h[5])
        for h, body in zip(headers, bodies, strict=True)
    ]


def _slice(data: bytes, offset: int, size: int) -> bytes:
    # A Python slice that reaches beyond the end is silently shorter.
    _require(
        offset + size <= len(data), f"a section of {size} bytes at {offset} in {len(data)} bytes"
    )
    return data[offset : offset + size]


def _read_symbols(sections: list[_Section]) -> list[_Symbol]:
    tables = [section for section in sections if section.kind == _SYMTAB]
    _require(len(tables) == 1, f"{len(tables)} symbol tables, expected 1")
    table = tables[0]
    _require(
        table.link < len(sections) and len(table.body) % 24 == 0,
        "symbol table without names or of odd size",
    )
    names = sections[table.link].body
    rows = struct.iter_unpack("<IBBHQQ", table.body)
    return [
        _Symbol(_name(names, name), info & 0xF, other, section)
        for name, info, other, section, _, _ in rows
    ]


def _keeps_state(section: _Section) -> bool:
    """Whether a section is writable memory other than shared memory: a `__device__` variable,
    managed memory, a `static const` table or a string.

    `.nv.merc.*` is the second description of the same kernel that sm_100 cubins carry.
    """
    name = section.name.replace(".nv.merc.nv.", ".nv.")
    return name.startswith(".nv.global") or (
        bool(section.flags & _WRITE) and not name.startswith(".nv.shared.")
    )


def _iter_records(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(format, attribute, payload) of one .nv.info section."""
    at = 0
    while at < len(body):
        kind, attribute, value = _unpack("<BBH", body, at)
        # Format 4 carries a payload of that size; every other format is the two bytes alone.
        size = value if kind == 4 else 0
        payload = _slice(body, at + 4, size) if kind == 4 else body[at + 2 : at + 4]
        yield kind, attribute, payload
        at += 4 + size


def _read_module_facts(sections: Mapping[str, _Section]) -> dict[int, dict[int, int]]:
    """symbol index -> attribute -> value, from the module's own .nv.info (registers, stack)."""
    facts: dict[int, dict[int, int]] = {}
    section = sections.get(".nv.info")
    for kind, attribute, payload in _iter_records(section.body) if section else ():
        if kind == 4 and len(payload) == 8:
            symbol, value = _unpack("<II", payload, 0)
            facts.setdefault(symbol, {})[attribute] = value
    return facts


def _read_kernel(
    symbol: str, sections: Mapping[str, _Section], module: Mapping[int, int]
) -> Kernel:
    _require(f".nv.info.{symbol}" in sections, f"kernel {symbol!r} has no .nv.info section")
    params: dict[int, int] = {}
    threes: dict[int, _Three] = {}
    total = 0
    for _, attribute, payload in _iter_records(sections[f".nv.info.{symbol}"].body):
        if attribute == _KPARAM_INFO:
            _, ordinal, _, word = _unpack("<IHHI", payload, 0)
            # A second record of the same fact could contradict the first, and the driver might take
            # it.
            _require(ordinal not in params, f"{symbol} describes parameter {ordinal} twice")
            # The size in bytes; the bits below hold other facts of the parameter.
            params[ordinal] = word >> 18
        elif attribute == _PARAM_SIZE:
            (total,) = _unpack("<H", payload, 0)
        elif attribute in (_REQNTID, _MAX_THREADS, _CLUSTER):
            _require(attribute not in threes, f"{symbol} states attribute {attribute:#x} twice")
            threes[attribute] = _unpack("<III", payload, 0)
    _require(
        sorted(params) == list(range(len(params))),
        f"{symbol} describes parameters {sorted(params)}, expected 0, 1, ...",
    )
    _require(
        # Alignment may add to the sizes, so the sum is not equal to the total.
        sum(params.values()) <= total and (total == 0 or bool(params)),
        f"{symbol}: {params} do not make up {total} bytes",
    )
    return Kernel(
        symbol=symbol,
        param_sizes=tuple(params[ordinal] for ordinal in range(len(params))),
        required_block=threes.get(_REQNTID),
        max_block=threes.get(_MAX_THREADS),
        cluster=threes.get(_CLUSTER),
        registers=module.get(_REGCOUNT, 0),
        stack_bytes=module.get(_FRAME_SIZE, 0),
    )
