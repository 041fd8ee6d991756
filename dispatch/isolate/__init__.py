"""Process isolation: the workers of a supervisor in a child process, and memory that outlives it.

A GPU fault is final for its process, so what may fault runs in another one. The parent owns the memory and never runs a
kernel; the child maps it and runs requests. The rooms: arena (blocks within chunks), memory (devices whose chunks are
shared), wire (messages), child (what runs there), crew (the parent's policy), launch (starting a child), recovery (what
becomes of requests that were in flight).
"""
