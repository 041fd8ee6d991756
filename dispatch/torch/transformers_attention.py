"""Our attention function for transformers models, which fused modules call if their config selects "sdpa".

At each call, a transformers module reads the name of its attention function from its config and looks the function up
in transformers' AttentionInterface. Our function is registered there under a new name, so no other model uses it. Each
attention module of a fused model gets a view of its config that returns this name instead of "sdpa". The config itself
is not changed, because all models made from it share it, and because the model's masks depend on it.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import itertools
import types
from typing import TYPE_CHECKING, Any

from dispatch.torch import fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["NAME", "config_view", "is_replaced", "uses_attention_interface", "why_not"]

NAME = "dispatch"  # the name of our function in transformers' AttentionInterface
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Arguments that only other functions of transformers support; its sdpa function refuses them or warns.
REFUSED = ("softcap", "output_attentions", "head_mask", "cache", "position_bias")


# -- which modules -------------------------------------------------------------------------------------------------
def uses_attention_interface(module: nn.Module) -> bool:
    """Whether a module's forward gets its attention function from transformers' AttentionInterface."""
    code = getattr(_undecorated_forward(module), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def why_not(module: nn.Module) -> str:
    """The reason why a module that `uses_attention_interface` cannot use our function; empty if it can."""
    forward: Any = _undecorated_forward(module)
    config: Any = module.__dict__.get("config")
    names = [one.argval for one in dis.get_instructions(forward)]
    reads = ("config", "_attn_implementation") in itertools.pairwise(names)
    if not reads or not hasattr(config, "_attn_implementation_internal"):
        return "its forward does not read config._attn_implementation itself"
    if is_replaced(module):
        return "its attention was replaced already"
    if config._attn_implementation != "sdpa":
        hint = "call model.set_attn_implementation('sdpa') first"
        return f"its config selects {config._attn_implementation!r} for attention, not 'sdpa': {hint}"
    constants = [one if isinstance(one, tuple) else (one,) for one in forward.__code__.co_consts]
    if any("sdpa" in some for some in constants):
        return "its forward compares the name of its attention function with 'sdpa'"
    if any("position_bias" in some for some in constants):  # the name of an argument
        return "it adds a position bias to its scores"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "it caps its scores"
    interface = forward.__globals__.get(INTERFACE)
    if interface is None or interface["sdpa"] is not _sdpa_of_transformers():
        return "the sdpa function that it calls is not transformers' own"
    return ""


def is_replaced(module: nn.Module) -> bool:
    """Whether a module uses our function already."""
    return isinstance(module.__dict__.get("config"), _ConfigView)


def _undecorated_forward(module: nn.Module) -> Any:
    """A module's forward without decorators."""
    return inspect.unwrap(type(module).forward)


# -- the config ----------------------------------------------------------------------------------------------------
class _ConfigView:
    """The mixin that a view's class adds to the class of the config."""

    __slots__ = ()
    _original: Any
    _attn_implementation_internal: Any

    def __init_subclass__(cls) -> None:
        """Override the config class's hook, which would turn the subclass into a dataclass."""

    @property
    def _attn_implementation(self) -> Any:
        selected = self._attn_implementation_internal
        return NAME if selected == "sdpa" else selected

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        self._original._attn_implementation = value

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return config_view, (self._original,)


def config_view(config: Any) -> Any:
    """A view that shares all attributes with the config, except the name of the attention function."""
    _register()
    kind: Any = type(config)
    view: Any = object.__new__(_view_class(kind))
    object.__setattr__(view, "__dict__", config.__dict__)
    object.__setattr__(view, "_original", config)
    return view


@functools.cache
def _view_class(kind: type) -> type:
    def fill(names: dict[str, Any]) -> None:
        names |= {"__slots__": ("_original",), "__module__": kind.__module__, "__doc__": kind.__doc__}

    return types.new_class(kind.__name__, (_ConfigView, kind), exec_body=fill)


# -- the function --------------------------------------------------------------------------------------------------
def _sdpa_of_transformers() -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module(
        "transformers.integrations.sdpa_attention"
    ).sdpa_attention_forward
    return function


def _register() -> None:
    """Register our function with transformers."""
    importlib.import_module("transformers.modeling_utils").AttentionInterface.register(
        NAME, _our_function(_sdpa_of_transformers())
    )


@functools.cache
def _our_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our function, which calls transformers' own for operands that our op does not support."""
    supported = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
    unsupported = (*REFUSED, *(set(inspect.signature(original).parameters) - supported - set(REFUSED)))

    def dispatch_attention_forward(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        several_queries = query.shape[2] > 1
        causal = bool(is_causal)
        if is_causal is None:
            causal = several_queries and attention_mask is None and getattr(module, "is_causal", True)
        # transformers' function runs for one token: with a growing cache, cuDNN would need a plan for each length.
        # The meaning of is_causal together with a mask differs between versions of transformers.
        if (
            several_queries
            and not (causal and attention_mask is not None)
            and not (kwargs and _any_given(kwargs, unsupported))
            and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
            and fused.supports_attention(query, key, value, attention_mask, dropout, causal, scaling, True)
        ):
            y = fused.run_attention(query, key, value, attention_mask, dropout, causal, scaling)
            return y.transpose(1, 2).contiguous(), None
        choices = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        result: tuple[Any, None] = original(module, query, key, value, attention_mask, **choices, **kwargs)
        return result

    return dispatch_attention_forward


def _any_given(arguments: dict[str, Any], names: tuple[str, ...]) -> bool:
    return any(arguments.get(name) is not None and arguments[name] is not False for name in names)
