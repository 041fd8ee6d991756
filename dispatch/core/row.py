"""Row: one line of the table. Table: the rows in order of priority, including those that users add.

The files of table/ hold the rows; `select.py` searches them. Adding a duplicate, or a row that can never be
reached, raises BadRow. Nothing here knows an op or calls a library.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dispatch.checks import names_arguments
from dispatch.core.fusion import NOTHING, Fusion
from dispatch.errors import BadRow, error_text
from dispatch.keys import HOST, Arch, Compute, Dtype, Epilogue
from dispatch.refusal import Kind, Refusal, any_rule_refuses, reason_of, rule_refusal

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from dispatch.core.fusion import Modes
    from dispatch.core.request import Plan, Request, Signature

__all__ = ["ENTRY_POINTS", "FAST", "Row", "Rule", "Table", "accepts", "refusals"]

ENTRY_POINTS = "dispatch.rows"  # packages add rows by an entry point of this group; it names one Row or several
Rule = Callable[[Any], str]  # from a request to the reason for a refusal ("needs …, has …"), or "" if there is none


@names_arguments
@dataclass(frozen=True)
class Row:
    """The requests that one library function takes, and the function of `ops/` that calls it.

    Attributes:
        op: the op's name, as `Request.op`.
        dtypes: of the operands, in the op's order (matmul: a, b, c, d).
        compute: the compute type; rows with a fast or an emulated one take only requests that name it.
        rules: further conditions; each returns why it does not take a request, or "" if it takes it.
        min_arch, max_arch: the oldest and the newest architecture, None for no limit; HOST for both on the host.
        min_version: the oldest version of the library; empty for any.
        library, function: the library function that the plan calls, named as in `cudabind.sys`.
        call: makes the plan.
        run_on: the GPUs on which its cases have passed; empty if no machine has run it yet.
        fusion: the operations that the function fuses with its product; None if the op has no such choices.
        variant: a word that distinguishes the row from others of the same op and dtypes.
        note: unexpected properties of its results; empty if there are none.
        stands_for: for a host row, the library whose rows it imitates; it takes requests that name that library.
        nonfinite: the handling of NaN and infinities; `nonfinite.py` fills it in for the rows of this package.
    """

    op: str
    dtypes: tuple[Dtype, ...]
    compute: Compute | None
    rules: tuple[Rule, ...]
    min_arch: Arch
    max_arch: Arch | None
    min_version: tuple[int, ...]
    library: str
    function: str
    call: Callable[[Any, Any, Row], Plan] = field(compare=False)
    run_on: tuple[str, ...] = field(default=(), compare=False)
    fusion: Fusion | None = None
    variant: str = field(default="", compare=False)
    note: str = field(default="", compare=False)
    stands_for: str = field(default="", compare=False)
    nonfinite: str = field(default="", compare=False)

    @property
    def epilogues(self) -> tuple[Epilogue, ...]:
        return (self.fusion or NOTHING).epilogues

    @property
    def epilogue_dtypes(self) -> tuple[tuple[Dtype, ...], ...]:
        return (self.fusion or NOTHING).epilogue_dtypes

    @property
    def scales(self) -> tuple[Modes, ...]:
        return (self.fusion or NOTHING).scales

    @cached_property
    def name(self) -> str:
        """Short, readable and unique: op, dtypes, compute type, scale modes, variant, architecture, library."""
        *inputs, output = map(str, self.dtypes)
        added = "".join(f"+{dtype}" for dtype in inputs[2:] if dtype != output)  # a C whose dtype is not D's
        compute = f" {self.compute.name.removeprefix('COMPUTE_')}" if self.compute is not None else ""
        # SCALAR_32F, one factor for the whole tensor, has the value 0 and is left out.
        pairs = {"·".join(dict.fromkeys(mode.name for mode in pair if mode)) for pair in self.scales}
        scale = "".join(f" {pair}" for pair in sorted(pairs) if pair)
        product = "×".join(inputs[:2])  # noqa: RUF001 - a multiplication sign, not a letter
        variant = f" {self.variant}" if self.variant else ""
        return f"{self.op} {product}{added}→{output}{compute}{scale}{variant} {self.min_arch} {self.library}"

    def __repr__(self) -> str:
        return f"<Row {self.name}>"

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that two rows must share if one takes requests of the other."""
        return self.op, self.dtypes, self.compute

    def of(self, library: str | None) -> bool:
        """Whether the row may serve requests that name this library; None stands for any."""
        return library is None or library in (self.library, self.stands_for)

    def on(self, arch: Arch) -> bool:
        """Whether the row is for an architecture; the host's rows are only for the host."""
        if self.min_arch == HOST or arch == HOST:
            return self.min_arch == arch
        return arch >= self.min_arch and (self.max_arch is None or arch <= self.max_arch)

    def covers(self, other: Row) -> bool:
        """Whether this row takes every request that the other one takes."""
        return (
            self.kind == other.kind
            and self.of(other.stands_for or other.library)
            and all(
                set(mine) >= set(others)
                for mine, others in zip(self.epilogue_dtypes, other.epilogue_dtypes, strict=False)
            )
            and set(self.epilogues) >= set(other.epilogues)
            and set(self.scales) >= set(other.scales)
            and (self.fusion or NOTHING).trees >= (other.fusion or NOTHING).trees
            and set(self.rules) <= set(other.rules)
            and self.on(other.min_arch)
            and (self.max_arch is None or (other.max_arch is not None and self.max_arch >= other.max_arch))
            and self.min_version <= other.min_version
        )


