"""cuTENSOR over memory of the host, by NumPy: plans run without a GPU.

It is as strict as the library: what it is given has the types of the bindings, descriptors are alive while they are
used, modes have one extent, strides and extents are above 0, what is added has the descriptor of the result, addresses
are as aligned as was said, and numbers are read as the type that the operation's attribute names.
"""

import ctypes
import importlib.util
from collections import defaultdict, deque
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.errors import CutensorError, LibraryNotFound
from cudabind.sys import cutensor
from dispatch.device import shortage
from dispatch.libraries.cutensor import block_sparse, caches, calls, descriptors, handle
from dispatch.ops.contraction.choices import TensorOp
from dispatch.ops.contraction.reference import BINARY_OF, UNARY_OF


def _beside(name):
    """A module beside this one; no test puts this folder on the path."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arithmetic, blocks, caches_of = map(_beside, ("cutensor_arithmetic", "cutensor_blocks", "cutensor_caches"))
COMPLEX, DTYPES, HALVES = arithmetic.COMPLEX, arithmetic.DTYPES, arithmetic.HALVES
INPUTS, LISTED = arithmetic.INPUTS, arithmetic.LISTED
einsum, rounded, strided = arithmetic.einsum, arithmetic.rounded, arithmetic.strided
WORKSPACE = 4096  # bytes of the executor's
SUGGESTED, REQUIRED = 768, 512  # of an operation
INVALID, UNSUPPORTED, CUDA_ERROR = 7, 15, 18
COMPUTE_DESC = "CUTENSOR_COMPUTE_DESC_"  # which only the library itself has
WORDS = tuple(dict.fromkeys(descriptors.COMPUTE.values()))


class Memory:
    """Memory of a device that holds NaN."""

    def __init__(self, nbytes):
        self.array = np.full(nbytes + 256, 0xFF, np.uint8)
        self.base = -(-self.array.ctypes.data // 256) * 256
        self.nbytes, self.c_ptr = nbytes, ctypes.c_void_p(self.base)
        self.owner = self.writer = None


class Call:
    """A function, whose arguments are converted as ctypes does it for the library's own."""

    def __init__(self, name, function):
        self.name, self.function, self.real = name, function, getattr(cutensor, name)

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def unchecked(self, *arguments):
        with suppress(LibraryNotFound):  # then nobody has its types
            kinds = self.real.unchecked.argtypes
            assert len(arguments) == len(kinds), self.name
            for argument, kind in zip(arguments, kinds, strict=True):
                kind.from_param(argument)  # TypeError for what the library's own would refuse
        return self.function(*arguments) or 0

    def error(self, status):
        return CutensorError("cutensor", self.name, status, cutensor.cutensorStatus_t(status).name)


