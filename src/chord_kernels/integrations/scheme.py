# SPDX-License-Identifier: Apache-2.0
"""Which layers of a serving engine Chord computes, and why not the others. Pure: no engine, no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..formats import W4A16
from ..plan import EPILOGUES, NEVER_RUN, Problem, why_not

_ANY_SM_COUNT = 132  # no rule asks for it
ACTORDER = (None, "static", "weight")  # orders that leave columns where they are


@dataclass(frozen=True)
class LayerFacts:
    """What an engine says of one MoE layer. arch: as the kernels name it; None: no CUDA GPU."""

    format: str | None
    num_bits: int | None
    type: str | None
    symmetric: bool
    strategy: str | None
    group_size: int | None
    actorder: str | None
    quantized_activations: bool
    dtype: str
    activation: str
    clamped: bool  # a limit, alpha or beta of the activation
    bias: bool
    lora: bool
    expert_balancing: bool
    weight_on_input: bool  # routing weights multiply what goes into an expert
    backend: str
    batched: bool
    experts: int
    hidden: int
    intermediate: int
    arch: str | None


_WANTED = {
    "format": "pack-quantized",
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": W4A16.group,
    "quantized_activations": False,
    "dtype": "bfloat16",
    "activation": "silu",
    "clamped": False,
    "bias": False,
    "lora": False,
    "expert_balancing": False,
    "weight_on_input": False,
}
assert set(_WANTED) <= {field.name for field in fields(LayerFacts)}


def why_not_layer(facts: LayerFacts, *, force: bool = False) -> str | None:
    """Why a layer is left to the engine, with the value and the rule; None where Chord takes it.

    force: also layers for which a backend was named, and architectures whose kernels were never run.
    """
    for name, wanted in _WANTED.items():
        if (found := getattr(facts, name)) != wanted:
            return f"{name.replace('_', ' ')} is {found!r}; Chord computes {wanted!r}"
    if facts.actorder not in ACTORDER:
        return f"actorder is {facts.actorder!r}, which shuffles columns; Chord takes null, static and weight"
    if facts.backend != "auto" and not force:
        return f"the MoE backend {facts.backend!r} was asked for; CHORD_VLLM=force overrides it"
    if facts.arch is None:
        return "no CUDA GPU"
    contract = "masked" if facts.batched else "indexed"
    swiglu, store = EPILOGUES[1], EPILOGUES[0]
    for epilogue, paired, n, k in ((swiglu, True, 2 * facts.intermediate, facts.hidden), (store, False, facts.hidden, facts.intermediate)):
        if reason := why_not(Problem(facts.arch, _ANY_SM_COUNT, contract, epilogue, paired, facts.experts, n, k, rows=1)):
            return reason
    if facts.arch in NEVER_RUN and not force:
        return f"{facts.arch}: kernels are compiled, never run; CHORD_VLLM=force takes them"
    return None
