"""A forward in several graphs: on trial in the user's own calls, which stay as they are in eager
whatever the trial does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.entries import plant_regions
from tests.test_architectures import state_of
from torch_cudal1.api import pieces
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.lower import lower

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Branching(nn.Module):
    """What it computes depends on values, and it tells what it has done in a list."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.second = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x @ self.first)
        positive = bool(x.sum() > 0)
        self.seen.append("positive" if positive else "negative")
        if positive:
            h = h * 2
        return torch.tanh(h @ self.second)


@pytest.fixture(autouse=True)
def plant_every_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every graph that Dynamo brings finds a decision."""
    original = pieces.cudal1

    def backend(
        gm: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Any
    ) -> Callable[..., Any]:
        try:
            graphs = trace(gm, inputs).graphs
            plant_regions(
                [lower(g.module, static=g.static, kind=g.kind).region for g in graphs], tmp_path
            )
        except NotLowerableError:
            return gm.forward
        return original(gm, inputs, options=options)

    torch._dynamo.reset()
    monkeypatch.setattr(pieces, "cudal1", backend)
    yield
    torch._dynamo.reset()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What a call of each side takes, in seconds by a clock of the test's own."""
    takes = {"own": 2.0, "graphs": 1.0}
    now = 0.0

    def tick(self: pieces.Pieces) -> float:
        nonlocal now
        now += takes[self._choose_side()]
        return now

    monkeypatch.setattr(pieces.Pieces, "_read_clock", tick)
    return takes


def accelerate_tuned(module: nn.Module, cache_dir: Path, **options: Any) -> nn.Module:
    with torch.no_grad():
        return torch_cudal1.accelerate(module, X, on_miss="tune", cache_dir=cache_dir, **options)


def inputs(number: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(number):
        yield torch.randn(4, 8, generator=generator)


@torch.no_grad()
def test_graphs_that_win_stay_and_the_python_between_runs_once_a_call(
    tmp_path: Path, clock: dict[str, float]
) -> None:
    module, plain = accelerate_tuned(Branching(), tmp_path), Branching()
    assert module.seen == []
    assert "on trial" in torch_cudal1.explain(module).gate[0]
    for x in inputs(60):
        torch.testing.assert_close(module(x), plain(x))
        assert module.seen == plain.seen
    assert {"positive", "negative"} == set(plain.seen)
    explanation = torch_cudal1.explain(module)
    assert "2.00x" in explanation.gate[0]
    assert len(explanation.regions) >= 2


@torch.no_grad()
def test_what_won_is_tried_again_by_the_next_process_without_a_search(
    tmp_path: Path, clock: dict[str, float]
) -> None:
    module = accelerate_tuned(Branching(), tmp_path)
    for x in inputs(60):
        module(x)
    later = torch_cudal1.accelerate(Branching(), X, cache_dir=tmp_path)
    assert "on trial" in torch_cudal1.explain(later).gate[0]


@torch.no_grad()
def test_graphs_that_lose_leave_the_module_as_it_was(
    tmp_path: Path, clock: dict[str, float]
) -> None:
    clock["graphs"] = 1.99
    module, plain = accelerate_tuned(Branching(), tmp_path), Branching()
    for x in inputs(40):
        torch.testing.assert_close(module(x), plain(x))
    assert module.seen == plain.seen
    assert "_compiled_call_impl" not in vars(module)
    assert "graphs with Python between" in torch_cudal1.explain(module).undone


@torch.no_grad()
def test_nothing_runs_before_the_first_call(tmp_path: Path) -> None:
    module = Branching()
    before = state_of(module)
    accelerate_tuned(module, tmp_path)
    after = state_of(module)
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(before[2:], after[2:], strict=True)
    )
    assert module.seen == []


