"""CUPTI: what the GPU did and when, by its activity records."""
