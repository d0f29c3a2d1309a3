# ruff: noqa: F811  fixtures of another file are arguments here
"""Replay of a captured graph: right inputs go in, results stay valid while they are held, streams
take turns, failures have names.

Without a GPU the driver is `test_driver`'s recording library, whose graph launch runs a Python
function on the graph's buffers.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.device.test_cubin import build  # noqa: F401  (fixtures, here and below)
from tests.device.test_driver import add, cuda, number, pointer, recorder_path  # noqa: F401
from tests.runtime.executors import in_threads
from torch_cudal1.core import native
from torch_cudal1.core.errors import DriverError, NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime import cuda_graph
from torch_cudal1.runtime.cuda_graph import (
    GraphCapture,
    GraphedRunner,
    _copy_with_strides,
    capture_calls,
)

CPU = torch.device("cpu")
needs_extension = pytest.mark.skipif(
    native.extension() is None, reason=f"no C++ replay: {native.status()[1]}"
)


def function(inputs: Any) -> list[torch.Tensor | None]:
    """weight (input 0, static) and x (input 1): several results, one expanded, one absent, one the
    input itself.
    """
    weight, x = inputs
    return [x * weight, None, x, (x + 1).sum(0, keepdim=True).expand(3, 4), (x - weight).t()]


@pytest.fixture
def graph_runner(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GraphedRunner on the CPU, its captures (run by the recording driver's graph launch), and
    how to make another one.
    """
    bodies: dict[int, Any] = {}

    def capture(self: GraphedRunner, inputs: Any) -> GraphCapture:
        graph_inputs = [
            t if index in self._static else _copy_with_strides(t) for index, t in enumerate(inputs)
        ]
        steps = self._runner
        results = steps(graph_inputs)
        outputs = [
            next((i for i, t in enumerate(graph_inputs) if t is out), out) for out in results
        ]
        handle = 0x900 + len(bodies)

        def body() -> None:
            for out, fresh in zip(outputs, steps(graph_inputs), strict=True):
                if isinstance(out, torch.Tensor) and fresh is not None:
                    storage, new = out.untyped_storage(), fresh.untyped_storage()
                    storage.copy_(new)

        bodies[handle] = body
        return GraphCapture(
            SimpleNamespace(raw_cuda_graph=lambda: handle),
            [graph_inputs[i] for i in self._moving],
            outputs,
        )  # type: ignore[arg-type]

    run = ctypes.CFUNCTYPE(None)(lambda: bodies[pointer(cuda, "replayed") or 0]())
    ctypes.c_void_p.in_dll(cuda.library, "graph_body").value = ctypes.cast(
        run, ctypes.c_void_p
    ).value
    monkeypatch.setattr(GraphedRunner, "_capture", capture)
    runner = GraphedRunner(function, frozenset([0]), CPU)
    return SimpleNamespace(
        run=runner, bodies=bodies, keep=run, make=lambda body: GraphedRunner(body, frozenset(), CPU)
    )


def draw() -> list[torch.Tensor]:
    return [torch.randn(3, 4), torch.randn(3, 4)]


def assert_right(results: Any, inputs: Any) -> None:
    for result, expected in zip(results, function(inputs), strict=True):
        if expected is None:
            assert result is None
        else:
            assert torch.equal(result, expected)
            assert result.stride() == expected.stride()


@needs_extension
def test_results_are_the_function_s_and_stay_valid_while_they_are_held(graph_runner, cuda):
    weight, x = draw()
    kept_results = []
    for _ in range(5):
        x = torch.randn(3, 4)
        kept_results.append((x, graph_runner.run([weight, x])))
    for then, results in kept_results:
        assert results[2] is then
        assert_right(results, [weight, then])
    assert (number(cuda, "replays"), len(graph_runner.bodies)) == (5, 1)
    assert graph_runner.run.direct is graph_runner.run._replay is not None


