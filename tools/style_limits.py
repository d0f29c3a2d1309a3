"""Measures how the package reads, and fails where a figure is worse than its limit: `python tools/style_limits.py`.

Limits only move towards the better side: who improves a figure writes the new one down here. It reads and parses files and
imports nothing of them. A name that passes is not yet a good name: read it aloud.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "torch_cudal1", ROOT / "tests"
MAX_COLUMNS = 100
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50  # of code, without docstring and comments
MAX_PARAMETERS = 6

# Pronouns, participles and fillers: as a variable's name they say nothing of what the value is.
OPAQUE_WORDS = """
one ones found told made held given what own left known kept whole asked ours theirs tried taken
said wanted begun put gone seen done apart beside anew others those these who whose nothing
something everything thing things
"""
OPAQUE_NAMES = frozenset(OPAQUE_WORDS.split())
PARTICIPLE = re.compile(
    r"^_*(told|asked|made|held|given|kept|found|taken|said|begun|gone|seen|done|left|known|shown|"
    r"drawn|written|sent|lent|built|spent|met|led|heard|grown|thrown|born|worn|torn|[a-z]{3,}ed)"
    r"(_|$)"
)
VERBS_IN_ED = frozenset(("need", "feed", "embed", "seed", "speed", "exceed", "proceed", "shed"))


@dataclass(frozen=True)
class Source:
    """One parsed file of the package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]


@dataclass(frozen=True)
class Limit:
    """A figure and the worst value that passes. `at_least`: the figure must not be smaller."""

    name: str
    measure: Callable[[Sequence[Source]], float]
    worst: float
    at_least: bool = False

    def is_kept(self, value: float) -> bool:
        return value >= self.worst if self.at_least else value <= self.worst


def read_sources() -> list[Source]:
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def iterate_bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id.strip("_")
        elif isinstance(node, ast.arg):
            yield node.arg.strip("_")


def percent(part: float, total: float) -> float:
    return round(100 * part / max(total, 1), 1)


def measure_opaque_names(sources: Sequence[Source]) -> float:
    names = [name for source in sources for name in iterate_bound_names(source.tree)]
    return percent(sum(name in OPAQUE_NAMES for name in names), len(names))


def measure_participle_functions(sources: Sequence[Source]) -> float:
    names = [function.name for source in sources for function in source.functions]
    names = [name for name in names if not name.startswith("__")]
    led = [name for name in names if PARTICIPLE.match(name)]
    led = [name for name in led if name.strip("_").split("_")[0] not in VERBS_IN_ED]
    return percent(len(led), len(names))


def count_shared_class_names(sources: Sequence[Source]) -> float:
    counts = collections.Counter(
        node.name
        for source in sources
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    )
    return sum(count > 1 for count in counts.values())


def count_root_entries(_: Sequence[Source]) -> float:
    built = (".so", ".pyd", "_native_build.txt")
    entries = [path for path in PACKAGE.iterdir() if not path.name.endswith(built)]
    return sum(path.name != "__pycache__" for path in entries)


def measure_largest_folder(sources: Sequence[Source]) -> float:
    folders = collections.Counter(s.path.parent for s in sources if s.path.name != "__init__.py")
    return max(folders.values())


def measure_long_lines(sources: Sequence[Source]) -> float:
    lines = [line for source in sources for line in source.text.splitlines()]
    return percent(sum(len(line) > MAX_COLUMNS for line in lines), len(lines))


def measure_mirrored_modules(sources: Sequence[Source]) -> float:
    tested = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    modules = [s.path.stem for s in sources if not s.path.name.startswith("__")]
    return percent(sum(module in tested for module in modules), len(modules))


def find_docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


def find_code_lines(source: Source) -> tuple[set[int], int]:
    """The numbers of lines with code, and how many comments there are."""
    code: set[int] = set()
    comments = 0
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - find_docstring_lines(source.tree), comments


def measure_comments(sources: Sequence[Source]) -> float:
    counted = [find_code_lines(source) for source in sources]
    return percent(sum(count for _, count in counted), sum(len(code) for code, _ in counted))


def count_long_files(sources: Sequence[Source]) -> float:
    return sum(source.text.count("\n") > MAX_FILE_LINES for source in sources)


def count_long_functions(sources: Sequence[Source]) -> float:
    long = 0
    for source in sources:
        code, _ = find_code_lines(source)
        spans = [range(f.lineno, (f.end_lineno or 0) + 1) for f in source.functions]
        long += sum(len(code.intersection(span)) > MAX_FUNCTION_LINES for span in spans)
    return long


def count_wide_functions(sources: Sequence[Source]) -> float:
    arguments = [function.args for source in sources for function in source.functions]
    counts = [len(each.posonlyargs) + len(each.args) + len(each.kwonlyargs) for each in arguments]
    return sum(count > MAX_PARAMETERS + 1 for count in counts)  # `self` is none of them


LIMITS = (
    Limit("names bound to a pronoun or participle, %", measure_opaque_names, 0.2),
    Limit("functions led by a participle, %", measure_participle_functions, 0.8),
    Limit("class names in several files", count_shared_class_names, 0),
    Limit("entries at the package root", count_root_entries, 16),
    Limit("files in the largest folder", measure_largest_folder, 20),
    Limit("lines over 100 columns, %", measure_long_lines, 0.6),
    Limit("modules mirrored by a test, %", measure_mirrored_modules, 99.0, at_least=True),
    Limit("comments per 100 lines of code", measure_comments, 10.0, at_least=True),
    Limit("files over 500 lines", count_long_files, 0),
    Limit("functions over 50 lines", count_long_functions, 0),
    Limit("functions with more than 6 parameters", count_wide_functions, 3),
)


def main() -> int:
    sources, failed = read_sources(), False
    for limit in LIMITS:
        value = limit.measure(sources)
        kept = limit.is_kept(value)
        failed |= not kept
        direction = "at least" if limit.at_least else "at most"
        print(f"{'ok  ' if kept else 'FAIL'} {limit.name}: {value:g} ({direction} {limit.worst:g})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
