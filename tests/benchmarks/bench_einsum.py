"""Contractions beside torch.einsum, CuPy with its cuTENSOR backend, and nvmath, in one run.

Tables, by `--only`: `f32`, `tf32`, `f64` and `c64`, the contractions of the TCCG benchmark with extents of one about
alike, so that its largest tensor has 2^24 elements; `attention`, scores and sums in f16 and bf16; `networks`, sweeps
over a matrix product state and lattices of tensors: us of the GPU for one call, and TFLOP/s; and `host`, us of the
host for one call of a small contraction of three tensors at ever other addresses.

Each result is held against torch's in double precision first. Candidates take turns, and the median counts. A ratio
is the fastest peer's time over ours: above 1 ours is faster. Of two tensors our other ways stand beside it, and are
no peers: cuTENSOR's `algo="ttgt"`, and cuBLASLt around permutations where the operands need some. The share of the
peak is of the time that a contraction would take at the rate of a large matrix product of its dtype, or at the
bandwidth of a copy, whichever is longer; both are measured in the same run. What fails, a peer that is not installed
too, is noted at the end, and the others go on.
Repeat:
`python tests/benchmarks/bench_einsum.py [--quick] [--device cuda:0|host] [--json FILE] [--only TABLE,TABLE]`. With
`--quick` the largest tensor has 2^22 elements, there are 3 rounds in place of 9, and after 230 seconds no further
contraction is begun, so that all tables have a part of the time; it says how many were left out. On `host` sizes are
tiny, the peer is NumPy, and it shows whether it runs.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from command import command
from report import Report, Target, judge, say
from timing import attempt, geometric_mean, gpu_race, host_race, statement, summary

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLES = ("f32", "tf32", "f64", "c64", "attention", "networks", "host")
TINY, SMALL, LARGEST = 1 << 8, 1 << 22, 1 << 24  # elements of a contraction's largest tensor
SECONDS = 230  # after which --quick begins with no other contraction
ROOM = 2 << 30  # bytes of all operand sets of a case
ADDRESSES = 256
KINDS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "complex64": "c64"}
BOUNDS = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "tf32": 2e-2, "float64": 1e-11, "complex64": 1e-4}
TARGETS = (
    Target("each contraction to the best peer", "least", 0.97, at_least=True),
    Target("geometric mean to torch.einsum", "to torch", 1.3, at_least=True),
    Target("host time of a repeated contraction", "host: dispatch", 0.3, "us", "host: torch"),
)


def shapes_of() -> Any:
    """The module of contractions that the tests have, too."""
    path = Path(__file__).parents[1] / "dispatch" / "contraction_shapes.py"
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Case:
    """A contraction of operands of some shapes; `compute` is dispatch's name of a fast type."""

    spec: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str  # torch's name
    compute: str | None = None

    def __str__(self) -> str:
        what = self.spec if len(self.spec) < 40 else f"{len(self.shapes)} tensors"
        return f"{what} {'x'.join(map(str, self.shapes[0]))} {KINDS[self.dtype]}"

    @property
    def flops(self) -> float:
        """Additions and multiplications of real numbers, in the order that dispatch takes."""
        course = dp.tensors.contract_expression(self.spec, *self.shapes)
        blank = [np.broadcast_to(np.zeros((), "f4"), shape) for shape in self.shapes]
        request = dp.EinsumRequest(course.spec, [dp.device("host").array(one) for one in blank])
        return request.schedule.flops * (4.0 if self.dtype.startswith("complex") else 1.0)


