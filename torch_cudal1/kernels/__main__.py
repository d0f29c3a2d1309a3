"""Prints `docs/kernel-templates.md` from the registry:
`python -m torch_cudal1.kernels > docs/kernel-templates.md`.
"""

from __future__ import annotations

import sys

from torch_cudal1.kernels.registry import TEMPLATES

__all__ = ["render_page"]

_PAGE = """# Kernel templates

This page is made by `python -m torch_cudal1.kernels` from `torch_cudal1/kernels/registry.py`. A
template is a family of kernels. The first one of this list that serves a fusion group proposes
kernels for it. Of a *shortlisted* family several kernels are timed side by side and the fastest
correct one is taken; of another the first correct one.

| family | what it serves | architectures | dtypes | shortlisted |
|---|---|---|---|---|
{rows}

Fusion groups are made around these operators:

| family | operators |
|---|---|
{anchors}

Chains of element-wise steps are a group of their own, and join a group around the operators above
where its template takes them in.

[CONTRIBUTING.md](../CONTRIBUTING.md) shows how to add a template.
"""


def render_page() -> str:
    """The text of `docs/kernel-templates.md`."""
    rows = "\n".join(
        f"| `{t.family}` | {t.summary} | {t.architectures} | {t.dtypes} |"
        f" {'yes' if t.is_shortlisted else 'no'} |"
        for t in TEMPLATES
    )
    anchors = "\n".join(
        f"| `{t.family}` | {', '.join(f'`{name}`' for name in sorted(t.fusion.anchors))} |"
        for t in TEMPLATES
        if t.fusion.anchors
    )
    return _PAGE.format(rows=rows, anchors=anchors)


if __name__ == "__main__":
    sys.stdout.write(render_page())
