"""Workers in threads and in processes, their queues, and their statistics, traces, journals and status server."""