class Library(blocks.Blocks, caches_of.Caches):
    """The functions of cuTENSOR that plans call."""

    def __init__(self):
        super().__init__()
        self.alive, self.numbers, self.executed, self.refused, self.cache = {}, count(16, 16), [], set(), {}
        self.destroyed = []  # what kinds of things, in their order
        self.waited = []  # a stream for each time that the host waited for it

    def __getattr__(self, name):
        if name.startswith(COMPUTE_DESC):
            return cutensor.cutensorComputeDescriptor_t(1 + WORDS.index(name.removeprefix(COMPUTE_DESC)))
        if not (name.startswith("cutensor") and hasattr(type(self), f"_{name.removeprefix('cutensor')}")):
            if name.startswith(("cutensorCreate", "cutensorDestroy")):
                return self._known(name)
            return getattr(cutensor, name)
        function = Call(name, getattr(self, f"_{name.removeprefix('cutensor')}"))
        setattr(self, name, function)
        return function

    def _known(self, name):
        rest = name.removeprefix("cutensorCreate").removeprefix("cutensorDestroy")
        made = self._described(rest) if name.startswith("cutensorCreate") else self._destroyed
        function = Call(name, made)
        setattr(self, name, function)
        return function

    def _new(self, pointer, **facts):
        pointer._obj.value = next(self.numbers)
        self.alive[pointer._obj.value] = SimpleNamespace(**facts)
        return 0

    @staticmethod
    def word(compute):
        """The compute type that a descriptor means."""
        return WORDS[compute.value - 1]

    def _destroyed(self, thing):
        self.destroyed.append(self.alive.pop(thing.value).kind)

    def _Create(self, pointer):
        self._new(pointer if hasattr(pointer, "_obj") else ctypes.byref(pointer), kind="handle")

    def _CreateTensorDescriptor(self, library, pointer, modes, extents, strides, dtype, alignment):
        assert self.alive[library.value].kind == "handle"
        shape, steps = list(extents)[:modes], list(strides)[:modes]
        if min((*shape, *steps), default=1) < 1 or int(dtype) not in DTYPES:
            return INVALID
        assert alignment >= np.dtype(DTYPES[int(dtype)]).itemsize
        return self._new(
            pointer, kind="tensor", shape=tuple(shape), steps=tuple(steps), dtype=int(dtype), alignment=alignment
        )

    def _described(self, rest):
        def create(library, pointer, *arguments):
            assert self.alive[library.value].kind == "handle"
            inputs, handles = [], []
            for _ in range(INPUTS[rest]):
                tensor, modes, operator, *arguments = arguments
                found = self.alive[tensor.value]
                handles.append(tensor.value)
                inputs.append((found, tuple(modes)[: len(found.shape)], TensorOp(operator)))
            tensor, modes, *binary, compute = arguments
            handles.append(tensor.value)
            output = self.alive[tensor.value], tuple(modes)[: len(self.alive[tensor.value].shape)]
            return self._checked(rest, pointer, inputs, output, [TensorOp(one) for one in binary], compute, handles)

        return create

    def _checked(self, rest, pointer, inputs, output, binary, compute, handles):
        sizes = {}
        for tensor, modes, *_ in (*inputs, output):
            if len(set(modes)) < len(modes):
                return INVALID
            for mode, extent in zip(modes, tensor.shape, strict=True):
                if sizes.setdefault(mode, extent) != extent:
                    return INVALID
        if rest != "Permutation":
            added, modes, _ = inputs[-1]
            if added is not output[0] or modes != output[1]:
                return UNSUPPORTED
        for tensor, _, operator in inputs:
            if operator in (TensorOp.IDENTITY, TensorOp.CONJ):
                continue
            if tensor.dtype in COMPLEX:  # seen with 2.8.1 of NEG, TANH, EXP and ABS
                return INVALID
            if rest == "Contraction":
                return UNSUPPORTED
        given = {mode for _, modes, _ in (inputs if rest == "Permutation" else inputs[:-1]) for mode in modes}
        if rest in ("Contraction", "ContractionTrinary", "Reduction") and not set(output[1]) <= given:
            return UNSUPPORTED
        if rest not in ("Contraction", "ContractionTrinary", "Reduction") and not given <= set(output[1]):
            return INVALID
        word = WORDS[compute.value - 1]
        kinds = (*(tensor.dtype for tensor, *_ in inputs), output[0].dtype)
        if word not in LISTED[rest](kinds) or rest in self.refused:
            return UNSUPPORTED
        scalar = kinds[-1] if kinds[-1] not in HALVES or word in ("16F", "16BF") else 0
        if kinds[0] == 1 and kinds[-1] == 0:
            scalar = 1
        if kinds[0] == 5 and kinds[-1] == 4:
            scalar = 5
        if word == "64F" and scalar in (0, 4):
            scalar += 1
        if word == "32F" and rest.startswith("E") and scalar in HALVES:
            scalar = 0
        return self._new(
            pointer,
            kind="operation",
            rest=rest,
            inputs=inputs,
            output=output,
            binary=binary,
            scalar=scalar,
            needs=handles,
        )

    def _OperationDescriptorGetAttribute(self, library, operation, attribute, pointer, size):
        assert (attribute.name, size) == ("CUTENSOR_OPERATION_DESCRIPTOR_SCALAR_TYPE", 4)
        pointer._obj.value = self.alive[operation.value].scalar

    def _CreatePlanPreference(self, library, pointer, algo, jit):
        cutensor.cutensorAlgo_t(algo)
        self._new(pointer, kind="preference", algo=algo, jit=int(jit), rank=0, cached=1, mode=0, count=0)

    def _PlanPreferenceSetAttribute(self, library, preference, attribute, pointer, size):
        assert size == 4
        names = {"KERNEL_RANK": "rank", "CACHE_MODE": "cached", "AUTOTUNE_MODE": "mode", "INCREMENTAL_COUNT": "count"}
        name = names[attribute.name.removeprefix("CUTENSOR_PLAN_PREFERENCE_")]
        setattr(self.alive[preference.value], name, pointer._obj.value)

    def _EstimateWorkspaceSize(self, library, operation, preference, kind, pointer):
        assert self.alive[preference.value].kind == "preference"
        found = self.alive[operation.value]
        pointer._obj.value = 0 if not self._works(found) else REQUIRED if found.rest == "BlockSparse" else SUGGESTED

    @staticmethod
    def _works(operation):
        return operation.rest in ("Contraction", "ContractionTrinary", "Reduction", "BlockSparse")

    def _CreatePlan(self, library, pointer, operation, preference, limit):
        chosen, found = self.alive[preference.value], self.alive[operation.value]
        assert all(one in self.alive for one in found.needs), "descriptors are there while the plan is made"
        needed = REQUIRED if self._works(found) else 0
        if limit < needed:
            return 19
        if chosen.rank > 1 or (chosen.algo in (-4, -3, -2) and found.rest != "Contraction"):
            return UNSUPPORTED
        if chosen.cached and found.rest != "BlockSparse":  # by what is done alone: another choice is that of the first
            sides = [(vars(tensor)["steps"], tensor.shape, modes, *more) for tensor, modes, *more in found.inputs]
            key = repr((found.rest, sides, found.output, found.binary))
            chosen = self.tries(chosen, key) if chosen.mode else self.cache.setdefault(key, chosen)
        if chosen.jit:
            self.kernels.add(repr([(tensor.shape, modes) for tensor, modes, *_ in found.inputs]))
        return self._new(pointer, kind="plan", operation=operation.value, preference=chosen, needed=needed)

    def _PlanGetAttribute(self, library, plan, attribute, pointer, size):
        assert (attribute.name, size) == ("CUTENSOR_PLAN_REQUIRED_WORKSPACE", 8)
        pointer._obj.value = self.alive[plan.value].needed

    # -- what plans do ------------------------------------------------------------------------------------------------
    def _number(self, pointer, operation):
        return strided(pointer.value, DTYPES[operation.scalar], (), ())[()]

    def _ready(self, plan, rest, stream):
        assert type(stream) is cutensor.cudaStream_t
        made = self.alive[plan.value]
        operation = self.alive[made.operation]
        assert operation.rest == rest
        self.executed.append((rest, made.preference.algo, made.preference.rank, stream.value))
        return made, operation

    def _read(self, operation, place, address, factor):
        """An operand with its operator and its factor; nothing is read where that is 0."""
        tensor, modes, operator = operation.inputs[place]
        work = np.complex128 if DTYPES[tensor.dtype] in (np.complex64, np.complex128) else np.float64
        if factor == 0:
            return modes, np.zeros(tensor.shape, work)
        assert address.value % tensor.alignment == 0
        given = strided(address.value, DTYPES[tensor.dtype], tensor.shape, tensor.steps).astype(work)
        return modes, np.asarray(UNARY_OF[operator](given))

    def _write(self, operation, address, values):
        tensor, _ = operation.output
        assert address.value % tensor.alignment == 0
        strided(address.value, DTYPES[tensor.dtype], tensor.shape, tensor.steps)[...] = values

    def _sum(self, rest, plan, numbers, addresses, out, workspace, size, stream):
        made, operation = self._ready(plan, rest, stream)
        if rest == "ContractionTrinary" and not operation.output[1]:  # a scalar: seen with 2.8.1
            return CUDA_ERROR
        alpha, beta = (self._number(one, operation) for one in numbers)
        if made.needed:
            assert size >= made.needed
            assert workspace.value % 256 == 0
            ctypes.memset(workspace.value, 0xFF, made.needed)
        *read, added = [
            self._read(operation, place, address, beta if place == len(addresses) - 1 else alpha)
            for place, address in enumerate(addresses)
        ]
        _, modes = operation.output
        if rest == "Reduction" and operation.binary[0] is not TensorOp.ADD:
            (own, values), kind = read[0], BINARY_OF[operation.binary[0]]
            lost = [axis for axis, mode in enumerate(own) if mode not in modes]
            kept = [mode for mode in own if mode in modes]
            found = kind.reduce(values, tuple(lost)).transpose([kept.index(mode) for mode in modes])
        else:
            if rest == "ContractionTrinary":  # two of them first, stored as they are
                (first, second, last), dtype = read, DTYPES[operation.inputs[0][0].dtype]
                kept = tuple(mode for mode in dict.fromkeys((*first[0], *second[0])) if mode in (*last[0], *modes))
                both = einsum((first, second), kept)
                read = [(kept, rounded(both, dtype)), last]
            tensor = operation.inputs[0][0]
            if rest == "Reduction" and tensor.dtype in HALVES and operation.scalar not in HALVES:
                (own, values), *_ = read
                found = arithmetic.sum_in_parts(tensor, values, own, modes)
            else:
                found = einsum(read, modes)
        return self._write(operation, out, alpha * found + (0 if beta == 0 else beta * added[1]))

    def _Contract(self, library, plan, alpha, a, b, beta, c, d, workspace, size, stream):
        return self._sum("Contraction", plan, (alpha, beta), (a, b, c), d, workspace, size, stream)

    def _ContractTrinary(self, library, plan, alpha, a, b, c, beta, d, e, workspace, size, stream):
        return self._sum("ContractionTrinary", plan, (alpha, beta), (a, b, c, d), e, workspace, size, stream)

    def _Reduce(self, library, plan, alpha, a, beta, c, d, workspace, size, stream):
        return self._sum("Reduction", plan, (alpha, beta), (a, c), d, workspace, size, stream)

    def _each(self, rest, plan, pairs, out, stream):
        _, operation = self._ready(plan, rest, stream)
        tensor, wanted = operation.output
        half = DTYPES[operation.scalar] if operation.scalar in HALVES else None  # to which it rounds each step
        parts = []
        for place, (number, address) in enumerate(pairs):
            factor = self._number(number, operation)
            modes, values = self._read(operation, place, address, factor)
            there = tuple(slice(None) if mode in modes else None for mode in wanted)
            laid = values.transpose([modes.index(mode) for mode in wanted if mode in modes])[there]
            parts.append(rounded(factor * rounded(laid, half), half))
        found = parts[0]
        for kind, part in zip(operation.binary, parts[1:], strict=True):
            found = rounded(BINARY_OF[kind](found, part), half)
        self._write(operation, out, np.broadcast_to(found, tensor.shape))

    def _Permute(self, library, plan, alpha, a, b, stream):
        self._each("Permutation", plan, [(alpha, a)], b, stream)

    def _ElementwiseBinaryExecute(self, library, plan, alpha, a, gamma, c, d, stream):
        self._each("ElementwiseBinary", plan, [(alpha, a), (gamma, c)], d, stream)

    def _ElementwiseTrinaryExecute(self, library, plan, alpha, a, beta, b, gamma, c, d, stream):
        self._each("ElementwiseTrinary", plan, [(alpha, a), (beta, b), (gamma, c)], d, stream)


