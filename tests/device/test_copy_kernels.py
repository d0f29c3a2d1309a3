"""The PTX of the copies and fills; tests/runtime/test_captured.py compiles it."""

from __future__ import annotations

from torch_cudal1.device.cuda.copy_kernels import WIDTHS, ptx


def test_there_is_a_copy_and_a_fill_for_each_width() -> None:
    text = ptx()
    names = [f"cudal1_{kind}{width}" for width in WIDTHS for kind in ("copy", "fill")]
    assert [text.count(f".entry {name}(") for name in names] == [1] * 2 * len(WIDTHS)
    assert text.count("ld.global") == text.count("st.global") - len(WIDTHS) == len(WIDTHS)
