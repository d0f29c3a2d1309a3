"""What goes to stdout and stderr, and when progress speaks."""

from __future__ import annotations

import io
import json

import pytest

from torch_cudal1.cli.view.terminal import Progress, Screen, time_left
from torch_cudal1.core.report import Interval


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Seen:
    def __init__(self) -> None:
        self.lines: list[tuple[str, float | None, str]] = []
        self.closed = False

    def show(self, activity: str, fraction: float | None, time_text: str) -> None:
        self.lines.append((activity, fraction, time_text))

    def close(self) -> None:
        self.closed = True


def screen(out: io.StringIO | None = None, **how: bool) -> Screen:
    return Screen(out=out or io.StringIO(), err=io.StringIO(), width=60, **how)  # type: ignore[arg-type]


def test_work_of_under_two_seconds_shows_no_progress() -> None:
    now = [0.0]
    display = Seen()
    with Progress(display, lambda: now[0]).open_display() as report:
        for at in (0.0, 1.0, 1.9):
            now[0] = at
            report("judging", 0.5)
        assert display.lines == []
        now[0] = 4.0
        report("judging", 0.25)
    assert display.lines == [("judging", 0.25, "about 12 s left")]
    assert display.closed


def test_the_display_is_closed_when_the_work_fails() -> None:
    display = Seen()
    with pytest.raises(KeyError), Progress(display).open_display():
        raise KeyError("x")
    assert display.closed


@pytest.mark.parametrize(
    ("passed", "fraction", "sentence"),
    [(10.0, 0.5, "about 10 s left"), (10.0, None, "10 s so far"), (10.0, 0.001, "10 s so far")],
)
def test_time_left_is_only_promised_when_something_is_known(
    passed: float, fraction: float | None, sentence: str
) -> None:
    assert time_left(passed, fraction) == sentence


def test_a_fraction_outside_its_range_is_clipped() -> None:
    now, display = [0.0], Seen()
    progress = Progress(display, lambda: now[0])
    now[0] = 5.0
    progress.update("x", 7.0)
    assert display.lines == [("x", 1.0, "about 0.0 s left")]


def test_json_output_is_one_value_and_nothing_else() -> None:
    display = screen(as_json=True)
    display.line("for people")
    display.table(("a",), [["b"]])
    display.json({"v": Interval(1.0, 1.0, 1.0), "inf": float("inf")})
    assert json.loads(display.out.getvalue()) == {
        "v": {"value": 1.0, "low": 1.0, "high": 1.0},
        "inf": "inf",
    }  # type: ignore[attr-defined]


def test_text_output_holds_no_json() -> None:
    display = screen()
    display.json({"a": 1})
    display.line("for people")
    assert display.out.getvalue() == "for people\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["pipe", "terminal with rich"])
def test_a_table_shows_markup_in_a_name_as_it_is(stream: type[io.StringIO]) -> None:
    out = stream()
    screen(out).table(("name", "n"), [["[bold]x[/bold]", "1"]])
    assert "[bold]x[/bold]" in out.getvalue()


def test_problems_go_to_stderr_as_one_line() -> None:
    display = screen()
    display.problem("first\nsecond")
    assert display.err.getvalue() == "cudal1: first second\n"  # type: ignore[attr-defined]
    assert display.out.getvalue() == ""  # type: ignore[attr-defined]
