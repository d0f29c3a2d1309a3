"""The database of cheats: known cases as texts, and the ones most like a new program. It grows with
every cheat that is confirmed.

Cases come from a folder in the form of `tests/adversarial` (one Python file a cheat, with `CASE`,
`REFERENCE`, `CHEAT`, `HONEST` and a docstring), which is read as syntax and never imported; from
the index of that folder which is shipped with this package; and from a run's own file. Likeness is
of code, not of words: names that the author chose, comments and literals do not count.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import keyword
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch_cudal1.ingest.llm.database import StoredSample
from torch_cudal1.judge.checks.static.source_syntax import parse_source

__all__ = ["CaseBase", "CheatCase", "Match", "find_shipped_index", "measure_likeness"]

_GRAM = 4
# Names of APIs, which say what code does whatever its author calls things. All other names count as
# one token.
_KEPT = frozenset(
    (
        *(
            "torch",
            "nn",
            "cuda",
            "Stream",
            "data_ptr",
            "forward",
            "self",
            "empty",
            "empty_like",
            "zeros",
            "clone",
            "half",
            "to",
        ),
        *(
            "Thread",
            "Tensor",
            "__torch_function__",
            "__torch_dispatch__",
            "perf_counter",
            "synchronize",
            "Event",
            "setattr",
            "gc",
        ),
        *(
            "get_objects",
            "modules",
            "append",
            "dict",
            "cache",
            "is_grad_enabled",
            "seed",
            "manual_seed",
            "randn",
            "sys",
            "os",
        ),
    )
)


@dataclass(frozen=True)
class CheatCase:
    """One cheat. `mechanism`: how it works, for people and for a checking model. `twin`: an honest
    program that looks like it.
    """

    name: str
    group: str
    mechanism: str
    cheat: str = field(repr=False)
    twin: str = field(default="", repr=False)

    @cached_property
    def grams(self) -> Counter[tuple[str, ...]]:
        """The cheat's runs of tokens, which likeness counts."""
        return _count_grams(self.cheat)

    @cached_property
    def trick(self) -> Counter[tuple[str, ...]]:
        """What the cheat has and its honest twin has not."""
        # Counter subtraction keeps positive counts only: code that both have is not the trick.
        return self.grams - _count_grams(self.twin)


@dataclass(frozen=True)
class Match:
    """A case, how much a program is like its cheat, and how much of its trick the program holds: 0
    nothing, 1 all of it.
    """

    case: CheatCase
    likeness: float
    trick: float


class CaseBase:
    """Cases by name. `grown`: the file that takes new ones, None to forget them at the end."""

    def __init__(self, cases: Iterable[CheatCase], grown: Path | None = None) -> None:
        self._grown = grown
        self._cases = {case.name: case for case in cases}
        if grown is not None and grown.exists():
            self._cases |= {case.name: case for case in _read_index(grown)}

    @classmethod
    def shipped(cls, grown: Path | None = None) -> CaseBase:
        """The cases of this package."""
        return cls(_read_index(find_shipped_index()), grown)

    @classmethod
    def of_folder(cls, folder: Path, grown: Path | None = None) -> CaseBase:
        """The cases of a folder. Raises ValueError for one without any."""
        cases = list(_read_folder(folder))
        if not cases:
            raise ValueError(
                f"{folder} holds no case: expected files <group>/<name>.py with CASE and CHEAT "
                f"as texts"
            )
        return cls(cases, grown)

    def __len__(self) -> int:
        return len(self._cases)

    def __iter__(self) -> Iterator[CheatCase]:
        return iter(self._cases.values())

    def nearest(self, source: str, count: int = 3) -> list[Match]:
        """The cases whose cheat is most like a program, the likest first. Pure."""
        grams = _count_grams(source)
        matches = [
            Match(case, measure_likeness(grams, case.grams), _share_of(case.trick, grams))
            for case in self
        ]
        # The name second, so that equal likeness gives the same prompt on every machine.
        return sorted(matches, key=lambda match: (-match.likeness, match.case.name))[:count]

    def confirm(self, sample: StoredSample) -> CheatCase | None:
        """Take a program that was found out as a cheat; None if it is one already, or there is no
        source.
        """
        source = sample.source or sample.measured.program
        # A text without a single run of tokens would be like no program.
        if not _count_grams(source) or any(case.cheat == source for case in self):
            return None
        # A digest in the name: several cheats of one task are several cases.
        name = f"{sample.measured.task}-{hashlib.sha256(source.encode(errors='replace')).hexdigest()[:8]}"
        case = CheatCase(name, "confirmed", sample.measured.detail, source)
        self._cases[name] = case
        if self._grown is not None:
            self._grown.parent.mkdir(parents=True, exist_ok=True)
            # Appended, so that cases of earlier runs stay.
            with self._grown.open("a", encoding="utf-8") as file:
                file.write(_write_case(case))
        return case

    def save(self, path: Path) -> None:
        """Write all cases as an index."""
        path.write_text(
            "".join(_write_case(case) for case in sorted(self, key=lambda case: case.name)),
            encoding="utf-8",
        )


