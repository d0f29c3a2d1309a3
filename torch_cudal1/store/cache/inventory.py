"""What lies in a cache's folders, place by place: the material of locks, bundles and coverage.

A *place* is a file's path below its folder (`v1/<family>/<contract>/<key[:2]>/<key>.safetensors`,
or `v1/alias/...json`). The same place may be held by several folders for several models of one
architecture (H100 and H200 are both sm_90): both are kept apart. It reads whole files and decodes
them as a look-up would; it writes nothing and decides nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cudal1.ir.records import Contract, Entry, Miss
from torch_cudal1.store.cache.decision_record import open_alias
from torch_cudal1.store.cache.entry_file import Opened, digest_of, open_entry, plain
from torch_cudal1.store.cache.files import files_under, read_file
from torch_cudal1.store.cache.local_cache import Broken, LocalCache, entry_path

__all__ = [
    "ALIAS_LIMIT_BYTES",
    "ENTRY_LIMIT_BYTES",
    "Held",
    "Inventory",
    "Position",
    "held_in",
    "position_of",
    "take_inventory",
]

ENTRY_LIMIT_BYTES = 4 << 30
ALIAS_LIMIT_BYTES = 64 << 20
_PLACE = re.compile(
    r"v1/(?P<alias>alias/)?(?P<family>[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99})/(?P<contract>[0-9a-f]{12})"
    r"/(?P<start>[0-9a-f]{2})/(?P<name>[0-9a-f]{16,128})\.(?P<suffix>safetensors|json)"
)


@dataclass(frozen=True)
class Position:
    """A place, read: what a file there must hold."""

    family: str
    contract: str
    name: str  # the region's key, or the alias's name
    is_alias: bool

    @property
    def limit_bytes(self) -> int:
        """The largest file that may lie there."""
        return ALIAS_LIMIT_BYTES if self.is_alias else ENTRY_LIMIT_BYTES


@dataclass(frozen=True, eq=False)
class Held:
    """A whole file: where it belongs, where it lies, and the Entry or the alias's object in it.

    `sha256` is of all its bytes; `digest` covers everything but signatures, and is what these and
    revocation lists name.
    """

    place: str
    position: Position
    path: Path
    sha256: str
    digest: str
    size_bytes: int
    content: Entry | Mapping[str, Any]

    @property
    def made_for(self) -> str:
        """What tells two files of one place apart: the device model of an entry, the candidates
        that an alias speaks of.
        """
        if isinstance(self.content, Entry):
            return self.content.target.sku
        candidates = self.content.get("candidates")
        return digest_of(plain(candidates))[:16] if candidates else ""


@dataclass(frozen=True)
class Inventory:
    """Every usable file of the folders, in order of place; what a folder asked earlier has for the
    same purpose hides the later.
    """

    entries: tuple[Held, ...]
    aliases: tuple[Held, ...]
    broken: tuple[Broken, ...]

    def only(
        self,
        keys: Collection[str] | None = None,
        families: Collection[str] | None = None,
        contract: Contract | None = None,
    ) -> Inventory:
        """The entries of these regions and families (None: all) with the aliases that need nothing
        else.

        `contract`: only what was judged under its precision; whatever the rights, which are the
        flags of the process that runs it.
        """

        def wanted(held: Held) -> bool:
            return families is None or held.position.family in families

        entries = tuple(
            held
            for held in self.entries
            if wanted(held)
            and (keys is None or held.position.name in keys)
            and (contract is None or _fits(held, contract))
        )
        aliases = tuple(filter(wanted, self.aliases))
        if keys is not None:
            known = _known(entries)
            aliases = tuple(alias for alias in aliases if _speaks_of(alias, known))
        return Inventory(entries, aliases, self.broken)


def position_of(place: str) -> Position | None:
    """`place` read strictly: plain segments in a fixed order, so no other path, absolute or
    upwards, is one. None for all else.
    """
    found = _PLACE.fullmatch(place)
    if (
        found is None
        or not found["name"].startswith(found["start"])
        or (found["suffix"] == "json") != bool(found["alias"])
    ):
        return None
    return Position(found["family"], found["contract"], found["name"], bool(found["alias"]))


def held_in(data: bytes, place: str, path: Path) -> Held | Miss:
    """The file `data` as a look-up at `place` would read it; a Miss where it does not decode or
    belongs elsewhere.
    """
    position = position_of(place)
    if position is None:
        return Miss(f"{place!r} is no place of an entry or alias")
    opened = (
        open_alias(data, tuple(place.split("/")[2:])) if position.is_alias else open_entry(data)
    )
    if isinstance(opened, Miss):
        return opened
    content = opened.entry if isinstance(opened, Opened) else opened.value
    if isinstance(content, Entry) and (misplaced := _misplaced(content, place)):
        return Miss(misplaced)
    return Held(
        place, position, path, hashlib.sha256(data).hexdigest(), opened.digest, len(data), content
    )


def _misplaced(entry: Entry, place: str) -> str:
    """Why `entry` does not belong at `place`; "" if it does."""
    try:
        own = entry_path(Path(), entry.region_key, entry.target, entry.contract).as_posix()
    except ValueError as error:
        return f"unreadable: {error}"
    return "" if own == place else f"unreadable: it holds the entry of {own}"


def take_inventory(cache: LocalCache) -> Inventory:
    """Read every file of the cache's folders once, in the order in which a look-up asks them."""
    found: dict[tuple[str, str], Held] = {}
    broken: list[Broken] = []
    for root in (cache.root, *cache.read_only):
        for path in (
            *files_under(root / "v1", ".safetensors"),
            *files_under(root / "v1" / "alias", ".json"),
        ):
            held = _read(path, root)
            if isinstance(held, Broken):
                broken.append(held)
            elif held is not None:
                found.setdefault((held.place, held.made_for), held)
    ordered = [found[name] for name in sorted(found)]
    entries = tuple(held for held in ordered if not held.position.is_alias)
    return Inventory(
        entries, tuple(held for held in ordered if held.position.is_alias), tuple(broken)
    )


