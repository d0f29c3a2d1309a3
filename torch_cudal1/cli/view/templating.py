"""Renders the templates of the HTML pages: every value is escaped and freed of control characters.

Pages are self-contained: inline CSS and SVG, no script, no network. jinja2 comes with torch, which
requires it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from torch_cudal1.cli.view import text

__all__ = ["render_template", "style_sheet"]

_TEMPLATES = Path(__file__).parent / "templates"


def render_template(name: str, **values: Any) -> str:
    """A whole page as text; write it as UTF-8."""
    return _environment().get_template(name).render(**values) + "\n"


def style_sheet() -> str:
    """The CSS of the pages."""
    return (_TEMPLATES / "style.css").read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        # Escaping is on for every file. jinja2's own default escapes nothing, and names and reasons
        # on a page come from models and kernels of other people, who could put a script there.
        autoescape=True,
        # A misspelt name in a template is an error, not an empty place on the page.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Control characters are not valid in HTML, escaped or not.
        finalize=_clean,
    )


def _clean(value: object) -> object:
    """Text without control characters; what a macro rendered stays as it is."""
    return value if isinstance(value, Markup) else text.clean(value)