def extents(spec: str, largest: int) -> dict[str, int]:
    """About the same for all modes, multiples of 8 where there is room, so that no tensor has more elements."""
    terms = spec.replace("->", ",").split(",")
    each = largest ** (1 / max(map(len, terms)))
    size = max(2, int(each) // 8 * 8 or int(each))
    return {mode: size for term in terms for mode in term}


def cases(table: str, largest: int) -> Iterator[Case]:
    """The contractions of a table."""
    known, tiny = shapes_of(), largest == TINY
    dtypes = {"f32": "float32", "tf32": "float32", "f64": "float64", "c64": "complex64"}
    if table in dtypes:
        for spec in known.TCCG[:: 12 if tiny else 1]:
            sizes = extents(spec, largest)
            shapes = tuple(tuple(sizes[mode] for mode in term) for term in spec.split("->")[0].split(","))
            yield Case(spec, shapes, dtypes[table], "tf32" if table == "tf32" else None)
    elif table == "attention":
        batch, heads, width = (1, 2, 4) if tiny else (4, 16, 128)
        lengths = (8,) if tiny else (512, 2048) if largest == SMALL else (512, 2048, 4096)
        for length, dtype in itertools.product(lengths, ("float16", "bfloat16")):
            tokens, weights = (batch, length, heads, width), (batch, heads, length, length)
            yield Case("bqhd,bkhd->bhqk", (tokens, tokens), dtype)
            yield Case("bhqk,bkhd->bqhd", (weights, tokens), dtype)
    elif table == "networks":
        for bond in (4,) if tiny else (64, 256, 1024):
            state = (bond, 2, bond)
            yield Case("ab,aic,bid->cd", ((bond, bond), state, state), "complex64")
            yield Case("ab,aic,ijkl,bkd->cjld", ((bond, bond), state, (2, 2, 2, 2), state), "float32")
        for rows, columns, bond in ((2, 2, 2),) if tiny else ((3, 3, 8), (4, 4, 4), (6, 4, 4)):
            spec, shapes = known.lattice(rows, columns, bond)
            yield Case(spec, tuple(shapes), "float32")


def drawn(case: Case, generator: Any) -> list[Any]:
    """Operands in torch's memory of the GPU."""
    import torch

    dtype = getattr(torch, case.dtype)
    found = []
    for shape in case.shapes:
        kind = dtype if dtype.is_complex else torch.float32
        made = torch.randn(shape, generator=generator, device="cuda", dtype=kind)
        found.append((made / max(1.0, math.sqrt(shape[-1]))).to(dtype))
    return found


def calls(case: Case, sets: list[list[Any]], missing: dict[str, str]) -> dict[str, Callable[[int], Any]]:
    """How each library is called over operand set i, which is torch's."""
    import torch

    found: dict[str, Callable[[int], Any]] = {
        "dispatch": lambda i: dp.einsum(case.spec, *sets[i], compute=case.compute),
        "torch": lambda i: torch.einsum(case.spec, *sets[i]),
    }

    def cupy_side() -> Callable[[int], Any]:
        import cupy
        from cupy._core import _accelerator  # its switch: CuPy has no other

        _accelerator.set_routine_accelerators(["cutensor"])
        arrays = [[cupy.from_dlpack(one) for one in some] for some in sets]

        def call(i: int) -> Any:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                return cupy.einsum(case.spec, *arrays[i], optimize="greedy")

        return call

    def nvmath_side() -> Callable[[int], Any]:
        import nvmath

        def call(i: int) -> Any:
            return nvmath.tensor.binary_contraction(case.spec, *sets[i])

        if len(case.shapes) != 2:
            raise ValueError("nvmath.tensor contracts two")
        return call

    def other_way(**choices: Any) -> Callable[[], Callable[[int], Any]]:
        """Our contraction in another way than the table's, refused where that has none."""

        def side() -> Callable[[int], Any]:
            def call(i: int) -> Any:
                return dp.contract(case.spec, *sets[i], compute=case.compute, **choices)

            call(0)
            return call

        return side

    sides: list[tuple[str, Any]] = [("nvmath", nvmath_side)]
    if len(case.shapes) == 2:
        sides += [("dispatch ttgt", other_way(algo="ttgt")), ("dispatch cublasLt", other_way(library="cublasLt"))]
    if case.compute is None and case.dtype != "bfloat16":
        sides.insert(0, ("cupy", cupy_side))
    for name, side in sides:
        call = attempt(name, side, missing)
        if call is not None:
            found[name] = call
    return found


def is_right(case: Case, name: str, call: Callable[[int], Any], sets: list[list[Any]], missing: dict[str, str]) -> bool:
    """Whether a candidate gives what is right over all operand sets; else it is noted why not."""
    import torch

    def work() -> bool:
        double = torch.complex128 if case.dtype.startswith("complex") else torch.float64
        right = torch.einsum(case.spec, *(one.to(double) for one in sets[0]))
        got = call(0)
        got = torch.from_dlpack(got) if not isinstance(got, torch.Tensor) else got
        off = float(torch.linalg.vector_norm(got.to(double) - right) / torch.linalg.vector_norm(right))
        if not off < BOUNDS["tf32" if case.compute else case.dtype]:
            raise AssertionError(f"{off:.2g} off")
        for i in range(len(sets)):
            call(i)
        return True

    return attempt(f"{case}: {name}", work, missing) is not None


class Peaks:
    """What the GPU does at best, measured: operations a second in a product of large matrices, bytes in a copy."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def seconds(self, case: Case, nbytes: int) -> float:
        """What a contraction would take at these rates."""
        return max(case.flops / self.rate("tf32" if case.compute else case.dtype), nbytes / self.rate("copy"))

    def rate(self, kind: str) -> float:
        """That of a dtype, or of "copy"."""
        if kind not in self._rates:
            self._rates[kind] = _rate(kind)
        return self._rates[kind]

    def figures(self) -> dict[str, float]:
        return dict(self._rates)


def _rate(kind: str) -> float:
    """Operations a second of torch's product of matrices of 4096 rows, bytes a second of a copy of 1 GB."""
    import torch

    if kind == "copy":
        x = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
        out, amount = torch.empty_like(x), 2.0 * x.nbytes
        run = lambda: out.copy_(x)  # noqa: E731
    else:
        dtype = getattr(torch, "float32" if kind == "tf32" else kind)
        a = torch.ones((4096, 4096), dtype=dtype, device="cuda")
        amount, run = 2.0 * 4096**3 * (4 if dtype.is_complex else 1), lambda: a @ a
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = math.inf
    for _ in range(4):
        begin.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return amount / best


def on_the_gpu(
    table: str, report: Report, missing: dict[str, str], peaks: Peaks, *, quick: bool, until: float
) -> tuple[list[float], list[float]]:
    """Race the cases of a table; prints a line for each, and gives the ratios of the best peer and of torch to ours."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = table == "tf32"
    generator = torch.Generator("cuda").manual_seed(7)
    rows: dict[str, Any] = {}
    say(f"\n{table}: us of the GPU for one call | ratio of the best peer to ours, TFLOP/s, share of the peak")
    left = 0
    for case in cases(table, SMALL if quick else LARGEST):
        if time.monotonic() > until:
            left += 1
            continue

        def work(case: Case = case) -> bool:
            values = drawn(case, generator)
            nbytes = sum(one.nbytes for one in values)
            count = max(1, min(2 if quick else 4, ROOM // max(nbytes, 1)))
            sets = [values, *([one.clone() for one in values] for _ in range(count - 1))]
            runs = calls(case, sets, missing)
            runs = {name: call for name, call in runs.items() if is_right(case, name, call, sets, missing)}
            if "dispatch" not in runs:
                raise AssertionError("dispatch gives no right result")
            out = runs["dispatch"](0)
            least = peaks.seconds(case, nbytes + out.numel() * out.element_size())
            seconds, how = gpu_race(runs, sets=count, repeats=max(8, count * 2), rounds=3 if quick else 9)
            figures = {name: summary(some) for name, some in seconds.items()}
            ours = figures["dispatch"]["median"]
            peers = {name: figure["median"] for name, figure in figures.items() if not name.startswith("dispatch")}
            ratio = min(peers.values()) / ours if peers else None
            row = {"us": figures, "how": how, "ratio": ratio, "tflops": case.flops / ours / 1e6}
            row |= {"share": least * 1e6 / ours, "to torch": peers["torch"] / ours if "torch" in peers else None}
            rows[f"{case.dtype} {case.spec} {case.shapes}"] = row
            report.put(table, rows)
            cells = "  ".join(f"{name} {figure['median']:8.4g}" for name, figure in figures.items())
            told = "   -" if ratio is None else f"{ratio:4.2f}"
            say(f"{case!s:<46} {cells}  | {told} {row['tflops']:6.1f} {row['share']:4.0%}")
            return True

        if not attempt(f"{table} {case}", work, missing):
            say(f"{case!s:<46} {missing[f'{table} {case}']}")
            torch.cuda.synchronize()  # raises where the GPU is lost: then no other contraction would run
    return summed_up(table, rows, left)


def summed_up(table: str, rows: dict[str, Any], left: int) -> tuple[list[float], list[float]]:
    """The line of a table's figures; the ratios of the best peer and of torch."""
    ratios = {spec: row["ratio"] for spec, row in rows.items() if row["ratio"] is not None}
    to_torch = [row["to torch"] for row in rows.values() if row["to torch"] is not None]
    if ratios:
        worst = min(ratios, key=lambda spec: ratios[spec])
        slow = sum(ratio < 0.97 for ratio in ratios.values())
        share = statistics.median(row["share"] for row in rows.values())
        say(
            f"{table}: {len(rows)} contractions; geometric mean to torch {geometric_mean(to_torch):.2f}, to the best"
            f" peer {geometric_mean(list(ratios.values())):.2f}; {slow} below 0.97, the least {ratios[worst]:.2f} of"
            f" {worst[:60]}; median share of the peak {share:.0%}"
        )
    if left:
        say(f"{table}: {left} contractions were left out, for the time is up")
    return list(ratios.values()), to_torch


def on_the_host(device: dp.Device, report: Report, missing: dict[str, str], *, quick: bool) -> dict[str, float]:
    """The host's time of one call of a contraction of three small tensors, at ever other addresses."""
    spec, shapes = "abi,ij,jc->abc", ((4, 8, 16), (16, 16), (16, 8))
    values = [np.random.default_rng(7).standard_normal(shape).astype("f4") for shape in shapes]
    ours = itertools.cycle([[device.array(one) for one in values] for _ in range(ADDRESSES)]).__next__
    candidates = [statement("dispatch", "einsum(spec, *x())", einsum=dp.einsum, spec=spec, x=ours)]
    if device.is_host:
        candidates.append(statement("numpy", "einsum(spec, *x)", einsum=np.einsum, spec=spec, x=values))
    else:

        def torch_side() -> Any:
            import torch

            made = [[torch.from_numpy(one).cuda() for one in values] for _ in range(ADDRESSES)]
            x = itertools.cycle(made).__next__
            return [
                statement("torch", "einsum(spec, *x())", einsum=torch.einsum, spec=spec, x=x),
                statement("dispatch over torch", "einsum(spec, *x())", einsum=dp.einsum, spec=spec, x=x),
            ]

        def cupy_side() -> Any:
            import cupy

            x = itertools.cycle([[cupy.asarray(one) for one in values] for _ in range(ADDRESSES)]).__next__
            return [statement("cupy", "einsum(spec, *x())", einsum=cupy.einsum, spec=spec, x=x)]

        for name, side in (("torch", torch_side), ("cupy", cupy_side)):
            candidates += attempt(name, side, missing) or []
    for candidate in candidates:
        attempt(candidate.name, lambda candidate=candidate: candidate.burst(ADDRESSES), missing)
    device.synchronize()
    calls_of = 16 if device.is_host else 100
    seconds, failed = host_race(candidates, device.synchronize, bursts=3 if quick else 30, calls=calls_of)
    missing.update(failed)
    figures = {name: summary(some) for name, some in seconds.items()}
    cells = " | ".join(f"{name} {figure['median']:.3g}" for name, figure in figures.items())
    say(f"\nhost: us of the host for one contraction of three small tensors: {cells}")
    report.put("host", {"us": figures, "missing": missing})
    return {f"host: {name}": figure["median"] for name, figure in figures.items()}


def measure(device: dp.Device, quick: bool, report: Report, wanted: list[str]) -> None:
    """All tables that are wanted; the GPU's are those of torch's current device."""
    missing: dict[str, str] = {}
    if device.is_host:
        on_the_host(device, report, missing, quick=True)
        rng = np.random.default_rng(7)
        for table in TABLES[:-1]:
            for case in cases(table, TINY):
                tried = replace(case, dtype="float64", compute=None)
                arrays = [rng.standard_normal(shape) for shape in tried.shapes]
                got = dp.einsum(tried.spec, *map(device.array, arrays)).numpy()
                np.testing.assert_allclose(got, np.einsum(tried.spec, *arrays, optimize=True), atol=1e-9)
                assert tried.flops > 0
        return
    begun = time.monotonic()
    figures: dict[str, float] = {}
    if "host" in wanted:
        figures = attempt("host", lambda: on_the_host(device, report, missing, quick=quick), missing) or {}
    import torch

    ratios: list[float] = []
    to_torch: list[float] = []
    peaks, tables = Peaks(), [table for table in TABLES[:-1] if table in wanted]
    with torch.cuda.stream(torch.cuda.Stream()):  # the default one takes no recording
        for number, table in enumerate(tables):
            now = time.monotonic()
            share = (begun + SECONDS - now) / (len(tables) - number) if quick else math.inf
            best, theirs = on_the_gpu(table, report, missing, peaks, quick=quick, until=now + share)
            ratios += best
            to_torch += theirs
    rates = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in peaks.figures().items())
    say(f"\nmeasured peaks, TFLOP/s, and TB/s of a copy: {rates}")
    report.put("peaks", peaks.figures())
    if ratios:
        figures |= {"least": min(ratios), "to torch": geometric_mean(to_torch)}
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("missing", missing)
    judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(measure, __doc__, tables=TABLES)
