"""The attention of transformers' models: a function of ours that their modules call where their config chooses sdpa.

A module of transformers reads the name of its attention function from its config at each call, and finds the function
in transformers' AttentionInterface. Ours is registered there under a name of its own, which chooses it for no model.
A fused model's attention modules each get a view of their config that gives this name in the place of "sdpa"; the
config itself stays as it is, since models made from one config share it, and since the model's masks depend on it.
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

NAME = "dispatch"  # of our function, in transformers' AttentionInterface
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Arguments that only other functions of transformers take account of; sdpa's own refuses them, or warns.
REFUSED = ("softcap", "output_attentions", "head_mask", "cache", "position_bias")


# -- which modules -------------------------------------------------------------------------------------------------
def uses_attention_interface(module: nn.Module) -> bool:
    """Whether its forward takes its attention function from transformers' AttentionInterface."""
    code = getattr(_undecorated_forward(module), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def why_not(module: nn.Module) -> str:
    """Why a module that `uses_attention_interface` cannot be given our function; empty where it can."""
    forward: Any = _undecorated_forward(module)
    config: Any = module.__dict__.get("config")
    names = [one.argval for one in dis.get_instructions(forward)]
    reads = ("config", "_attn_implementation") in itertools.pairwise(names)
    if not reads or not hasattr(config, "_attn_implementation_internal"):
        return "it does not read config._attn_implementation of its own"
    if is_replaced(module):
        return "its attention was replaced already"
    if config._attn_implementation != "sdpa":
        hint = "call model.set_attn_implementation('sdpa') first"
        return f"its config chooses {config._attn_implementation!r} for attention, not 'sdpa': {hint}"
    constants = [one if isinstance(one, tuple) else (one,) for one in forward.__code__.co_consts]
    if any("sdpa" in some for some in constants):
        return "its forward compares the name of its attention function with 'sdpa'"
    if any("position_bias" in some for some in constants):  # the name of an argument
        return "it adds a bias by position to its scores"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "it caps its scores"
    interface = forward.__globals__.get(INTERFACE)
    if interface is None or interface["sdpa"] is not _sdpa_of_transformers():
        return "the sdpa function that it calls is not transformers' own"
    return ""


def is_replaced(module: nn.Module) -> bool:
    """Whether a module has our function already."""
    return isinstance(module.__dict__.get("config"), _ConfigView)


def _undecorated_forward(module: nn.Module) -> Any:
    """A module's forward without decorators."""
    return inspect.unwrap(type(module).forward)


# -- the config ----------------------------------------------------------------------------------------------------
class _ConfigView:
    """What the class of a view adds to that of the config."""

    __slots__ = ()
    _original: Any
    _attn_implementation_internal: Any

    def __init_subclass__(cls) -> None:
        """Keep the config's class from making a dataclass of its own of it."""

    @property
    def _attn_implementation(self) -> Any:
        chosen = self._attn_implementation_internal
        return NAME if chosen == "sdpa" else chosen

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        self._original._attn_implementation = value

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return config_view, (self._original,)


def config_view(config: Any) -> Any:
    """The config with all its attributes, which both share, but for the function of attention."""
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
    found: Callable[..., Any] = importlib.import_module(
        "transformers.integrations.sdpa_attention"
    ).sdpa_attention_forward
    return found


def _register() -> None:
    """Make our function known to transformers."""
    importlib.import_module("transformers.modeling_utils").AttentionInterface.register(
        NAME, _our_function(_sdpa_of_transformers())
    )


@functools.cache
def _our_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our function beside transformers' own, which runs what ours does not take."""
    known = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
    others = (*REFUSED, *(set(inspect.signature(original).parameters) - known - set(REFUSED)))

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
        several = query.shape[2] > 1
        causal = bool(is_causal)
        if is_causal is None:
            causal = several and attention_mask is None and getattr(module, "is_causal", True)
        # One token is left to theirs: beside a cache, which grows, each length would be prepared by cuDNN anew.
        # What causal means beside a mask differs between versions of transformers.
        if (
            several
            and not (causal and attention_mask is not None)
            and not (kwargs and _any_given(kwargs, others))
            and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
            and fused.supports_attention(query, key, value, attention_mask, dropout, causal, scaling, True)
        ):
            y = fused.run_attention(query, key, value, attention_mask, dropout, causal, scaling)
            return y.transpose(1, 2).contiguous(), None
        choices = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        found: tuple[Any, None] = original(module, query, key, value, attention_mask, **choices, **kwargs)
        return found

    return dispatch_attention_forward


def _any_given(arguments: dict[str, Any], names: tuple[str, ...]) -> bool:
    return any(arguments.get(name) is not None and arguments[name] is not False for name in names)
