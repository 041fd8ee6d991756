"""One Ray for the tests of a worker: two CPUs of this machine, no dashboard; its processes find what tests find."""

import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.fixture(scope="session")
def ray():
    """Ray, which has begun."""
    module = pytest.importorskip("ray", reason="Ray is not installed: pip install 'cudabind[ray]'")
    os.environ.update(QUIET)
    paths = [str(ROOT), str(HERE.parent / "world"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.init(
            num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False,
            object_store_memory=100 << 20, runtime_env={"env_vars": env},
        )  # fmt: skip
    assert sys.executable
    yield module
    module.shutdown()
