"""Specs drawn at random for tests/differential.py: matmul in families that have a pattern in common, and small ops.

Some are mistakes: an output that is an operand, a fraction for integers, read-only memory. A fresh request refuses
them, and so must every call.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
from differential_specs import LINE, Operand, Slot, Spec

import dispatch as dp
from dispatch.keys import Dtype, Epilogue


def numbers(rng: np.random.Generator, dtype: Dtype, size: int) -> np.ndarray[Any, Any]:
    if dtype.numpy.kind in "iub":
        return rng.integers(0, 5, size).astype(dtype.numpy)
    values = rng.standard_normal(size)
    if dtype.is_complex:
        values = values + 1j * rng.standard_normal(size)
    return values.astype(dtype.numpy)


def drawn(
    rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...], order: tuple[int, ...] | None = None,
    *, pad: int = 0, skew: int = 0, repeat: tuple[int, ...] = (),
) -> Operand:  # fmt: skip
    """An operand whose axes lie in memory in an order, with `pad` elements behind each line; `repeat` has stride 0."""
    axes = order or tuple(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for place, axis in enumerate(reversed(axes)):
        if axis in repeat:
            continue
        strides[axis] = step
        step *= max(shape[axis], 1)
        step += pad if place == 0 else 0
    size = 0 if 0 in shape else 1 + sum((e - 1) * s for e, s in zip(shape, strides, strict=True))
    return Operand(dtype, shape, tuple(strides), skew * dtype.itemsize % LINE, 0, numbers(rng, dtype, size).tobytes())


EXTENTS = (1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 31, 32, 33, 40, 48, 56, 64, 65, 96, 128)
E = Epilogue
KINDS = (
    ("f32", "f32", "f32"), ("f32", "f32", "f32"), ("f32", "f32", "f32"), ("bf16", "bf16", "bf16"),
    ("bf16", "bf16", "bf16"), ("f16", "f16", "f16"), ("f64", "f64", "f64"), ("f16", "f16", "f32"),
    ("bf16", "bf16", "f32"), ("i8", "i8", "i32"), ("c64", "c64", "c64"), ("c128", "c128", "c128"),
    ("f8e4m3", "f8e4m3", "bf16"), ("f8e4m3", "f8e5m2", "f16"), ("f8e4m3", "f8e4m3", "f32"),
)  # fmt: skip
ALIKE = (  # epilogues that take the same operands
    (E.NONE, E.RELU, E.GELU),
    (E.BIAS, E.RELU_BIAS, E.GELU_BIAS),
    *((e,) for e in E if e.writes_aux or e.writes_bgrad or e.is_gradient),
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "compute": (None, dp.Compute.COMPUTE_32F, dp.Compute.COMPUTE_32F_FAST_TF32),
    "workspace": (None, 0, 1 << 20),
    "fast_accum": (False, True),
    "reduced_precision": (False, True),
    "out_dtype": (None, "f32", "f16", "bf16"),
}
SWAPPED = {name: Dtype.of(other) for name, other in (("f16", "bf16"), ("bf16", "f16"), ("f32", "f64"), ("f64", "f32"))}
MISTAKES = (
    "out is a",
    "out is b",
    "aux is out",
    "readonly",
    "alpha",
    "alpha",
    "equal",
    "equal",
    "b",
    "out",
    "bias",
    "c",
)
ALPHAS = (1.0, 1.0, 1.0, 1, 2, -0.5, 0.0, -0.0, 0, 3.0, np.float64(0.5), np.float32(2.0), np.int64(2))
BETAS = (None, None, 0.0, 1.0, 1, -0.5, 2, -0.0, np.float32(0.5))


class MatmulFamily:
    """Matmul calls that have all in common but their extents, paddings and numbers: what a pattern stands for."""

    def __init__(self, rng: np.random.Generator, largest: int = 128) -> None:
        def pick(choices: Any) -> Any:
            return choices[int(rng.integers(len(choices)))]

        self.rng, self.pick, self.largest = rng, pick, largest
        plain = rng.random() < 0.5  # two axes each and no C: what patterns are made of
        self.dtypes = tuple(Dtype.of(name) for name in pick(KINDS))
        a = self.dtypes[0]
        fused = not (a.name == "i8" or a.is_complex)
        self.epilogue = pick((E.NONE, E.NONE, *E)) if fused else E.NONE
        fp8 = a.is_fp8
        self.orders = tuple("rc" if fp8 else pick("rc") for _ in "ab") if not fp8 else ("r", "c")
        if self.epilogue is E.BGRADA:
            self.orders = ("c", self.orders[1])
        if self.epilogue is E.BGRADB:
            self.orders = (self.orders[0], "r")
        self.batch = () if plain else pick(((), (2,), (3,), (2, 3), (1,)))
        self.shared = pick(("", "", "a", "b", "stride b"))
        self.d_columns = self.epilogue in (E.NONE, E.RELU, E.GELU) and rng.random() < 0.2
        self.given = {name: rng.random() < 0.5 for name in ("out", "aux", "bgrad")}
        self.c = "" if plain else pick(("", "c", "out", "view of out"))
        self.beta = pick(BETAS)
        self.out_dtype = pick((None, self.dtypes[2], self.dtypes[2].name, self.dtypes[2].numpy))
        self.padded = rng.random() < 0.4
        self.skewed = rng.random() < 0.25
        self.mistake = ""
        self.square = rng.random() < 0.25  # then an output can be mistaken for an operand
        if self.square:
            self.padded = self.skewed = False
            self.given["out"] = self.given["aux"] = True
        fast = dp.Compute.COMPUTE_32F_FAST_TF32 if self.dtypes == (Dtype.of("f32"),) * 3 else None
        self.options = {
            "compute": pick((None, None, None, fast)),
            "workspace": pick((None, None, None, 0, 1 << 20)),
            "fast_accum": bool(fp8 and rng.random() < 0.3),
            "reduced_precision": bool(rng.random() < 0.15),
        }
        self.scale = pick(("", "number", "tensor", "d")) if fp8 else ""
        self.alpha_on_device = rng.random() < 0.06

    def extent(self) -> int:
        rng = self.rng
        if self.dtypes[0].bits == 8 and rng.random() < 0.85:
            return 16 * int(rng.integers(1, 2 + self.largest // 24))
        if rng.random() < 0.02:
            return 0
        return min(int(self.pick(EXTENTS)) if rng.random() < 0.6 else int(rng.integers(1, 90)), self.largest)

    def extents(self) -> tuple[int, int, int]:
        """m, n and k."""
        m, n, k = self.extent(), self.extent(), self.extent()
        return (m, m, m) if self.square else (m, n, k)

    def changed(self) -> MatmulFamily:
        """A family that differs from this one in one thing."""
        other, pick = copy.copy(self), self.pick
        other.given, other.options = dict(self.given), dict(self.options)
        change = pick(
            ("given", "option", "option", "epilogue", "c", "numbers", "mistake", "mistake", "dtypes", "order")
        )
        if change == "given":
            name = pick(("out", "aux", "bgrad"))
            other.given[name] = not self.given[name]
        elif change == "option":
            name, choices = pick(list(OPTIONS.items()))
            other.options[name] = pick(choices)
        elif change == "epilogue" and self.dtypes[0].name != "i8" and not self.dtypes[0].is_complex:
            other.epilogue = pick(next(group for group in ALIKE if self.epilogue in group))
        elif change == "c":
            other.c = pick(("", "c", "out", "view of out"))
        elif change == "numbers":
            other.alpha_on_device = not self.alpha_on_device
            other.beta = pick(BETAS)
            other.scale = pick(("", "number", "tensor")) if self.scale else ""
        elif change == "mistake":
            other.mistake = pick(MISTAKES)
        elif change == "dtypes":
            other.dtypes = tuple(SWAPPED.get(dtype.name, dtype) for dtype in self.dtypes)
        elif not self.dtypes[0].is_fp8 and self.epilogue not in (E.BGRADA, E.BGRADB):
            other.orders = (pick("rc"), pick("rc"))
        return other

    def matrix(self, dtype: Dtype, batch: tuple[int, ...], rows: int, columns: int, order: str, **more: Any) -> Operand:
        rng, axes = self.rng, tuple(range(len(batch)))
        last = (len(batch), len(batch) + 1) if order == "r" else (len(batch) + 1, len(batch))
        wide = 16 if dtype.bits == 8 else 1
        pad = wide * int(rng.integers(0, 5)) if self.padded else 0
        skew = wide * int(rng.integers(0, 5)) if self.skewed else 0
        return drawn(rng, dtype, (*batch, rows, columns), (*axes, *last), pad=pad, skew=skew, **more)

    def spec(self, extents: tuple[int, int, int] | None = None) -> Spec:
        """One call of the family."""
        epilogue, batch = self.epilogue, self.batch
        m, n, k = extents or self.extents()
        a_type, b_type, d_type = self.dtypes
        operands: list[Operand] = []

        def keep(operand: Operand) -> Slot:
            operands.append(operand)
            return Slot(len(operands) - 1)

        a_batch, b_batch = (() if self.shared == name else batch for name in "ab")
        repeat = tuple(range(len(batch))) if self.shared == "stride b" else ()
        given: dict[str, Any] = {"epilogue": epilogue, **self.options}
        given["a"] = keep(self.matrix(a_type, a_batch, m, k, self.orders[0]))
        given["b"] = keep(self.matrix(b_type, b_batch, k, n, self.orders[1], repeat=repeat))
        order = "c" if self.d_columns else "r"
        given["out"] = keep(self.matrix(d_type, batch, m, n, order)) if self.given["out"] or self.d_columns else None
        given["c"] = self._c(keep, batch, m, n, order, given["out"])
        given["alpha"] = self.pick(ALPHAS)
        given["beta"] = self.beta if given["c"] is not None or given["out"] is not None else None
        if given["out"] is None:
            given.setdefault("out_dtype", self.out_dtype)
        self._vectors(keep, given, batch, (m, n))
        self._scales(keep, given)
        self._mistakes(given, operands)
        return Spec(dp.MatmulRequest, given, operands, self.mistake)

    def _c(self, keep: Any, batch: tuple[int, ...], m: int, n: int, order: str, out: Slot | None) -> Slot | None:
        if self.c == "c" or (self.c and out is None):
            return keep(self.matrix(self.dtypes[2], batch, m, n, order))  # type: ignore[no-any-return]
        if self.c in ("out", "view of out") and out is not None:
            return Slot(out.number, self.c == "view of out")
        return None

    def _vectors(self, keep: Any, given: dict[str, Any], batch: tuple[int, ...], shape: tuple[int, int]) -> None:
        rng, epilogue, (m, n) = self.rng, self.epilogue, shape
        kind = self.dtypes[2]
        if self.dtypes[0].is_fp8 and kind.name == "f32":
            kind = Dtype.of("bf16")
        if epilogue.adds_bias:
            given["bias"] = keep(drawn(rng, kind, (*self.pick(((), batch)), n)))
        if epilogue.writes_bgrad and self.given["bgrad"]:
            extent = m if epilogue is E.BGRADA else n
            given["bgrad"] = keep(drawn(rng, kind, (*batch, extent), pad=4 * int(rng.integers(0, 2))))
        if epilogue.is_gradient or (epilogue.writes_aux and self.given["aux"]):
            relu = epilogue.activation == "relu"
            wanted, strides = dp.aux_shape(epilogue, (*batch, m, n))
            pad = strides[-2] - wanted[-1] + (16 if self.padded else 0)
            given["aux"] = keep(drawn(rng, Dtype.of("u8") if relu else self.dtypes[2], wanted, pad=pad))

    def _scales(self, keep: Any, given: dict[str, Any]) -> None:
        if self.scale:
            one = 0.5 if self.scale == "number" else keep(drawn(self.rng, Dtype.of("f32"), (1,)))
            given["scales"] = dp.Scales(a=one, b=self.pick((None, 2.0, 2)))  # type: ignore[arg-type]  # a Slot for now
        if self.alpha_on_device:
            wanted = {"f64": "f64", "i8": "i32", "c64": "c64", "c128": "c128"}.get(self.dtypes[0].name, "f32")
            given["alpha"] = keep(drawn(self.rng, Dtype.of(wanted), (1,)))

    def _mistakes(self, given: dict[str, Any], operands: list[Operand]) -> None:
        out, wrong = given["out"], self.mistake
        if wrong in ("out is a", "out is b") and out is not None:
            given["out"] = Slot(given[wrong[-1]].number, bool(self.rng.integers(2)))
        elif wrong == "aux is out" and out is not None and given.get("aux") is not None:
            given["aux"] = Slot(out.number)
        elif wrong == "readonly" and out is not None:
            operands[out.number] = replace(operands[out.number], readonly=True)
        elif wrong == "alpha":
            given["alpha"] = self.pick((0.5, True, 1j, "2", 2**40, float("nan")))
        elif wrong == "equal":
            name, value = self.pick((("epilogue", int(self.epilogue)), ("fast_accum", 0), ("workspace", True)))
            given[name] = value
        elif wrong:  # one line more than fits
            slot = given.get(wrong)
            if slot is not None:
                operand = operands[slot.number]
                axis = len(operand.shape) - 1 - (wrong == "b")
                shape = (*operand.shape[:axis], operand.shape[axis] + 1, *operand.shape[axis + 1 :])
                operands[slot.number] = drawn(self.rng, operand.dtype, shape, _order(operand))


def _order(operand: Operand) -> tuple[int, ...]:
    """The axes from the outermost in memory to the innermost."""
    return tuple(sorted(range(len(operand.shape)), key=lambda axis: (-operand.strides[axis], axis)))


VECTORS = ("bias", "aux", "bgrad")  # which are refused but at multiples of 16 bytes


def relaid(spec: Spec, rng: np.random.Generator, name: str) -> Spec:
    """A spec whose operands are the same but for one, which lies otherwise: at more of a distance, or elsewhere."""
    number = spec.given[name].number
    operand, operands = spec.operands[number], list(spec.operands)
    order, wide = _order(operand), int(rng.integers(0, 2))
    repeat = tuple(axis for axis, step in enumerate(operand.strides) if step == 0)
    pad = operand.strides[order[-2]] - operand.shape[order[-1]] if len(order) > 1 and not repeat else 0
    skew = 0 if wide else int(rng.integers(1, 17)) * (16 // operand.dtype.itemsize if name in VECTORS else 1)
    operands[number] = drawn(
        rng, operand.dtype, operand.shape, order, pad=max(pad, 0) + 16 * wide, skew=skew, repeat=repeat
    )
    return Spec(spec.kind, spec.given, operands, f"relaid {name}")


def matmul_specs(rng: np.random.Generator, largest: int, **fixed: Any) -> list[Spec]:
    """Calls of a family: of several extents, and beside one of them such as differ from it in one thing.

    `fixed` are attributes of the family that are not to be drawn.
    """
    family = MatmulFamily(rng, largest)
    vars(family).update(fixed)
    extents = [family.extents() for _ in range(4)]
    found = [family.spec(one) for one in extents]
    found += [family.changed().spec(extents[0] if rng.random() < 0.6 else None) for _ in range(4)]
    if family.square:
        wrong = copy.copy(family)
        wrong.mistake = family.pick(MISTAKES[:3])
        found.append(wrong.spec(extents[0]))
    given = [name for name, value in found[0].given.items() if isinstance(value, Slot)]
    return [*found, *(relaid(found[0], rng, name) for name in given if rng.random() < 0.5)]


def elementwise(rng: np.random.Generator) -> Spec:
    """A call of an op that is one cuDNN call, over a tensor of any shape and order."""
    dtype = Dtype.of(("f32", "f16", "bf16", "f64")[int(rng.integers(4))])
    shape = tuple(int(x) for x in rng.integers(1, 9, int(rng.integers(1, 5))))
    order = tuple(int(x) for x in rng.permutation(len(shape)))
    pad, skew = (int(x) for x in rng.integers(0, 3, 2) * (rng.random(2) < 0.4))
    x = drawn(rng, dtype, shape, order, pad=pad, skew=skew)
    which = int(rng.integers(3))
    given: dict[str, Any] = {"x": Slot(0)}
    kind: type[dp.Request] = dp.ActivationRequest
    if which == 0:
        mode = list(dp.ActivationMode)[int(rng.integers(6))]
        given.update(mode=mode, coef=0.5 if mode in (3, 4, 6) and rng.integers(2) else 1.0)
    elif which == 1:
        kind = dp.SoftmaxRequest
        axis = int(rng.integers(-len(shape), len(shape)))
        given.update(axis=axis, algorithm=list(dp.SoftmaxAlgorithm)[int(rng.integers(1, 3))])
    else:
        kind = dp.ReduceRequest
        axes = tuple(int(a) for a in rng.permutation(len(shape))[: int(rng.integers(1, len(shape) + 1))])
        given.update(axes=axes, reduce=list(dp.ReduceOp)[int(rng.integers(0, 8))], keepdims=bool(rng.integers(2)))
        return Spec(kind, given, [x], "drawn")
    place = int(rng.integers(4))
    if place == 0:
        given["out"] = Slot(0, bool(rng.integers(2)))
    elif place < 3:
        out = drawn(rng, dtype, shape, order if place == 1 else None, pad=pad, skew=skew)
        return Spec(kind, {**given, "out": Slot(1)}, [x, out], "drawn")
    return Spec(kind, given, [x], "drawn")
