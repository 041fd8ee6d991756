"""Executor of the host: runs requests with NumPy, at once, on the calling thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.device.host_memory import host_shortage
from dispatch.execute.executor import Executor
from dispatch.refusal import calls_user_code

if TYPE_CHECKING:
    from dispatch.core.request import Operands, R_co, Request

__all__ = ["HostExecutor"]


class HostExecutor(Executor):
    """Runs requests with NumPy, at once, on the calling thread."""

    def run(self, request: Request[R_co]) -> R_co:
        outputs = self.outputs(request)
        self.run_into(request, outputs)
        return request.give(outputs)

    @calls_user_code
    def run_into(self, request: Request, outputs: Operands) -> None:
        try:
            self.plan(request).run(request, outputs)
        except MemoryError as error:  # from NumPy, for intermediate arrays
            raise host_shortage(error) from error
