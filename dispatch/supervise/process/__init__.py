"""Process isolation: the workers of a supervisor in a child process, and memory that outlives it.

A GPU fault is final for its process, so what may fault runs in another one. The parent owns the memory and never runs a
kernel; the child maps it and runs requests. The files: shared_device and chunks (the parent's memory), messages,
child_main and what begins with child_ (what runs in a child), process_pool and monitor (the parent's policy),
remote_queue and sending (requests on their way), recovery and repeatable (what becomes of those that were in flight).
"""