@needs_extension
def test_weights_are_read_where_they_lie_and_captured_again_where_they_moved(graph_runner):
    weight, x = draw()
    graph_runner.run([weight, x])
    weight.mul_(3)
    assert_right(graph_runner.run([weight, x]), [weight, x])
    assert len(graph_runner.bodies) == 1
    moved = weight.clone() + 1
    assert_right(graph_runner.run([moved, x]), [moved, x])
    assert_right(graph_runner.run([weight, x]), [weight, x])
    assert len(graph_runner.bodies) == 2


@needs_extension
def test_old_graphs_go_when_weights_move_for_ever(graph_runner):
    x, weights = draw()[1], [torch.randn(3, 4) for _ in range(cuda_graph._MAX_GRAPHS + 1)]
    for weight in weights:
        graph_runner.run([weight, x])
    graph_runner.run([weights[-1], x])
    assert len(graph_runner.bodies) == cuda_graph._MAX_GRAPHS + 1
    assert_right(graph_runner.run([weights[0], x]), [weights[0], x])  # the first was forgotten
    assert len(graph_runner.bodies) == cuda_graph._MAX_GRAPHS + 2


@needs_extension
def test_inputs_of_other_strides_or_dtypes_are_copied_by_value(graph_runner):
    weight, x = draw()
    graph_runner.run([weight, x])
    turned = torch.randn(4, 3).t()
    (first, *_) = graph_runner.run([weight, turned])
    assert torch.equal(first, turned * weight)
    with pytest.raises(ValueError, match="captured for"):
        graph_runner.run([weight, torch.randn(1, 4)])


@needs_extension
def test_another_stream_waits_for_what_the_last_one_had_enqueued(graph_runner, cuda):
    weight, x = draw()
    graph_runner.run([weight, x])
    graph_runner.run([weight, x])
    assert number(cuda, "waited") == 0
    ctypes.c_int.in_dll(cuda.library, "stream_base").value = 0x5000
    graph_runner.run([weight, x])
    graph_runner.run([weight, x])
    assert (number(cuda, "recorded"), number(cuda, "waited")) == (1, 1)
    assert (
        pointer(cuda, "recorded_on"),
        pointer(cuda, "waited_on"),
        pointer(cuda, "replayed_on"),
    ) == (0xABC0, 0x5000, 0x5000)


@needs_extension
def test_while_the_user_captures_the_steps_go_into_the_user_s_graph(graph_runner, cuda):
    weight, x = draw()
    graph_runner.run([weight, x])
    ctypes.c_int.in_dll(cuda.library, "capturing").value = 1
    assert_right(graph_runner.run([weight, x]), [weight, x])
    cuda.capturing = True
    assert_right(graph_runner.run([weight.clone(), x]), [weight, x])
    assert (number(cuda, "replays"), len(graph_runner.bodies)) == (1, 1)


def refuse(cuda: Any, switch: str, result: int = 719) -> None:
    ctypes.c_int.in_dll(cuda.library, switch).value = result


@needs_extension
def test_copies_are_nodes_of_the_graph_and_only_changed_addresses_are_updated(graph_runner, cuda):
    weight, x = draw()
    kept_results = [(x, graph_runner.run([weight, x]))]
    for _ in range(5):
        before, graphs_before = number(cuda, "nodes_set"), number(cuda, "graphs_made")
        kept_results.append((x, graph_runner.run([weight, x])))
        if (
            graphs_before == 3
        ):  # there is no room for more, so one learns where the three results lie; one of the five is x, another is None
            assert number(cuda, "nodes_set") - before == 3
        else:
            assert (number(cuda, "nodes_set"), number(cuda, "graphs_made")) == (
                0,
                graphs_before + 1,
            )
    for then, results in kept_results:
        assert_right(results, [weight, then])
    assert (number(cuda, "graphs_made"), number(cuda, "copies"), number(cuda, "replays")) == (
        3,
        0,
        6,
    )
    assert (number(cuda, "size_fill"), number(cuda, "size_copy")) == (
        40,
        200,
    )  # what captured.h says of cuda.h


