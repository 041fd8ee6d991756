"""The matrix products that bench_matmul times: the linear layers of published language models, by name.

A layer is y = x·Wᵀ with W stored (out, in), as F.linear has it: forward m = tokens, n = out, k = in; dgrad is dx = dy·W
and wgrad dW = dyᵀ·x. A fused layer counts once, with the width of all its parts (QKV, gate and up). Tokens: 16 is
decoding with a batch, 256 a large one, 2048 a prompt or a micro-batch, 8192 training.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRODUCTS", "Product", "spread"]


@dataclass(frozen=True)
class Product:
    """One product D (m, n) of A (m, k) and B (k, n); `kind` is bf16, fp8 (fast accumulation) or fp8-exact (without)."""

    layer: str
    form: str  # forward, dgrad, wgrad
    kind: str
    epilogue: str  # NONE, BIAS, GELU_BIAS
    m: int
    n: int
    k: int

    @property
    def label(self) -> str:
        return self.layer if self.form == "forward" else f"{self.layer} {self.form}"

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def itemsize(self) -> int:
        """Bytes of an element of A and B."""
        return 2 if self.kind == "bf16" else 1

    @property
    def nbytes(self) -> int:
        """Bytes of A, B and D (bf16)."""
        return (self.m * self.k + self.k * self.n) * self.itemsize + 2 * self.m * self.n


# fmt: off
LAYERS = {
    #                          out     in
    "Llama-3-8B qkv":         (6144,   4096),
    "Llama-3-8B o":           (4096,   4096),
    "Llama-3-8B gate+up":     (28672,  4096),
    "Llama-3-8B down":        (4096,   14336),
    "Llama-3-8B head":        (128256, 4096),
    "Llama-3-70B qkv":        (10240,  8192),
    "Llama-3-70B o":          (8192,   8192),
    "Llama-3-70B gate+up":    (57344,  8192),
    "Llama-3-70B down":       (8192,   28672),
    "DeepSeek-V3 q_a":        (1536,   7168),
    "DeepSeek-V3 q_b":        (24576,  1536),
    "DeepSeek-V3 kv_a":       (576,    7168),
    "DeepSeek-V3 kv_b":       (32768,  512),
    "DeepSeek-V3 o":          (7168,   16384),
    "DeepSeek-V3 expert up":  (4096,   7168),
    "DeepSeek-V3 expert down": (7168,  2048),
    "Mamba-2-2.7B in":        (10576,  2560),   # without attention
    "Mamba-2-2.7B out":       (2560,   5120),
    "Qwen2.5-7B qkv":         (4608,   3584),   # with bias
    "GPT-NeoX-20B qkv":       (18432,  6144),   # with bias, and GELU after fc1
    "GPT-NeoX-20B fc1":       (24576,  6144),
    "GPT-NeoX-20B fc2":       (6144,   24576),
    "GPT-3-13B fc1":          (20480,  5120),
    "GPT-2-XL fc1":           (6400,   1600),
}

PLAN = (
    # layer                      form       kind         epilogue     tokens
    ("Llama-3-8B qkv",          "forward", "bf16",      "NONE",      (16, 256, 2048, 8192)),
    ("Llama-3-8B o",            "forward", "bf16",      "NONE",      (16, 256, 2048, 8192)),
    ("Llama-3-8B gate+up",      "forward", "bf16",      "NONE",      (16, 256, 2048, 8192)),
    ("Llama-3-8B down",         "forward", "bf16",      "NONE",      (16, 256, 2048, 8192)),
    ("Llama-3-8B head",         "forward", "bf16",      "NONE",      (16, 2048)),
    ("Llama-3-70B qkv",         "forward", "bf16",      "NONE",      (256, 8192)),
    ("Llama-3-70B o",           "forward", "bf16",      "NONE",      (256, 2048)),
    ("Llama-3-70B gate+up",     "forward", "bf16",      "NONE",      (16, 2048)),
    ("Llama-3-70B down",        "forward", "bf16",      "NONE",      (16, 2048)),
    ("DeepSeek-V3 q_a",         "forward", "bf16",      "NONE",      (2048,)),
    ("DeepSeek-V3 q_b",         "forward", "bf16",      "NONE",      (2048,)),
    ("DeepSeek-V3 kv_a",        "forward", "bf16",      "NONE",      (256, 2048)),
    ("DeepSeek-V3 kv_b",        "forward", "bf16",      "NONE",      (2048,)),
    ("DeepSeek-V3 o",           "forward", "bf16",      "NONE",      (2048,)),
    ("DeepSeek-V3 expert up",   "forward", "bf16",      "NONE",      (256,)),
    ("DeepSeek-V3 expert down", "forward", "bf16",      "NONE",      (256,)),
    ("Mamba-2-2.7B in",         "forward", "bf16",      "NONE",      (2048, 8192)),
    ("Mamba-2-2.7B out",        "forward", "bf16",      "NONE",      (2048, 8192)),
    ("Qwen2.5-7B qkv",          "forward", "bf16",      "BIAS",      (16, 256, 2048, 8192)),
    ("GPT-NeoX-20B qkv",        "forward", "bf16",      "BIAS",      (16, 2048)),
    ("GPT-NeoX-20B fc2",        "forward", "bf16",      "BIAS",      (16, 256, 2048)),
    ("GPT-NeoX-20B fc1",        "forward", "bf16",      "GELU_BIAS", (16, 256, 2048, 8192)),
    ("GPT-3-13B fc1",           "forward", "bf16",      "GELU_BIAS", (256, 2048)),
    ("GPT-2-XL fc1",            "forward", "bf16",      "GELU_BIAS", (2048,)),
    ("Llama-3-8B qkv",          "forward", "fp8",       "NONE",      (16, 256, 2048, 8192)),
    ("Llama-3-8B o",            "forward", "fp8",       "NONE",      (16, 2048)),
    ("Llama-3-8B gate+up",      "forward", "fp8",       "NONE",      (16, 256, 2048, 8192)),
    ("Llama-3-8B down",         "forward", "fp8",       "NONE",      (16, 256, 2048, 8192)),
    ("Llama-3-70B qkv",         "forward", "fp8",       "NONE",      (2048,)),
    ("Llama-3-70B down",        "forward", "fp8",       "NONE",      (2048,)),
    ("DeepSeek-V3 q_b",         "forward", "fp8",       "NONE",      (2048,)),
    ("DeepSeek-V3 o",           "forward", "fp8",       "NONE",      (2048,)),
    ("DeepSeek-V3 expert up",   "forward", "fp8",       "NONE",      (256,)),
    ("DeepSeek-V3 expert down", "forward", "fp8",       "NONE",      (256,)),
    ("Qwen2.5-7B qkv",          "forward", "fp8",       "BIAS",      (16, 2048)),
    ("GPT-NeoX-20B fc1",        "forward", "fp8",       "GELU_BIAS", (16, 256, 2048)),
    ("Llama-3-8B qkv",          "forward", "fp8-exact", "NONE",      (2048, 8192)),
    ("Llama-3-8B gate+up",      "forward", "fp8-exact", "NONE",      (16, 2048)),
    ("Llama-3-8B down",         "forward", "fp8-exact", "NONE",      (2048,)),
    ("GPT-NeoX-20B fc1",        "forward", "fp8-exact", "GELU_BIAS", (2048,)),
    ("Llama-3-8B qkv",          "dgrad",   "bf16",      "NONE",      (2048, 8192)),
    ("Llama-3-8B qkv",          "wgrad",   "bf16",      "NONE",      (2048, 8192)),
    ("Llama-3-8B down",         "dgrad",   "bf16",      "NONE",      (8192,)),
    ("Llama-3-8B down",         "wgrad",   "bf16",      "NONE",      (8192,)),
    ("DeepSeek-V3 q_a",         "dgrad",   "bf16",      "NONE",      (2048,)),
    ("DeepSeek-V3 q_a",         "wgrad",   "bf16",      "NONE",      (2048,)),
    ("GPT-2-XL fc1",            "dgrad",   "bf16",      "NONE",      (8192,)),
    ("GPT-2-XL fc1",            "wgrad",   "bf16",      "NONE",      (8192,)),
)
# fmt: on


def _product(layer: str, form: str, kind: str, epilogue: str, tokens: int) -> Product:
    outs, ins = LAYERS[layer]
    m, n, k = {
        "forward": (tokens, outs, ins),
        "dgrad": (tokens, ins, outs),
        "wgrad": (outs, ins, tokens),
    }[form]
    return Product(layer, form, kind, epilogue, m, n, k)


PRODUCTS = tuple(_product(*row, tokens) for *row, many in PLAN for tokens in many)


def spread(products: tuple[Product, ...], count: int) -> list[Product]:
    """All of them in an order in which any first part is a cross-section, cut after `count`."""
    step = 17  # shares no factor with their number, so that every one is met once
    while len(products) % step == 0:
        step += 2
    return [products[number * step % len(products)] for number in range(min(count, len(products)))]
