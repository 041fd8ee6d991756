"""C++ sources of CUTLASS kernels, by architecture and kind."""