def train(module: nn.Module, steps: int) -> list[torch.Tensor]:
    """The losses of `steps` steps of SGD, and the weights after them."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.01), []
    for x in inputs(steps):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in module.parameters())]


def accelerate_for_training(module: nn.Module, cache_dir: Path) -> nn.Module:
    return torch_cudal1.accelerate(module, X, on_miss="tune", cache_dir=cache_dir)


@pytest.mark.parametrize("wins", [True, False])
def test_a_training_loop_is_its_own_trial(
    wins: bool, tmp_path: Path, clock: dict[str, float]
) -> None:
    clock["graphs"] = 1.0 if wins else 1.99
    module, plain = accelerate_for_training(Branching(), tmp_path), Branching()
    torch.testing.assert_close(train(module, 60), train(plain, 60))
    assert module.seen == plain.seen
    explanation = torch_cudal1.explain(module)
    assert "pairs of training steps" in (explanation.gate[0] if wins else explanation.undone)
    assert ("_compiled_call_impl" in vars(module)) == wins


def test_calls_that_share_a_loss_are_one_step(
    tmp_path: Path, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made by one side, or their times would say nothing."""
    calls, end = [], pieces.Pieces._end_step

    def note(trial: pieces.Pieces, *call: Any) -> None:
        calls.append(trial._step.calls)
        end(trial, *call)

    monkeypatch.setattr(pieces.Pieces, "_end_step", note)
    module, plain = accelerate_for_training(Branching(), tmp_path), Branching()
    for x in inputs(60):
        losses = [kind(x).square().mean() + kind(-x).square().mean() for kind in (module, plain)]
        gradients = [
            torch.autograd.grad(loss, list(kind.parameters()))
            for loss, kind in zip(losses, (module, plain), strict=True)
        ]
        torch.testing.assert_close(*gradients)
    assert set(calls) == {2}
    assert "training steps" in torch_cudal1.explain(module).gate[0]


def test_calls_that_want_gradients_and_get_none_end_the_trial_too(
    tmp_path: Path, clock: dict[str, float]
) -> None:
    module = accelerate_for_training(Branching(), tmp_path)
    for x in inputs(400):
        module(x)
    assert not torch_cudal1.api.accelerate.is_on_trial(module)


def test_a_checkpointed_forward_is_the_modules_own_both_times(
    tmp_path: Path, clock: dict[str, float]
) -> None:
    """It runs again in the backward, and must save as many tensors as it did before."""
    from torch.utils.checkpoint import checkpoint

    module, plain = accelerate_for_training(Branching(), tmp_path), Branching()
    for number, x in enumerate(inputs(60)):
        if number % 3:
            gradients = [
                torch.autograd.grad(kind(x).square().mean(), list(kind.parameters()))
                for kind in (module, plain)
            ]
        else:
            results = [checkpoint(kind, x, use_reentrant=False) for kind in (module, plain)]
            gradients = [
                torch.autograd.grad(result.square().mean(), list(kind.parameters()))
                for result, kind in zip(results, (module, plain), strict=True)
            ]
        torch.testing.assert_close(*gradients)


def test_a_gradient_can_be_differentiated_again(tmp_path: Path, clock: dict[str, float]) -> None:
    module, plain = accelerate_for_training(Branching(), tmp_path), Branching()
    for x in inputs(40):
        gradients = []
        for kind in (module, plain):
            leaf = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(kind(leaf).square().sum(), leaf, create_graph=True)
            gradients.append(
                torch.autograd.grad(gradient.square().sum(), [leaf, *kind.parameters()])
            )
        torch.testing.assert_close(*gradients)


def test_a_backward_can_be_repeated(tmp_path: Path, clock: dict[str, float]) -> None:
    module, plain = accelerate_for_training(Branching(), tmp_path), Branching()
    for number, x in enumerate(inputs(40)):
        gradients = []
        for kind in (module, plain):
            if number % 2:
                kind(
                    x
                ).sum().backward()  # what it saved may be written over, but not what a later one will save
            loss = kind(x).square().sum()
            gradients.append(
                [
                    torch.autograd.grad(loss, list(kind.parameters()), retain_graph=True)
                    for _ in range(2)
                ]
            )
        torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_a_number_asked_of_a_tensor_is_a_break_and_no_constant(
    tmp_path: Path, clock: dict[str, float]
) -> None:
    """Dynamo may keep `.item()` in a graph, where nothing of ours can follow; and each number must
    not be a graph of its own.
    """

    class Centred(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.first) - x.mean().item()

    module, plain = accelerate_tuned(Centred(), tmp_path), Centred()
    assert "on trial" in torch_cudal1.explain(module).gate[0]
    (bound,) = module._compiled_call_impl.bindings.values()
    for x in inputs(60):
        torch.testing.assert_close(module(x), plain(x))
    assert bound.pieces.graphs <= 4


@torch.no_grad()
def test_what_nobody_tuned_is_left_out(tmp_path: Path) -> None:
    module = torch_cudal1.accelerate(Branching(), X, cache_dir=tmp_path)
    assert "nothing was tuned" in torch_cudal1.explain(module).left_out[0]


