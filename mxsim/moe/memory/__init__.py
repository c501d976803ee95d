"""How much memory and time a mixture-of-experts transformer takes to train, by recipe and recomputation. No torch.

    run = Run(DEEPSEEK_V3, Recipe.MXFP4, frozenset({Module.MLA_UP_PROJ}), pipeline=32, expert_parallel=8)
    judge(run).fits, token_time(run).tokens_per_s

An estimate: every assumption is a parameter of `Assumptions`, with its source. Not modelled: interleaved pipelines,
tensor and context parallelism, multi-token prediction, the loss's logits.
"""

from mxsim.moe.memory.activations import (
    ATTENTION,
    PAPER_SCOPES,
    KeptTensor,
    Module,
    Scope,
    Stored,
    expert_tensors,
    expert_working_bytes,
    kept_bytes,
    layer_tensors,
)
from mxsim.moe.memory.assumptions import Assumptions
from mxsim.moe.memory.estimate import Run, StageMemory, Verdict, judge
from mxsim.moe.memory.models import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3, MODELS, ModelShape
from mxsim.moe.memory.schedule import layers_of_stages, micro_batches_in_flight
from mxsim.moe.memory.search import fastest_that_fits
from mxsim.moe.memory.throughput import TokenTime, token_time

__all__ = [
    "ATTENTION",
    "DEEPSEEK_V2",
    "DEEPSEEK_V2_LITE",
    "DEEPSEEK_V3",
    "MODELS",
    "PAPER_SCOPES",
    "Assumptions",
    "KeptTensor",
    "ModelShape",
    "Module",
    "Run",
    "Scope",
    "StageMemory",
    "Stored",
    "TokenTime",
    "Verdict",
    "expert_tensors",
    "expert_working_bytes",
    "fastest_that_fits",
    "judge",
    "kept_bytes",
    "layer_tensors",
    "layers_of_stages",
    "micro_batches_in_flight",
    "token_time",
]
