"""Arrays of other libraries as operands: conversion to tensors, stream order, and conversion of results.

    framework      the interface that each library implements
    frameworks     which library a type of operand belongs to
    torch, cupy, jax, numpy, exchange   one library each; `exchange` is for all others with DLPack

A library's module is imported when its first operand is passed; the library itself is already imported then.
"""
