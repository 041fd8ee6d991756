"""Probe: a request that runs a function of the test's own, through the table, a row and a worker like any other."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dispatch as dp
from dispatch.keys import F32, HOST
from dispatch.request import Plan, Request, Signature


class Probe(Request):
    """Runs `action()` where a product would be computed; its result is what that returns."""

    op = "probe"

    def __init__(self, action: Callable[[], Any] = lambda: None) -> None:
        self.action = action
        self.home = dp.device("host")

    @property
    def device(self) -> dp.Device:
        return self.home

    def signature(self) -> Signature:
        return Signature((F32,))

    def key(self) -> tuple[Any, ...]:
        return (self.home,)

    def arguments(self, outputs: Any) -> tuple[Any, ...]:
        return ()

    def tensors(self) -> Iterator[Any]:
        return iter(())

    def missing(self) -> dict[str, Any]:
        return {}

    def result(self, outputs: Any) -> Any:
        return self.value

    def replace(self, **operands: Any) -> "Probe":
        return self

    def describe(self) -> str:
        return "probe()"


class ProbePlan(Plan):
    __slots__ = ()

    def run(self, request: Probe, outputs: Any) -> None:
        request.value = request.action()


def probe_plan(_request: Probe, _lane: Any, row: dp.Row) -> Plan:
    return ProbePlan(row, capture_safe=False)


NONE = ((dp.Epilogue.NONE,), ((None, None),), ())  # epilogues, scales, rules
ROW = dp.Row("probe", (F32,), (), None, *NONE, HOST, HOST, (), "tests", "probe", probe_plan)


@pytest.fixture
def probe() -> Iterator[type[Probe]]:
    dp.register(ROW)
    yield Probe
    dp.TABLE.unregister(ROW)