@pytest.fixture
def input_spy(graph_runner: Any) -> Any:
    """A runner without results of its own, so that its addresses are the caller's, and the input
    that its graph saw last.
    """
    scratch = torch.zeros(4)
    return SimpleNamespace(
        run=graph_runner.make(lambda inputs: (scratch.copy_(inputs[0]), [inputs[0]])[1]),
        input=scratch,
    )


@needs_extension
def test_addresses_that_come_back_cost_nothing(input_spy, cuda):
    places = {name: torch.randn(4) for name in "abcd"}
    turns = [  # whose turn, executables made, nodes updated: the least recently used one goes
        *(
            ("a", 1, 0),
            ("a", 1, 0),
            ("b", 2, 0),
            ("a", 2, 0),
            ("b", 2, 0),
            ("c", 3, 0),
            ("a", 3, 0),
            ("b", 3, 0),
            ("c", 3, 0),
        ),
        *(
            ("d", 3, 1),
            ("b", 3, 1),
            ("c", 3, 1),
            ("d", 3, 1),
            ("a", 3, 2),
            ("d", 3, 2),
            ("c", 3, 2),
            ("b", 3, 3),
        ),
    ]
    for name, graphs_made, nodes_set in turns:
        places[name].normal_()
        assert input_spy.run([places[name]])[0] is places[name]
        assert torch.equal(input_spy.input, places[name])
        assert (number(cuda, "graphs_made"), number(cuda, "nodes_set")) == (graphs_made, nodes_set)
    input_spy.run = None
    gc.collect()
    assert number(cuda, "graphs_destroyed") == 2 * 3  # each is a graph and what was made of it


@needs_extension
@pytest.mark.parametrize(("nodes", "max_graphs"), [(1000, 3), (1400, 2), (2100, 1)])
def test_a_large_graph_is_made_ready_less_often(input_spy, cuda, nodes, max_graphs):
    ctypes.c_int.in_dll(cuda.library, "captured_kernels").value = nodes
    places = [torch.randn(4) for _ in range(4)]
    for place in places * 2:
        input_spy.run([place])
        assert torch.equal(input_spy.input, place)
    assert number(cuda, "graphs_made") == max_graphs


@needs_extension
@pytest.mark.parametrize("switch", ["fail_clone", "fail_node"])
def test_where_no_second_one_can_be_made_the_first_goes_on(input_spy, cuda, switch):
    places = [torch.randn(4) for _ in range(2)]
    input_spy.run(places[:1])
    refuse(cuda, switch, 2)
    input_spy.run(places[1:])
    refuse(cuda, switch, 0)
    for place in places * 2:
        input_spy.run([place])
        assert torch.equal(input_spy.input, place)
    assert (number(cuda, "nodes_set"), number(cuda, "copies"), number(cuda, "replays")) == (5, 0, 6)


@needs_extension
@pytest.mark.parametrize(
    ("switch", "copies"), [("fail_clone", 20), ("fail_node", 20), ("fail_set", 8)]
)
def test_a_driver_that_takes_no_copies_as_nodes_gets_them_beside_the_graph(
    graph_runner, cuda, switch, copies
):
    weight, x = draw()
    refuse(cuda, switch, 1)
    kept_results = []
    for _ in range(5):
        x = torch.randn(3, 4)
        kept_results.append((x, graph_runner.run([weight, x])))
    for then, results in kept_results:
        assert_right(results, [weight, then])
    # Four a call, from the refusal on: an address is first updated in the fourth.
    assert number(cuda, "copies") == copies
    assert number(cuda, "replays") == 5


