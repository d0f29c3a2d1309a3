"""The two lists that a platform team owns, as TOML: whose signatures count, and what must not be
used any more.

    [[publisher]]                                  [[revoked]]
    name = "platform-team"                         entry = "<digest>"      # or program = "<digest>", or key = "ed25519:..."
    key = "ed25519:<64 hex digits>"                reason = "wrong for NaN on driver 580.65"

A list is read again when its file changes. A list that is absent or damaged, holds an unknown key,
or can be written by every user is a `Refusal` naming the file and the line, never an empty list. A
symbolic link is followed (mounted configuration is one) and logged once; it must belong to this
user or to root.

Tables are checked by hand after `tomllib`, without a schema library: trust begins here, a refusal
names the line, and an unknown key is refused rather than ignored.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.cache.files import hold_lock, write_file
from torch_cudal1.store.trust.signatures import parse_public

__all__ = [
    "Publishers",
    "Revocations",
    "append_revocation",
    "read_publishers",
    "read_revocations",
]

log = logging.getLogger("torch_cudal1")

_MAX_BYTES = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
RevokedKind: TypeAlias = Literal["entry", "program", "key"]
_KINDS: tuple[RevokedKind, ...] = ("entry", "program", "key")
# One table of a list, and the line where it begins.
_Item: TypeAlias = tuple[dict[str, Any], int]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Publishers:
    """The allowed public keys, each with its publisher's name."""

    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Revocations:
    """Why each entry, Program or key is not to be used any more, by digest or public key."""

    entry: Mapping[str, str] = field(default_factory=dict)
    program: Mapping[str, str] = field(default_factory=dict)
    key: Mapping[str, str] = field(default_factory=dict)


class _ListError(Exception):
    """Inside this file: what is wrong with a list, and on which line (0: with the file)."""

    def __init__(self, reason: str, line: int = 0) -> None:
        self.reason, self.line = reason, line
        super().__init__(reason, line)


_memo: dict[tuple[str, Path], tuple[object, Any]] = {}
_logged_links: set[Path] = set()
_lock = threading.Lock()


def read_publishers(path: Path | None) -> Publishers | Refusal:
    """The allow-list at `path`; an empty one for None."""
    return Publishers() if path is None else _read(path, "publisher", _parse_publishers)


def read_revocations(path: Path | None) -> Revocations | Refusal:
    """The revocation list at `path`; an empty one for None."""
    return Revocations() if path is None else _read(path, "revoked", _parse_revocations)


def append_revocation(path: Path, kind: RevokedKind, subject: str, reason: str) -> None:
    """Add one record at the end of a list, which is made if there is none. Raises SettingError if
    it cannot be used or written.
    """
    block = f"[[revoked]]\n{kind} = {_quote(subject)}\nreason = {_quote(reason)}\n"
    # Two appends at once would each write the list without the other's record.
    with hold_lock(path.with_name(f".{path.name}.lock"), 30.0):
        before = ""
        if path.is_symlink() or path.exists():
            revocations = read_revocations(path)
            if isinstance(revocations, Refusal):
                raise SettingError(
                    "revoked", str(path), f"a list that is whole: {revocations.reason}"
                )
            before = path.read_text(encoding="utf-8").rstrip("\n")
        text = f"{before}\n\n{block}".lstrip("\n")
        try:
            _parse_revocations(_parse(text.encode(), "revoked"))
        except _ListError as problem:
            # A list that does not parse makes every look-up refuse, so it is never written.
            raise SettingError(
                "revoked",
                subject,
                f"a record for the list, which was left as it is: {problem.reason}",
            ) from problem
        # Resolved, so that the rename replaces the list and not the link to it.
        stored = write_file(path.resolve(), text.encode())
    if isinstance(stored, Refusal):
        raise SettingError("revoked", str(path), f"a list that can be written: {stored.reason}")


def _read(path: Path, word: str, build: Callable[[list[_Item]], _T]) -> _T | Refusal:
    try:
        state = _examine_file(path)
        with _lock:
            if (memo := _memo.get((word, path))) is not None and memo[0] == state:
                return memo[1]  # type: ignore[no-any-return]
        built = build(_parse(_read_content(path), word))
    except _ListError as problem:
        where = f"line {problem.line}: " if problem.line else ""
        return Refusal(f"{path}: {where}{problem.reason}")
    except OSError as error:
        hint = (
            "; restore it, or take it out of the settings"
            if isinstance(error, FileNotFoundError)
            else ""
        )
        return Refusal(f"{path}: {type(error).__name__}: {error.strerror or error}{hint}")
    with _lock:
        _memo[(word, path)] = (state, built)
    return built