def _check(row: Any, others: Iterable[Row], *, last: bool) -> None:
    """Raise BadRow for a malformed or duplicate row, or one that comes last and can never be reached."""
    if not isinstance(row, Row):
        raise BadRow(f"{row!r} is a {type(row).__name__}, not a Row")
    from dispatch.core.row_columns import check_columns  # imported with the first row, not by `import dispatch`

    check_columns(row)
    for other in others:
        if other == row:
            reason = (
                row.name if other.name == row.name else f"{row.name} accepts the same requests as {other.name}, which"
            )
            raise BadRow(f"{reason} is already in the table")
        if last and other.covers(row):
            raise BadRow(f"{row.name} can never be reached: {other.name} before it takes all its requests")


def _check_all(rows: Iterable[Row]) -> None:
    """`_check` each row against those before it."""
    # Only rows of one kind can repeat or cover each other; comparing only within a kind takes a tenth of the time.
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        group = groups.setdefault(getattr(row, "kind", ()), [])  # `_check` refuses objects that are not Rows
        _check(row, group, last=True)
        group.append(row)


class Table:
    """The rows in order of priority: those that users registered, the latest first, then those of this package.

    `modules` maps modules to their ops, in order of priority; the ROWS of each come after the given rows. Several
    modules may have rows of one op. A module is imported when one of its ops is first looked up, so `import dispatch`
    is quick.
    """

    def __init__(self, rows: Iterable[Row], modules: Mapping[str, Iterable[str]] = MappingProxyType({})) -> None:
        self._modules = {module: frozenset(ops) for module, ops in modules.items()}
        self._unloaded = tuple(self._modules)  # not imported yet
        self._imported: dict[str, tuple[Row, ...]] = dict.fromkeys(modules, ())
        self._importing: set[str] = set()
        self.lock = threading.RLock()  # held while rows are added or removed
        self._rows: tuple[Row, ...] = ()
        self._by_op: dict[str, tuple[Row, ...]] = {}
        self._by_dtypes: dict[tuple[object, ...], tuple[Row, ...]] = {}
        self._loaded = self._loading = False
        self._entries: set[tuple[str, str]] = set()  # the entry points loaded so far, in case Ctrl-C ends the loading
        self.broken: tuple[str, ...] = ()  # the errors of packages whose rows could not be added
        self.watchers: list[Callable[[], None]] = []  # called when the rows change, to discard cached plans
        _check_all(initial := tuple(rows))
        self._set(initial)

    def __repr__(self) -> str:
        """The number of rows imported so far; unlike iteration and `len`, this imports nothing."""
        later = f"; {len(self._unloaded)} more files are read when they are needed" if self._unloaded else ""
        return f"<Table: {len(self._rows)} rows of {len(self._by_op)} ops{later}>"

    def _repr_html_(self) -> str:
        from html import escape

        lines = (f"<tr><td>{escape(op)}</td><td>{len(rows)}</td></tr>" for op, rows in self._by_op.items())
        head = f"<code>{escape(repr(self))}</code><table><tr><th>op</th><th>rows</th></tr>"
        return f"<div>{head}{''.join(lines)}</table></div>"

    def register(self, *rows: Row) -> None:
        """Add rows before all others. BadRow for a malformed or duplicate row; then none is added."""
        with self.lock:
            before = self._rows
            try:
                for row in rows:
                    self._add(row)
            except BadRow:
                self._set(before)
                raise
        for watcher in list(self.watchers):
            watcher()

    def unregister(self, row: Row) -> None:
        """Remove a row; BadRow if it is not in the table."""
        if not isinstance(row, Row):
            raise BadRow(f"{row!r:.80} is a {type(row).__name__}, not a Row of the table")
        with self.lock:
            rows = tuple(r for r in self._rows if r != row or r.name != row.name)  # == ignores the variant
            if len(rows) == len(self._rows):
                raise BadRow(f"{row.name} is not in the table")
            self._set(rows)
        for watcher in list(self.watchers):
            watcher()

    def _add(self, row: Any) -> None:
        """Put a user's row before all others."""
        _check(row, self._rows, last=False)
        self._set((row, *self._rows))

    def _set(self, rows: tuple[Row, ...]) -> None:
        self._rows = rows
        by_op = {row.op: list[Row]() for row in rows}
        for row in rows:
            by_op[row.op].append(row)
        self._by_op = {op: tuple(of_op) for op, of_op in by_op.items()}
        self._by_dtypes = {}  # last: a thread that fills the old dict may have read the old rows

    def of(self, op: str) -> tuple[Row, ...]:
        """The rows of an op, including those of installed packages."""
        if not self._loaded:
            self._load()
        for module in self._unloaded:
            if op in self._modules[module]:
                self._import(module)
        return self._by_op.get(op, ())

    def with_dtypes(self, op: str, dtypes: tuple[Dtype | None, ...]) -> Iterator[Row]:
        """The rows of an op with these dtypes; a module is imported only after all earlier rows were yielded."""
        if not self._loaded:
            self._load()
        yielded: set[int] = set()
        while True:
            modules = [module for module, ops in self._modules.items() if op in ops]
            unloaded = [module for module in modules if module in self._unloaded]
            if unloaded == modules[len(modules) - len(unloaded) :]:  # the imported modules are the first ones
                for row in self._matching(op, dtypes):
                    if id(row) not in yielded:
                        yielded.add(id(row))
                        yield row
            if unloaded:
                self._import(unloaded[0])
            if not unloaded or unloaded[0] in self._unloaded:  # all are imported, or the module is being imported now
                return

    def _matching(self, op: str, dtypes: tuple[Dtype | None, ...]) -> tuple[Row, ...]:
        """The matching rows that are imported so far."""
        cached = self._by_dtypes
        key = (op, *(None if dtype is None else dtype.cuda for dtype in dtypes))
        if (matching := cached.get(key)) is None:
            rows = self._by_op.get(op, ())
            matching = cached[key] = tuple(row for row in rows if row.dtypes == dtypes[: len(row.dtypes)])
        return matching

    def _load(self) -> None:
        """Add the rows of installed packages; a broken package causes a warning and adds no rows."""
        with self.lock:
            if self._loaded or self._loading:  # a package that reads the table while it is loading sees the rows so far
                return
            self._loading = True
            try:
                self._load_entries()
                self._loaded = True
            finally:
                self._loading = False
        for text in self.broken:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _import(self, module: str) -> None:
        """Add the rows of a module at its place in the order of the modules, whatever the order of the imports."""
        with self.lock:
            if module in self._importing or module not in self._unloaded:
                return  # imported already, or being imported by a caller
            self._importing.add(module)
            try:
                new_rows = tuple(import_module(module).ROWS)
                _check_all(new_rows)
                names = list(self._imported)
                later_rows = {id(row) for name in names[names.index(module) :] for row in self._imported[name]}
                place = next((i for i, row in enumerate(self._rows) if id(row) in later_rows), len(self._rows))
                self._set((*self._rows[:place], *new_rows, *self._rows[place:]))
                self._imported[module] = new_rows
                self._unloaded = tuple(name for name in self._unloaded if name != module)
            finally:
                self._importing.discard(module)

    def _import_all(self) -> None:
        for module in tuple(self._unloaded):
            self._import(module)

    def _load_entries(self) -> None:
        from importlib.metadata import entry_points  # imported at first use: it costs more than the rest of this file

        for entry in entry_points(group=ENTRY_POINTS):
            if (entry.name, entry.value) not in self._entries:
                self._load_entry(entry)
                self._entries.add((entry.name, entry.value))

    def _load_entry(self, entry: EntryPoint) -> None:
        """Add the rows that an entry point names, all or none; a broken package does not affect the others."""
        before = self._rows
        try:
            loaded = entry.load()
            for row in (loaded,) if isinstance(loaded, Row) else loaded:
                self._add(row)
        except KeyboardInterrupt:  # the next access to the table resumes at this entry
            self._set(before)
            raise
        except BaseException as error:  # noqa: BLE001  # importing runs foreign code, which may even call sys.exit
            self._set(before)
            text = f"{type(error).__name__}: {error_text(error, str)}"
            self.broken += (f"entry point {entry.name} = {entry.value} of {ENTRY_POINTS} adds no rows: {text}",)

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.op for row in self))

    def __iter__(self) -> Iterator[Row]:
        self._load()
        self._import_all()
        return iter(self._rows)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Row:
        return tuple(self)[index]


