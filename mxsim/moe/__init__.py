"""The mixture-of-experts layer in BF16, FP8 and MXFP4: compute in FP8, store and send in FP4.

layer = MoE(7168, 2048, num_experts=256, top_k=8, recipe=Recipe.MXFP4)

Needs torch, but for the recipes and `mxsim.moe.memory`, the estimator: without torch nothing else is here.
"""

from importlib.util import find_spec

from mxsim.moe.recipe import Activation, Compute, Conversion, Gradients, Recipe

if find_spec("torch") is not None:
    from mxsim.moe.activation_observer import observe_activations
    from mxsim.moe.compression import ActivationCompression, CompressionReport, compress_activations
    from mxsim.moe.expert_parallel import ExpertParallel
    from mxsim.moe.experts import Experts
    from mxsim.moe.fp4_tokens import Fp4Tokens
    from mxsim.moe.grouped_gemm import Gemm, GemmRecord, grouped_gemm, grouped_wgrad, record_gemms
    from mxsim.moe.groups import Groups
    from mxsim.moe.layer import MoE
    from mxsim.moe.linear import Linear
    from mxsim.moe.permute import Permutation, permute, permute_rows, permute_weights, unpermute_sum
    from mxsim.moe.router import Router, Routing, TopKRouter
    from mxsim.moe.swiglu import swiglu, swiglu_backward

else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(f"mxsim.moe.{name} needs torch: install mxsim with its extra train, mxsim[train]")
        raise AttributeError(f"module 'mxsim.moe' has no attribute {name!r}")


__all__ = [
    "Activation",
    "ActivationCompression",
    "CompressionReport",
    "Compute",
    "Conversion",
    "ExpertParallel",
    "Experts",
    "Fp4Tokens",
    "Gemm",
    "GemmRecord",
    "Gradients",
    "Groups",
    "Linear",
    "MoE",
    "Permutation",
    "Recipe",
    "Router",
    "Routing",
    "TopKRouter",
    "compress_activations",
    "grouped_gemm",
    "grouped_wgrad",
    "observe_activations",
    "permute",
    "permute_rows",
    "permute_weights",
    "record_gemms",
    "swiglu",
    "swiglu_backward",
    "unpermute_sum",
]
