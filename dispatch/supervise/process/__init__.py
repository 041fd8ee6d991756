"""Process isolation: the workers of a supervisor in a child process, and memory that outlives it.

A GPU fault ends CUDA for its process, so requests run in another one. The parent owns the memory and never runs a
kernel; the child maps the memory and runs requests. The files:

    parent's policy         process_pool, monitor, children, child_process, deadlines, owner
    parent's memory         shared_device, chunks
    sending and receiving   sending, runs, remote_queue, messages, mailbox
    after a fault           recovery, repeatable
    in the child            child_main, child_pool, child_workers, child_jobs, child_series, child_device
"""
