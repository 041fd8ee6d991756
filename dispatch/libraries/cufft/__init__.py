"""cuFFT: plans of transforms, the layouts that they can be told, and kernels of this library around them."""
