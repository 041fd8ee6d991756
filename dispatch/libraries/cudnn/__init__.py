"""Code that all ops with cuDNN rows share. Importing this package loads no library.

`handle` is an executor's cuDNN handle; graph, modes, convolve and reference call no library; descriptors, lower,
engines and plan build and run a graph.
"""
