# ruff: noqa: F401, F811  fixtures of another file are arguments here
"""The C++ executor launches with exactly the planned geometry and bytes, refuses with a name, and
leaks nothing in 10,000 calls.

Without a GPU the driver is `test_driver`'s recording library, and CPU tensors stand for device
memory: a launch looks only at their addresses and device. With one, the same Programs run for real.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import resource
import struct
import threading
from typing import Any

import pytest
import torch

from tests.device.test_cubin import ADD, HIDDEN, POINTERS, build
from tests.device.test_driver import (
    GPU,
    add,
    cuda,
    geometry,
    number,
    parameters,
    pointer,
    recorder_path,
)
from tests.runtime.executors import in_threads
from torch_cudal1.core import native
from torch_cudal1.core.errors import DriverError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda import addresses, driver
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Alloc, Aten, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.runtime.compiled import compile_program
from torch_cudal1.runtime.executor import launch_through_driver, prepare

pytestmark = pytest.mark.skipif(
    native.extension() is None, reason=f"no C++ executor: {native.status()[1]}"
)

CPU = torch.device("cpu")
SPEC = TensorSpec("float32", (500,), (1,), "cpu")


def on_recorder(cubin: torch.Tensor, *launches: Launch, **changes: Any) -> Any:
    """A plan of two inputs, an alloc (value 2) and the launches, whose kernels are loaded in the
    recording driver's device 1.
    """
    program = Program((SPEC, SPEC), (Alloc(2, SPEC), *launches), (2,), payloads={"p": cubin})
    plan = compile_program(
        dataclasses.replace(program, **changes),
        CPU,
        load=lambda cubin, launch, _: driver.load_launch(cubin, launch, GPU),
    )
    assert not isinstance(plan, Refusal), plan
    return plan


def inputs() -> list[torch.Tensor]:
    return [torch.zeros(500), torch.zeros(500)]


def pack_address(tensor: torch.Tensor) -> bytes:
    return struct.pack("<Q", tensor.data_ptr())


# Launching
# ---------------------------------------------------------------------------------------------------------------------


def test_parameters_geometry_stream_and_context_arrive(cuda, add):
    args = (
        *POINTERS,
        LaunchArg("i32", -500),
        LaunchArg("i64", -(2**40) - 3),
        LaunchArg("fp32", 0.1),
        *HIDDEN,
    )
    plan = on_recorder(
        add,
        dataclasses.replace(ADD, args=args, grid=(5, 3, 2), shared_bytes=640, aligned=(0, 1, 2)),
    )
    x, y = inputs()
    (out,) = plan([x, y])
    expected = [
        pack_address(x),
        pack_address(y),
        pack_address(out),
        struct.pack("<i", -500),
        struct.pack("<q", -(2**40) - 3),
    ]
    assert parameters(cuda) == [*expected, struct.pack("<f", 0.1), b"\0" * 8, b"\0" * 8]
    assert geometry(cuda) == (5, 3, 2, 128, 1, 1, 640, 0)
    assert cuda.library.stream() == 0xABC0
    assert pointer(cuda, "context_at_launch") == 0xC0DE00000000 + 101
    assert pointer(cuda, "launched_function") == 0x1000000001 << 4
    assert (out.shape, out.dtype) == ((500,), torch.float32)


def test_a_cluster_is_announced(cuda, build):
    cubin = torch.frombuffer(bytearray(build("dot", 90, num_ctas=2)), dtype=torch.uint8)
    ctypes.c_int.in_dll(cuda.library, "param_count").value = 5
    on_recorder(
        cubin, Launch("p", "dot_kernel", (3, 1, 1), 128, 1024, (*POINTERS, *HIDDEN), cluster=2)
    )(inputs())
    assert geometry(cuda) == (6, 1, 1, 128, 1, 1, 1024, 2)
    assert (cuda.library.cluster_x(), cuda.library.cluster_y(), cuda.library.cluster_z()) == (
        2,
        1,
        1,
    )
    assert cuda.library.policy() == 1


def test_steps_before_and_after_a_launch_run_in_order(cuda, add):
    steps = (
        Aten("aten.add.Tensor", (Value(0), Value(1)), (), (2,)),
        Alloc(3, SPEC),
        dataclasses.replace(
            ADD, args=(*(LaunchArg("ptr", Value(i)) for i in (2, 1, 3)), *ADD.args[3:])
        ),
        Aten("aten.mul.Tensor", (Value(2), 3.0), (), (4,)),
    )
    program = Program((SPEC, SPEC), steps, (4, 3, None), payloads={"p": add})
    plan = compile_program(
        program, CPU, load=lambda cubin, launch, _: driver.load_launch(cubin, launch, GPU)
    )
    with torch.no_grad():
        tripled, out, absent = plan([torch.ones(500), torch.ones(500)])
    assert torch.equal(tripled, torch.full((500,), 6.0))
    assert absent is None
    assert parameters(cuda)[2] == pack_address(out)
    assert number(cuda, "calls_launch") == 1


def test_a_context_that_is_current_is_not_pushed_and_one_that_is_not_is_put_back(cuda, add):
    plan = on_recorder(add, ADD, ADD)
    before = number(cuda, "calls_push")
    plan(inputs())
    assert (
        number(cuda, "calls_push") == number(cuda, "calls_pop") == before + 1
    )  # once for both launches
    cuda.library.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC0DE00000000 + 101))
    plan(inputs())
    assert number(cuda, "calls_push") == before + 2
    cuda.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    assert (number(cuda, "calls_launch"), number(cuda, "calls_stream")) == (
        4,
        2,
    )  # two in each call's graph


def test_kernels_are_loaded_before_the_first_call(cuda, add):
    plan = on_recorder(add, ADD)
    assert (
        number(cuda, "calls_load"),
        number(cuda, "calls_func_load"),
        number(cuda, "calls_launch"),
    ) == (1, 1, 0)
    cuda.capturing = True
    plan(inputs())
    assert number(cuda, "calls_launch") == 1


# Several launches, enqueued as one graph
# ----------------------------------------------------------------------------------------


def chain(
    cubin: torch.Tensor, length: int, *, spec: TensorSpec = SPEC, outputs: tuple[int, ...] = ()
) -> Program:
    """x, y -> add_kernel applied `length` times, each into an alloc of its own: value n + 2 = value
    n + 1 and y.
    """
    steps: list[Any] = []
    for n in range(length):
        args = (*(LaunchArg("ptr", Value(i)) for i in (n and n + 1, 1, n + 2)), *ADD.args[3:])
        steps += [Alloc(n + 2, spec), dataclasses.replace(ADD, args=args, grid=(n + 1, 1, 1))]
    return Program((spec, spec), tuple(steps), outputs or (length + 1,), payloads={"p": cubin})


def compile_on_recorder(program: Program) -> Any:
    plan = compile_program(
        program, CPU, load=lambda cubin, launch, _: driver.load_launch(cubin, launch, GPU)
    )
    assert not isinstance(plan, Refusal), plan
    return plan


def test_launches_side_by_side_are_one_graph_whose_nodes_follow_their_parameters(cuda, add):
    plan = compile_on_recorder(chain(add, 3, outputs=(2, 4)))
    x, y = inputs()
    first, last = plan([x, y])
    assert (number(cuda, "nodes_added"), number(cuda, "chained"), number(cuda, "replays")) == (
        3,
        2,
        1,
    )
    assert number(cuda, "size_node") == number(cuda, "size_kernel_node") == 72
    assert [cuda.library.node_grid(n) for n in range(3)] == [1, 2, 3]
    word = cuda.library.node_word
    word.restype = ctypes.c_ulonglong
    between = word(1, 2)
    expected = [(x, first), (first, None), (None, last)]
    for node, (source, target) in enumerate(expected):
        assert word(node, 0) == (between if source is None else source.data_ptr())
        assert word(node, 1) == y.data_ptr()
        assert word(node, 2) == (between if target is None else target.data_ptr())
        assert word(node, 3) == 500
    assert between not in (first.data_ptr(), last.data_ptr(), x.data_ptr(), y.data_ptr())
    changed = number(cuda, "nodes_set")
    z = torch.zeros(500)
    again, _ = plan([z, y])
    assert word(0, 0) == z.data_ptr()
    assert word(0, 2) == again.data_ptr() != first.data_ptr()
    assert number(cuda, "nodes_set") > changed
    assert (number(cuda, "graphs_made"), number(cuda, "calls_launch")) == (1, 6)


def test_launches_that_may_start_early_are_one_graph_too(cuda, add, monkeypatch):
    monkeypatch.setattr(driver, "waits_first", lambda code: True)
    plan = compile_on_recorder(chain(add, 3))
    plan(inputs())
    assert (number(cuda, "nodes_added"), number(cuda, "replays")) == (3, 1)


def test_one_launch_is_a_graph_while_its_parameters_stay_and_goes_directly_when_they_are_new(
    cuda, add
):
    in_place = dataclasses.replace(
        ADD, args=(*(LaunchArg("ptr", Value(i)) for i in (0, 1, 1)), *ADD.args[3:])
    )
    plan, first, second = on_recorder(add, in_place), inputs(), inputs()
    replays = []
    for call_inputs in (
        first,
        first,
        first,
        second,
        first,
        second,
        first,
        inputs(),
        second,
        second,
        second,
    ):
        plan(call_inputs)
        assert parameters(cuda)[:2] == [pack_address(call_inputs[0]), pack_address(call_inputs[1])]
        replays.append(number(cuda, "replays"))
    assert replays == [0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6]
    assert (
        number(cuda, "graphs_made"),
        number(cuda, "nodes_set"),
        number(cuda, "calls_launch"),
    ) == (1, 1, 11)


def test_only_nodes_whose_parameters_changed_are_updated(cuda, add):
    plan = compile_on_recorder(chain(add, 3))
    word = cuda.library.node_word
    word.restype = ctypes.c_ulonglong

    def nodes() -> list[list[int]]:
        return [[word(n, i) for i in range(8)] for n in range(3)]

    repeated_inputs = inputs()
    plan(repeated_inputs)
    updated_nodes = changed_nodes = 0
    for turn in range(40):
        before, count = nodes(), number(cuda, "nodes_set")
        plan(repeated_inputs if turn % 2 else inputs())
        updated_nodes += number(cuda, "nodes_set") - count
        changed_nodes += sum(a != b for a, b in zip(before, nodes(), strict=True))
    assert updated_nodes == changed_nodes > 0


def test_temporaries_share_one_allocation_and_those_alive_together_do_not_overlap(cuda, add):
    plan = compile_on_recorder(chain(add, 6))
    x, y = inputs()
    (out,) = plan([x, y])
    word = cuda.library.node_word
    word.restype = ctypes.c_ulonglong
    written = [word(n, 2) for n in range(6)]
    assert written[-1] == out.data_ptr()
    temporaries = written[:-1]
    assert len(set(temporaries)) == 2  # each lives until the next launch has read it
    assert abs(temporaries[0] - temporaries[1]) >= 2000
    assert all(word(n + 1, 0) == written[n] for n in range(5))
    assert all(word(n, 0) != written[n] for n in range(6))


def test_in_a_captured_stream_they_are_launched_one_by_one(cuda, add):
    plan = compile_on_recorder(chain(add, 3))
    ctypes.c_int.in_dll(cuda.library, "capturing").value = 1
    plan(inputs())
    assert (number(cuda, "calls_launch"), number(cuda, "replays"), number(cuda, "graphs_made")) == (
        3,
        0,
        0,
    )


@pytest.mark.parametrize("switch", ["fail_node", "fail_set"])
def test_a_driver_that_refuses_the_graph_gets_them_one_by_one(cuda, add, switch):
    plan = compile_on_recorder(chain(add, 3))
    ctypes.c_int.in_dll(cuda.library, switch).value = 1
    for count in (1, 2, 3):
        plan([torch.zeros(500), torch.zeros(500)])
        assert number(cuda, "calls_launch") == 3 * count
    del plan
    assert number(cuda, "graphs_destroyed") == (1 if switch == "fail_node" else 2)


def test_a_graph_that_is_refused_at_launch_is_an_error_with_its_name(cuda, add):
    plan = compile_on_recorder(chain(add, 2))
    ctypes.c_int.in_dll(cuda.library, "fail_replay").value = 719
    with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED"):
        plan(inputs())
    ctypes.c_int.in_dll(cuda.library, "fail_replay").value = 0
    plan(inputs())
    assert number(cuda, "replays") == 1


def test_a_temporary_that_an_operator_reads_is_a_tensor_of_its_own(cuda, add):
    args = (*(LaunchArg("ptr", Value(i)) for i in (0, 1, 2)), *ADD.args[3:])
    steps = (
        Alloc(2, SPEC),
        dataclasses.replace(ADD, args=args),
        Aten("aten.mul.Tensor", (Value(2), 0.0), (), (3,)),
        Alloc(4, SPEC),
        dataclasses.replace(
            ADD, args=(*(LaunchArg("ptr", Value(i)) for i in (3, 1, 4)), *ADD.args[3:])
        ),
    )
    plan = compile_on_recorder(Program((SPEC, SPEC), steps, (3, 4), payloads={"p": add}))
    with torch.no_grad():
        product, out = plan(inputs())
    assert product.shape == (500,)
    assert parameters(cuda)[:3] == [pack_address(product), parameters(cuda)[1], pack_address(out)]
    assert number(cuda, "calls_launch") == 2


# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_a_misaligned_tensor_is_named(cuda, add):
    plan = on_recorder(add, dataclasses.replace(ADD, aligned=(0, 1, 2)))
    with pytest.raises(
        ProgramError, match=r"'add_kernel': value 1 starts at .*multiple of 16"
    ) as caught:
        plan([torch.zeros(500), torch.zeros(501)[1:]])
    assert caught.value.rule == "alignment"
    assert number(cuda, "calls_launch") == 0
    on_recorder(add, ADD)([torch.zeros(500), torch.zeros(501)[1:]])
    assert number(cuda, "calls_launch") == 1


def test_a_tensor_elsewhere_is_named(cuda, add):
    with pytest.raises(ProgramError, match=r"'add_kernel': value 0 is on device") as caught:
        on_recorder(add, ADD)([torch.zeros(500, device="meta"), torch.zeros(500)])
    assert caught.value.rule == "device"
    assert number(cuda, "calls_launch") == 0


def test_an_absent_tensor_is_named(cuda, add):
    mask = (True, False, False)
    steps = (
        Aten(
            "aten.native_layer_norm.default",
            (Value(0), (500,), None, None, 1e-5),
            (),
            (2, 3, 4),
            True,
        ),
        Aten(
            "aten.native_layer_norm_backward.default",
            (Value(1), Value(0), (500,), Value(3), Value(4), None, None, mask),
            (),
            (5, 6, 7),
            True,
        ),
        Alloc(8, SPEC),
        dataclasses.replace(
            ADD, args=(*(LaunchArg("ptr", Value(i)) for i in (0, 6, 8)), *ADD.args[3:])
        ),
    )
    program = Program((SPEC, SPEC), steps, (8,), payloads={"p": add})
    plan = compile_program(
        program, CPU, load=lambda cubin, launch, _: driver.load_launch(cubin, launch, GPU)
    )
    with torch.no_grad(), pytest.raises(ProgramError, match="value 6 is absent"):
        plan(inputs())


@pytest.mark.parametrize(
    ("switch", "result", "call", "status"),
    [
        ("fail_launch", 719, "cuLaunchKernelEx", "CUDA_ERROR_LAUNCH_FAILED"),
        ("fail_launch", 12345, "cuLaunchKernelEx", "result 12345"),
        ("fail_stream", 1, "aoti_torch_get_current_cuda_stream", "error 1"),
    ],
)
def test_every_result_but_success_is_an_error_with_its_name(
    cuda, add, switch, result, call, status
):
    plan = on_recorder(add, ADD)
    ctypes.c_int.in_dll(cuda.library, switch).value = result
    with pytest.raises(DriverError) as caught:
        plan(inputs())
    assert (caught.value.call, caught.value.status) == (call, status)
    if switch == "fail_launch":
        assert "'add_kernel'" in caught.value.hint
    assert number(cuda, "calls_push") == number(cuda, "calls_pop")
    ctypes.c_int.in_dll(cuda.library, switch).value = 0
    plan(inputs())
    assert number(cuda, "calls_launch") == 1


def test_bad_machine_code_is_refused_before_anything_is_launched(cuda, add):
    for spoiled in (
        add[:100],
        torch.randint(256, (4000,), dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
    ):
        with pytest.raises(ProgramError):
            on_recorder(spoiled, ADD)
    with pytest.raises(ProgramError, match="no_such"):
        on_recorder(add, dataclasses.replace(ADD, symbol="no_such"))
    cuda.capability = (8, 0)
    with pytest.raises(ProgramError):
        on_recorder(add, ADD)
    cuda.capability = (9, 0)
    with pytest.raises(DriverError, match="more than this GPU allows"):
        on_recorder(add, dataclasses.replace(ADD, shared_bytes=300_000))
    assert number(cuda, "calls_launch") == 0


def test_a_pytorch_that_cannot_name_its_stream_is_a_reason_not_a_crash(cuda, add, monkeypatch):
    program = Program((SPEC, SPEC), (Alloc(2, SPEC), ADD), (2,), payloads={"p": add})

    def compile_again() -> Any:
        return compile_program(
            program, CPU, load=lambda cubin, launch, _: driver.load_launch(cubin, launch, GPU)
        )

    monkeypatch.setattr(addresses, "_STREAM_FUNCTION", "no_such_function")
    assert "no_such_function" in compile_again().reason
    monkeypatch.setattr(addresses, "_STREAM_LIBRARY", "libtorch_that_is_not_there.so")
    assert "is not loaded" in compile_again().reason


# Endurance
# ---------------------------------------------------------------------------------------------------------------------


def test_ten_thousand_calls_leak_nothing_whether_they_succeed_or_fail(cuda, add):
    plan, good, bad = (
        on_recorder(add, dataclasses.replace(ADD, aligned=(1,))),
        inputs(),
        [torch.zeros(500), torch.zeros(501)[1:]],
    )

    def calls(count: int) -> None:
        for _ in range(count):
            plan(good)
            with pytest.raises(ProgramError):
                plan(bad)

    calls(300)
    gc.collect()
    objects, peak = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(10_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8_000
    )  # kB; a leaked output a call would be 20 MB
    assert number(cuda, "calls_launch") == 10_300


def test_threads_do_not_share_parameters(cuda, add):
    plan = on_recorder(add, ADD)
    wrong: list[str] = []

    def work() -> None:
        try:
            for _ in range(300):
                plan(inputs())
        except (ProgramError, DriverError) as error:
            wrong.append(str(error))

    in_threads(work)
    assert not wrong
    assert number(cuda, "calls_pop") == number(cuda, "calls_push")


# On a GPU
# ----------------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ON_GPU = TensorSpec("float32", (500,), (1,), "cuda")


@pytest.fixture
def real(build: Any) -> Program:
    """x + 2 y through two launches of add_kernel: t = x + 2 y, out = t + 2 x."""
    major, minor = torch.cuda.get_device_capability()
    cubin = torch.frombuffer(bytearray(build("add", 10 * major + minor)), dtype=torch.uint8)
    first = dataclasses.replace(
        ADD, args=(*(LaunchArg("ptr", Value(i)) for i in (0, 1, 2)), *ADD.args[3:])
    )
    second = dataclasses.replace(
        ADD, args=(*(LaunchArg("ptr", Value(i)) for i in (2, 0, 3)), *ADD.args[3:])
    )
    return Program(
        (ON_GPU, ON_GPU),
        (Alloc(2, ON_GPU), first, Alloc(3, ON_GPU), second),
        (3,),
        payloads={"p": cubin},
    )


def on_gpu() -> list[torch.Tensor]:
    return [torch.randn(500, device="cuda"), torch.randn(500, device="cuda")]


def right(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.double() + 2 * y.double()).float().double() + 2 * x.double()


@pytest.mark.gpu
@gpu
def test_both_executors_agree_on_the_device(real):
    plan = compile_program(real, torch.device("cuda", 0))
    assert not isinstance(plan, Refusal), plan
    x, y = on_gpu()
    assert torch.equal(
        plan([x, y])[0],
        interpret(real, torch.device("cuda", 0), launcher=launch_through_driver)([x, y])[0],
    )
    torch.testing.assert_close(plan([x, y])[0].double(), right(x, y), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@gpu
def test_the_stream_of_the_moment_is_used_and_captured(real):
    run = prepare(real, torch.device("cuda"))
    x, y = on_gpu()
    run([x, y])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.add_(1)
        (out,) = run([x, y])
    side.synchronize()
    torch.testing.assert_close(out.double(), right(x, y), rtol=1e-6, atol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (static,) = run([x, y])
    x.normal_()
    graph.replay()
    torch.testing.assert_close(static.double(), right(x, y), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@gpu
def test_memory_freed_on_another_stream_is_not_reused_too_early(real):
    run = prepare(real, torch.device("cuda"))
    x, y = on_gpu()
    side = torch.cuda.Stream()
    for _ in range(20):
        (out,) = run([x, y])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            copy = out.clone()
        out.record_stream(side)
        del out
        for _ in range(4):
            run([x + 1, y + 1])
        side.synchronize()
        torch.testing.assert_close(copy.double(), right(x, y), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@gpu
def test_a_fresh_thread_and_ten_thousand_calls_leak_nothing_on_the_device(real):
    run = prepare(real, torch.device("cuda"))
    x, y = on_gpu()
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(run([x, y])[0]))
    thread.start()
    thread.join()
    torch.testing.assert_close(results[0].double(), right(x, y), rtol=1e-6, atol=1e-6)
    for _ in range(100):
        run([x, y])
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated()
    for _ in range(10_000):
        run([x, y])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == used


@pytest.mark.gpu
@gpu
def test_bad_input_is_an_exception_and_the_device_lives_on(real):
    run = prepare(real, torch.device("cuda"))
    x, y = on_gpu()
    with pytest.raises(ProgramError, match="add_kernel"):
        run([x, y.cpu()])
    cubin = real.payloads["p"]
    device = torch.device("cuda")
    for spoiled in (cubin[: len(cubin) // 2], torch.randint(256, (len(cubin),), dtype=torch.uint8)):
        with pytest.raises((ProgramError, DriverError)):
            prepare(dataclasses.replace(real, payloads={"p": spoiled}), device)
    torch.testing.assert_close(run([x, y])[0].double(), right(x, y), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("length", [2, 5, 16])
def test_a_chain_of_launches_computes_on_the_device_whatever_its_addresses(real, length):
    program = chain(real.payloads["p"], length, spec=ON_GPU)
    program = dataclasses.replace(
        program,
        steps=tuple(
            dataclasses.replace(s, grid=(4, 1, 1)) if isinstance(s, Launch) else s
            for s in program.steps
        ),
    )
    run, kept_results = prepare(program, torch.device("cuda")), []
    for _ in range(10):
        x, y = on_gpu()
        kept_results.append((x, y, run([x, y])[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = run([x, y])[0]
    graph.replay()
    kept_results.append((x, y, static))
    for x, y, out in kept_results:
        torch.testing.assert_close(
            out.double(), x.double() + 2 * length * y.double(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.gpu
@gpu
def test_threads_and_streams_share_one_chain(real):
    program = chain(real.payloads["p"], 4, spec=ON_GPU)
    program = dataclasses.replace(
        program,
        steps=tuple(
            dataclasses.replace(s, grid=(4, 1, 1)) if isinstance(s, Launch) else s
            for s in program.steps
        ),
    )
    run, wrong = prepare(program, torch.device("cuda")), []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                x, y = on_gpu()
                out = run([x, y])[0]
                if not torch.allclose(
                    out.double(), x.double() + 8 * y.double(), rtol=1e-5, atol=1e-5
                ):
                    wrong.append(1)

    in_threads(work)
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_program_runs_on_the_device_it_was_prepared_for(real):
    run = prepare(real, torch.device("cuda", 1))
    x, y = (t.to("cuda:1") for t in on_gpu())
    (out,) = run([x, y])
    assert out.device == x.device
    torch.cuda.synchronize(1)
    torch.testing.assert_close(out.double(), right(x, y), rtol=1e-6, atol=1e-6)
    with pytest.raises(ProgramError, match="on device 0"):
        run([x.to("cuda:0"), y])
