"""PyTorch's ops with autograd over this library's products: `import dispatch.torch`, which imports torch.

Each is a `torch.library` custom op with a rule for fake tensors and a gradient, so that torch.compile, torch.export
and autocast work through it. CUDA tensors run on torch's current stream, those of the CPU on the `host` backend.

    products      linear with an activation
    mlps          mlp: two linear layers with an activation between
    grouped       grouped_linear: rows in groups, each by weights of its own
    fp8           fp8_linear
    norms         layer_norm, rms_norm
    rotary        rope: queries and keys with their position
    gated         gated_activation: what is behind the first products of a gated MLP
    attention     scaled_dot_product_attention
    convolution   conv2d with bias, residual and ReLU
    trees         tree_linear: a product with an epilogue tree, forward alone
    data_parallel gradients of a module, averaged over ranks as they are computed
    fusing        fuse: has a model call these where it does the same in several
    patterns      what fuse looks for in the graph of a forward
    forward_guards  what a fused forward relies on, checked at each call
    graphs        CUDA graphs of a fused model's forward
    graph_recorder      what records and replays them
    training_graphs     CUDA graphs of its training steps: which calls are learnt, recorded and replayed
    training_recording  how one is recorded and held against the model itself
    training_step       its two graphs behind one node of autograd
    training_call       a call with other operands and parameters
    model_state   what a model consists of, and whether it is as it was
    masks         masks of attention as cuDNN adds them
    fused         what a fused model calls
    torch_layers  torch's layers for transformers in a fused model
    transformers_rotary     what they call for the position of queries and keys
    transformers_attention  what attention modules of transformers call in a fused model
    shared        what the ops share

What a row does not take is refused with NoRow, which says why, as everywhere here.
"""

from __future__ import annotations

from dispatch.torch.attention import scaled_dot_product_attention as scaled_dot_product_attention
from dispatch.torch.convolution import conv2d as conv2d
from dispatch.torch.data_parallel import DataParallel as DataParallel
from dispatch.torch.data_parallel import data_parallel as data_parallel
from dispatch.torch.fp8 import fp8_linear as fp8_linear
from dispatch.torch.fusing import Note as Note
from dispatch.torch.fusing import Report as Report
from dispatch.torch.fusing import fuse as fuse
from dispatch.torch.gated import gated_activation as gated_activation
from dispatch.torch.grouped import grouped_linear as grouped_linear
from dispatch.torch.mlps import mlp as mlp
from dispatch.torch.norms import layer_norm as layer_norm
from dispatch.torch.norms import rms_norm as rms_norm
from dispatch.torch.products import linear as linear
from dispatch.torch.rotary import rope as rope
from dispatch.torch.trees import tree_linear as tree_linear

__all__ = [
    "DataParallel",
    "Note",
    "Report",
    "conv2d",
    "data_parallel",
    "fp8_linear",
    "fuse",
    "gated_activation",
    "grouped_linear",
    "layer_norm",
    "linear",
    "mlp",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "tree_linear",
]