@needs_extension
@pytest.mark.parametrize(
    ("switch", "call"), [("fail_copy", "cuMemcpyDtoDAsync"), ("fail_replay", "cuGraphLaunch")]
)
def test_a_driver_that_refuses_is_an_error_with_its_name(graph_runner, cuda, switch, call):
    weight, x = draw()
    refuse(cuda, "fail_clone", 801)  # so that both calls are made
    graph_runner.run([weight, x])
    refuse(cuda, switch)
    with pytest.raises(DriverError) as caught:
        graph_runner.run([weight, x])
    assert (caught.value.call, caught.value.status) == (call, "CUDA_ERROR_LAUNCH_FAILED")
    ctypes.c_int.in_dll(cuda.library, switch).value = 0
    assert_right(graph_runner.run([weight, x]), [weight, x])
    assert number(cuda, "calls_push") == number(cuda, "calls_pop")


@needs_extension
def test_wrong_arguments_are_refused(graph_runner):
    weight, x = draw()
    graph_runner.run([weight, x])
    replay = graph_runner.run._replay
    for bad in ([weight], [weight, 3], 5, [weight, x, x]):
        with pytest.raises(TypeError):
            replay(bad)
    for bad in (
        ((weight,), 1, (x,), (), 0),
        ((weight, x), 0, (x,), (), 0),
        ((weight, x), 1, (), (), 0),
        ((weight, x), 1, (x,), (7,), 0),
    ):
        with pytest.raises(ValueError):
            replay.add(*bad)


@needs_extension
def test_calls_leak_nothing_and_the_runner_can_be_collected(graph_runner):
    weight, x = draw()
    for _ in range(300):
        graph_runner.run([weight, x])
    gc.collect()
    objects, peak = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        graph_runner.run([weight, x])
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8_000
    runner_reference = torch.utils.weak.weakref.ref(graph_runner.run)
    graph_runner.run = None
    gc.collect()
    assert runner_reference() is None


def test_tensors_elsewhere_are_refused_before_a_capture():
    cuda_graph._refuse_other_devices("input", [torch.zeros(2), None], CPU)
    with pytest.raises(
        NotLowerableError, match="input 1 is on meta, and a CUDA graph serves tensors on cpu"
    ):
        cuda_graph._refuse_other_devices(
            "input", [torch.zeros(2), torch.zeros(2, device="meta")], CPU
        )
    with pytest.raises(NotLowerableError, match="output 0 is on cpu"):
        cuda_graph._refuse_other_devices("output", [torch.zeros(2)], torch.device("cuda", 0))


