"""Block-sparse contractions of cuTENSOR over memory of the host, by NumPy: a part of the library's stand-in.

It is as strict as the documentation: blocks begin where memory of their own would, are column-major, and each there
once; modes have one cut into sections; what is added has the descriptor of the result.
"""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np

INVALID, UNSUPPORTED = 7, 15


def _arithmetic():
    path = Path(__file__).with_name("cutensor_arithmetic.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arithmetic = _arithmetic()


def in_threes(given):
    return [given[at : at + 3] for at in range(0, len(given), 3)]


class Blocks:
    """The functions of block-sparse tensors; the stand-in of the library derives from it."""

    def _CreateBlockSparseTensorDescriptor(
        self, library, pointer, modes, count, sections, extents, coordinates, strides, dtype
    ):
        assert self.alive[library.value].kind == "handle"
        assert strides is None  # blocks are column-major then
        counts, left = list(sections)[:modes], list(extents)
        cuts = [tuple(left.pop(0) for _ in range(number)) for number in counts]
        blocks = [tuple(coordinates[number * modes : (number + 1) * modes]) for number in range(count)]
        if modes > 32 or not count or min(map(min, cuts), default=1) < 1 or int(dtype) not in (0, 1, 4, 5):
            return UNSUPPORTED
        assert len(set(blocks)) == count
        assert all(0 <= place < number for block in blocks for place, number in zip(block, counts, strict=True))
        return self._new(pointer, kind="blocks", cuts=cuts, blocks=blocks, dtype=int(dtype))

    def _CreateBlockSparseContraction(self, library, pointer, *given):
        *given, d, d_modes, compute = given
        sides = [(self.alive[one.value], tuple(modes), operator) for one, modes, operator in in_threes(given)]
        known = {}
        for side, modes, operator in sides:
            assert operator == 1
            for mode, cut in zip(modes, side.cuts, strict=False):
                if known.setdefault(mode, cut) != cut:
                    return INVALID
        assert self.alive[d.value] is sides[2][0]
        assert tuple(d_modes) == sides[2][1]
        word, dtype = self.word(compute), sides[0][0].dtype
        if word != ("64F" if dtype in (1, 5) else "32F") or len({side.dtype for side, *_ in sides}) > 1:
            return UNSUPPORTED
        needs = [one.value for one, *_ in in_threes(given)]
        return self._new(
            pointer, kind="operation", rest="BlockSparse", inputs=sides, output=(), binary=(), needs=needs, same=False
        )

    def _OperationDescriptorSetAttribute(self, library, operation, attribute, pointer, size):
        assert (attribute.name, size) == ("CUTENSOR_OPERATION_DESCRIPTOR_BLOCKSPARSE_REPRODUCIBLE", 4)
        self.alive[operation.value].same = bool(pointer._obj.value)

    def _BlockSparseContract(self, library, plan, alpha, a, b, beta, c, d, workspace, size, stream):
        made = self.alive[plan.value]
        operation = self.alive[made.operation]
        self.executed.append(("BlockSparse", operation.same, stream.value))
        assert size == made.needed
        assert workspace.value % 256 == 0
        ctypes.memset(workspace.value, 0xFF, size)
        dtype = arithmetic.DTYPES[operation.inputs[0][0].dtype]
        alpha, beta = (arithmetic.strided(one.value, dtype, (), ())[()] for one in (alpha, beta))

        def views(side, modes, addresses):
            for block, address in zip(side.blocks, addresses, strict=False):
                assert address % 256 == 0
                shape = [cut[place] for cut, place in zip(side.cuts, block, strict=True)]
                steps = np.cumprod([1, *shape[:-1]]).tolist() if shape else []
                yield dict(zip(modes, block, strict=False)), arithmetic.strided(address, dtype, shape, steps)

        (of_a, of_b, of_d) = (
            list(views(*side[:2], addresses)) for side, addresses in zip(operation.inputs, (a, b, d), strict=True)
        )
        added = list(views(*operation.inputs[2][:2], c))
        modes = [side[1][: len(side[0].cuts)] for side in operation.inputs]
        for (place, target), (_, more) in zip(of_d, added, strict=True):
            found = np.zeros(target.shape, dtype)
            for at_a, one in of_a:
                for at_b, other in of_b:
                    known = [{**at_a, **place}, {**at_b, **place}, {**at_a, **at_b}]
                    if known[0] == {**place, **at_a} and known[1] == {**place, **at_b} and known[2] == {**at_b, **at_a}:
                        found += arithmetic.einsum([(modes[0], one), (modes[1], other)], modes[2])
            target[...] = alpha * found + (beta * more if beta else 0)
