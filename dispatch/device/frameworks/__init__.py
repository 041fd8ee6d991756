"""Arrays of other libraries as operands: how they become tensors, on which stream, and as what results are returned.

    framework      the interface that each library implements
    frameworks     which library a type of operand belongs to
    torch, cupy, jax, numpy, exchange   one library each; `exchange` is for all others with DLPack

A library's module is imported when its first operand is given; the library itself is imported by then.
"""