def _read(path: Path, root: Path) -> Held | Broken | None:
    place = path.relative_to(root).as_posix()
    position = position_of(place)
    if position is None:
        return Broken(path, "it lies where no entry or alias belongs")
    data = read_file(path, position.limit_bytes)
    if isinstance(data, Miss):
        return (
            None if data.reason == "absent" else Broken(path, data.reason)
        )  # absent: purged since the folder was listed
    held = held_in(data, place, path)
    return Broken(path, held.reason) if isinstance(held, Miss) else held


def _fits(held: Held, contract: Contract) -> bool:
    own = held.content.contract if isinstance(held.content, Entry) else contract
    return (own.precision, own.assume_finite) == (contract.precision, contract.assume_finite)


def _known(entries: Collection[Held]) -> dict[tuple[str, str], tuple[set[str], set[str]]]:
    """Region keys and candidates of the entries, by family and contract."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for held in entries:
        keys, candidates = found.setdefault(
            (held.position.family, held.position.contract), (set(), set())
        )
        keys.add(held.position.name)
        if isinstance(held.content, Entry):
            candidates.add(held.content.choice.digest)
    return found


def _speaks_of(alias: Held, known: Mapping[tuple[str, str], tuple[set[str], set[str]]]) -> bool:
    """Whether everything an alias leads to is known for its own family and contract."""
    keys, digests = known.get((alias.position.family, alias.position.contract), (set(), set()))
    content = alias.content if isinstance(alias.content, Mapping) else {}
    regions, candidates = content.get("regions"), content.get("candidates")
    if isinstance(regions, list):
        return all(isinstance(key, str) and key in keys for key in regions)
    return isinstance(candidates, list) and all(
        isinstance(one, str) and one in digests for one in candidates
    )
