"""The page needs no network, escapes names, and has a plot for every level."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from benchmarks.kernelbench.pages import render_html, render_markdown
from tests.benchmarks.kernelbench.test_tables import ROWS


class _Page(HTMLParser):
    """What a page is made of; raises on a tag that closes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_by_itself_and_has_a_plot_for_every_level() -> None:
    text = render_html(ROWS)
    page = _Page()
    page.feed(text)
    assert (page.open, page.outside, page.seen.count("script")) == ([], [], 0)
    assert page.seen.count("svg") == 4  # two levels, fast_p, tuning time
    assert page.seen.count("circle") == 3
    assert "Task &lt;1/1&gt;" in text
    assert not re.search(r"<(1/1|capture)>", text)
    assert "nan" not in text.lower().replace("finance", "")


def test_a_cell_with_a_bar_does_not_break_its_table() -> None:
    line = next(line for line in render_markdown(ROWS).splitlines() if "capture" in line)
    assert len(re.split(r"(?<!\\)\|", line)) == 6
