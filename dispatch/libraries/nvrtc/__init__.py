"""Users' own kernels, compiled by NVRTC: a row of a user's own op names such a kernel as its call."""
