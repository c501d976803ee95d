"""Tokens per GPU per second: floating-point operations, conversions and dispatch, each at a rate.

    us a token = GEMMs / rate + attention / rate + conversion bytes / memory + exposed dispatch / network + other
    tokens per GPU per second = 1e6 / us

A token passes every layer once on some GPU, so that a GPU's time a token is the whole model's, whatever the layout.
"""

from dataclasses import dataclass

from mxsim.moe.memory.activations import Module, Stored, dispatched
from mxsim.moe.memory.estimate import Run
from mxsim.moe.recipe import Activation, Compute

_BACKWARD_OVER_FORWARD = 2.0  # of a GEMM: Dgrad and Wgrad
_FLASH_BACKWARD_OVER_FORWARD = 2.5  # five products for two


@dataclass(frozen=True)
class TokenTime:
    """Microseconds of one token, forward, recomputation and backward, all layers."""

    gemm_us: float
    recomputed_gemm_us: float
    attention_us: float  # recomputation included
    conversion_us: float
    dispatch_us: float  # what is exposed of it
    other_us: float

    @property
    def total_us(self) -> float:
        """The sum."""
        return (
            self.gemm_us
            + self.recomputed_gemm_us
            + self.attention_us
            + self.conversion_us
            + self.dispatch_us
            + self.other_us
        )

    @property
    def tokens_per_s(self) -> float:
        """Of a GPU."""
        return 1e6 / self.total_us


def token_time(run: Run) -> TokenTime:
    """The time of a token by its parts."""
    a = run.assumptions
    is_bf16 = run.recipe.compute is Compute.BF16
    rate = (a.bf16_gemm_tflop_per_s if is_bf16 else a.gemm_tflop_per_s) * 1e6  # operations a microsecond
    forward, again = gemm_flops(run)
    attention = attention_flops(run)
    passes = 1 + _FLASH_BACKWARD_OVER_FORWARD + (Module.CORE_ATTN in run.scope)
    return TokenTime(
        gemm_us=forward * (1 + _BACKWARD_OVER_FORWARD) / rate,
        recomputed_gemm_us=again / rate,
        attention_us=attention * passes / (a.attention_tflop_per_s * 1e6),
        conversion_us=conversion_bytes(run) / (a.memory_tb_per_s * 1e6),
        dispatch_us=dispatch_bytes(run) / (a.dispatch_gb_per_s * 1e3) * a.exposed_dispatch,
        other_us=a.other_us,
    )


def gemm_flops(run: Run) -> tuple[float, float]:
    """(forward, recomputed) operations of a token's matrix products with weights, two a parameter."""
    model, scope = run.model, run.scope
    num_moe = model.num_layers - model.num_dense_layers
    parameters: dict[Module | None, int] = {
        None: model.num_layers * (model.num_attention_parameters - model.num_up_projection_parameters)
        + num_moe * model.num_experts * model.hidden_size
        + model.num_embedding_parameters,
        Module.MLA_UP_PROJ: model.num_layers * model.num_up_projection_parameters,
        Module.MLP: model.num_dense_layers * model.num_dense_mlp_parameters,
        Module.SHARED_EXPERTS: num_moe * model.num_shared_experts * model.num_expert_parameters,
        Module.MOE_EXPERTS: num_moe * model.top_k * model.num_expert_parameters,
    }
    again = sum(count for module, count in parameters.items() if module in scope)
    return 2.0 * sum(parameters.values()), 2.0 * again


def attention_flops(run: Run) -> float:
    """Forward operations of a token's q k^T and p v: half the sequence lies before it on average."""
    model = run.model
    width = model.num_heads * (model.nope_size + model.rope_size + model.v_size)
    return 2.0 * width * model.num_layers * run.assumptions.sequence / 2


def dispatch_bytes(run: Run) -> float:
    """Sent for a token by dispatch and combine, forward and backward, to experts on other GPUs.

    Combine and the gradient of the dispatch are in BF16. The gradient of the combine is in BF16 too, in FP8 where rows
    are dispatched in MXFP4. No copy is saved where two experts share a GPU.
    """
    model = run.model
    rows = (model.num_layers - model.num_dense_layers) * model.top_k * (1 - 1 / run.expert_parallel)
    there = dispatched(run.recipe)
    gradient = Stored.FP8 if there is Stored.MXFP4 else Stored.BF16
    bits = there.value + gradient.value + 2 * Stored.BF16.value
    return rows * model.hidden_size * bits / 8


def conversion_bytes(run: Run) -> float:
    """Read and written by the quantizing kernels of a token's routed experts, recomputation included.

    Two FP8 kernels of a BF16 tensor read it twice and write it by rows and by columns. Kept in MXFP4: BF16 to codes and
    rows in one kernel (or codes to rows, of what was dispatched), then codes to columns.
    """
    model, recipe = run.model, run.recipe
    if recipe.compute is Compute.BF16:
        return 0.0
    bf16, fp8, fp4 = (stored.value / 8 for stored in (Stored.BF16, Stored.FP8, Stored.MXFP4))
    hidden, wide = model.hidden_size, model.intermediate_size
    both = 2 * (bf16 + fp8)
    forward_x = fp4 + fp8 if recipe.keeps_fp4(Activation.EXPERT_INPUT) else both
    forward_a = bf16 + fp4 + fp8 if recipe.keeps_fp4(Activation.DOWN_INPUT) else both
    forward = hidden * forward_x + wide * forward_a
    if recipe.keeps_fp4(Activation.SWIGLU_INPUT):
        forward += 2 * wide * (bf16 + fp4)
    backward = (hidden + 2 * wide) * both
    for activation, size in ((Activation.EXPERT_INPUT, hidden), (Activation.DOWN_INPUT, wide)):
        if recipe.keeps_fp4(activation):
            backward += size * (fp4 + fp8)
    passes = 1 + (Module.MOE_EXPERTS in run.scope)
    rows = (model.num_layers - model.num_dense_layers) * model.top_k
    num_bytes: float = rows * (passes * forward + backward)
    return num_bytes