class Failing(Branching):
    """Raises what its input asks for, between the graphs and in them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x @ self.first)
        code = int(x[0, 0].item())
        if code == 1:
            raise KeyError("asked for")
        if code == 2:
            return h @ torch.ones(9, 9)
        if code == 3:
            return h[:, torch.tensor([99])]
        return h @ self.second


@torch.no_grad()
@pytest.mark.parametrize("code", [1, 2, 3])
def test_what_eager_raises_is_raised_at_every_stage_of_the_trial(
    code: int, tmp_path: Path, clock: dict[str, float]
) -> None:
    module, plain = accelerate_tuned(Failing(), tmp_path), Failing()
    bad = X.clone()
    bad[0, 0] = code
    good = X.clone()
    good[0, 0] = 0
    with pytest.raises((KeyError, RuntimeError, IndexError)) as expected:
        plain(bad)
    for _ in range(30):
        with pytest.raises(expected.type) as caught:
            module(bad)
        assert type(caught.value) is expected.type
        torch.testing.assert_close(module(good), plain(good))


@torch.no_grad()
def test_a_class_whose_body_dynamo_forgets_is_watched(
    tmp_path: Path, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.13 it reads an attribute of a class that a forward names, and never again."""
    monkeypatch.setattr("torch_cudal1.graph.traced_code._FORGETS_CLASSES", True)

    class Held:
        gain = 2.0

    class Gained(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * Held.gain

    module, plain = accelerate_tuned(Gained(), tmp_path), Gained()
    for number, x in enumerate(inputs(40)):
        if number % 10 == 9:
            Held.gain += 1.0
        torch.testing.assert_close(module(x), plain(x))
    (bound,) = module._compiled_call_impl.bindings.values()
    assert not bound.pieces.holds({"args": (x,), "kwargs": {}})


@torch.no_grad()
def test_threads_that_call_during_the_trial_get_eagers_answers(
    tmp_path: Path, clock: dict[str, float]
) -> None:
    module, plain = accelerate_tuned(Branching(), tmp_path), Branching()
    wrong: list[Exception] = []

    def call() -> None:
        try:
            for x in inputs(20):
                with torch.no_grad():
                    torch.testing.assert_close(module(x), plain(x))
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(module.seen) == 80


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_the_trial_measures_and_its_answers_are_eagers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small steps, which a CUDA graph launches at once: with a real clock the graphs win."""

    class Long(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(40):
                x = torch.tanh(x @ self.first)
            x = x * 2 if bool(x.sum() > 0) else x
            self.seen.append("once")
            for _ in range(40):
                x = torch.tanh(x @ self.second)
            return x

    plant = plant_regions
    monkeypatch.setitem(
        globals(),
        "plant_regions",
        lambda regions, folder: plant(regions, folder, schedule="eager+graph", device="cuda:0"),
    )
    module, plain, x = Long().cuda(), Long().cuda(), X.cuda()
    torch_cudal1.accelerate(module, x, on_miss="tune", cache_dir=tmp_path)
    for number in range(80):
        torch.testing.assert_close(module(x + number), plain(x + number), rtol=1e-3, atol=1e-3)
    assert module.seen == plain.seen
    explanation = torch_cudal1.explain(module)
    print(explanation.gate, explanation.undone)
    assert "pairs of calls" in (*explanation.gate, explanation.undone)[0]


@torch.no_grad()
def test_random_numbers_are_those_of_eager(tmp_path: Path, clock: dict[str, float]) -> None:
    class Noisy(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x @ self.first + torch.rand(8)
            return h * 2 if bool(h.sum() > 0) else h + torch.randn(4, 8)

    module, plain = accelerate_tuned(Noisy(), tmp_path), Noisy()
    for number, x in enumerate(inputs(60)):
        torch.manual_seed(number)
        got = module(x)
        torch.manual_seed(number)
        torch.testing.assert_close(got, plain(x))


class Asking(Branching):
    """Computes something else where it is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x @ self.first)
        if x.sum().item() > 1e9:
            h = h * 3
        return h @ self.second if torch.compiler.is_compiling() else torch.tanh(h @ self.second)


def test_a_forward_that_asks_whether_it_is_compiled_answers_as_eager_does(
    tmp_path: Path, inference: None
) -> None:
    module, own = Asking().eval(), Asking().eval()
    torch_cudal1.accelerate(module, cache_dir=tmp_path, on_miss="quick")
    for _ in range(30):
        torch.testing.assert_close(module(X), own(X), atol=1e-5, rtol=1e-5)
