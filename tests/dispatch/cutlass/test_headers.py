"""Headers that are installed in part, or of a release that has them elsewhere."""

import cuda.pathfinder
import pytest

from dispatch.libraries.cutlass import headers


def test_a_header_that_is_not_there_says_what_to_install(tmp_path, monkeypatch):
    version = tmp_path / "cutlass" / "version.h"
    version.parent.mkdir()
    version.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n")
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda _: str(tmp_path))
    find = headers.find.__wrapped__  # what is installed here stays as it was found
    with pytest.raises(headers.HeadersMissing, match=r"__cccl/version\.h cannot be read.*pip install"):
        find()  # older CCCL has its version elsewhere
    cccl = tmp_path / "cuda" / "std" / "__cccl" / "version.h"
    cccl.parent.mkdir(parents=True)
    cccl.write_text("#define CCCL_VERSION 3000000\n")
    with pytest.raises(headers.HeadersMissing, match="cannot be read"):
        find()
