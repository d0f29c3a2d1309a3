"""The module guard: whatever changes what a call would do makes it let go and say where; all else
leaves it holding.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import tracemalloc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime.guard_cases import (
    BUILT,
    NATIVE,
    WHY_NOT,
    StatefulBlock,
    TaggedTensor,
    bind,
    make_model,
    nest,
)
from torch_cudal1.core import native
from torch_cudal1.runtime import guard
from torch_cudal1.runtime.guard import (
    call_state,
    find_tracing,
    python_opaque_signature,
    python_signature,
)


def test_functional_call_is_seen_while_it_lasts(implementation: Any) -> None:
    module = make_model()
    during: list[bool] = []
    holds: list[Callable[[], bool]] = []
    spy = types.MethodType(
        lambda self, x: (during.append(holds[0]()), StatefulBlock.step(self, x))[1], module.first
    )
    module.first.step = spy
    module_guard = bind(module, implementation)
    holds.append(module_guard.holds)
    doubled = {name: tensor.detach() * 2 for name, tensor in module.named_parameters()}
    torch.func.functional_call(module, doubled, (torch.ones(2, 4),))
    assert during == [False]


def test_pickle_and_deepcopy_leave_the_guard_behind(implementation: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module_guard = bind(module, implementation)
    module._compiled_call_impl = module_guard.holds
    twin = copy.deepcopy(module)
    unpickled = pickle.loads(pickle.dumps(module))  # noqa: S301  our own bytes
    torch.save(module.state_dict(), io.BytesIO())
    for copied in (twin, unpickled):
        assert "_compiled_call_impl" not in copied.__dict__
        copied.eval()
    assert module_guard.holds(), module_guard.explain_difference()


def test_a_guard_in_the_module_it_guards_is_collected(implementation: Any) -> None:
    module = nn.Linear(2, 2)
    module._compiled_call_impl = bind(module, implementation)
    module_reference = weakref.ref(module)
    del module
    gc.collect()
    assert module_reference() is None


def test_old_storage_is_not_kept_alive(implementation: Any) -> None:
    module = nn.Linear(64, 64)
    module_guard = bind(module, implementation)
    storage = weakref.ref(module.weight.untyped_storage())
    old_storage = torch.multiprocessing.reductions.StorageWeakRef(module.weight.untyped_storage())
    module.weight.data = torch.zeros(64, 64)
    gc.collect()
    assert storage() is None
    assert old_storage.expired()
    assert module_guard.holds()


def test_ten_thousand_checks_leave_nothing_behind(implementation: Any) -> None:
    module = nn.Sequential(StatefulBlock())
    module_guard = bind(module, implementation)
    objects = [
        module,
        module[0],
        module[0].__dict__,
        module[0].linear.weight,
        module[0].sizes,
        module[0].order,
        None,
        True,
    ]
    gc.collect()  # what earlier tests left must not go while we count
    counts = [sys.getrefcount(item) for item in objects[:-2]]
    rounds = 10_000 if implementation == "native" else 1_000
    tracemalloc.start()
    try:
        module_guard.holds()
        before = tracemalloc.get_traced_memory()[0]
        assert all(module_guard.holds() for _ in range(rounds))
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(item) for item in objects[:-2]] == counts


# --- signatures


@pytest.fixture(params=["python", NATIVE])
def sign(request: pytest.FixtureRequest) -> Any:
    if request.param == "python":
        return python_signature
    return getattr(native.extension(), "signature")  # noqa: B009


X = torch.arange(24.0)
LONG = torch.arange(64.0)
EMPTY = torch.empty(0)
NUMBERS, NAMES = [1, 2], {"a": 1}
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [  # no two may have the same signature
    ((), {}),
    ((X,), {}),
    ((X.view(4, 6),), {}),
    ((X.view(6, 4).t(),), {}),
    ((X.double(),), {}),
    ((X.clone().requires_grad_(),), {}),
    ((torch.empty(24, device="meta"),), {}),
    ((LONG[1:25],), {}),
    ((X, X.clone()), {}),
    ((X, X), {}),
    ((X, X.detach()), {}),
    ((torch.empty(0), torch.empty(0)), {}),
    ((EMPTY, EMPTY), {}),
    ((nn.Parameter(X.clone()),), {}),
    ((nn.Parameter(X.clone(), requires_grad=False),), {}),
    ((X.clone().requires_grad_() * 1.0,), {}),
    ((NUMBERS, NUMBERS), {}),
    ((NUMBERS, list(NUMBERS)), {}),
    ((NUMBERS, [NUMBERS]), {}),
    ((NUMBERS, [list(NUMBERS)]), {}),
    ((NAMES, NAMES), {}),
    ((NAMES, dict(NAMES)), {}),
    ((X, X.view(4, 6)), {}),
    ((X, X[:1].clone().expand(24)), {}),
    ((X, X.clone(), X), {}),
    ((X, X, X.clone()), {}),
    ((), {"x": X}),
    ((), {"y": X}),
    (([X],), {}),
    (((X,),), {}),
    (({"x": X},), {}),
    ((None,), {}),
    ((True,), {}),
    ((1,), {}),
    ((1.0,), {}),
    ((0.0,), {}),
    ((-0.0,), {}),
    ((float("nan"),), {}),
    (("1",), {}),
    (("é",), {}),
    ((torch.float32,), {}),
    ((torch.float64,), {}),
    ((torch.device("cpu"),), {}),
    ((torch.device("cuda", 1),), {}),
    ((torch.Size([1]),), {}),
    (((1,),), {}),
    (([1],), {}),
    (([1, []],), {}),
    (([1], []), {}),
    (({"a": 1, "b": 2},), {}),
    (({"b": 2, "a": 1},), {}),
    (({},), {}),
]


def test_calls_that_need_other_plans_have_other_signatures(sign: Any) -> None:
    signatures = [sign(args, kwargs) for args, kwargs in ARGUMENTS]
    assert None not in signatures
    assert len(set(signatures)) == len(ARGUMENTS)


def test_calls_that_share_a_plan_share_a_signature(sign: Any) -> None:
    for args, kwargs in ARGUMENTS:
        assert sign(args, kwargs) == sign(copy.copy(args), dict(kwargs))
    assert sign((X,), {}) == sign((torch.zeros(24),), {})
    assert sign((float("nan"),), {}) == sign((float("nan"),), {})
    assert sign((X, LONG[32:56]), {}) == sign((LONG[:24], LONG[32:56]), {}), (
        "parts of one storage that do not overlap"
    )
    assert sign((torch.empty(0), torch.empty(0)), {}) == sign((X[:0], X[:0]), {})


NOT_SERVABLE: dict[str, Callable[[], Any]] = {
    "object": object,
    "tensor subclass": lambda: torch.ones(2).as_subclass(TaggedTensor),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative bit": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "set": lambda: {1},
    "bool subclass of int": lambda: types.SimpleNamespace(),
    "huge int": lambda: 2**63,
    "dict with int keys": lambda: {1: 2},
    "complex": lambda: 1j,
    "deep list": lambda: nest(40),
    "named tuple": lambda: torch.ones(2).max(0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", NOT_SERVABLE)
def test_what_a_plan_cannot_take_has_no_signature(case: str, sign: Any) -> None:
    value = NOT_SERVABLE[case]()
    assert sign((value,), {}) is None
    assert sign((), {"x": [value]}) is None


def test_a_list_that_holds_itself_has_no_signature(sign: Any) -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert sign((loop,), {}) is None


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)


@pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}")
@settings(max_examples=150, deadline=None)
@given(st.lists(_plain, max_size=3), st.lists(_plain, max_size=3))
def test_both_signatures_distinguish_the_same_calls(a: list[Any], b: list[Any]) -> None:
    extension: Any = native.extension()
    first, second = python_signature(tuple(a), {}), python_signature(tuple(b), {})
    fast_first, fast_second = extension.signature(tuple(a), {}), extension.signature(tuple(b), {})
    assert (first is None, second is None) == (fast_first is None, fast_second is None)
    assert (first == second) == (fast_first == fast_second)


@pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}")
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 24)), min_size=2, max_size=5))
def test_both_signatures_find_the_same_overlaps(windows: list[tuple[int, int]]) -> None:
    views = tuple(LONG[start : start + size] for start, size in windows)
    separate_views = tuple(LONG.clone()[start : start + size] for start, size in windows)
    extension: Any = native.extension()
    overlaps = any(
        i < j and max(a, c) < min(a + b, c + d)
        for i, (a, b) in enumerate(windows)
        for j, (c, d) in enumerate(windows)
    )
    for implementation in (python_signature, extension.signature):
        assert (implementation(views, {}) != implementation(separate_views, {})) == overlaps


@pytest.fixture(params=["python", NATIVE])
def sign_opaquely(request: pytest.FixtureRequest) -> Any:
    if request.param == "python":
        return python_opaque_signature
    return getattr(native.extension(), "opaque_signature")  # noqa: B009


OF_TENSORS = ("tensor subclass", "sparse", "conjugated", "negative bit", "quantized")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", NOT_SERVABLE)
def test_an_object_is_described_by_its_class_alone(case: str, sign_opaquely: Any) -> None:
    first, second = (NOT_SERVABLE[case]() for _ in range(2))
    described = sign_opaquely((X, first), {"x": [first]})
    assert (described is None) == (case in OF_TENSORS)
    assert sign_opaquely((X.clone(), second), {"x": [second]}) == described
    if described is not None:
        assert sign_opaquely((X, native), {"x": [native]}) != described
        assert sign_opaquely((X[:5], first), {"x": [first]}) != described


def test_without_objects_the_opaque_signature_tells_as_much(sign_opaquely: Any) -> None:
    signatures = [sign_opaquely(args, kwargs) for args, kwargs in ARGUMENTS]
    assert len({*signatures, None}) == len(ARGUMENTS) + 1


@pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}")
@settings(max_examples=150, deadline=None)
@given(*(st.lists(st.dictionaries(st.integers(0, 3) | st.text(max_size=1), _plain)),) * 2)
def test_both_opaque_signatures_distinguish_the_same_calls(a: list[Any], b: list[Any]) -> None:
    extension: Any = native.extension()
    first, second = (python_opaque_signature((each, object()), {}) for each in (a, b))
    fast_first, fast_second = (extension.opaque_signature((each, object()), {}) for each in (a, b))
    assert (first == second) == (fast_first == fast_second)


def test_ten_thousand_signatures_leave_nothing_behind(sign: Any) -> None:
    y = torch.ones(3)
    args: tuple[Any, ...] = ([X, y], {"a": y}, "text", 1.5, torch.device("cpu"))
    objects = [X, y, args, args[0], args[1], torch.float32]
    sign(args, {"k": y})
    gc.collect()  # what earlier tests left must not go while we count
    counts = [sys.getrefcount(item) for item in objects]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000 if sign is not python_signature else 1_000):
            sign(args, {"k": y})
            sign((object(),), {})
        gc.collect()  # also empties the interpreter's lists of free tuples
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(item) for item in objects] == counts


def test_signature_uses_an_implementation_that_is_there() -> None:
    assert guard.signature((X,), {}) == guard.signature((X.clone(),), {})
    assert isinstance(guard.signature((X,), {}), bytes if BUILT else tuple)


# --- the state of a call


@pytest.fixture
def restore_switches() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


SWITCHES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.usefixtures("restore_switches")
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_changes_results_changes_the_state(switch: str) -> None:
    before = call_state("cuda")
    assert hash(before) == hash(call_state("cuda"))
    SWITCHES[switch]()
    assert call_state("cuda") != before


def test_grad_mode_autocast_and_default_device_change_the_state() -> None:
    states = {call_state("cpu")}
    with torch.no_grad():
        states.add(call_state("cpu"))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            states.add(call_state("cpu"))
    with torch.device("meta"):
        assert find_tracing() is None
        states.add(call_state("cpu"))
    assert len(states) == 5
    # A forward may ask for the autocast of the other device.
    enabled = torch.is_autocast_enabled("cuda")
    try:
        torch.set_autocast_enabled("cuda", not enabled)
        assert call_state("cpu") not in states
    finally:
        torch.set_autocast_enabled("cuda", enabled)


def test_the_state_can_be_asked_for_under_any_mode() -> None:
    with _Mode():
        assert call_state("cpu") == call_state("cpu")


def test_inference_mode_and_no_grad_are_one_state() -> None:
    with torch.no_grad():
        state = call_state("cpu")
    with torch.inference_mode():
        assert call_state("cpu") == state


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _find_tracing_in(run: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> str:
    reasons: list[str] = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        reasons.append(str(find_tracing() or ""))
        return x * 2

    run(spy)
    return reasons[0]


def _under(mode: Any, spy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with mode:
        spy(torch.ones(2))


def _dual(spy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.autograd.forward_ad.dual_level():
        spy(torch.ones(2))


TRACERS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain call": (lambda spy: spy(torch.ones(2)), ""),
    "function mode": (lambda spy: _under(_Mode(), spy), "torch function mode"),
    "default device and a function mode": (
        lambda spy: _under(torch.device("cpu"), lambda x: _under(_Mode(), spy)),
        "function mode",
    ),
    "fake tensors": (lambda spy: _under(torch._subclasses.FakeTensorMode(), spy), "dispatch mode"),
    "make_fx": (lambda spy: torch.fx.experimental.proxy_tensor.make_fx(spy)(torch.ones(2)), "mode"),
    "jit trace": (lambda spy: torch.jit.trace(spy, torch.ones(2), check_trace=False), "torch.jit"),
    "vmap": (lambda spy: torch.vmap(spy)(torch.ones(2, 2)), "functorch"),
    "grad": (lambda spy: torch.func.grad(lambda x: spy(x).sum())(torch.ones(2)), "functorch"),
    "forward mode": (_dual, "forward-mode"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACERS)
def test_what_looks_into_a_call_is_named(tracer: str) -> None:
    run, words = TRACERS[tracer]
    reason = _find_tracing_in(run)
    assert words in reason
    assert bool(words) == bool(reason)
    assert find_tracing() is None
