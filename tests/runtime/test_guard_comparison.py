"""The guard in Python and the one in C++ answer alike, and name every change that ends them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.guard_cases import BUILT, CHANGES, HARMLESS, WHY_NOT, bind, make_model
from torch_cudal1.core import native


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_the_guard_and_is_named(change: str, implementation: Any) -> None:
    module = make_model()
    module_guard = bind(module, implementation)
    mutate, words = CHANGES[change]
    mutate(module)
    assert not module_guard.holds()
    assert words in module_guard.explain_difference()


@pytest.mark.parametrize("use", HARMLESS)
def test_what_does_not_change_the_call_leaves_it_holding(use: str, implementation: Any) -> None:
    module = make_model()
    module_guard = bind(module, implementation)
    HARMLESS[use](module)
    assert module_guard.holds(), module_guard.explain_difference()
    assert module_guard.explain_difference() == ""


@pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*CHANGES, *HARMLESS]), min_size=1, max_size=4))
def test_both_implementations_and_the_words_agree_on_any_sequence(names: list[str]) -> None:
    module = make_model()
    python, cpp = bind(module, "python"), bind(module, "native")
    for name in names:
        mutate = CHANGES[name][0] if name in CHANGES else HARMLESS[name]
        # An earlier change may have taken away what this one needs: then it changes less, and the
        # answers must still agree.
        with contextlib.suppress(
            AttributeError,
            KeyError,
            IndexError,
            TypeError,
            RuntimeError,
            NotImplementedError,
            ValueError,
        ):
            mutate(module)
        assert (
            python.holds()
            == cpp.holds()
            == (python.explain_difference() == "")
            == (cpp.explain_difference() == "")
        )
        # The next change may write into the storage, which ends the process with any guard.
        if name == "storage freed":
            break


@pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}")
def test_the_extension_refuses_records_of_another_form() -> None:
    extension: Any = native.extension()
    for arguments in (
        (),
        tuple(() for _ in range(9)),
        (((1,),), *(() for _ in range(9))),
        (*(() for _ in range(9)), (1,)),
    ):
        with pytest.raises(TypeError, match="ten tuples"):
            extension.Guard(*arguments)
