"""CUTLASS templates from Python, compiled by NVRTC alone: no nvcc, no host compiler.

The rooms: evt (epilogue trees) arithmetic (what they compute) visitors (in CUTLASS's terms) emit (a kernel's source)
headers compile child store (to a cubin, and its cache) params launch (on a GPU) gemm (requests). Importing this loads
nothing of CUDA; nothing here is compiled before a request asks for it.
"""
