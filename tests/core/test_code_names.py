"""What bytecode looks up among globals is told from attributes of the same name."""

from __future__ import annotations

from torch_cudal1.core.code_names import iter_code, read_code_names

GAIN = 2.0


def compute(x: object) -> object:
    import math
    from collections.abc import Mapping

    def inner(y: object) -> object:
        return GAIN, y.step, Mapping, math.pi  # type: ignore[attr-defined]

    return inner(x), getattr(x, "later", None)


def test_globals_attributes_imports_and_texts_are_told_apart() -> None:
    names = read_code_names(compute.__code__)
    assert {"GAIN", "getattr"} <= names.globals_
    assert "step" not in names.globals_
    assert {"step", "pi", "GAIN"} <= names.names
    assert names.imports == {(0, "math"), (0, "collections.abc")}
    assert "later" in names.texts


def test_a_relative_import_has_its_level() -> None:
    code = compile(
        "def f():\n    from ..package import name\n    from . import other\n", "f", "exec"
    )
    assert read_code_names(code).imports == {(2, "package"), (1, "")}


def test_code_of_inner_functions_is_visited() -> None:
    assert [code.co_name for code in iter_code(compute.__code__)] == ["compute", "inner"]
