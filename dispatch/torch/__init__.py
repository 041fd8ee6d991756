"""PyTorch ops with autograd that run on this library: `import dispatch.torch`, which imports torch.

Each op is a `torch.library` custom op with a fake-tensor rule and a gradient, so it works with torch.compile,
torch.export and autocast. CUDA tensors run on torch's current stream, CPU tensors on the `host` backend.

    products      linear with an activation
    mlps          mlp: two linear layers with an activation between them
    grouped       grouped_linear: groups of rows, each with its own weights
    fp8           fp8_linear
    norms         layer_norm, rms_norm
    rotary        rope: rotary position embedding of queries and keys
    gated         gated_activation: the elementwise part of a gated MLP
    attention     scaled_dot_product_attention
    convolution   conv2d with bias, residual and ReLU
    trees         tree_linear: a product with an epilogue tree, without a gradient
    data_parallel data_parallel: averages a module's gradients over ranks during the backward pass
    fusing        fuse: replaces several torch calls of a model by one call of these ops
    patterns      the patterns that fuse searches for in a forward's graph
    forward_guards  conditions of a fused forward, checked at each call
    graphs        CUDA graphs of a fused model's forward
    graph_recorder      records CUDA graphs and orders their replays
    training_graphs     CUDA graphs of training steps: decides which calls are observed, recorded or replayed
    training_recording  records a training step and compares it with the model itself
    training_step       a recorded step: two graphs behind one autograd node
    training_call       a call that can be repeated with other operands and parameters
    model_state   a snapshot of a model, to detect changes
    masks         attention masks in the form that cuDNN adds to scores
    fused         functions that a fused model calls
    torch_layers  forwards for torch's transformer layers in a fused model
    transformers_rotary     the rotary embedding that fused transformers models call
    transformers_attention  the attention function that fused transformers models call
    shared        code that the ops share

Operands that no row supports raise NoRow with the reasons, as in the rest of the library.
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
