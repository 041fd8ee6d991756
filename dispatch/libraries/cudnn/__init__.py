"""What every op that ends in cuDNN shares. Importing this package loads no library.

`handle` is an executor's cuDNN handle; graph, modes, convolve and reference are pure; descriptors, lower, engines and
plan carry a graph out.
"""
