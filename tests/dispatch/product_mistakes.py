"""One mistake each in the fields of a good product: the good fields go in, and are broken in place."""

import numpy as np

import dispatch
from dispatch import Epilogue, MatmulRequest, ScaleMode, Scales
from dispatch.device.host import HostDevice
from dispatch.keys import Compute

E = Epilogue
JUNK = ("a matrix", 7, [[1.0, 2.0]], (1, 2), np.ones((16, 16), np.int16), object(), {"a": 1})
OTHER_DTYPES = ("i64", "u32", "bool", "f64", "c64", "u8", "i32")


class Scene:
    """A device, tensors of its dead generation, a device that is not it, and random choices."""

    def __init__(self, name, rng):
        self.rng = rng
        before = dispatch.device(name)
        self.dead = before.array(np.ones((32, 32), np.float32))
        before.close()
        self.device = dispatch.device(name)
        self.other = dispatch.device("host") if name != "host" else HostDevice(generation=1 << 20)
        a, b = self.array((16, 16)), self.array((16, 16))
        self.prepared = dispatch.prepare(MatmulRequest(a=a, b=b, out=self.device.zeros((16, 16))))

    def pick(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def size(self):
        return 16 * int(self.rng.integers(1, 4))

    def array(self, shape, dtype="f32", device=None):
        return (device or self.device).array(self.rng.standard_normal(shape).astype(np.float32), dtype)

    def strided(self, tensor, shape, strides, *, readonly=False, skip=0):
        """A view that slicing cannot make, of the same memory."""
        ptr = tensor.ptr + skip * tensor.dtype.itemsize
        layout = self.device.layout(tensor.dtype, tuple(shape), tuple(strides), ptr, readonly)
        return dispatch.Tensor(tensor.storage, ptr, layout)

    def good(self, epilogue=None):
        """The fields of a request that works."""
        m, n, k = self.size(), self.size(), self.size()
        epilogue = epilogue or self.pick((E.NONE, E.RELU, E.GELU, E.BIAS, E.RELU_AUX_BIAS, E.DRELU, E.DGELU_BGRAD))
        fields = {"a": self.array((m, k)), "b": self.array((k, n)), "epilogue": epilogue}
        if epilogue.adds_bias:
            fields["bias"] = self.array((n,))
        if epilogue.is_gradient:
            relu = epilogue.activation == "relu"
            fields["aux"] = self.device.zeros((m, -(-n // 128) * 16) if relu else (m, n), "u8" if relu else "f32")
        if self.rng.random() < 0.3:
            fields["out"] = self.device.zeros((m, n))
        if self.rng.random() < 0.3:
            fields["c"] = self.array((m, n))
        return fields

    def sizes(self, fields):
        return fields["a"].shape[0], fields["b"].shape[1], fields["a"].shape[1]


def not_a_tensor(scene, fields):
    name = scene.pick(("a", "b", "c", "out", "bias", "aux", "bgrad"))
    fields[name] = scene.pick(JUNK if name not in "ab" else (*JUNK, None))


def wrong_inner_extent(scene, fields):
    _, n, k = scene.sizes(fields)
    fields["b"] = scene.array((k + scene.pick((-1, 1, 16)), n))


def wrong_number_of_axes(scene, fields):
    fields[scene.pick("ab")] = scene.array(scene.pick(((), (16,))))


def batches_that_do_not_broadcast(scene, fields):
    m, n, k = scene.sizes(fields)
    fields.update(a=scene.array((2, m, k)), b=scene.array((3, k, n)))


def dtypes_that_no_library_multiplies(scene, fields):
    name = scene.pick("ab")
    fields[name] = scene.array(fields[name].shape, scene.pick(OTHER_DTYPES))


def dtypes_alike_that_no_library_multiplies(scene, fields):
    dtype = scene.pick(("i64", "u64", "u8", "bool", "i32", "e8m0", "f8e5m2"))
    for name in "ab":
        fields[name] = scene.device.zeros(fields[name].shape, dtype)


def wrong_shape(scene, fields):
    m, n, _ = scene.sizes(fields)
    name = scene.pick(("c", "out"))
    fields[name] = scene.array(scene.pick(((m, n + 1), (m + 1, n), (1, m, n), (m * n,), (n + 1, m + 1))))


def wrong_dtype(scene, fields):
    m, n, _ = scene.sizes(fields)
    fields[scene.pick(("c", "out"))] = scene.device.zeros(
        (m, n), scene.pick(("i8", "u64", "bool", "f64", "c64", "f8e4m3"))
    )


def order_that_no_library_steps_through(scene, fields):
    name = scene.pick("ab")
    rows, columns = fields[name].shape
    whole = scene.array((2 * rows, 2 * columns))
    backward = scene.strided(whole, (rows, columns), (-2 * columns, 1), skip=2 * columns * (rows - 1))
    same_row = scene.strided(whole, (rows, columns), (0, 1))
    fields[name] = scene.pick((whole[::2, ::2], backward, same_row, whole[:rows, ::-2]))


def output_that_cannot_be_written(scene, fields):
    m, n, _ = scene.sizes(fields)
    whole = scene.array((m, n))
    readonly = scene.strided(whole, (m, n), (n, 1), readonly=True)
    fields["out"] = scene.pick((readonly, scene.strided(whole, (m, n), (0, 1))))


def output_over_an_operand(scene, fields):
    m, n, k = scene.sizes(fields)
    memory = scene.array((m + k + n + 1, n + k + m))
    if scene.rng.integers(2):
        fields.update(a=memory[:m, :k], out=memory[m - 1 : 2 * m - 1, :n] if m + n > m else None)
        if fields["out"].shape != (m, n):
            fields["out"] = memory[:m, :n]
    else:
        fields.update(b=memory[:k, :n], out=scene.strided(memory, (m, n), (memory.shape[1], 1), skip=1))


def output_over_a_shifted_c(scene, fields):
    m, n, _ = scene.sizes(fields)
    memory = scene.array((m + 1, n))
    fields.update(c=memory[:m], out=memory[1:])


def bias_of_wrong_shape(scene, fields):
    _, n, _ = scene.sizes(fields)
    shape = scene.pick(((n + 1,), (1, n), (n, 1), (), (2, n)))
    fields.update(epilogue=scene.pick((E.BIAS, E.GELU_BIAS, E.RELU_AUX_BIAS)), bias=scene.array(shape))
    fields.pop("aux", None)


def bias_missing_or_not_taken(scene, fields):
    _, n, _ = scene.sizes(fields)
    if scene.rng.integers(2):
        fields.update(epilogue=scene.pick((E.BIAS, E.RELU_BIAS, E.GELU_BIAS, E.GELU_AUX_BIAS)), bias=None)
        fields.pop("aux", None)
    else:
        fields.update(epilogue=scene.pick((E.NONE, E.RELU, E.GELU, E.RELU_AUX)), bias=scene.array((n,)))
        fields.pop("aux", None)


def bias_of_wrong_dtype_or_step(scene, fields):
    _, n, _ = scene.sizes(fields)
    fields.pop("aux", None)
    fields["epilogue"] = scene.pick((E.BIAS, E.RELU_BIAS))
    fields["bias"] = scene.pick((scene.array((2 * n,))[::2], scene.array((n,), scene.pick(("f64", "i32", "f8e4m3")))))


def aux_missing_or_not_taken(scene, fields):
    m, n, _ = scene.sizes(fields)
    fields.pop("bias", None)
    if scene.rng.integers(2):
        fields.update(epilogue=scene.pick((E.DRELU, E.DGELU, E.DRELU_BGRAD, E.DGELU_BGRAD)), aux=None)
    else:
        fields.update(epilogue=scene.pick((E.NONE, E.RELU, E.BGRADB)), aux=scene.array((m, n)))


def aux_of_wrong_kind(scene, fields):
    m, n, _ = scene.sizes(fields)
    width = -(-n // 128) * 16
    fields.pop("bias", None)
    if scene.rng.integers(2):
        fields["epilogue"] = scene.pick((E.DRELU, E.RELU_AUX))
        wrong = (
            ((m, width), "i8"),
            ((m, width - 1), "u8"),
            ((m, n), "f32"),
            ((m, n + 1), "u8"),
            ((m + 1, width), "u8"),
        )
    else:
        fields["epilogue"] = scene.pick((E.DGELU, E.GELU_AUX))
        wrong = (((m, n + 1), "f32"), ((m, n), "i32"), ((m, n), "u8"), ((n + 1, m), "f32"), ((m, n), "f64"))
    shape, dtype = scene.pick(wrong)
    fields["aux"] = scene.device.zeros(shape, dtype)


def aux_of_wrong_step(scene, fields):
    m, n, _ = scene.sizes(fields)
    fields.pop("bias", None)
    fields.update(epilogue=E.DGELU, aux=scene.device.zeros((m, n + 3))[:, :n])


def bgrad_of_wrong_kind(scene, fields):
    m, n, _ = scene.sizes(fields)
    for name in ("bias", "aux"):
        fields.pop(name, None)
    if scene.rng.integers(3) == 0:
        fields.update(epilogue=E.NONE, bgrad=scene.array((n,)))
        return
    fields["epilogue"] = scene.pick((E.BGRADA, E.BGRADB))
    if fields["epilogue"] is E.BGRADA:
        fields["a"] = scene.array((fields["a"].shape[1], m)).mT
    extent = m if fields["epilogue"] is E.BGRADA else n
    shape, dtype = scene.pick((((extent + 1,), "f32"), ((1, extent), "f32"), ((extent,), "i32"), ((extent,), "f64")))
    fields["bgrad"] = scene.device.zeros(shape, dtype)


def number_that_is_none(scene, fields):
    junk = ("one", None, True, [1.0], np.ones(2), 1j, object())
    fields["alpha"] = scene.pick(junk)
    if scene.rng.integers(2):
        fields["alpha"] = 1.0
        fields["beta"] = scene.pick([value for value in junk if value is not None])


def scalar_tensor_of_wrong_kind(scene, fields):
    wrong = (scene.array((2,)), scene.array((1,), "f64"), scene.array((1,), "i32"), scene.array((0,)))
    fields["alpha"] = scene.pick((*wrong, scene.array((1,), device=scene.other)))


def beta_without_c(scene, fields):
    for name in ("c", "out"):
        fields.pop(name, None)
    fields["beta"] = scene.pick((1.0, -0.5, scene.array((1,))))


def choice_of_wrong_type(scene, fields):
    name = scene.pick(
        ("epilogue", "compute", "scales", "fast_accum", "autotune", "reduced_precision", "workspace", "out_dtype")
    )
    junk = {
        "epilogue": ("RELUX", 2, None, object()),
        "compute": ("COMPUTE_33F", 68, 1.5, object()),
        "scales": (2.0, None, {"a": 1.0}, (1.0, 1.0)),
        "fast_accum": (1, "yes", None),
        "autotune": (1, "yes", None),
        "reduced_precision": (1, "yes", None),
        "workspace": (-1, 1.5, "much", [1]),
        "out_dtype": ("f31", object(), 3, "string", np.dtype("S4")),
    }
    fields[name] = scene.pick(junk[name])


def choice_that_no_library_offers(scene, fields):
    fields.pop("out", None)
    fields.update(
        scene.pick(
            (
                {"compute": Compute.COMPUTE_64F},
                {"compute": Compute.COMPUTE_32I},
                {"compute": Compute.COMPUTE_16F},
                {"fast_accum": True},
                {"scales": Scales(a=2.0)},
                {"scales": Scales(d=2.0)},
                {"out_dtype": scene.pick(("f64", "i32", "f8e4m3", "bool"))},
            )
        )
    )


def out_dtype_against_out(scene, fields):
    m, n, _ = scene.sizes(fields)
    fields.update(out=scene.device.zeros((m, n)), out_dtype=scene.pick(("f16", "bf16", "f64", "i32")))


def fp8_fields(scene):
    m, n, k = scene.size(), scene.size(), scene.size()
    fields = {"a": scene.array((m, k), "f8e4m3"), "b": scene.array((n, k), "f8e4m3").mT, "epilogue": E.NONE}
    return fields, (m, n, k)


def scale_out_of_range(scene, fields):
    made, _ = fp8_fields(scene)
    value = scene.pick((0.0, -1.0, float("nan"), float("inf"), -float("inf"), True, "x", [1.0], np.ones(1)))
    fields.clear()
    fields.update(made, scales=Scales(**{scene.pick("abcd"): value}))


def scale_tensor_of_wrong_kind(scene, fields):
    made, (m, n, k) = fp8_fields(scene)
    modes = ScaleMode
    wrong = (
        Scales(a=scene.array((2,))),
        Scales(a=scene.array((1,), "f64")),
        Scales(a=scene.array((m + 1,)), a_mode=modes.OUTER_VEC_32F, b=scene.array((n,)), b_mode=modes.OUTER_VEC_32F),
        Scales(a=2.0, a_mode=modes.OUTER_VEC_32F),
        Scales(b=scene.array((k,)), b_mode=modes.VEC128_32F),
        Scales(b=scene.array((2 * n,))[::2], b_mode=modes.OUTER_VEC_32F),
        Scales(a=scene.array((m,), "f16"), a_mode=modes.OUTER_VEC_32F),
        Scales(a=1.0, a_mode=0),
        Scales(a=1.0, b_mode="SCALAR_33F"),
        Scales(aux=2.0),
        Scales(amax_d=scene.array((2,))),
        Scales(amax_d=scene.array((1,), "f64")),
        Scales(amax_d=1.0),
        Scales(amax_aux=scene.array((1,))),
        Scales(a=scene.array((1,), device=scene.other)),
    )
    fields.clear()
    fields.update(made, scales=scene.pick(wrong))


def fp8_that_the_units_do_not_read(scene, fields):
    made, (m, n, k) = fp8_fields(scene)
    by_rows = scene.array((k, n), "f8e4m3")
    wrong = (
        {"b": by_rows},
        {"a": scene.array((k, m), "f8e4m3").mT},
        {"a": scene.array((m, k + 1), "f8e4m3"), "b": scene.array((n, k + 1), "f8e4m3").mT},
        # CUTLASS has kernels for these.
        {"a": scene.array((m, k), "f8e5m2"), "b": scene.array((n, k), "f8e5m2").mT, "library": "cublasLt"},
        {"b": scene.array((n, k), "f32").mT},
        {"epilogue": E.BGRADB},
    )
    fields.clear()
    fields.update(made | scene.pick(wrong))


def i8_that_is_no_integer_product(scene, fields):
    m, n, k = scene.size(), scene.size(), scene.size()
    made = {"a": scene.device.zeros((m, k), "i8"), "b": scene.device.zeros((k, n), "i8")}
    wrong = (
        {"alpha": 0.5},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"out_dtype": "f16"},
        {"epilogue": E.RELU},
        {"a": scene.device.zeros((m, k + 1), "i8"), "b": scene.device.zeros((k + 1, n), "i8")},
    )
    fields.clear()
    fields.update(made | scene.pick(wrong))


def bias_gradient_of_nothing(scene, fields):
    _, n, k = scene.sizes(fields)
    fields.clear()
    fields.update(a=scene.device.zeros((0, k)), b=scene.array((k, n)), epilogue=scene.pick((E.BGRADA, E.BGRADB)))


def dead_tensor(scene, fields):
    shape = {"a": (32, 32), "b": (32, 32), "out": (32, 32), "c": (32, 32)}
    name = scene.pick(("a", "b", "c", "out", "bias", "alpha"))
    fields.clear()
    fields.update({operand: scene.array(shape[operand]) for operand in "ab"})
    dead = {"bias": scene.dead[0], "alpha": scene.dead[0, :1]}
    fields[name] = dead.get(name, scene.dead)
    if name == "bias":
        fields["epilogue"] = E.BIAS


def tensor_of_another_device(scene, fields):
    m, n, k = scene.sizes(fields)
    name = scene.pick(("a", "b", "c", "out"))
    shape = {"a": (m, k), "b": (k, n)}.get(name, (m, n))
    fields[name] = scene.array(shape, device=scene.other)


MISTAKES = [
    not_a_tensor, wrong_inner_extent, wrong_number_of_axes, batches_that_do_not_broadcast,
    dtypes_that_no_library_multiplies, dtypes_alike_that_no_library_multiplies, wrong_shape, wrong_dtype,
    order_that_no_library_steps_through, output_that_cannot_be_written, output_over_an_operand, output_over_a_shifted_c,
    bias_of_wrong_shape, bias_missing_or_not_taken, bias_of_wrong_dtype_or_step, aux_missing_or_not_taken,
    aux_of_wrong_kind, aux_of_wrong_step, bgrad_of_wrong_kind, number_that_is_none, scalar_tensor_of_wrong_kind,
    beta_without_c, choice_of_wrong_type, choice_that_no_library_offers, out_dtype_against_out, scale_out_of_range,
    scale_tensor_of_wrong_kind, fp8_that_the_units_do_not_read, i8_that_is_no_integer_product,
    bias_gradient_of_nothing, dead_tensor, tensor_of_another_device,
]  # fmt: skip
