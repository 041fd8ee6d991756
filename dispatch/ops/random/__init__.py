"""Random numbers: cuRAND's generators, and further distributions with kernels of this library, based on Philox.

`Generator` has NumPy's method names and assigns positions in a sequence. Each method makes a request, such as
`random_normal`, that contains its position as a value. docs/random.md describes the results.
"""

from __future__ import annotations

from dispatch.ops.random.curand import curand_has_mean as curand_has_mean
from dispatch.ops.random.curand import curand_has_ordering as curand_has_ordering
from dispatch.ops.random.curand import curand_has_word_size as curand_has_word_size
from dispatch.ops.random.curand import curand_on_host as curand_on_host
from dispatch.ops.random.curand import curand_random as curand_random
from dispatch.ops.random.curand import philox_on_host as philox_on_host
from dispatch.ops.random.curand import restarts_sequence as restarts_sequence
from dispatch.ops.random.curand import uses_philox as uses_philox
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
