"""The rows of the generator by area, one file each; `cudabind.gen.libraries` joins them."""
