"""Requests of CUTLASS's convolutions, and images with channels last for them."""

from functools import partial

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Compute
from dispatch.ops.conv import channels_last

TF32 = Compute.COMPUTE_32F_FAST_TF32
Fwd, BwdData, BwdFilter = (
    partial(request, library="cutlass")
    for request in (dp.ConvFwdRequest, dp.ConvBwdDataRequest, dp.ConvBwdFilterRequest)
)
conv_fwd, conv_bwd_data, conv_bwd_filter = (
    partial(function, library="cutlass") for function in (dp.conv_fwd, dp.conv_bwd_data, dp.conv_bwd_filter)
)


@pytest.fixture
def host():
    return dp.device("host")


def image(host, values, dtype="bf16"):
    return channels_last(host.array(values, dtype))


def zeros(host, *shape, dtype="bf16"):
    return image(host, np.zeros(shape), dtype)


def of(host, dtype="bf16", **choices):
    x, w = zeros(host, 2, 8, 9, 9, dtype=dtype), zeros(host, 16, 8, 3, 3, dtype=dtype)
    return dp.ConvFwdRequest(x, w, **choices)