def find_shipped_index() -> Path:
    """The index that comes with the package; `python -m torch_cudal1.ingest.llm.casebase FOLDER`
    writes it anew.
    """
    return Path(__file__).parent / "data" / "cases.jsonl"


def measure_likeness(first: Counter[tuple[str, ...]], second: Counter[tuple[str, ...]]) -> float:
    """Share of runs of tokens that both have (Jaccard, with multiplicity): 0 nothing in common, 1
    the same code.
    """
    # With multiplicity: a program that repeats a run has more of it.
    union = (first | second).total()
    return (first & second).total() / union if union else 0.0


def _share_of(part: Counter[tuple[str, ...]], grams: Counter[tuple[str, ...]]) -> float:
    """The share of `part` that is in `grams`."""
    return (part & grams).total() / part.total() if part else 0.0


def _count_grams(source: str) -> Counter[tuple[str, ...]]:
    tokens = list(_iter_tokens(source))
    return Counter(tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1))


def _iter_tokens(source: str) -> Iterator[str]:
    """Keywords, operators and telling names as they are, other names and literals as their kind.
    Stops where it is no Python.
    """
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                yield (
                    token.string
                    if keyword.iskeyword(token.string) or token.string in _KEPT
                    else "name"
                )
            elif token.type == tokenize.OP:
                yield token.string
            elif token.type in (tokenize.NUMBER, tokenize.STRING):
                # As their kind: another constant or text does not make another trick. Comments are
                # no tokens here.
                yield "literal"
    except (tokenize.TokenError, SyntaxError, ValueError):
        # The tokens so far count: a program that is no Python to its end may still hold a trick.
        return


def _read_folder(folder: Path) -> Iterator[CheatCase]:
    for path in sorted(folder.glob("*/*.py")):
        # As syntax: files of cheats are never imported.
        tree = parse_source(path.read_text(encoding="utf-8", errors="replace"))
        if isinstance(tree, str):
            continue
        # Only texts assigned at the top level: whatever a file computes would need it to run.
        texts = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        # A folder of cases also holds modules without a case, such as `__init__.py`.
        if "CHEAT" in texts and "CASE" in {target.id for target in _iter_targets(tree)}:
            mechanism = " ".join((ast.get_docstring(tree) or "").split())
            yield CheatCase(
                f"{path.parent.name}/{path.stem}",
                path.parent.name,
                mechanism,
                texts["CHEAT"],
                texts.get("HONEST", ""),
            )


def _iter_targets(tree: ast.Module) -> Iterator[ast.Name]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from (target for target in node.targets if isinstance(target, ast.Name))


def _read_index(path: Path) -> Iterator[CheatCase]:
    """Cases of an index; a line that is none is passed over."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            name, group, mechanism, cheat = (
                str(row[key]) for key in ("name", "group", "mechanism", "cheat")
            )
            yield CheatCase(name, group, mechanism, cheat, str(row.get("twin", "")))
        except (ValueError, KeyError, TypeError, RecursionError):
            # A kill may have left half a line at the end of a run's own file.
            continue


def _write_case(case: CheatCase) -> str:
    row = {
        "name": case.name,
        "group": case.group,
        "mechanism": case.mechanism,
        "cheat": case.cheat,
        "twin": case.twin,
    }
    return json.dumps(row) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Write the shipped index from a folder of cases."""
    CaseBase.of_folder(Path(arguments[0])).save(find_shipped_index())


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