def test_without_the_extension_or_a_handle_python_replays_and_says_why(monkeypatch):
    runner = GraphedRunner(function, frozenset([0]), CPU)
    monkeypatch.setattr(
        cuda_graph, "find_replay_addresses", lambda device: Refusal("no CUDA driver: none here")
    )
    monkeypatch.setattr(cuda_graph.native, "extension", lambda: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace(raw_cuda_graph=None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weight, x = draw()
    assert_right(
        runner([weight, x]), [weight, x]
    )  # while the user captures, nothing is found out, as that would load kernels
    assert runner.interpreted == ""
    runner._make_native(2)
    assert runner.interpreted == "no CUDA driver: none here"
    assert runner.direct is runner


# On a GPU
# ----------------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture
def on_gpu() -> Any:
    torch.manual_seed(0)
    net = (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        .cuda()
        .eval()
        .requires_grad_(False)
    )
    weights = [net[0].weight, net[0].bias, net[2].weight, net[2].bias]

    def steps(inputs: Any) -> list[torch.Tensor | None]:
        a, b, c, d, x = inputs
        hidden = torch.nn.functional.gelu(torch.addmm(b, x, a.t()))
        return [torch.addmm(d, hidden, c.t()), None, x, hidden.sum(1, keepdim=True).expand(-1, 5)]

    return SimpleNamespace(
        weights=weights,
        steps=steps,
        run=GraphedRunner(steps, frozenset(range(4)), torch.device("cuda", 0)),
    )


@pytest.mark.gpu
@gpu
def test_held_outputs_stay_valid_on_the_device(on_gpu):
    kept_results = []
    with torch.inference_mode():
        for _ in range(20):
            x = torch.randn(32, 64, device="cuda")
            kept_results.append((x, on_gpu.run([*on_gpu.weights, x])))
        for x, results in kept_results:
            for result, expected in zip(results, on_gpu.steps([*on_gpu.weights, x]), strict=True):
                assert (result is None) if expected is None else torch.equal(result, expected)
            assert results[2] is x
    assert on_gpu.run.interpreted == "" or native.extension() is None


@pytest.mark.gpu
@gpu
def test_a_number_on_the_cpu_is_not_kept_in_a_graph():
    scaled = GraphedRunner(
        lambda inputs: [inputs[0] * inputs[1]], frozenset([1]), torch.device("cuda", 0)
    )
    with torch.inference_mode(), pytest.raises(NotLowerableError, match="input 1 is on cpu"):
        scaled([torch.ones(4, device="cuda"), torch.tensor(2.0)])


@pytest.mark.gpu
@gpu
def test_streams_take_turns_on_one_graph(on_gpu):
    with torch.inference_mode():
        on_gpu.run([*on_gpu.weights, torch.randn(32, 64, device="cuda")])
        torch.cuda.synchronize()
        streams, stream_results = [torch.cuda.Stream() for _ in range(3)], []
        for turn in range(60):
            with torch.cuda.stream(streams[turn % 3]):
                torch.cuda._sleep(100_000 * (turn % 4))
                x = torch.randn(32, 64, device="cuda")
                stream_results.append((x, on_gpu.run([*on_gpu.weights, x])[0]))
        torch.cuda.synchronize()
        for x, out in stream_results:
            torch.testing.assert_close(
                out, on_gpu.steps([*on_gpu.weights, x])[0], rtol=1e-5, atol=1e-5
            )


@pytest.mark.gpu
@gpu
def test_threads_take_turns_on_one_graph(on_gpu):
    wrong: list[str] = []
    with torch.inference_mode():
        on_gpu.run([*on_gpu.weights, torch.randn(32, 64, device="cuda")])

    def work() -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                x = torch.randn(32, 64, device="cuda")
                out = on_gpu.run([*on_gpu.weights, x])[0]
                if not torch.allclose(
                    out, on_gpu.steps([*on_gpu.weights, x])[0], rtol=1e-4, atol=1e-4
                ):
                    wrong.append("different")

    in_threads(work)
    assert not wrong


@pytest.mark.gpu
@gpu
def test_a_user_s_capture_gets_the_steps_and_moved_weights_a_new_graph(on_gpu):
    with torch.inference_mode():
        x = torch.randn(32, 64, device="cuda")
        on_gpu.run([*on_gpu.weights, x])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = on_gpu.run([*on_gpu.weights, x])[0]
        x.normal_()
        graph.replay()
        assert torch.equal(static, on_gpu.steps([*on_gpu.weights, x])[0])
        moved = [weight.clone() + 0.1 for weight in on_gpu.weights]
        assert torch.equal(on_gpu.run([*moved, x])[0], on_gpu.steps([*moved, x])[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_calls_that_are_captured_for_timing_run_again() -> None:
    device = torch.device("cuda", 0)
    total, step = torch.zeros(5, device=device), torch.ones(5, device=device)
    scratch = torch.full((5,), 7.0, device=device)

    def call() -> None:
        scratch.zero_()
        total.add_(step + scratch)

    call()
    replay = capture_calls(call, device)
    scratch.fill_(9.0)
    for _ in range(3):
        replay()
    torch.cuda.synchronize(device)
    assert total.tolist() == [4.0] * 5


def test_a_capture_for_timing_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    context = nullcontext
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: context())
    monkeypatch.setattr(torch.cuda, "device", lambda *_: context())
    monkeypatch.setattr(cuda_graph, "find_replay_addresses", lambda _: Refusal("no driver"))

    def fail() -> None:
        raise RuntimeError("not while capturing")

    with pytest.raises(RuntimeError, match="not while capturing"):
        capture_calls(fail, CPU)
    capture_calls(lambda: calls.append("call"), CPU)()
    assert calls == ["begin", "end", "begin", "call", "end", "replay"]
