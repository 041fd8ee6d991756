"""Compiling ahead: what is compiled is what requests ask for later."""

import dispatch as dp
from dispatch.cli import precompile
from dispatch.keys import Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.config import CHOSEN, choose
from dispatch.libraries.cutlass.emit.sm90_gemm import emit
from dispatch.ops.matmul import MatmulRequest
from dispatch.ops.matmul.cutlass import spec_of

PLAIN = {(8192, 8192, 64), (2048, 1536, 1024), (128, 512, 16384), (16, 512, 512)}


def test_there_is_a_kernel_for_each_row_and_each_choice():
    rows = [row for row in dp.TABLE.of("matmul") if row.function == "GemmUniversal" and row.min_arch == 90]
    labels = [label for label, _ in precompile.specs()]
    assert labels == [f"{row.name} {config}" for row in rows for config in CHOSEN]
    assert not list(precompile.specs("conv_fwd"))


def test_a_plain_request_takes_a_kernel_that_was_compiled_ahead():
    dev = dp.device("host")
    ahead = {emit(spec).text for _, spec in precompile.specs()}
    a, b = dev.zeros((16, 32), "bf16"), dev.zeros((16, 32), "bf16").T
    request = MatmulRequest(a, b, library="cutlass")
    configs = {choose(*extents, 1, 132) for extents in PLAIN}
    assert configs == set(CHOSEN)
    assert {emit(spec_of(request.form, Arch(90), config)).text for config in configs} <= ahead


def test_kernels_are_counted_once_they_are_ready(monkeypatch):
    asked = []

    def request(source, target, _label):
        asked.append((target, source.text))
        future = compiler.Future()
        future.set_result(b"")
        return future

    monkeypatch.setattr(compiler, "request", request)
    assert precompile.precompile(chosen=list(precompile.specs())[:3]) == 3
    assert {target for target, _ in asked} == {"sm_90a"}
