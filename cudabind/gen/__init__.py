"""Headers to bindings: `python -m cudabind.gen` writes `cudabind/sys` from NVIDIA's headers with libclang.

`libraries` has one row per library, `parse` reads a header into a small model, `emit` writes the model as Python, and
`__main__` is the command line. Used by developers and CI only: nothing in here is imported at run time.
"""
