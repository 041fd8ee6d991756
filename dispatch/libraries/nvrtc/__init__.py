"""Kernels of a user's own, compiled by NVRTC: what a row of an own op names as its call."""
