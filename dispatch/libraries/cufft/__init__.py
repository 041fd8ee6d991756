"""cuFFT: plans of transforms, the layouts that they support, and this library's kernels before and after them."""
