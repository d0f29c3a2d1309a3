"""The global state of a process is read as plain values, which change where the state does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from torch_cudal1.judge.worker.global_state import read_global_state, reseed_generators

CPU = torch.device("cpu")


def test_two_readings_of_an_idle_process_are_equal() -> None:
    first, second = (read_global_state(torch.device("cpu")) for _ in range(2))
    assert first == second
    assert len(first["flags"]) >= 40
    assert len(first["identities"]["torch"]) > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_the_first_attention_of_a_process_changes_no_flag() -> None:
    """In a process of its own: torch chooses the order of its attention kernels once a process."""
    code = """
import torch
from torch_cudal1.judge.worker.global_state import read_global_state
device = torch.device("cuda")
before = read_global_state(device)["flags"]
q = torch.randn(1, 2, 64, 64, device=device, dtype=torch.float16)
torch.nn.functional.scaled_dot_product_attention(q, q, q)
after = read_global_state(device)["flags"]
assert after == before, {name: (before.get(name), after[name]) for name in after if after[name] != before.get(name)}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def restore_state() -> Iterator[None]:
    """Put back what the tests below change in this process."""
    is_enabled, folder = torch.is_autocast_cache_enabled(), os.getcwd()
    yield
    torch.set_autocast_cache_enabled(is_enabled)
    os.chdir(folder)
    os.environ.pop("CUDAL1_TEST_VARIABLE", None)


CHANGES: dict[str, tuple[str, str, Callable[[], object]]] = {
    "a flag": ("flags", "autocast_cache", lambda: torch.set_autocast_cache_enabled(False)),
    "the working folder": ("process", "working directory", lambda: os.chdir("/")),
    "a variable": (
        "environment",
        "CUDAL1_TEST_VARIABLE",
        lambda: os.environ.update(CUDAL1_TEST_VARIABLE="x"),
    ),
    "a random draw": ("random", "torch", lambda: torch.rand(1)),
}


@pytest.mark.usefixtures("restore_state")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows_in_its_group_and_in_no_other(change: str) -> None:
    group, name, act = CHANGES[change]
    before = read_global_state(CPU, tables=False)
    act()
    after = read_global_state(CPU, tables=False)
    assert [part for part in after if after[part] != before[part]] == [group]
    changed = [key for key in after[group] if after[group][key] != before[group].get(key)]
    assert len(changed) == 1
    assert name in changed[0]


def test_the_same_seed_gives_every_generator_the_same_state() -> None:
    reseed_generators(5)
    first = read_global_state(CPU, tables=False)["random"]
    torch.rand(3)
    random.random()
    moved = read_global_state(CPU, tables=False)["random"]
    reseed_generators(5)
    assert read_global_state(CPU, tables=False)["random"] == first
    assert moved["torch"] != first["torch"]
    assert moved["random"] != first["random"]
