"""Recurrent layers reach the backend in inference, as one step each; every other compilation of the
process is as it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torch_cudal1.api import backend, dynamo_rnn
from torch_cudal1.ir.ops.recurrent_ops import find_one_step_layers, rewrite_as_one_step

pytestmark = pytest.mark.usefixtures("dynamo", "frames")
LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Tagger(nn.Module):
    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.layer = LAYERS[kind](8, 16, batch_first=True, **options)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x.relu())[0]).relu()


class Seen:
    """Stands for what is behind the backend's door: keeps each graph, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.layers: list[bool] = []
        self.traced_through: list[bool] = []

    def __call__(
        self, gm: torch.fx.GraphModule, inputs: Sequence[Any], *_: Any, **__: Any
    ) -> Callable[..., Any]:
        self.graphs.append(gm.graph)
        self.layers += find_one_step_layers(gm.graph)
        self.traced_through.append(config.allow_rnn)
        return gm.forward


@pytest.fixture
def frames() -> None:
    dynamo_rnn.install(backend.cudal1)  # the fixture before has reset Dynamo


@pytest.fixture
def graphs_seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    double = Seen()
    monkeypatch.setattr(backend, "_find_best", double)
    monkeypatch.setattr(backend, "compile_with_inductor", double)
    return double


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 5, 8)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_in_inference_is_one_step_of_a_graph(
    kind: str, graphs_seen: Seen, x: torch.Tensor
) -> None:
    model = Tagger(kind).eval()
    with torch.no_grad():
        output = torch.compile(model, backend=backend.cudal1, fullgraph=True)(x)
        assert torch.equal(output, model(x))
    assert graphs_seen.layers == [True]
    assert len(graphs_seen.graphs) == 1


def test_nothing_that_compiles_for_the_backend_is_traced_through(
    graphs_seen: Seen, x: torch.Tensor
) -> None:
    with torch.no_grad():
        torch.compile(Tagger().eval(), backend=backend.cudal1)(x)
    assert graphs_seen.traced_through == [False]
    assert config.allow_rnn is False


def test_another_backend_sees_what_it_saw(x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.compile(Tagger("GRU").eval(), backend=backend.cudal1)(x)
        other_backend = Seen()
        torch.compile(nn.Sequential(Tagger()).eval(), backend=other_backend)(x)
    assert other_backend.layers == []


def test_a_users_own_choice_stays(graphs_seen: Seen, x: torch.Tensor) -> None:
    with torch.no_grad(), config.patch(allow_rnn=True):
        torch.compile(Tagger().eval(), backend=backend.cudal1)(x)
        assert config.allow_rnn is True
    assert graphs_seen.layers == [True]


def test_with_gradients_dynamo_does_as_always(graphs_seen: Seen, x: torch.Tensor) -> None:
    model = Tagger()
    torch.compile(model, backend=backend.cudal1)(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
    assert graphs_seen.layers == []
    assert all(
        torch.equal(gradient, p.grad)
        for gradient, p in zip(gradients, model.parameters(), strict=True)
    )


def test_dropout_between_layers_is_left_to_dynamo(graphs_seen: Seen, x: torch.Tensor) -> None:
    model = Tagger(num_layers=2, dropout=0.5).train()
    with torch.no_grad():
        torch.manual_seed(3)
        output = torch.compile(model, backend=backend.cudal1)(x)
        torch.manual_seed(3)
        assert torch.equal(output, model(x))
    assert graphs_seen.layers == []


@pytest.mark.parametrize(("dropout", "layers", "graphs"), [(0.0, [True], 2), (0.5, [], 0)])
def test_a_graph_break_after_the_layer(
    dropout: float, layers: list[bool], graphs: int, graphs_seen: Seen, x: torch.Tensor
) -> None:
    """Dynamo by itself skips the whole frame of a layer that it does not trace."""

    class Broken(Tagger):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = self.layer(x.relu())[0].tanh()
            torch._dynamo.graph_break()
            return self.head(output)

    model = Broken(num_layers=2, dropout=dropout).train()
    with torch.no_grad():
        torch.manual_seed(3)
        output = torch.compile(model, backend=backend.cudal1)(x)
        torch.manual_seed(3)
        assert torch.equal(output, model(x))
    assert graphs_seen.layers == layers
    assert len(graphs_seen.graphs) == graphs


def test_switched_off_it_is_plain_torch_compile(graphs_seen: Seen, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.compile(Tagger().eval(), backend=backend.cudal1, options={"enabled": False})(x)
    assert graphs_seen.layers == []


def test_a_frame_that_cannot_be_read_changes_nothing(
    graphs_seen: Seen, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo_rnn, "_TRACER", ("torch._dynamo.convert_frame", "renamed"))
    model = Tagger().eval()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend.cudal1)(x), model(x))
    assert graphs_seen.layers == []


def test_packed_sequences_are_right(x: torch.Tensor) -> None:
    class Packed(Tagger):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(
                x, torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False
            )
            return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])

    model = Packed().eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend.cudal1)(x), model(x))


def test_inductors_result_follows_lengths_and_weights(x: torch.Tensor, tmp_path: Path) -> None:
    model = Tagger(bidirectional=False, num_layers=2).eval()
    compiled = torch.compile(
        model, backend=backend.cudal1, options={"cache_dir": tmp_path, "strictness": "error"}
    )
    with torch.no_grad():
        for length in (5, 6, 9):
            torch.testing.assert_close(
                compiled(x[:, :1].expand(3, length, 8)), model(x[:, :1].expand(3, length, 8))
            )
        model.layer.weight_hh_l1.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_graph_names_its_steps_for_inductors_caches(graphs_seen: Seen, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.compile(Tagger().eval(), backend=backend.cudal1)(x)
        (graph,) = graphs_seen.graphs
        module = torch.fx.GraphModule({}, graph)
        assert "cudal1.lstm.default" in {
            str(node.target) for node in rewrite_as_one_step(module).graph.nodes
        }
        assert find_one_step_layers(graph) == [True]  # the caller's graph is only read
    plain = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert rewrite_as_one_step(plain) is plain


_PROCESS = """
import torch
from torch import nn
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        return self.head(self.layer(x)[0])
torch.manual_seed(0)
model, x = Tagger().eval(), torch.randn(3, 5, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="cudal1", options={"strictness": "error"})(x), model(x))
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_second_process_finds_inductors_result(tmp_path: Path) -> None:
    """Its caches load code that calls the step before anything has traced one."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCH_CUDAL1_CACHE_DIR": str(tmp_path / "own"),
    }
    hits = [
        int(
            subprocess.run(
                [sys.executable, "-c", _PROCESS],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(2)
    ]
    assert (hits[0] > 0, hits[1] > 0) == (False, True)
