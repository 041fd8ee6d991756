"""Engines for a graph: those that cuDNN's heuristics propose and the policy allows, and their execution plans.

`plan.py` uses them. A target is a handle, or the description of a GPU that is not present: heuristics and plans work
for that, too, so graphs can be checked without a GPU. Nothing is launched here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from cudabind.errors import CudnnError
from cudabind.sys import cudnn
from dispatch.errors import Refused
from dispatch.libraries.cudnn.descriptors import BackendDescriptor
from dispatch.libraries.cudnn.handle import last_error
from dispatch.libraries.cudnn.lower import lower

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.libraries.cudnn.graph import Graph

__all__ = ["Engine", "Policy", "Target", "engines", "restore_engine", "target_of"]

NOTE = cudnn.cudnnBackendNumericalNote_t
HEURISTICS = ("A", "B", "FALLBACK")
CONFIGURATIONS = 24  # requested from each heuristic
REASONS = 3  # the number of cuDNN's refusals that an error quotes


class Target(NamedTuple):
    """The GPU for which plans are made: a handle, or a finalized description of a GPU (DEVICEPROP)."""

    handle: cudnn.cudnnHandle_t | None
    properties: BackendDescriptor | None = None


class Policy(NamedTuple):
    """Limits for engines. `tensor_cores` is False if f32 must not be rounded to TF32; `workspace` is in bytes."""

    tensor_cores: bool = True
    deterministic: bool = False
    workspace: int = 1 << 62

    def forbids(self, notes: list[int]) -> str:
        """The reason why an engine with these numerical notes is not used, or ""."""
        if not self.tensor_cores and NOTE.CUDNN_NUMERICAL_NOTE_TENSOR_CORE in notes:
            return "it computes f32 in TF32"
        if self.deterministic and NOTE.CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC in notes:
            return "it is not deterministic"
        reasons = [reason for note, reason in LESS_PRECISE.items() if note in notes]
        return f"it {reasons[0]}" if reasons else ""


# Notes of engines whose results are less precise than the compute type: these are never used.
LESS_PRECISE = {
    NOTE.CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS: "rounds its inputs",
    NOTE.CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION: "accumulates in a lower precision than the compute type",
    NOTE.CUDNN_NUMERICAL_NOTE_FFT: "uses FFT",
    NOTE.CUDNN_NUMERICAL_NOTE_WINOGRAD: "uses Winograd's transform",
    NOTE.CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4: "uses Winograd's transform",
    NOTE.CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6: "uses Winograd's transform",
    NOTE.CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13: "uses Winograd's transform",
}


class Engine(NamedTuple):
    """A finalized execution plan, and the bytes of workspace it needs."""

    plan: BackendDescriptor
    workspace: int

    def saved(self) -> bytes:
        """The plan as text, for `restore_engine` in a process with the same GPU and the same cuDNN."""
        return self.plan.get_text("EXECUTION_PLAN_JSON_REPRESENTATION")


def engines(graph: Graph, target: Target, policy: Policy) -> Iterator[Engine]:
    """cuDNN's plans for a graph, in the order of its heuristics; Refused with cuDNN's reasons if there is none."""
    reasons: list[str] = []
    seen: set[tuple[object, ...]] = set()
    found = False
    try:
        operations = lower(graph, target.handle)
    except CudnnError as error:
        raise Refused(f"cuDNN does not support this graph: {_error_text(error)}") from error
    for mode in HEURISTICS:
        for configuration in _configurations(operations, mode, target, reasons):
            try:
                engine = _engine_of(configuration)
                name = _identity(configuration, engine)
                if name in seen:
                    continue
                seen.add(name)
                why = policy.forbids(engine.get_ints("ENGINE_NUMERICAL_NOTE", "NUMERICAL_NOTE", 16))
                plan = None if why else _plan(configuration, target)
            except CudnnError as error:
                why, plan = _error_text(error), None
            if plan is not None and plan.workspace > policy.workspace:
                why, plan = f"it needs {plan.workspace} bytes of workspace, but {policy.workspace} are allowed", None
            if plan is None:
                reasons.append(f"engine {name[0]}: {why}")
                continue
            found = True
            yield plan
    if not found:
        quoted = (
            "; ".join(dict.fromkeys(reasons)) if len(set(reasons)) <= REASONS else "; ".join(_first_reasons(reasons))
        )
        raise Refused(f"cudnnBackendFinalize returns no plan: {quoted}")


def restore_engine(saved: bytes, target: Target, policy: Policy) -> Engine | None:
    """The engine from a text of `Engine.saved`; None if cuDNN does not accept it."""
    with suppress(CudnnError):
        plan = BackendDescriptor("EXECUTION_PLAN").set("EXECUTION_PLAN_HANDLE", "HANDLE", target.handle)
        plan.set_text("EXECUTION_PLAN_JSON_REPRESENTATION", saved).finalize()
        engine = Engine(plan, plan.get_ints("EXECUTION_PLAN_WORKSPACE_SIZE")[0])
        if engine.workspace <= policy.workspace:
            return engine
    return None


def target_of(properties: bytes) -> Target:
    """The target of a GPU described by CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION; needs no GPU."""
    descriptor = BackendDescriptor("DEVICEPROP").set_text("DEVICEPROP_JSON_REPRESENTATION", properties)
    return Target(None, descriptor.finalize())


def _configurations(
    operations: BackendDescriptor, mode: str, target: Target, reasons: list[str]
) -> list[BackendDescriptor]:
    number = cudnn.cudnnBackendHeurMode_t[f"CUDNN_HEUR_MODE_{mode}"]
    try:
        heuristic = BackendDescriptor("ENGINEHEUR").set("ENGINEHEUR_OPERATION_GRAPH", "BACKEND_DESCRIPTOR", operations)
        heuristic.set("ENGINEHEUR_MODE", "HEUR_MODE", number)
        if target.properties is not None:
            heuristic.set("ENGINEHEUR_DEVICEPROP", "BACKEND_DESCRIPTOR", target.properties)
        empty = [BackendDescriptor("ENGINECFG") for _ in range(CONFIGURATIONS)]
        found = heuristic.finalize().get_descriptors("ENGINEHEUR_RESULTS", empty)
        if not found:
            reasons.append(f"heuristic {mode} proposes no engine: {_reason(last_error())}")
        return found
    except CudnnError as error:
        reasons.append(f"heuristic {mode}: {_error_text(error)}")
        return []


def _reason(text: str) -> str:
    """The innermost reasons that cuDNN logged for the last engine it tried."""
    found = re.findall(r"(CUDNN_STATUS_\w+); Reason: (.*?)(?= Warning: |$)", text)
    return "; ".join(f"{status} at {place}" for status, place in found[:2]) or text or "no reason given"


def _engine_of(configuration: BackendDescriptor) -> BackendDescriptor:
    (engine,) = configuration.get_descriptors("ENGINECFG_ENGINE", [BackendDescriptor("ENGINE")])
    return engine


def _identity(configuration: BackendDescriptor, engine: BackendDescriptor) -> tuple[object, ...]:
    """What distinguishes configurations: the engine's number and its knobs."""
    empty = [BackendDescriptor("KNOB_CHOICE") for _ in range(cudnn.cudnnBackendKnobType_t.CUDNN_KNOB_TYPE_COUNTS)]
    knobs = configuration.get_descriptors("ENGINECFG_KNOB_CHOICES", empty)
    choices = [
        (knob.get_ints("KNOB_CHOICE_KNOB_TYPE", "KNOB_TYPE")[0], knob.get_ints("KNOB_CHOICE_KNOB_VALUE")[0])
        for knob in knobs
    ]
    return (engine.get_ints("ENGINE_GLOBAL_INDEX")[0], *sorted(choices))


def _plan(configuration: BackendDescriptor, target: Target) -> Engine:
    plan = BackendDescriptor("EXECUTION_PLAN").set("EXECUTION_PLAN_ENGINE_CONFIG", "BACKEND_DESCRIPTOR", configuration)
    if target.properties is not None:
        plan.set("EXECUTION_PLAN_DEVICEPROP", "BACKEND_DESCRIPTOR", target.properties)
    else:
        plan.set("EXECUTION_PLAN_HANDLE", "HANDLE", target.handle)
    plan.finalize()
    return Engine(plan, plan.get_ints("EXECUTION_PLAN_WORKSPACE_SIZE")[0])


def _error_text(error: CudnnError) -> str:
    """cuDNN's status and its last error message."""
    message = last_error()
    return f"{error.name}: {message}" if message else error.name


def _first_reasons(reasons: list[str]) -> list[str]:
    different = list(dict.fromkeys(reasons))
    return [*different[:REASONS], f"and {len(different) - REASONS} more"]
