"""What memory and order are: devices, contexts, streams, tensors, and the exchange with other libraries."""
