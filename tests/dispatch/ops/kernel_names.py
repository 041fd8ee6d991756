"""Products whose kernels are known by their names: stand-ins for cuBLASLt's heuristic, and for an executor."""

from __future__ import annotations

import ctypes

import dispatch as dp
from cudabind.sys import cublasLt as lt
from dispatch.keys import Epilogue
from dispatch.ops.matmul import cublaslt, cublaslt_matmul

# Kernels as cuBLASLt 13.1 names them on an H200.
FUSED = "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_relubias_TNT"
PLAIN = "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_splitK_TNT"
REDUCE = "_ZN8cublasLt19splitKreduce_kernelILi32ELi16Ei{}Lb1ELb1ELb0ELb0EEEvNS_18cublasSplitKParamsIT4_EEPKT2_PKT8_PT7_"
IN_F32 = (REDUCE.format("f13__nv_bfloat16fS1_Lb0EfS1_S1_"), REDUCE.format("f6__halffS1_Lb0EfS1_S1_"))
THEN_16 = (REDUCE.format("f13__nv_bfloat16fS1_Lb0ES1_S1_S1_"), REDUCE.format("f6__halffS1_Lb0ES1_S1_S1_"))
FROM_16 = REDUCE.format("13__nv_bfloat16S1_fS1_Lb0ES1_S1_S1_")
BEHIND = (
    "_ZN8cublasLt8epilogue4impl12globalKernelILi8ELi32E13__nv_bfloat16S3_fLb1ELb1ELi1EEEviilPT1_18cublasLtEpilogue_t"
)


class Library:
    """Stands for the heuristic and for what its algorithms launch: numbers by which both know them."""

    def __init__(self, monkeypatch, *launches):
        self.launches, self.asked, self.looks = launches, [], []
        monkeypatch.setattr(cublaslt, "heuristic", self.heuristic)
        monkeypatch.setattr(cublaslt, "suggested_algo", lambda *_: None)  # test_matmul_rounded.py asks for those
        monkeypatch.setattr(cublaslt, "kernels", self.kernels)

    def heuristic(self, _handle, _descriptors, _problem, _workspace, count=1):
        self.asked.append(count)
        results = [lt.cublasLtMatmulHeuristicResult_t() for _ in self.launches[:count]]
        for number, result in enumerate(results):
            result.workspaceSize = number
        return results

    def kernels(self, _executor, call):
        self.looks.append(call.args[-2].value)  # the bytes of workspace
        return self.launches[self.looks[-1]]


class ExecutorOf:
    """An executor without a GPU."""

    stream = algorithms = None
    target = ctypes.c_void_p()

    def __init__(self):
        self.handles = {"cublasLt": lt.cublasLtHandle_t()}

    def refuse_capture(self, what):
        """Nobody captures it."""


def bound(**choices):
    dev = dp.device("host")
    fields = {"epilogue": Epilogue.RELU_BIAS, "bias": dev.zeros((48,), "bf16"), "autotune": False} | choices
    request = dp.MatmulRequest(dev.zeros((32, 64), "bf16"), dev.zeros((64, 48), "bf16"), **fields)
    row = next(row for row in dp.TABLE.of("matmul") if row.dtypes == request.signature().dtypes[:4])
    executor = ExecutorOf()
    executor.device = dev
    executor.workspace = type("W", (), {"nbytes": 1 << 25, "c_ptr": None})
    return cublaslt_matmul(request, executor, row)


def taken(plan):
    return plan._calls[0].args[-2].value
