"""The module guard: whatever changes what a call would do makes it let go and say where; all else
leaves it holding.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import tracemalloc
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from torch_cudal1.core import native
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime import guard
from torch_cudal1.runtime.guard import (
    ModuleGuard,
    bind_guard,
    call_state,
    find_tracing,
    python_signature,
)

BUILT, WHY_NOT = native.status()
NATIVE = pytest.param("native", marks=pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}"))
FLAG = 1.0
TABLE = {"gain": 1.0}


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FLAG


class Config:
    def __init__(self) -> None:
        self.gain = 1.0
        self.inner = {"sizes": [1, 2, 3]}


class Block(nn.Module):
    slope = 0.1
    table: dict[str, float] = {"a": 1.0}  # noqa: RUF012  a mutable class attribute is the case under test

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.scale = 1.5
        self.sizes = [1, [2, 3]]
        self.options = {"mode": "a", "deep": {"x": 1}}
        self.marks = {"one", "two"}
        self.order = OrderedDict(a=1, b=2)
        self.raw = bytearray(b"abc")
        self.pair = ([1],)
        self.config = Config()
        self.cache = torch.ones(4)
        self.callback = make_callback()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x) * TABLE["gain"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.step(self.linear(x))) * self.scale + self.mean


def make_callback() -> Callable[[], float]:
    factor = 2.0

    def callback() -> float:
        return factor

    return callback


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.layers = nn.Sequential(Block(), nn.Tanh())
        self.tied = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x))


@pytest.fixture(params=["python", NATIVE])
def implementation(request: pytest.FixtureRequest) -> Any:
    return request.param


def bound(module: nn.Module, implementation: Any = None) -> ModuleGuard:
    held = bind_guard(module, implementation=implementation)
    assert isinstance(held, ModuleGuard), held
    assert held.holds(), held.why()
    assert held.why() == ""
    return held


def _set(path: str, value: Any) -> Callable[[Model], None]:
    owner, _, name = path.rpartition(".")
    return lambda m: setattr(m.get_submodule(owner), name, value)


def _swap_data(m: Model) -> None:
    m.first.linear.weight.data = m.first.linear.weight.data.half()


def _transpose(m: Model) -> None:
    m.first.linear.weight.data = m.first.linear.weight.data.t()


def _misalign(m: Model) -> None:
    m.first.mean.data = torch.zeros(5)[1:]


def _free(m: Model) -> None:
    m.first.linear.weight.untyped_storage().resize_(0)


def _rename(m: Model) -> None:
    m.layers._modules["one"] = m.layers._modules.pop("1")


def _reorder(m: Model) -> None:
    m.layers._modules["0"] = m.layers._modules.pop("0")


def _new_dict(m: Model) -> None:
    m.first.__dict__ = dict(m.first.__dict__)


def _same_size_swap(
    m: Model,
) -> None:  # one attribute goes, another comes, both None: the size does not tell
    del m.first.spare
    m.first.other = None


def _new_class(m: Model) -> None:
    m.first.__class__ = type("Other", (Block,), {})


def _in_cell(m: Model) -> None:
    m.first.callback.__closure__[0].cell_contents = 3.0


def _delete(path: str) -> Callable[[Model], None]:
    owner, _, name = path.rpartition(".")
    return lambda m: delattr(m.get_submodule(owner), name)


def _first(do: Callable[[Any], Any]) -> Callable[[Model], Any]:
    return lambda m: do(m.first)


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "train to eval": (lambda m: m.eval(), "training changed"),
    "one layer to eval": (lambda m: m.layers[0].linear.eval(), "layers.0.linear: training changed"),
    "plain attribute": (_set("first.scale", 2.0), "first: scale changed"),
    "new attribute": (_set("layers.1.extra", 1), "layers.1: extra added"),
    "deleted attribute": (_delete("first.scale"), "first: scale removed"),
    "attribute renamed": (_same_size_swap, "first: spare removed"),
    "instance forward": (_set("layers.1.forward", lambda x: x), "layers.1: forward added"),
    "attribute dictionary": (_new_dict, "first: __dict__ was replaced"),
    "class of a child": (_new_class, "first: class Block -> Other"),
    "hook dictionary": (
        _set("first._forward_hooks", OrderedDict()),
        "first: _forward_hooks changed",
    ),
    "parameter replaced": (
        lambda m: setattr(m.first.linear, "weight", nn.Parameter(torch.ones(4, 4))),
        "parameter first.linear.weight: replaced",
    ),
    "parameter removed": (
        lambda m: m.first.linear.register_parameter("bias", None),
        "parameter first.linear.bias: replaced",
    ),
    "parameter added": (
        lambda m: m.layers[1].register_parameter("p", nn.Parameter(torch.ones(1))),
        "parameter layers.1.p: added",
    ),
    "parameter deleted": (_delete("first.linear.bias"), "parameter first.linear.bias: removed"),
    "buffer replaced": (_set("first.mean", torch.ones(4)), "buffer first.mean: replaced"),
    "buffer added": (
        lambda m: m.layers[1].register_buffer("b", torch.ones(1)),
        "buffer layers.1.b: added",
    ),
    "child replaced": (
        lambda m: m.layers.__setitem__(1, nn.ReLU()),
        "submodule layers.1: replaced",
    ),
    "child appended": (lambda m: m.layers.append(nn.ReLU()), "submodule layers.2: added"),
    "child deleted": (lambda m: m.layers.__delitem__(1), "layers: _modules changed"),
    "child popped": (lambda m: m.layers._modules.pop("1"), "submodule layers.1: removed"),
    "linear to half": (
        lambda m: m.first.linear.half(),
        "parameter first.linear.weight: dtype float32 -> float16",
    ),
    "child renamed": (_rename, "submodule layers.1: removed"),
    "children reordered": (_reorder, "layers: order of submodules changed"),
    "child is identity": (_set("first.linear", nn.Identity()), "submodule first.linear: replaced"),
    "half": (lambda m: m.half(), "buffer first.mean: replaced"),
    "p.data = half": (_swap_data, "parameter first.linear.weight: dtype float32 -> float16"),
    "p.data = transposed": (_transpose, "parameter first.linear.weight: strides (4, 1) -> (1, 4)"),
    "b.data = unaligned": (_misalign, "buffer first.mean: address aligned -> unaligned"),
    "storage freed": (_free, "parameter first.linear.weight: address aligned -> none"),
    "meta device": (lambda m: m.to("meta"), "buffer first.mean: replaced"),
    "shape": (
        lambda m: setattr(m.first.mean, "data", torch.zeros(1, 4)),
        "buffer first.mean: shape (4,) -> (1, 4)",
    ),
    "attribute tensor": (
        lambda m: setattr(m.first.cache, "data", torch.zeros(2)),
        "tensor first.cache: shape (4,) -> (2,)",
    ),
    "frozen": (lambda m: m.first.requires_grad_(False), "requires_grad True -> False"),
    "forward hook": (
        _first(lambda b: b.register_forward_hook(print)),
        "first._forward_hooks: hooks were registered",
    ),
    "forward hook, kwargs": (
        _first(lambda b: b.register_forward_hook(print, with_kwargs=True)),
        "_forward_hooks: hooks",
    ),
    "forward hook, always": (
        _first(lambda b: b.register_forward_hook(print, always_call=True)),
        "_forward_hooks: hooks",
    ),
    "forward pre hook": (
        _first(lambda b: b.register_forward_pre_hook(print)),
        "first._forward_pre_hooks: hooks",
    ),
    "inner hook": (
        lambda m: m.layers[1].register_forward_hook(print),
        "layers.1._forward_hooks: hooks",
    ),
    "backward hook": (
        _first(lambda b: b.register_full_backward_hook(print)),
        "first._backward_hooks: hooks",
    ),
    "backward pre hook": (
        _first(lambda b: b.register_full_backward_pre_hook(print)),
        "first._backward_pre_hooks: hooks",
    ),
    "list item": (lambda m: m.first.sizes.__setitem__(0, 7), "first.sizes: content changed"),
    "nested list": (lambda m: m.first.sizes[1].append(4), "first.sizes[1]: content changed"),
    "list in a tuple": (lambda m: m.first.pair[0].clear(), "first.pair[0]: content changed"),
    "dict item": (lambda m: m.first.options.update(mode="b"), "first.options: item 'mode' changed"),
    "nested dict": (
        lambda m: m.first.options["deep"].update(y=1),
        "first.options['deep']: item 'y' added",
    ),
    "ordered dict": (
        lambda m: m.first.order.move_to_end("a"),
        "first.order: order of items changed",
    ),
    "set": (lambda m: m.first.marks.add("three"), "first.marks: content changed"),
    "bytearray": (lambda m: m.first.raw.__setitem__(0, 0), "first.raw: content changed"),
    "object attribute": (
        lambda m: setattr(m.first.config, "gain", 2.0),
        "first.config: gain changed",
    ),
    "list in an object": (
        lambda m: m.first.config.inner["sizes"].pop(),
        "first.config.inner['sizes']: content changed",
    ),
    "closure variable": (_in_cell, "first.callback, closure variable factor changed"),
    "parametrization": (
        lambda m: parametrize.register_parametrization(m.first.linear, "weight", nn.Identity()),
        "first.linear: class Linear -> ParametrizedLinear",
    ),
}


def model() -> Model:
    made = Model()
    made.first.spare = None
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_the_guard_and_is_named(change: str, implementation: Any) -> None:
    module = model()
    held = bound(module, implementation)
    mutate, words = CHANGES[change]
    mutate(module)
    assert not held.holds()
    assert words in held.why()


def _write_weights(m: Model) -> None:
    with torch.no_grad():
        for p in m.parameters():
            p.add_(1)
            p.data.copy_(torch.zeros_like(p))


def _train_step(m: Model) -> None:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    m(torch.ones(2, 4)).sum().backward()
    optimizer.step()


HARMLESS: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda m: None,
    "call": lambda m: m(torch.ones(2, 4)),
    "weights written in place": _write_weights,
    "training step": _train_step,
    "load_state_dict": lambda m: m.load_state_dict(Model().state_dict()),
    "same mode again": lambda m: m.train(),
    "there and back": lambda m: (m.eval(), m.train()),
    "accelerated": _set("_compiled_call_impl", print),
    "child compiled": lambda m: m.first.compile(backend="eager"),
    "state_dict hook": lambda m: m.first.register_state_dict_post_hook(lambda *a: None),
    "same dtype and device": lambda m: m.to("cpu", torch.float32),
    "gradients": lambda m: m.zero_grad(),
    "hook and its removal": lambda m: m.first.register_forward_hook(print).remove(),
    "saved and copied": lambda m: (copy.deepcopy(m.state_dict()), list(m.modules()), repr(m)),
}


@pytest.mark.parametrize("use", HARMLESS)
def test_what_does_not_change_the_call_leaves_it_holding(use: str, implementation: Any) -> None:
    module = model()
    held = bound(module, implementation)
    HARMLESS[use](module)
    assert held.holds(), held.why()
    assert held.why() == ""


@pytest.mark.parametrize(
    "name", ["_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"]
)
def test_hooks_for_every_module_end_the_guard(name: str, implementation: Any) -> None:
    held = bound(Model(), implementation)
    registry = getattr(torch_module, name)
    registry[-1] = print
    try:
        assert not held.holds()
        assert name in held.why()
        assert isinstance(bind_guard(Model()), Refusal)
    finally:
        del registry[-1]
    assert held.holds()


OUTSIDE: dict[str, tuple[object, str, object, str]] = {
    "method patched": (Block, "step", lambda self, x: x, "class Block: step changed"),
    "class attribute": (Block, "slope", 0.2, "class Block: slope changed"),
    "torch class patched": (
        nn.Linear,
        "forward",
        lambda self, x: x,
        "class Linear: forward changed",
    ),
    "module call patched": (
        nn.Module,
        "__call__",
        lambda self, x: x,
        "class Module: __call__ changed",
    ),
    "torch function patched": (torch.nn.functional, "relu", torch.tanh, "functional.relu"),
    "global flag": (sys.modules[__name__], "FLAG", 2.0, "FLAG changed"),
    "global function": (sys.modules[__name__], "helper", torch.tanh, "helper changed"),
    "code reloaded": (helper, "__code__", (lambda x: x).__code__, "helper: code changed"),
}


@pytest.mark.parametrize("change", OUTSIDE)
def test_patched_classes_globals_and_code_end_the_guard(
    change: str, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = bound(model(), implementation)
    owner, name, value, words = OUTSIDE[change]
    monkeypatch.setattr(owner, name, value)
    assert not held.holds()
    assert words in held.why()


@pytest.mark.parametrize("table", [TABLE, Block.table])
def test_small_containers_of_classes_and_globals_are_watched(
    table: dict[str, float], implementation: Any
) -> None:
    held = bound(model(), implementation)
    table["new"] = 1.0
    try:
        assert not held.holds()
        assert "'new' added" in held.why()
    finally:
        del table["new"]
    assert held.holds()


def test_hidden_modules_in_plain_containers_are_watched(implementation: Any) -> None:
    module = nn.Module()
    module.hidden = [nn.Linear(2, 2)]
    held = bound(module, implementation)
    module.hidden[0].eval()
    assert held.why() == "hidden[0]: training changed"
    assert not held.holds()


class _Tagged(torch.Tensor):
    pass


class _Slots:
    __slots__ = ("value",)


class _Slotted(nn.Module):
    __slots__ = ("hidden",)


class _Listed(nn.Identity, list):  # type: ignore[type-arg]
    pass


class _MyDict(dict):  # type: ignore[type-arg]
    pass


def _with(name: str, value: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    setattr(module[0], name, value)
    return module


def _hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_pre_hook(print)
    return module


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (_hooked, "0._forward_pre_hooks: hooks are registered"),
    "scripted child": (lambda: nn.Sequential(torch.jit.script(nn.Tanh())), "ScriptModule"),
    "lazy parameter": (lambda: nn.Sequential(nn.LazyLinear(3)), "hooks|not initialised"),
    "tensor subclass": (
        lambda: _with("weight", nn.Parameter(torch.ones(2).as_subclass(_Tagged))),
        "0.weight is a _Tagged",
    ),
    "sparse buffer": (
        lambda: _with("extra", torch.eye(2).to_sparse()),
        "not a dense strided tensor",
    ),
    "long list": (lambda: _with("extra", list(range(2000))), "0.extra is a list of 2000 items"),
    "deep list": (lambda: _with("extra", _nested(30)), "nest deeper"),
    "slots": (lambda: _with("extra", _Slots()), "_Slots, which can change unseen"),
    "module with slots": (lambda: nn.Sequential(_Slotted()), "0 is a _Slotted"),
    "module that is a list": (lambda: nn.Sequential(_Listed()), "0 is a _Listed"),
    "foreign object": (lambda: _with("extra", iter([1])), "list_iterator, which can change unseen"),
    "dict subclass": (lambda: _with("extra", _MyDict()), "subclass of a container"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_watched_is_refused_with_the_reason(case: str) -> None:
    make, words = REFUSED[case]
    refused = bind_guard(make())
    assert isinstance(refused, Refusal)
    assert any(word in refused.reason for word in words.split("|")), refused.reason


def test_recurrent_and_attention_modules_can_be_guarded(implementation: Any) -> None:
    for module in (
        nn.LSTM(3, 3),
        nn.TransformerEncoderLayer(4, 2),
        nn.BatchNorm2d(2),
        nn.ParameterList([torch.ones(1)]),
    ):
        assert bound(module, implementation).implementation == implementation


def test_a_cycle_of_modules_is_walked_once(implementation: Any) -> None:
    module = nn.Linear(2, 2)
    module.__dict__["me"] = [module]
    assert bound(module, implementation).holds()


def test_functional_call_is_seen_while_it_lasts(implementation: Any) -> None:
    module = model()
    during: list[bool] = []
    holds: list[Callable[[], bool]] = []
    spy = types.MethodType(
        lambda self, x: (during.append(holds[0]()), Block.step(self, x))[1], module.first
    )
    module.first.step = spy
    held = bound(module, implementation)
    holds.append(held.holds)
    original = {name: tensor.detach() * 2 for name, tensor in module.named_parameters()}
    torch.func.functional_call(module, original, (torch.ones(2, 4),))
    assert during == [False]


def test_pickle_and_deepcopy_leave_the_guard_behind(implementation: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    held = bound(module, implementation)
    module._compiled_call_impl = held.holds
    twin = copy.deepcopy(module)
    again = pickle.loads(pickle.dumps(module))  # noqa: S301  our own bytes
    torch.save(module.state_dict(), io.BytesIO())
    for other in (twin, again):
        assert "_compiled_call_impl" not in other.__dict__
        other.eval()
    assert held.holds(), held.why()


def test_a_guard_in_the_module_it_guards_is_collected(implementation: Any) -> None:
    module = nn.Linear(2, 2)
    module._compiled_call_impl = bound(module, implementation)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_old_storage_is_not_kept_alive(implementation: Any) -> None:
    module = nn.Linear(64, 64)
    held = bound(module, implementation)
    storage = weakref.ref(module.weight.untyped_storage())
    old = torch.multiprocessing.reductions.StorageWeakRef(module.weight.untyped_storage())
    module.weight.data = torch.zeros(64, 64)
    gc.collect()
    assert storage() is None
    assert old.expired()
    assert held.holds()


def test_ten_thousand_checks_leave_nothing_behind(implementation: Any) -> None:
    module = nn.Sequential(Block())
    held = bound(module, implementation)
    watched = [
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
    counts = [sys.getrefcount(thing) for thing in watched[:-2]]
    rounds = 10_000 if implementation == "native" else 1_000
    tracemalloc.start()
    try:
        held.holds()
        before = tracemalloc.get_traced_memory()[0]
        assert all(held.holds() for _ in range(rounds))
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(thing) for thing in watched[:-2]] == counts


@pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*CHANGES, *HARMLESS]), min_size=1, max_size=4))
def test_both_implementations_and_the_words_agree_on_any_sequence(names: list[str]) -> None:
    module = model()
    python, cpp = bound(module, "python"), bound(module, "native")
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
        assert python.holds() == cpp.holds() == (python.why() == "") == (cpp.why() == "")
        if (
            name == "storage freed"
        ):  # what comes next may write into it, which ends the process, ours or not
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


# --- signatures


@pytest.fixture(params=["python", NATIVE])
def sign(request: pytest.FixtureRequest) -> Any:
    if request.param == "python":
        return python_signature
    return getattr(native.extension(), "signature")  # noqa: B009


X = torch.arange(24.0)
LONG = torch.arange(64.0)
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
    assert sign((X,), {}) == sign((nn.Parameter(torch.zeros(24), requires_grad=False),), {})
    assert sign((float("nan"),), {}) == sign((float("nan"),), {})
    assert sign((X, LONG[32:56]), {}) == sign((LONG[:24], LONG[32:56]), {}), (
        "parts of one storage that do not overlap"
    )
    assert sign((torch.empty(0), torch.empty(0)), {}) == sign((X[:0], X[:0]), {})


NOT_SERVABLE: dict[str, Callable[[], Any]] = {
    "object": object,
    "tensor subclass": lambda: torch.ones(2).as_subclass(_Tagged),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative bit": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "set": lambda: {1},
    "bool subclass of int": lambda: types.SimpleNamespace(),
    "huge int": lambda: 2**63,
    "dict with int keys": lambda: {1: 2},
    "complex": lambda: 1j,
    "deep list": lambda: _nested(40),
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
def test_both_signatures_tell_the_same_calls_apart(a: list[Any], b: list[Any]) -> None:
    extension: Any = native.extension()
    left, right = python_signature(tuple(a), {}), python_signature(tuple(b), {})
    fast_left, fast_right = extension.signature(tuple(a), {}), extension.signature(tuple(b), {})
    assert (left is None, right is None) == (fast_left is None, fast_right is None)
    assert (left == right) == (fast_left == fast_right)


@pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}")
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 24)), min_size=2, max_size=5))
def test_both_signatures_find_the_same_overlaps(windows: list[tuple[int, int]]) -> None:
    views = tuple(LONG[start : start + size] for start, size in windows)
    apart = tuple(LONG.clone()[start : start + size] for start, size in windows)
    extension: Any = native.extension()
    truth = any(
        i < j and max(a, c) < min(a + b, c + d)
        for i, (a, b) in enumerate(windows)
        for j, (c, d) in enumerate(windows)
    )
    for implementation in (python_signature, extension.signature):
        assert (implementation(views, {}) != implementation(apart, {})) == truth


def test_ten_thousand_signatures_leave_nothing_behind(sign: Any) -> None:
    y = torch.ones(3)
    args: tuple[Any, ...] = ([X, y], {"a": y}, "text", 1.5, torch.device("cpu"))
    watched = [X, y, args, args[0], args[1], torch.float32]
    sign(args, {"k": y})
    gc.collect()  # what earlier tests left must not go while we count
    counts = [sys.getrefcount(thing) for thing in watched]
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
    assert [sys.getrefcount(thing) for thing in watched] == counts


def test_signature_uses_an_implementation_that_is_there() -> None:
    assert guard.signature((X,), {}) == guard.signature((X.clone(),), {})
    assert isinstance(guard.signature((X,), {}), bytes if BUILT else tuple)


# --- the state of a call


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


SWITCHES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.usefixtures("restored")
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


def _seen_in(run: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> str:
    seen: list[str] = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append(str(find_tracing() or ""))
        return x * 2

    run(spy)
    return seen[0]


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
    reason = _seen_in(run)
    assert words in reason
    assert bool(words) == bool(reason)
    assert find_tracing() is None
