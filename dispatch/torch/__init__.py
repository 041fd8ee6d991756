"""PyTorch's ops with autograd over this library's products: `import dispatch.torch`, which imports torch.

Each is a `torch.library` custom op with a rule for fake tensors and a gradient, so that torch.compile, torch.export
and autocast work through it. CUDA tensors run on torch's current stream, those of the CPU on the `host` backend.

    products      linear with an activation
    shared        what the ops share

What a row does not take is refused with NoRow, which says why, as everywhere here.
"""

from __future__ import annotations

from dispatch.torch.products import linear as linear

__all__ = ["linear"]
