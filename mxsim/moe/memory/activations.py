"""What a layer keeps for its backward pass, tensor by tensor, by recipe and by what is recomputed.

    bytes = elements * bits / 8, bits: BF16 16, FP8 8 + 32/128 = 8.25, MXFP4 4 + 8/32 = 4.25

A tensor that several modules read is kept once. Of the gate's logits the FP32 values are kept; indices and routing
weights (some ten bytes a routed row) are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from mxsim.moe.memory.models import ModelShape
from mxsim.moe.recipe import Activation, Compute, Recipe


class Stored(Enum):
    """How a tensor is kept; the value is bits an element, scales included."""

    FP32 = 32.0
    BF16 = 16.0
    FP8 = 8.25  # 1x128 blocks: an FP32 scale for 128 elements
    MXFP4 = 4.25  # an 8-bit scale for 32 elements


class Module(Enum):
    """What can be recomputed, named as Megatron's --recompute-modules (moe-experts is part of its moe)."""

    CORE_ATTN = "core-attn"  # softmax(q k^T) v
    MLA_UP_PROJ = "mla-up-proj"  # latents to queries, keys and values
    LAYERNORM = "layernorm"
    MLP = "mlp"  # of dense layers
    SHARED_EXPERTS = "shared-experts"
    MOE_EXPERTS = "moe-experts"  # routed experts, from their dispatched rows: no second dispatch


Scope = frozenset[Module]
ATTENTION: Scope = frozenset({Module.CORE_ATTN, Module.MLA_UP_PROJ})
# The paper's three, from most recomputation to least. What its "attention" holds is inferred: core attention and the
# up-projections before it. With the projections around them too, memory misses Table 1 by 2.3 points, not 1.7.
PAPER_SCOPES: dict[str, Scope] = {
    "attention + layer norm + MoE experts": ATTENTION | {Module.LAYERNORM, Module.MOE_EXPERTS},
    "attention + layer norm + MLP": ATTENTION | {Module.LAYERNORM, Module.MLP},
    "MLA up-projection only": frozenset({Module.MLA_UP_PROJ}),
}


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of one layer and one micro-batch.

    module: whose recomputation drops it; None: it is always kept. dropped: recomputed in the backward pass.
    """

    name: str
    module: Module | None
    num_elements: int
    stored: Stored
    dropped: bool

    @property
    def num_bytes(self) -> float:
        """As it would be kept, dropped or not."""
        return self.num_elements * self.stored.value / 8


def kept_bytes(tensors: Iterable[KeptTensor]) -> float:
    """Of those that are not dropped."""
    return sum(tensor.num_bytes for tensor in tensors if not tensor.dropped)


def gemm_input(recipe: Recipe, activation: Activation) -> Stored:
    """What a GEMM keeps of its input."""
    if recipe.compute is Compute.BF16:
        return Stored.BF16
    return Stored.MXFP4 if recipe.keeps_fp4(activation) else Stored.FP8


def swiglu_input(recipe: Recipe) -> Stored:
    """What SwiGLU keeps of its input: MXFP4, or BF16 in the other recipes."""
    return Stored.MXFP4 if recipe.keeps_fp4(Activation.SWIGLU_INPUT) else Stored.BF16


def dispatched(recipe: Recipe) -> Stored:
    """How rows travel to their experts: MXFP4, or BF16 (inferred for FP8: TransformerEngine quantizes in its GEMMs)."""
    return Stored.MXFP4 if recipe.keeps_fp4(Activation.EXPERT_INPUT) else Stored.BF16


def expert_tensors(
    rows: int, hidden: int, intermediate: int, recipe: Recipe, scope: Scope = frozenset()
) -> list[KeptTensor]:
    """Of routed experts over `rows` dispatched rows.

    Recomputed experts start from the rows as they were dispatched, so that those are kept; otherwise the first GEMM's
    own copy of its input is.
    """
    again = Module.MOE_EXPERTS in scope
    x = dispatched(recipe) if again else gemm_input(recipe, Activation.EXPERT_INPUT)
    down = gemm_input(recipe, Activation.DOWN_INPUT)
    return [
        KeptTensor("expert input", None, rows * hidden, x, False),
        KeptTensor("SwiGLU input", Module.MOE_EXPERTS, rows * 2 * intermediate, swiglu_input(recipe), again),
        KeptTensor("second GEMM's input", Module.MOE_EXPERTS, rows * intermediate, down, again),
    ]


def mlp_tensors(
    tokens: int, intermediate: int, recipe: Recipe, scope: Scope, module: Module, owner: str
) -> list[KeptTensor]:
    """Of a dense MLP or of shared experts, whose input is the norm's output."""
    again = module in scope
    down = gemm_input(recipe, Activation.LINEAR_INPUT)
    return [
        KeptTensor(f"{owner} SwiGLU input", module, tokens * 2 * intermediate, swiglu_input(recipe), again),
        KeptTensor(f"{owner} second GEMM's input", module, tokens * intermediate, down, again),
    ]


