"""The page of sections: whole, escaped, without anything from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from torch_cudal1.cli.view import plots
from torch_cudal1.cli.view.article import Figure, Section, Table, article
from torch_cudal1.cli.view.plots import Curve

NASTY = '<script>alert("x")</script> & $x_1$ "quoted"'


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "path", "use", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


def page() -> str:
    parts = [NASTY, Table(NASTY, ("name", NASTY), [[NASTY, "1.00"]])]
    if plots.available()[0]:
        lines = [
            Curve(NASTY, (0, 1, 2), (1.0, 1.5, 1.2), (0.9, 1.4, 1.1), (1.1, 1.6, 1.3)),
            Curve("b", (0, 1), (1.0, 0.5)),
        ]
        parts.append(
            Figure(NASTY, plots.plot_curves(lines, label=NASTY, x="step", y="speed-up", salt="one"))
        )
        parts.append(
            Figure("two", plots.plot_curves(lines, label="two", x="step", y="share", salt="two"))
        )
    return article(NASTY, NASTY, [Section(NASTY, parts)], {NASTY: NASTY})


def test_every_text_is_escaped_and_every_tag_is_closed():
    tags = Tags()
    tags.feed(page())
    assert "script" not in tags.seen
    assert tags.open == []


def test_nothing_is_loaded_from_elsewhere():
    assert not re.findall(r'(?:src|href)="(?!#)', page())
    assert "url(http" not in page()


@pytest.mark.skipif(not plots.available()[0], reason=plots.available()[1])
def test_two_figures_share_no_id():
    ids = re.findall(r' id="([^"]+)"', page())
    assert len(ids) == len(set(ids))
