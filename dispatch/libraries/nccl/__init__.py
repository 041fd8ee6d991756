"""NCCL: communicators that do not block, their configuration, and a monitor that ends what takes too long."""
