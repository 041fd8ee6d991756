"""Workers in threads and in processes, their queues, and what tells of them."""
