"""Which cases of large test matrices `make test` leaves to `make test-all`.

`tests/matrix.txt` has one line a test function: its name and how many of its cases stay in `make test`, spread evenly over the
matrix. The others carry the mark `matrix`. Cases are chosen by their order, so the same ones run everywhere. Made from measured
seconds by `python -m tests.matrix_table TIMES.jsonl` (lines of `[test id, phase, outcome, seconds]`): a test function keeps what
fits into a few seconds, and every file keeps something.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["TABLE", "find_cases_outside_share", "mark_matrix_cases", "read_table"]

TABLE = Path(__file__).with_name("matrix.txt")
SECONDS_PER_FUNCTION = 1.2
MIN_SECONDS = 2.5  # a test function that takes less altogether stays whole
WHOLE_SUITE = 5_000  # cases: of fewer, a part was asked for, and a line may well match nothing


def read_table() -> dict[str, int]:
    """How many cases of each listed test function stay."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: int(count) for name, count in pairs}


def mark_matrix_cases(items: Iterable[pytest.Item]) -> None:
    """Give the cases that `make test` leaves out their mark. Raises UsageError for a stale line."""
    table, cases = read_table(), defaultdict(list)
    count = 0
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
        count += 1
    files = {name.partition("::")[0] for name in cases}
    stale = sorted(
        name
        for name in table.keys() - cases.keys()
        # A file that is there and was not asked for may have the test.
        if (file := name.partition("::")[0]) in files or not (TABLE.parents[1] / file).exists()
    )
    if stale and count > WHOLE_SUITE:
        raise pytest.UsageError(f"{TABLE.name} names tests that are not there: {stale[:5]}")
    for name, members in cases.items():
        kept_positions = choose_evenly(len(members), table.get(name, len(members)))
        for index, item in enumerate(members):
            if index not in kept_positions:
                item.add_marker(pytest.mark.matrix)


def find_cases_outside_share(items: Sequence[pytest.Item], share: str) -> list[pytest.Item]:
    """Of the cases with the mark `matrix`, those that a run with `--matrix-share K/N` leaves to the
    others of the N: it has every N-th, from the K-th on, spread over all test functions.

    Raises UsageError for a share that is no such pair.
    """
    position, slash, count = share.partition("/")
    numbers = position.isdecimal() and count.isdecimal() and slash == "/"
    if not numbers or not 0 <= int(position) < int(count):
        raise pytest.UsageError(
            f"--matrix-share {share}: expected K/N with K from 0 to N - 1, such as 0/4"
        )
    cases = [item for item in items if item.get_closest_marker("matrix")]
    return [case for i, case in enumerate(cases) if i % int(count) != int(position)]


def choose_evenly(total: int, count: int) -> frozenset[int]:
    """`count` numbers below `total`, spread evenly; all where there are no more."""
    if count >= total:
        return frozenset(range(total))
    return frozenset(index * total // count for index in range(count)) if count else frozenset()


def make_table(seconds: Mapping[str, list[float]]) -> dict[str, int]:
    """Cases that stay, by test function, from the seconds of each case."""
    table: dict[str, int] = {}
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in seconds:
        files[name.partition("::")[0]].append(name)
    for names in files.values():
        left_out = [name for name in names if sum(seconds[name]) > MIN_SECONDS]
        for name in left_out:
            mean = sum(seconds[name]) / len(seconds[name])
            table[name] = min(int(SECONDS_PER_FUNCTION / mean), len(seconds[name]))
        if len(left_out) == len(names) and not any(table[name] for name in left_out):
            cheapest = min(left_out, key=lambda name: sum(seconds[name]) / len(seconds[name]))
            table[cheapest] = 1  # of every file something runs
    return {name: count for name, count in sorted(table.items()) if count < len(seconds[name])}


def main(path: Path) -> None:
    phases: defaultdict[str, float] = defaultdict(float)
    for line in path.read_text().splitlines():
        node, _, _, duration = json.loads(line)
        phases[node] += duration
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for node, duration in phases.items():
        seconds[node.partition("[")[0]].append(duration)
    table = make_table(seconds)
    TABLE.write_text("".join(f"{name} {count}\n" for name, count in table.items()))
    stays = sum(
        sum(cases) * (table.get(name, len(cases)) / len(cases)) for name, cases in seconds.items()
    )
    print(f"{stays:.0f} of {sum(phases.values()):.0f} s stay in `make test`")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
