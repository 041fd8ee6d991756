"""NVML: what the driver knows of the GPUs without touching them."""
