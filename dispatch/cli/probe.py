"""Trial requests for `explain`: real requests over host memory, in every variant that the command line allows.

The command line may omit the order of operands and the dtypes of an epilogue's operands. All variants are tried, the
likeliest first, until a row takes a request. For an op without a request class, such as one of a user's row, the
table's columns are compared without tensors, and the rules of its rows, which need tensors, are skipped.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass, replace
from itertools import chain, islice, product
from typing import TYPE_CHECKING, Any

from dispatch.cli.einsum_fields import EinsumFields
from dispatch.cli.graph_fields import GraphFields
from dispatch.cli.operands import tensor_of
from dispatch.cli.request_flags import Partial, Spec
from dispatch.core.request import Request, Signature
from dispatch.core.row import Row, refusals
from dispatch.errors import BadRequest, NoRow
from dispatch.ops.contraction.einsum import EinsumRequest
from dispatch.ops.graph import GraphRequest
from dispatch.refusal import Kind, Refusal, distance
from dispatch.table import select
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.cli.operands import RequestDraft
    from dispatch.keys import Arch, Compute, Dtype, Epilogue

__all__ = ["find_row", "find_row_by_dtypes", "request_classes"]

MAX_VARIANTS = 400  # variants that are tried


def request_classes(op: str) -> list[type[Any]]:
    """The request classes of an op: one for nearly every op, none for a user's row without a class."""
    TABLE.of(op)  # imports the op's family
    pending: list[type[Any]] = [Request]
    classes: list[type[Any]] = []
    for kind in pending:
        pending += kind.__subclasses__()
        if getattr(kind, "op", None) == op and is_dataclass(kind) and not inspect.isabstract(kind):
            classes.append(kind)
    classes.sort(key=_has_lists)
    return [GraphFields] if GraphRequest in classes else [EinsumFields] if EinsumRequest in classes else classes


def _has_lists(kind: type[Any]) -> bool:
    """Whether operands of a class are lists, which flags cannot give; classes without lists come first."""
    return any("Sequence[Tensor]" in str(field.type) for field in fields(kind))


def find_row(drafts: list[RequestDraft], arch: Arch) -> tuple[Row | None, Any, NoRow | None]:
    """The first row that takes one of the trial requests, and that request; or else the nearest refusal.

    Raises BadRequest, which names the flag, if no request can be made.
    """
    nearest: tuple[tuple[bool, int], Request] | None = None
    wrong: BadRequest | None = None
    for request in chain.from_iterable(map(_requests, drafts)):
        if isinstance(request, BadRequest):
            wrong = wrong or request
            continue
        for row in select.candidates(request, arch):
            return row, request, None
        reasons = select.no_row(request, arch, suggest=False).nearest_first[0][1]
        far = any(reason.kind is Kind.ARCH for reason in reasons), distance(reasons)
        if nearest is None or far < nearest[0]:
            nearest = far, request
    if nearest is None:
        raise (
            wrong
            if wrong is not None
            else BadRequest("op", "no request", "a request class that can be built from flags")
        )
    return None, None, select.no_row(nearest[1], arch)


def _requests(draft: RequestDraft) -> Iterator[Any]:
    """A request for each variant that the command line allows, or the BadRequest for its fields."""
    try:
        specs = draft.complete()
    except BadRequest as error:
        yield error
        return
    for variant in islice(_variants(draft, specs), MAX_VARIANTS):
        yield _request(draft, variant)


def _request(draft: RequestDraft, specs: dict[str, Spec]) -> Any:
    try:
        request = draft.kind(**_fields(draft, {name: tensor_of(spec) for name, spec in specs.items()}))
        return request.request() if isinstance(request, (GraphFields, EinsumFields)) else request
    except BadRequest as error:
        is_field = error.operand.partition(".")[0] in draft.fields
        flag = f"--{error.operand.replace('_', '-')}" if is_field else error.operand
        return error.about(flag)


def _fields(draft: RequestDraft, tensors: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request, including operands inside other fields."""
    values = {name: _field_value(name, value, tensors) for name, value in draft.values.items()}
    values |= {name: tensor for name, tensor in tensors.items() if "." not in name}
    for path, tensor in tensors.items():
        outer, dot, inner = path.partition(".")
        if dot and isinstance(draft.values.get(outer, {}), dict):
            values.setdefault(outer, {})[inner] = tensor
    return values


def _field_value(name: str, value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, Spec):
        return tensors[name]
    if isinstance(value, Partial):
        inner = {key: _field_value(f"{name}.{key}", part, tensors) for key, part in value.values.items()}
        inner |= {path.partition(".")[2]: tensor for path, tensor in tensors.items() if path.startswith(f"{name}.")}
        return value.kind(**inner)
    if isinstance(value, dict):
        return {key: _field_value(f"{name}.{key}", part, tensors) for key, part in value.items()}
    return value


def _variants(draft: RequestDraft, specs: dict[str, Spec]) -> Iterator[dict[str, Spec]]:
    """The operands in every order, and with every dtype of epilogue operands, that the command line allows."""
    free = [name for name in draft.required if specs[name].order is None and len(specs[name].shape or ()) > 1]
    first: Any = specs[draft.required[0]].dtype if draft.required else None
    dtypes = {name: dict.fromkeys((specs[name].dtype, *_dtypes(draft.kind.op, first))) for name in draft.open_dtypes}
    for orders in _orders([len(specs[name].shape or ()) for name in free]):
        for chosen in product(*dtypes.values()):
            variants = dict(specs)
            for name, order in zip(free, orders, strict=True):
                variants[name] = variants[name]._replace(order=order)
            for name, dtype in zip(dtypes, chosen, strict=True):
                variants[name] = variants[name]._replace(dtype=dtype)
            yield variants


def _orders(ranks: list[int]) -> Iterator[tuple[str, ...]]:
    """The orders to try: the same for all operands, or different ones for the first two."""
    kinds = ("rows", "columns", "channels_last")
    pairs = product(kinds[:2], repeat=min(2, len(ranks)))
    variants = [(kind,) * len(ranks) for kind in kinds] + [(*pair, *("rows",) * (len(ranks) - 2)) for pair in pairs]
    yield from dict.fromkeys(variants)


def _dtypes(op: str, first: Dtype | None) -> Iterator[Dtype]:
    """The dtypes that an op's rows combine with the first operand's dtype."""
    for row in TABLE.of(op):
        if first is None or row.dtypes[0] is first:
            yield from row.dtypes
            for allowed in row.epilogue_dtypes:
                yield from allowed


def find_row_by_dtypes(
    op: str, given: list[Dtype], arch: Arch, compute: Compute | None, epilogue: Epilogue
) -> tuple[Row | None, NoRow | None]:
    """Compare only the columns of an op's rows; dtypes that are not given are taken from the row."""
    text = f"{op}({', '.join(dtype.name for dtype in given)}) {epilogue.name}"
    tried: list[tuple[str, list[Refusal]]] = []
    for row in TABLE.of(op):
        dtypes = (*given[: len(row.dtypes)], *row.dtypes[len(given) :])
        signature = Signature(dtypes, compute, epilogue, row.scales[0])
        bare: Any = replace(row, rules=())  # rules need tensors
        arch_refusal = [] if row.on(arch) else [Refusal(Kind.ARCH, (row.min_arch, row.max_arch), arch)]
        reasons = arch_refusal or refusals(bare, bare, signature)
        if not reasons:
            return row, None
        tried.append((row.name, reasons))
    nearest = min(tried, key=lambda refused: distance(refused[1]))
    return None, NoRow(text, tried, f"{nearest[0]}, which {' and '.join(map(str, nearest[1]))}")
