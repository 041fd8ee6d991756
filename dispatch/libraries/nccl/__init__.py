"""NCCL: nonblocking communicators, their configuration, and a monitor that aborts calls that take too long."""
