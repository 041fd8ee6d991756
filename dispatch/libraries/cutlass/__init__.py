"""CUTLASS templates from Python, compiled by NVRTC alone: no nvcc, no host compiler.

The files: evt (epilogue trees), arithmetic and bounds (what they compute, and how exactly), visitors (in CUTLASS's
terms), config (tiles), emit/ and im2col (sources), headers, compile and compile_child (to cubins, which
`nvrtc.kernel_cache` keeps), params, launch and staged (on a GPU). The requests are in `dispatch.ops`. Importing
this loads nothing of CUDA; nothing is compiled before a request asks for it.
"""
