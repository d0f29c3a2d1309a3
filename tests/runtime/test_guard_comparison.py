"""The guard in Python and the one in C++ answer alike, and name every change that ends them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime.guard_cases import BUILT, CHANGES, HARMLESS, WHY_NOT, bind, make_model
from torch_cudal1.core import native
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_records import ABSENT, GuardRecords, NameMatch


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


def test_other_bases_of_a_class_end_the_guard(implementation: Any) -> None:
    class First(nn.Module):
        pass

    class Second(nn.Module):
        pass

    class Net(First):
        def forward(self, x: Any) -> Any:
            return x

    module_guard = bind(Net(), implementation)
    assert module_guard.holds()
    Net.__bases__ = (Second,)
    assert not module_guard.holds()
    assert "class " in module_guard.explain_difference()
    assert module_guard.explain_difference().endswith("its bases changed")
    # Back again is another order of classes, made anew, with the same content.
    Net.__bases__ = (First,)
    assert not module_guard.holds()


def test_names_in_one_dict_are_compared_each(implementation: Any) -> None:
    table: dict[str, Any] = {"first": 1, "second": 2, "unread": 3}
    names = [NameMatch(name, table, name, value) for name, value in table.items()][:2]
    names.append(NameMatch("third", table, "third", ABSENT))
    module_guard = ModuleGuard(
        replace(GuardRecords.make_empty(), names=tuple(names)), implementation
    )
    for name, value, holds in (
        ("unread", 4, True),
        ("second", 5, False),
        ("second", 2, True),
        ("third", 6, False),
    ):
        table[name] = value
        assert [module_guard.holds() for _ in range(2)] == [holds] * 2
    del table["third"]
    assert module_guard.holds()
    del table["first"]
    assert not module_guard.holds()
