"""Random numbers: cuRAND's generators, and distributions by kernels of this library on Philox.

`Generator` has NumPy's names and hands out places in a sequence; each method is a request of its own, such as
`random_normal`, which says its place by value. docs/random.md has what each gives.
"""

from __future__ import annotations

from dispatch.ops.random.curand import begins_anew as begins_anew
from dispatch.ops.random.curand import by_philox as by_philox
from dispatch.ops.random.curand import curand_on_host as curand_on_host
from dispatch.ops.random.curand import curand_random as curand_random
from dispatch.ops.random.curand import orders_of_library as orders_of_library
from dispatch.ops.random.curand import philox_on_host as philox_on_host
from dispatch.ops.random.curand import some_events as some_events
from dispatch.ops.random.curand import words_of_library as words_of_library
from dispatch.ops.random.distribution_kernels import nvrtc_draws as nvrtc_draws
from dispatch.ops.random.distributions import (
    RandomBetaRequest,
    RandomBinomialRequest,
    RandomChoiceRequest,
    RandomGammaRequest,
    RandomIntegersRequest,
    RandomMultinomialRequest,
    RandomPermutationRequest,
    RandomTruncatedNormalRequest,
    random_beta,
    random_binomial,
    random_choice,
    random_gamma,
    random_integers,
    random_multinomial,
    random_permutation,
    random_truncated_normal,
)
from dispatch.ops.random.philox_kernels import nvrtc_random as nvrtc_random
from dispatch.ops.random.reference import reference as reference
from dispatch.ops.random.reference_distributions import numpy_draws as numpy_draws
from dispatch.ops.random.request import (
    BitGenerator,
    Ordering,
    RandomBitsRequest,
    RandomExponentialRequest,
    RandomLognormalRequest,
    RandomNormalRequest,
    RandomPoissonRequest,
    RandomUniformRequest,
    random_bits,
    random_exponential,
    random_lognormal,
    random_normal,
    random_poisson,
    random_uniform,
)

__all__ = [
    "BitGenerator",
    "Ordering",
    "RandomBetaRequest",
    "RandomBinomialRequest",
    "RandomBitsRequest",
    "RandomChoiceRequest",
    "RandomExponentialRequest",
    "RandomGammaRequest",
    "RandomIntegersRequest",
    "RandomLognormalRequest",
    "RandomMultinomialRequest",
    "RandomNormalRequest",
    "RandomPermutationRequest",
    "RandomPoissonRequest",
    "RandomTruncatedNormalRequest",
    "RandomUniformRequest",
    "random_beta",
    "random_binomial",
    "random_bits",
    "random_choice",
    "random_exponential",
    "random_gamma",
    "random_integers",
    "random_lognormal",
    "random_multinomial",
    "random_normal",
    "random_permutation",
    "random_poisson",
    "random_truncated_normal",
    "random_uniform",
]
