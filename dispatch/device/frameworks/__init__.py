"""Operands of other libraries as they are: what becomes a tensor of ours, on which stream, and what is given back.

    framework      what each of them is asked
    frameworks     which library a type of operand belongs to
    torch, cupy, jax, numpy, exchange   one library each; `exchange` is for all with DLPack

None of them is imported until an operand of it is given, and then it is there already.
"""