def executor_of(monkeypatch):
    """What plans are made for, with the `library`; `monkeypatch` puts this file in the library's place."""
    library = Library()
    caches.cache_of.cache_clear()  # of another folder
    for module in (handle, descriptors, calls, block_sparse, caches):
        monkeypatch.setattr(module, "cutensor", library)
    monkeypatch.setattr(handle, "relaxed", nullcontext, raising=False)
    zero = lambda address, value, nbytes, _: ctypes.memset(address, value, nbytes)  # noqa: E731
    for module in (calls, block_sparse):
        monkeypatch.setattr(
            module, "driver", SimpleNamespace(cuMemsetD8Async=zero, cuStreamSynchronize=library.waited.append)
        )
    stream = SimpleNamespace(
        wait_for_uses=lambda _: None, done=lambda: None, synchronize=lambda: None, c_handle=ctypes.c_void_p(7)
    )
    device = SimpleNamespace(
        idle=defaultdict(deque),
        releases=SimpleNamespace(side=stream),
        context=nullcontext(),
        fault=None,
        alive=True,
        name="cuda:0",
        model="NVIDIA H100",
        trim=lambda: None,
        allocate=lambda nbytes, _: Memory(nbytes),
    )
    made = SimpleNamespace(
        device=device,
        stream=stream,
        target=ctypes.c_void_p(7),
        captured=False,
        free=64 << 30,
        handles={},
        versions={"cutensor": (2, 8, 1)},
        at_close=[],
        workspace=Memory(WORKSPACE),
        check=lambda: None,
        refuse_capture=lambda _: None,
    )
    made.library = library
    monkeypatch.setattr(shortage, "driver", SimpleNamespace(cuMemGetInfo=lambda: (made.free, 80 << 30)))
    return made
