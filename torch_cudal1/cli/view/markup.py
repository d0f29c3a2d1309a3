"""The pieces that every page of ours is made of: the document around it, a table, a list of facts,
escaped text.

Inline CSS, no script, no network. Every text that came from outside is escaped by who puts it in,
with `escaped`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.style import CSS

__all__ = ["document", "environment", "escaped", "table"]


def document(title: str, body: Sequence[str]) -> str:
    """The whole page as text; write it as UTF-8. `body` is HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escaped(title)}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """`rows` hold HTML already escaped."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    # Focusable, so that a keyboard can scroll a table that is wider than the screen.
    frame = f'<div class="scroll" role="region" aria-label="{escaped(caption)}" tabindex="0">'
    return f"{frame}<table><caption>{escaped(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def environment(facts: Mapping[str, str]) -> str:
    """The machine and the versions, as the page's last section."""
    items = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
        for name, value in facts.items()
    )
    return f'<section aria-labelledby="environment"><h2 id="environment">Environment</h2><dl>{items}</dl></section>'


def escaped(value: object) -> str:
    """As text of a page or an attribute, whatever it holds."""
    return html.escape(text.clean(value), quote=True)
