"""Rendering of pages: every value is escaped, and a value that a template lacks is an error."""

from __future__ import annotations

import jinja2
import pytest

from torch_cudal1.cli.view.templating import render_template, style_sheet


def page(title: str) -> str:
    return render_template("article.html", title=title, intro="", sections=[], environment={})


def test_a_value_is_escaped_and_loses_its_control_characters() -> None:
    content = page("<b>\x1b[31m & 'x'")
    assert "<b>" not in content
    assert "\x1b" not in content
    assert "&lt;b&gt;\ufffd[31m &amp; &#39;x&#39;" in content


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render_template("article.html", title="t", intro="", sections=[])


def test_a_page_carries_its_style_sheet() -> None:
    assert style_sheet().strip() in page("t")
