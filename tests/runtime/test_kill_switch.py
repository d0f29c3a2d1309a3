"""Inside `disabled()` the whole process runs its baselines; blocks may nest."""

from __future__ import annotations

import threading

import pytest

from torch_cudal1.runtime.kill_switch import disabled, is_disabled


def test_blocks_nest_and_the_last_one_switches_back() -> None:
    assert not is_disabled()
    with disabled():
        with disabled():
            assert is_disabled()
        assert is_disabled()
    assert not is_disabled()


def test_it_holds_for_other_threads_and_ends_with_an_error() -> None:
    answers: list[bool] = []

    def fail_while_disabled() -> None:
        with disabled():
            thread = threading.Thread(target=lambda: answers.append(is_disabled()))
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_disabled()
    assert answers == [True]
    assert not is_disabled()