def _examine_file(path: Path) -> object:
    """What changes when the file is changed or replaced. Raises _ListError where another user
    could do that.
    """
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode):
        # Another user who owns the link can point it at another list at any moment.
        if link.st_uid not in (0, os.geteuid()):
            raise _ListError(
                f"a symbolic link made by user {link.st_uid}; expected a file, or a link of "
                f"yours or root's"
            )
        _check_folder(path.parent)
        if path not in _logged_links:
            _logged_links.add(path)
            log.warning(
                "cudal1 follows the symbolic link %s to %s: who may write either decides whom "
                "you trust",
                path,
                path.resolve(),
            )
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _ListError(f"not a regular file ({stat.filemode(status.st_mode)})")
    # A list that any user may write decides whom every user trusts.
    if status.st_mode & stat.S_IWOTH:
        raise _ListError(
            f"everybody may write it ({stat.filemode(status.st_mode)}): chmod o-w it, after a "
            f"look at what it says"
        )
    _check_folder(path.resolve().parent)
    # Times, size, inode and mode of the link and its target: a change of any reads the list again.
    # `st_ctime_ns`, because a writer can set `st_mtime_ns` back.
    return tuple(
        (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_mode)
        for s in (link, status)
    )


def _check_folder(folder: Path) -> None:
    mode = os.stat(folder).st_mode
    # The sticky bit (as on /tmp) lets only a file's owner rename or delete it.
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _ListError(
            f"everybody may replace it: the folder {folder} is {stat.filemode(mode)}; chmod o-w it"
        )


def _read_content(path: Path) -> bytes:
    # O_NONBLOCK: opening a named pipe without it waits for a writer, perhaps for ever.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        # One byte more than allowed tells a list at the limit from a longer one.
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _ListError(f"over {_MAX_BYTES} bytes, expected a list of keys or digests")
    return data


def _parse(data: bytes, word: str) -> list[_Item]:
    """The tables of a list with their lines. Raises _ListError."""
    try:
        text = data.decode("utf-8")
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise _ListError("not UTF-8", data[: error.start].count(b"\n") + 1) from error
    except RecursionError as error:
        raise _ListError("no TOML: nested too deep") from error
    except tomllib.TOMLDecodeError as error:
        # No match: "at end of document".
        location = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(location.group(1)) if location else text.count("\n") + 1
        raise _ListError(f"no TOML: {str(error).split(' (at ')[0]}", line) from error
    # An unknown word is refused: a mistyped [[revokd]] would otherwise revoke nothing.
    for name in document:
        if name != word:
            raise _ListError(
                f"{name!r} is not known here; expected only [[{word}]]", _find_line(text, name)
            )
    tables = document.get(word, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _ListError(f"{word!r} is no list of tables; write [[{word}]]", _find_line(text, word))
    heads = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if re.match(rf"\s*\[\[\s*{word}\s*\]\]", line)
    ]
    # Tables may also be written inline; then only the first line with the word is known.
    lines = heads if len(heads) == len(tables) else [_find_line(text, word)] * len(tables)
    return list(zip(tables, lines, strict=True))


def _find_line(text: str, word: str) -> int:
    return next((number for number, line in enumerate(text.splitlines(), 1) if word in line), 1)


def _parse_publishers(items: list[_Item]) -> Publishers:
    names: dict[str, str] = {}
    for table, line in items:
        name = _require_text(table, "name", line)
        key = parse_public(table.get("key"))
        if isinstance(key, Refusal):
            raise _ListError(f"the key of {name!r}: {key.reason}", line)
        # With two names for one key, reports would name either as the publisher.
        if key in names:
            raise _ListError(f"the key of {name!r} is already that of {names[key]!r}", line)
        _check_names(table, ("name", "key"), line)
        names[key] = name
    return Publishers(names)


def _parse_revocations(items: list[_Item]) -> Revocations:
    reasons: dict[RevokedKind, dict[str, str]] = {kind: {} for kind in _KINDS}
    for table, line in items:
        named = [kind for kind in _KINDS if kind in table]
        if len(named) != 1:
            raise _ListError(
                f"{len(named)} of {', '.join(_KINDS)} in one record; expected exactly one", line
            )
        kind, subject = named[0], table[named[0]]
        checked = parse_public(subject) if kind == "key" else _parse_digest(subject)
        if isinstance(checked, Refusal):
            raise _ListError(f"{kind}: {checked.reason}", line)
        reasons[kind][subject] = _require_text(table, "reason", line)
        _check_names(table, (kind, "reason"), line)
    return Revocations(reasons["entry"], reasons["program"], reasons["key"])


def _require_text(table: Mapping[str, Any], name: str, line: int) -> str:
    text = table.get(name)
    if not isinstance(text, str) or not text.strip():
        raise _ListError(f"{name} is {text!r}; expected text", line)
    return text


def _check_names(table: Mapping[str, Any], allowed: tuple[str, ...], line: int) -> None:
    for name in table:
        if name not in allowed:
            raise _ListError(f"{name!r} is not known here; expected {', '.join(allowed)}", line)


def _parse_digest(text: Any) -> str | Refusal:
    if isinstance(text, str) and _DIGEST.fullmatch(text):
        return text
    return Refusal(f"{text!r} is no digest; expected 64 hex digits (0-9, a-f)")


def _quote(text: str) -> str:
    """A TOML basic string: JSON's escapes are a part of TOML's; what JSON leaves as it is and TOML
    does not is DEL.
    """
    return json.dumps(text).replace("\x7f", "\\u007f")
