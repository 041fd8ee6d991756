"""One folder for each library of NVIDIA's: its handles, descriptors and calls, without any op."""
