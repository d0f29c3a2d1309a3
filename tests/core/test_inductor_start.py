"""What Inductor needs is hashed in threads, once, and waited for before it compiles."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.async_compile

from torch_cudal1.core import inductor_start
from torch_cudal1.core.inductor_start import await_keys, hash_keys_ahead, start_compile_workers


class Hashes:
    """Stands for the functions that hash: each waits for `go` and says that it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = {"sources": threading.Event(), "triton": threading.Event()}
        self.ran: list[str] = []
        monkeypatch.setattr(inductor_start, "_threads", {})
        for module, function, name in (
            ("torch._inductor.codecache", "torch_key", "sources"),
            ("torch._inductor.runtime.triton_compat", "triton_key", "triton"),
        ):
            functions = SimpleNamespace(**{function: lambda name=name: self.run(name)})
            monkeypatch.setitem(sys.modules, module, functions)

    def run(self, name: str) -> None:
        assert self.go[name].wait(60)
        self.ran.append(name)

    def release(self) -> None:
        for event in self.go.values():
            event.set()


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    return Hashes(monkeypatch)


def test_the_caller_goes_on_while_files_are_hashed(hashes: Hashes) -> None:
    hash_keys_ahead()
    assert not hashes.ran
    hashes.release()
    await_keys()
    assert sorted(hashes.ran) == ["sources", "triton"]


def test_files_are_hashed_once(hashes: Hashes) -> None:
    hashes.release()
    for _ in range(3):
        hash_keys_ahead()
    await_keys()
    assert len(hashes.ran) == 2


def test_nothing_is_awaited_where_nothing_was_started(hashes: Hashes) -> None:
    await_keys()
    assert not hashes.ran


def test_what_nobody_has_imported_is_not_hashed(
    hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.codecache")
    hashes.release()
    hash_keys_ahead()
    await_keys()
    assert hashes.ran == ["triton"]


def test_workers_start_when_the_sources_are_hashed(
    hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    name = "torch._inductor.async_compile.maybe_warm_pool"
    monkeypatch.setattr(name, lambda: started.append(list(hashes.ran)))
    hash_keys_ahead()
    hashes.go["sources"].set()
    start_compile_workers(torch.device("cuda"))
    # Triton's files may still be on their way.
    assert started == [["sources"]]
    hashes.release()
    await_keys()


def test_a_pytorch_without_that_function_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._inductor.async_compile.maybe_warm_pool")
    start_compile_workers(torch.device("cuda"))


def test_no_workers_start_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: started.append(1))
    start_compile_workers(torch.device("cpu"))
    assert not started


def test_pytorch_has_the_functions() -> None:
    # Names of PyTorch that no promise covers.
    from torch._inductor.async_compile import maybe_warm_pool
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import triton_key

    assert all(map(callable, (maybe_warm_pool, torch_key, triton_key)))
