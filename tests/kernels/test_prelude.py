"""The head of a kernel text: only the functions that it calls."""

from __future__ import annotations

from torch_cudal1.kernels.codegen.prelude import add_prelude


def test_special_functions_are_there_where_they_are_called() -> None:
    plain = add_prelude("p0):\n    pass\n")
    assert plain.startswith('"""Generated kernel')
    assert plain.endswith("def SYMBOL(p0):\n    pass\n")
    assert "nearest_tf32" not in plain
    rounded = add_prelude("p0):\n    x = nearest_tf32(p0)\n", "\n# own functions\n")
    assert "def nearest_tf32(x)" in rounded
    assert rounded.index("# own functions") < rounded.index("def SYMBOL(")