def accepts(row: Row, request: Request, wanted: Signature) -> bool:
    """Whether a row takes a request, regardless of architecture and library version."""
    count = len(row.dtypes)
    return (
        wanted.dtypes[:count] == row.dtypes
        and row.of(wanted.library)
        and (row.compute is wanted.compute or (wanted.compute is None and row.compute not in FAST))
        and _fuses(row.fusion or NOTHING, wanted, wanted.dtypes[count:])
        and not any_rule_refuses(row.rules, request)
    )


def _fuses(fusion: Fusion, wanted: Signature, added: tuple[Dtype | None, ...]) -> bool:
    is_scaled = not wanted.scales or wanted.scales in fusion.scales
    pairs = zip(fusion.epilogue_dtypes, added, strict=False)
    return fusion.takes(wanted.epilogue) and is_scaled and all(one is None or one in allowed for allowed, one in pairs)


def refusals(row: Row, request: Request, wanted: Signature, asked: dict[Rule, str] | None = None) -> list[Refusal]:
    """Why a row does not take a request; empty if `accepts` is true. `asked` caches the rules' answers over rows."""
    reasons, asked, count = [], {} if asked is None else asked, len(row.dtypes)
    if not row.of(wanted.library):
        reasons.append(Refusal(Kind.OTHER_LIBRARY, row.stands_for or row.library, wanted.library))
    if wanted.dtypes[:count] != row.dtypes:
        reasons.append(Refusal(Kind.DTYPES, row.dtypes, wanted.dtypes[:count]))
    for allowed, dtype in zip(row.epilogue_dtypes, wanted.dtypes[count:], strict=False):
        if dtype is not None and dtype not in allowed:
            reasons.append(Refusal(Kind.EPILOGUE_DTYPE, allowed, dtype))
    if wanted.compute is not row.compute and (wanted.compute is not None or row.compute in FAST):
        reasons.append(Refusal(Kind.COMPUTE, row.compute, wanted.compute))
    if not (row.fusion or NOTHING).takes(wanted.epilogue):
        kind = Kind.EPILOGUE if isinstance(wanted.epilogue, Epilogue) else Kind.TREE
        reasons.append(Refusal(kind, row.epilogues, wanted.epilogue))
    if wanted.scales and wanted.scales not in row.scales:
        reasons.append(Refusal(Kind.SCALES, row.scales, wanted.scales))
    answers = [_ask(rule, request, asked, sure=not reasons) for rule in row.rules]  # a generator bars StopIteration
    return reasons + [rule_refusal(text) for text in answers if text]


def _ask(rule: Rule, request: Request, asked: dict[Rule, str], *, sure: bool) -> str:
    """A rule's answer. A rule may rely on the columns, so it may raise if they already refuse the request."""
    if rule not in asked:
        try:
            asked[rule] = reason_of(rule, rule(request))
        except Exception:
            if sure:
                raise
            return ""
    return asked[rule]


FAST = tuple(one for one in Compute if "FAST" in one.name or "EMULATED" in one.name or one is Compute.COMPUTE_16F)
