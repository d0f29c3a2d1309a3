"""Numbers as people read them, and tables that keep their width."""

from __future__ import annotations

import pytest

from torch_cudal1.cli.view import text
from torch_cudal1.core.report import Interval


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Interval(1.42, 1.38, 1.47), "1.42x [1.38, 1.47]"),
        (Interval(130.4, 120.0, 141.0), "130x [120, 141]"),
        (Interval(1.0, 1.0, 1.0), "1.00x"),
        (0.985, "0.98x"),
        (None, "-"),
        (float("inf"), "infx"),
    ],
)
def test_a_speed_up_carries_its_interval(value: Interval | float | None, shown: str) -> None:
    assert text.speedup(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.42, "0.4 s"),
        (12.2, "12 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_a_duration_uses_the_unit_that_fits(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (4.123, "4.12 us"),
        (999.0, "999 us"),
        (12_345.0, "12.3 ms"),
        (1_234_567.0, "1.23 s"),
        (None, "-"),
    ],
)
def test_a_latency_is_never_in_the_wrong_unit(us: float | None, shown: str) -> None:
    assert text.latency(us) == shown


def test_an_unmeasured_number_is_neither_zero_nor_one() -> None:
    assert {text.speedup(None), text.ratio(None), text.error(None), text.latency(None)} == {
        text.ABSENT
    }
    assert text.ratio(0.001) == "<0.01"
    assert text.error(0.0) == "0"


@pytest.mark.parametrize("attack", ["\x1b[31mred", "a\rb", "a\x07b", "a\u202eb", "line\nbreak"])
def test_a_name_cannot_drive_the_terminal(attack: str) -> None:
    cleaned = text.clean(attack)
    assert cleaned.isprintable()


def test_a_traceback_in_a_reason_is_cut_to_a_line() -> None:
    shortened = text.brief("broke\n" + "x" * 900, 100)
    assert shortened.startswith("broke x")
    assert len(shortened) == 100
    assert text.brief("short") == "short"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_keeps_to_the_width_and_loses_no_word(width: int) -> None:
    long = "a candidate that was refused because a NaN input gives 0 instead of NaN"
    table_text = text.table(
        ("name", "n", "why"), [["diag", "12", long], ["x" * 30, "3", "short"]], width=width
    )
    assert max(map(len, table_text.splitlines())) <= width
    assert all(word in table_text.replace("\n", " ") for word in long.split())


def test_a_name_is_only_broken_when_sentences_cannot_give_way() -> None:
    name = "LinearThenSum.inference/island0"
    rows = [[name, "estimated from FLOPs and bytes, as nothing is measured yet"]]
    assert name in text.table(("region", "why"), rows, width=60)
    assert name not in text.table(("region", "why"), rows, width=40)


def test_numbers_are_aligned_to_the_right() -> None:
    assert text.table(("name", "size"), [["a", "5 B"], ["b", "512 B"]], width=80).splitlines()[
        2:
    ] == ["a       5 B", "b     512 B"]


def test_one_is_singular() -> None:
    assert [text.count_text(n, "entry", "entries") for n in (0, 1, 2)] == [
        "0 entries",
        "1 entry",
        "2 entries",
    ]
    assert text.count_text(2, "region") == "2 regions"
