"""NumPy's operators and functions on a Tensor: most raise a TypeError that says what to call instead.

The table has no elementwise row for any two tensors, and a silent copy to the host would cost more than the arithmetic.
`a @ b` is an exception; it runs `dispatch.matmul`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["apply_function", "point_elsewhere", "refuse_operators", "refuse_product", "refuse_ufunc"]

T = TypeVar("T")

# NumPy's functions that need no elements.
ANSWERED: dict[Any, Callable[..., Any]] = {
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a, axis=None: a.size if axis is None else a.shape[axis],
    np.transpose: lambda a, axes=None: a.transpose() if axes is None else a.transpose(axes),
}

# The notation of each operator and its cuDNN pointwise mode, by the name of the special method without underscores.
BINARY = {
    "add": ("a + b", "ADD"),
    "sub": ("a - b", "SUB"),
    "mul": ("a * b", "MUL"),
    "truediv": ("a / b", "DIV"),
    "floordiv": ("a // b", ""),
    "mod": ("a % b", "MOD"),
    "divmod": ("divmod(a, b)", ""),
    "pow": ("a ** b", "POW"),
    "lshift": ("a << b", ""),
    "rshift": ("a >> b", ""),
    "and": ("a & b", ""),
    "or": ("a | b", ""),
    "xor": ("a ^ b", ""),
}
UNARY = {"neg": ("-a", "NEG"), "pos": ("+a", ""), "abs": ("abs(a)", "ABS"), "invert": ("~a", "")}
ORDER = {
    "lt": ("a < b", "CMP_LT"),
    "le": ("a <= b", "CMP_LE"),
    "gt": ("a > b", "CMP_GT"),
    "ge": ("a >= b", "CMP_GE"),
}
EQUAL = {"eq": ("a == b", "CMP_EQ"), "ne": ("a != b", "CMP_NEQ")}
BEHIND_A_PRODUCT = {"add", "mul"}  # operations that dispatch.matmul can apply to the product before it is stored
REDUCTIONS = {
    "add": "ADD",
    "multiply": "MUL",
    "maximum": "MAX",
    "minimum": "MIN",
}  # by ufunc: the ReduceOp of dispatch.reduce
TENSORS_NAMES = (  # names of NumPy's arrays, and further ones of torch's tensors
    *(name for name in dir(np.ndarray) if not name.startswith("_")),
    *("bfloat16", "clone", "contiguous", "cpu", "cuda", "float", "half", "matmul", "permute", "to", "unsqueeze"),
)
NUMBERS = (bool, int, float, complex, list, tuple, np.generic)


def _instead(written: str, mode: str, name: str) -> str:
    """The text of a refusal."""
    ways = []
    if mode:
        operands = "x" if name in UNARY else "x, y"
        ways.append(f"as a request, dispatch.cudnn.Graph with its pointwise({mode!r}, {operands})")
    if name in BEHIND_A_PRODUCT:
        ways.append("behind a product, dispatch.matmul(x, w, alpha=…, c=…, bias=…)")
    ways.append("on the host, NumPy's own on a.numpy()")
    return (
        f"{written}: a Tensor has no elementwise operators, because they would silently copy from the GPU."
        f" {_listed(ways)}"
    )


def _listed(ways: list[str]) -> str:
    text = "; ".join(ways)
    return text[0].upper() + text[1:]


def _refusing(name: str, text: str) -> Callable[..., NoReturn]:
    def refuse(_self: Any, *_others: Any) -> NoReturn:
        raise TypeError(text)

    refuse.__name__ = refuse.__qualname__ = f"__{name}__"
    return refuse


def _comparing(name: str, text: str) -> Callable[..., Any]:
    def compare(_self: Any, other: Any) -> Any:
        if isinstance(other, NUMBERS) or hasattr(type(other), "__array__"):
            raise TypeError(text)
        return NotImplemented  # None, a string, an object of another kind: never equal

    compare.__name__ = compare.__qualname__ = f"__{name}__"
    return compare


def refuse_operators(kind: type[T]) -> type[T]:
    """Give a class the operators of NumPy's arrays, each of which raises a TypeError that says what to call instead.

    They are set at run time, so that `a + b` is an error to type checkers as well.
    """
    for name, (written, mode) in (BINARY | UNARY).items():
        text = _instead(written, mode, name)
        setattr(kind, f"__{name}__", _refusing(name, text))
        if name in BINARY:
            setattr(kind, f"__r{name}__", _refusing(f"r{name}", text))
    for name, (written, mode) in (ORDER | EQUAL).items():
        text = _instead(written, mode, name)
        if name in EQUAL:
            text += "; np.array_equal(a.numpy(), b.numpy()) to compare all elements; `a is b` to compare identity"
        setattr(kind, f"__{name}__", _comparing(name, text))
    return kind


def refuse_product(side: str, other: Any) -> Any:
    """Raise for `a @ b` if `side` ("a" or "b") is no Tensor; NotImplemented if its type multiplies Tensors."""
    kind = type(other)
    if getattr(kind, "multiplies_tensors", False):
        return NotImplemented
    package = kind.__module__.partition(".")[0]
    advice = "copy it to the device: dev.array(x), or dispatch.from_dlpack(x) without a copy"
    if hasattr(kind, "__dlpack__"):
        advice = f"dispatch.matmul(a, b) accepts it; or {advice}"
    name = kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"
    raise TypeError(f"a @ b: {side} is a {name}, not a Tensor of dispatch; {advice}")


class Elsewhere:
    """A descriptor for a name that other libraries have and a class lacks: its AttributeError says what to use instead.

    `words` is the name of the function in dispatch/elsewhere.py that returns the text. Unlike a `__getattr__`, it is
    not called for every missing name that NumPy looks up.
    """

    def __init__(self, name: str, words: str) -> None:
        self.name, self.words = name, words

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        from dispatch import elsewhere

        instead = getattr(elsewhere, self.words)(self.name)
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}; {instead}")


def point_elsewhere(kind: type[T], names: Iterable[str] = TENSORS_NAMES, words: str = "of_tensor") -> type[T]:
    """Give a class an `Elsewhere` for each of the names that it lacks; `dir` does not list them."""
    lacking = {name for name in names if not hasattr(kind, name)}
    for name in lacking:
        setattr(kind, name, Elsewhere(name, words))

    def listed(self: Any) -> list[str]:
        return [name for name in object.__dir__(self) if name not in lacking]

    listed.__name__ = listed.__qualname__ = "__dir__"
    kind.__dir__ = listed  # type: ignore[method-assign]
    return kind


def refuse_ufunc(ufunc: Any, method: str) -> NoReturn:
    """Raise TypeError for a NumPy ufunc with a tensor among its operands."""
    name = ufunc.__name__
    if name == "matmul":
        advice = (
            "dispatch.matmul(a, b) accepts both; a @ b needs two Tensors, and dev.array(x) makes a Tensor of an array"
        )
        raise TypeError(f"a @ b of a Tensor and a NumPy array, or np.matmul: {advice}")
    call = f"np.{name}" if method == "__call__" else f"np.{name}.{method}"
    if method == "reduce" and name in REDUCTIONS:
        other = f"dispatch.reduce with ReduceOp.{REDUCTIONS[name]}, or on the host {call}(a.numpy())"
    else:
        other = f"{call}(a.numpy(), …) computes on the host"
    raise TypeError(f"{call} does not accept a Tensor, because it would silently copy from the GPU. {other}")


def apply_function(kind: Any, function: Any, types: Iterable[type], args: Any, options: dict[str, Any]) -> Any:
    """Call a NumPy function on host tensors (instances of `kind`), which NumPy reads without a copy.

    Raises TypeError if one is on a GPU: a copy from there must be explicit, `a.numpy()`.
    """
    if not all(issubclass(each, (kind, np.ndarray)) for each in types):
        return NotImplemented
    if function in ANSWERED and isinstance(args[0] if args else None, kind):
        return ANSWERED[function](*args, **options)

    def read(value: Any) -> Any:
        if isinstance(value, kind):
            if not value.device.is_host:
                _refuse_function(function, value)
            return np.asarray(value)
        if type(value) in (list, tuple):
            return type(value)(map(read, value))
        return value

    return function(*map(read, args), **{name: read(value) for name, value in options.items()})


def _refuse_function(function: Any, tensor: Any) -> NoReturn:
    from dispatch import elsewhere

    module = function.__module__.removeprefix("numpy").lstrip(".")
    name = function.__name__
    call = f"np.{module}.{name}" if hasattr(getattr(np, module, None), name) else f"np.{name}"
    instead = elsewhere.of_module(name)
    advice = (
        f"{instead}, or on the host {call}(a.numpy(), …)" if instead else f"{call}(a.numpy(), …) computes on the host"
    )
    raise TypeError(
        f"{call} does not accept a Tensor on {tensor.device}, because it would silently copy it to the host. {advice}"
    )
