"""Rows of the generator: cuQuantum, the simulation of quantum circuits."""

from __future__ import annotations

from cudabind.gen.row import Row

_DOCS = "https://docs.nvidia.com/cuda/cuquantum/latest/"


def _row(
    module: str,
    headers: tuple[str, ...],
    status: str,
    success: str,
    text: str,
    error: str,
    structs: tuple[str, ...] = (),
) -> Row:
    return Row(
        module=module,
        headers=headers,
        wheel=module,
        docs=f"{_DOCS}{module}/",
        prefixes=(module,),
        status=status,
        success=success,
        text=text,
        error=error,
        uses=("cuda_types",),
        renumbered=(status,),
        left_out=dict.fromkeys(structs, "a constant struct, for C programs to copy: its members are null"),
    )


# fmt: off
ROWS = (
    _row("custatevec",   ("custatevec.h", "custatevecEx.h", "custatevecEx_ext.h"),
         "custatevecStatus_t",   "CUSTATEVEC_STATUS_SUCCESS",   "custatevecGetErrorString",   "CustatevecError"),
    _row("cutensornet",  ("cutensornet/types.h", "cutensornet/typesDistributed.h", "cutensornet.h"),
         "cutensornetStatus_t",  "CUTENSORNET_STATUS_SUCCESS",  "cutensornetGetErrorString",  "CutensornetError"),
    _row("cudensitymat", ("cudensitymat.h",),
         "cudensitymatStatus_t", "CUDENSITYMAT_STATUS_SUCCESS", "",                           "CudensitymatError",
         tuple(f"cudensitymat{kind}CallbackNone" for kind in ("Scalar", "Tensor", "ScalarGradient", "TensorGradient"))),
    _row("cupauliprop",  ("cupauliprop.h",),
         "cupaulipropStatus_t",  "CUPAULIPROP_STATUS_SUCCESS",  "cupaulipropGetErrorString",  "CupaulipropError"),
    _row("custabilizer", ("custabilizer.h",),
         "custabilizerStatus_t", "CUSTABILIZER_STATUS_SUCCESS", "custabilizerGetErrorString", "CustabilizerError"),
)
# fmt: on
