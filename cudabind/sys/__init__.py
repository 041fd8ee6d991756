"""Generated modules, one per library, in NVIDIA's spelling: `from cudabind.sys import cublasLt`.

Written by `python -m cudabind.gen` from NVIDIA's headers, called by users and by `dispatch`, never edited by hand.
Each module's functions bind at their first call.
"""
