"""CUTLASS templates from Python, compiled by NVRTC alone: no nvcc, no host compiler.

The files: evt (epilogue trees), arithmetic and bounds (their results and errors), visitors (trees in CUTLASS's terms),
config (tiles), emit/ and im2col (sources), headers, compile and compile_child (to cubins, which `nvrtc.kernel_cache`
stores), params, launch and staged (on a GPU). The requests are in `dispatch.ops`. Importing this package loads no part
of CUDA; a kernel is compiled only when a request needs it.
"""
