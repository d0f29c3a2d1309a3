"""The signature of a call as JSON, and inputs that are made to such a signature. A signature
describes every tensor and holds no tensor's values.

    (x, {"mask": m}, 3)  ->  {"u": [{"t": ["float32", [4, 8], [8, 1], "cuda", false]}, {"d": {"mask": {"t": [...]}}}, {"v": 3}]}

Flags and numbers that are passed as arguments are part of the signature, because they decide what
is computed. Elements of a new tensor are drawn from the tensor at the same place of an example;
without one they are normal random numbers, and zeros for integers.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FormError", "describe", "make_inputs"]

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
# A signature is read from a file: a damaged one must not ask for memory without end.
_MAX_BYTES = 1 << 40
# None is a value that an example may have.
_NOTHING = object()


class FormError(ValueError):
    """A signature that no input can be made of, or a value that has no signature."""


def describe(value: Any) -> Any:
    """The signature of `value`, as JSON. Raises FormError for anything but plain containers,
    tensors and plain values.
    """
    if isinstance(value, torch.Tensor):
        return {
            "t": [
                _name(value.dtype),
                list(value.shape),
                list(value.stride()),
                value.device.type,
                value.requires_grad,
            ]
        }
    # The exact types: an IntEnum or a subclass would come back as a plain number.
    if value is None or type(value) in (bool, int):
        return {"v": value}
    if type(value) is float:
        # Exact, and JSON has no word for inf and nan.
        return {"f": value.hex()}
    if type(value) is str:
        # A text may be data, such as a prompt, and a recording must hold none.
        return {"s": 0}
    if type(value) is torch.dtype:
        return {"dtype": _name(value)}
    if type(value) is torch.device:
        # The ordinal is that of the machine that recorded it.
        return {"device": value.type}
    if type(value) is torch.Size:
        return {"size": list(value)}
    if type(value) in (list, tuple):
        return {"l" if type(value) is list else "u": [describe(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"d": {key: describe(item) for key, item in value.items()}}
    raise FormError(f"a {type(value).__name__} has no form")


def make_inputs(form: Any, device: torch.device, example: Any = _NOTHING) -> Any:
    """A value of that signature on `device`; what the signature leaves open comes from `example`.
    Raises FormError.
    """
    if not isinstance(form, dict) or len(form) != 1:
        raise FormError(f"{form!r} is no form")
    ((kind, body),) = form.items()
    try:
        return _make(kind, body, device, example)
    # A damaged file fails anywhere in here; the caller handles one exception.
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        if isinstance(error, FormError):
            raise
        raise FormError(f"{form!r} is no form: {type(error).__name__}: {error}") from error


def _make(kind: str, body: Any, device: torch.device, example: Any) -> Any:
    if kind == "t":
        return _make_tensor(body, device, example)
    if kind == "v" and (body is None or type(body) in (bool, int)):
        return body
    if kind == "f":
        return float.fromhex(body)
    if kind == "s":
        if not isinstance(example, str):
            raise FormError(
                "texts are not recorded, and the target's own inputs have none at this place"
            )
        return example
    if kind == "dtype":
        return _DTYPES[body]
    if kind == "device":
        return torch.device(body)
    if kind == "size":
        return torch.Size(body)
    if kind in ("l", "u"):
        elements = example if isinstance(example, (list, tuple)) else ()
        items = [
            make_inputs(item, device, elements[i] if i < len(elements) else _NOTHING)
            for i, item in enumerate(body)
        ]
        return items if kind == "l" else tuple(items)
    if kind == "d":
        entries = example if isinstance(example, dict) else {}
        return {
            str(key): make_inputs(item, device, entries.get(key, _NOTHING))
            for key, item in body.items()
        }
    raise FormError(f"{kind!r} is no kind of form")


def _make_tensor(body: Any, device: torch.device, example: Any) -> torch.Tensor:
    name, shape, strides, kind, requires_grad = body
    if kind != device.type:
        raise FormError(f"a tensor was on {kind!r}, and this is {device.type!r}")
    dtype = _DTYPES[name]
    # PyTorch has no negative strides, and a bool is an int that JSON tells apart.
    if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in (*shape, *strides)):
        raise FormError(f"{shape} with strides {strides} is no tensor")
    size = (
        0
        if 0 in shape
        else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    )
    if size * dtype.itemsize > _MAX_BYTES:
        raise FormError(f"{shape} with strides {strides} would take {size * dtype.itemsize} bytes")
    # Of the storage's size, then viewed: strides may leave gaps or make elements share memory.
    storage = _make_elements(size, dtype, device, example)
    return storage.as_strided(shape, strides).requires_grad_(bool(requires_grad))


def _make_elements(
    size: int, dtype: torch.dtype, device: torch.device, example: Any
) -> torch.Tensor:
    # The same inputs each time, and the caller's random numbers are left alone.
    generator = torch.Generator().manual_seed(0)
    if (
        # An index drawn from the example's indices is in range, a mask stays a mask.
        isinstance(example, torch.Tensor)
        and example.numel()
        and _sort(example.dtype) == _sort(dtype)
    ):
        pool = example.detach().reshape(-1)
        drawn = torch.randint(pool.numel(), (size,), generator=generator)
        return pool[drawn.to(pool.device)].to(device=device, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)
    return torch.zeros(size, dtype=dtype, device=device)


def _sort(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "numbers"
    return "flags" if dtype == torch.bool else "integers"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
