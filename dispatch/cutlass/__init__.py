"""CUTLASS templates from Python, compiled by NVRTC alone: no nvcc, no host compiler.

The rooms: evt (epilogue trees), arithmetic and bounds (what they compute, and how exactly), visitors (in CUTLASS's
terms), config (tiles), emit, emit80, emit100, emit_grouped, im2col, emit_conv and emit_conv80 (sources), headers,
compile, child, store and warm (to cubins, and their cache), params and launch (on a GPU). The requests are in
`dispatch.ops`. Importing this loads nothing of CUDA; nothing is compiled before a request asks for it.
"""