def attention_tensors(model: ModelShape, tokens: int, recipe: Recipe, scope: Scope) -> list[KeptTensor]:
    """Of latent attention. A flash kernel keeps its output and a log-sum of each head, not the probabilities.

    The output projection keeps its input in any scope: in BF16 that is the kernel's output itself.
    """
    core, up, norm = (Module.CORE_ATTN, Module.MLA_UP_PROJ, Module.LAYERNORM)
    linear = gemm_input(recipe, Activation.LINEAR_INPUT)
    latents = model.q_lora_size + model.kv_lora_size
    size = tokens * model.attention_size
    tensors = [
        KeptTensor("attention norm's output", norm, tokens * model.hidden_size, linear, norm in scope),
        KeptTensor("latents", None, tokens * model.latent_size, Stored.BF16, False),
        KeptTensor("up-projections' input", up, tokens * latents, linear, up in scope),
        KeptTensor("queries, keys, values", up, tokens * model.qkv_size, Stored.BF16, up in scope),
        KeptTensor("attention log-sums", core, tokens * model.num_heads, Stored.FP32, core in scope),
        KeptTensor("output projection's input", None, size, linear, False),
    ]
    if linear is not Stored.BF16:
        tensors.append(KeptTensor("attention output", core, size, Stored.BF16, core in scope))
    return tensors


def layer_tensors(
    model: ModelShape, tokens: int, recipe: Recipe, scope: Scope, *, is_dense: bool, imbalance: float = 1.0
) -> list[KeptTensor]:
    """Everything of one layer and one micro-batch.

    imbalance: rows that a device receives over those of a balanced routing.
    """
    hidden = tokens * model.hidden_size
    linear = gemm_input(recipe, Activation.LINEAR_INPUT)
    norm_again = Module.LAYERNORM in scope
    tensors = [
        KeptTensor("residual before attention", None, hidden, Stored.BF16, False),
        *attention_tensors(model, tokens, recipe, scope),
        KeptTensor("residual before the MLP", None, hidden, Stored.BF16, False),
    ]
    if is_dense:
        tensors.append(KeptTensor("MLP norm's output", Module.LAYERNORM, hidden, linear, norm_again))
        width = model.dense_intermediate_size
        return tensors + mlp_tensors(tokens, width, recipe, scope, Module.MLP, "MLP's")
    # The gate reads BF16; shared experts keep their GEMM's own copy beside it.
    tensors.append(KeptTensor("MLP norm's output", Module.LAYERNORM, hidden, Stored.BF16, norm_again))
    tensors.append(KeptTensor("gate's logits", None, tokens * model.num_experts, Stored.FP32, False))
    rows = round(tokens * model.top_k * imbalance)
    tensors += expert_tensors(rows, model.hidden_size, model.intermediate_size, recipe, scope)
    if model.num_shared_experts:
        if linear is not Stored.BF16:
            tensors.append(KeptTensor("shared experts' input", Module.LAYERNORM, hidden, linear, norm_again))
        width = model.num_shared_experts * model.intermediate_size
        tensors += mlp_tensors(tokens, width, recipe, scope, Module.SHARED_EXPERTS, "shared experts'")
    return tensors


def expert_working_bytes(
    rows: int, hidden: int, intermediate: int, recipe: Recipe, scope: Scope = frozenset()
) -> float:
    """What the experts' backward pass holds at its peak, the last Wgrad, beyond what is kept and weight gradients.

    dy and dx in BF16; dh in BF16, or its FP8 columns; FP8 columns of x converted from MXFP4. Recomputed experts hold
    their recomputed output and inputs besides.
    """
    is_bf16 = recipe.compute is Compute.BF16
    bits = 2 * hidden * Stored.BF16.value
    bits += 2 * intermediate * (Stored.BF16 if is_bf16 else Stored.FP8).value
    if recipe.keeps_fp4(Activation.EXPERT_INPUT):
        bits += hidden * Stored.FP8.value
    num_bytes: float = rows * bits / 8
    if Module.MOE_EXPERTS in scope:
        tensors = expert_tensors(rows, hidden, intermediate, recipe, scope)
        num_bytes += sum(tensor.num_bytes for tensor in tensors if tensor.dropped) + rows * hidden * 2
        if recipe.compute is Compute.FP8 and not recipe.keeps_fp4(Activation.EXPERT_INPUT):
            num_bytes += rows * hidden * Stored.FP8.value / 8  # the first GEMM's columns beside the dispatched rows
    return num_bytes


def attention_working_bytes(model: ModelShape, tokens: int, recipe: Recipe, scope: Scope) -> float:
    """What attention's backward pass holds beyond what is kept: gradients of q, k, v and output, what is recomputed."""
    gradients = tokens * (model.qkv_size + model.attention_size) * Stored.BF16.value / 8
    return gradients + sum(t.num_bytes for t in attention_tensors(model, tokens, recipe, scope) if t.dropped)


def mlp_working_bytes(tokens: int, hidden: int, intermediate: int, recipe: Recipe, scope: Scope) -> float:
    """The same of a dense MLP, whose input comes from the norm."""
    num_bytes = expert_working_bytes(tokens, hidden, intermediate, recipe)
    tensors = mlp_tensors(tokens, intermediate, recipe, scope, Module.MLP, "MLP's")
    return num_bytes + sum(tensor.num_bytes for tensor in tensors if tensor.dropped)
