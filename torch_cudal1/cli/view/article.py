"""A self-contained HTML page of sections: paragraphs, tables and figures, in the style of the
explanations' page.

It computes nothing and chooses nothing; where plots cannot be made the page says why, and every
number is in the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_cudal1.cli.view.templating import render_template

__all__ = ["Figure", "Section", "Table", "article"]


@dataclass(frozen=True)
class Table:
    """`rows` hold plain text; the first cell of each is its name."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """`svg`: as `cli.view.plots` makes it."""

    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A heading and what is under it; a string is a paragraph."""

    title: str
    parts: Sequence[str | Table | Figure]


def article(title: str, intro: str, sections: Sequence[Section], facts: Mapping[str, str]) -> str:
    """The whole page as text; write it as UTF-8. `facts`: the machine and the versions."""
    return render_template(
        "article.html", title=title, intro=intro, sections=sections, environment=facts
    )
