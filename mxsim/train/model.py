"""The language model: a decoder-only transformer whose MLPs are mixtures of experts, after DeepSeek-V3.

Parameters are FP32, the optimizer's master weights; the layers compute in BF16 (norms, routers and the loss in FP32).

B sequences of S tokens, T = B * S; H hidden, N heads of D, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float32, Int
from torch import Tensor, nn

from mxsim.moe import Experts, Linear, MoE, Recipe
from mxsim.train.config import VOCABULARY, TrainConfig

_NORM_EPSILON = 1e-6
_ROPE_BASE = 10_000.0


class RmsNorm(nn.Module):
    """x / sqrt(mean(x**2) + epsilon) * weight over the last axis, in FP32, rounded once."""

    def __init__(self, size: int, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device))

    def forward(self, x: BFloat16[Tensor, "*batch H"]) -> BFloat16[Tensor, "*batch H"]:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, _NORM_EPSILON).to(x.dtype)


class Rope(nn.Module):
    """Turns the pair (x[i], x[i + D/2]) of position s by the angle s * base**(-2 i / D), in FP32, rounded once."""

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, head_size: int, sequence_length: int, device: Any = None) -> None:
        super().__init__()
        exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        angles = torch.arange(sequence_length, dtype=torch.float64)[:, None] * _ROPE_BASE**-exponents
        for name, table in (("cos_SD", angles.cos()), ("sin_SD", angles.sin())):
            self.register_buffer(name, table.to(device=device, dtype=torch.float32), persistent=False)  # (S, D / 2)

    def forward(self, x_BNSD: BFloat16[Tensor, "B N S D"]) -> BFloat16[Tensor, "B N S D"]:
        length = x_BNSD.shape[2]
        cos, sin = self.cos_SD[:length], self.sin_SD[:length]
        first, second = x_BNSD.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x_BNSD.dtype)


class Attention(nn.Module):
    """Causal self-attention of N heads, RoPE on queries and keys, without biases."""

    def __init__(self, config: TrainConfig, device: Any = None) -> None:
        super().__init__()
        options = {"recipe": config.linear_recipe, "gemm": config.gemm, "device": device}
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, **options)
        self.out = Linear(config.hidden_size, config.hidden_size, **options)
        self.rope = Rope(config.hidden_size // config.num_heads, config.sequence_length, device)

    def forward(self, x_BSH: BFloat16[Tensor, "B S H"]) -> BFloat16[Tensor, "B S H"]:
        q, k, v = self.qkv(x_BSH).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, N, S, D)
        y_BNSD = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        result: Tensor = self.out(y_BNSD.transpose(1, 2).flatten(2))
        return result


class DenseMlp(nn.Module):
    """SwiGLU for every token: a layer of one expert."""

    def __init__(self, config: TrainConfig, device: Any = None) -> None:
        super().__init__()
        self.recipe = config.linear_recipe
        self.experts = Experts(
            config.hidden_size, config.dense_size, 1, recipe=self.recipe, gemm=config.gemm, device=device
        )

    def forward(self, x_BSH: BFloat16[Tensor, "B S H"]) -> BFloat16[Tensor, "B S H"]:
        x_TH = x_BSH.flatten(0, 1)
        y_TH: Tensor = self.experts(x_TH, torch.full((1,), x_TH.shape[0], dtype=torch.int64))
        return y_TH.view_as(x_BSH)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the MLP a mixture of experts or, in the first layers, dense."""

    def __init__(self, config: TrainConfig, layer: int, device: Any = None) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.hidden_size, device)
        self.attention = Attention(config, device)
        self.mlp_norm = RmsNorm(config.hidden_size, device)
        self.mlp: DenseMlp | MoE
        if layer < config.num_dense_layers:
            self.mlp = DenseMlp(config, device)
        else:
            self.mlp = MoE(
                config.hidden_size,
                config.expert_size,
                config.num_experts,
                config.top_k,
                num_shared_experts=config.num_shared_experts,
                bias_update_speed=config.bias_update_speed,
                recipe=config.expert_recipe,
                gemm=config.gemm,
                device=device,
            )

    def forward(self, x_BSH: BFloat16[Tensor, "B S H"]) -> BFloat16[Tensor, "B S H"]:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        result: Tensor = x_BSH + self.mlp(self.mlp_norm(x_BSH))
        return result


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out. The same seed gives the same weights in every recipe.

    >>> model = LanguageModel(TrainConfig(recipe="bf16"))
    >>> model(torch.zeros(2, 16, dtype=torch.int64)).shape
    torch.Size([2, 16, 256])
    """

    def __init__(self, config: TrainConfig, device: Any = None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embedding = nn.Embedding(VOCABULARY, hidden, device=device)
        self.blocks = nn.ModuleList(Block(config, layer, device) for layer in range(config.num_layers))
        self.norm = RmsNorm(hidden, device)
        self.head = Linear(hidden, VOCABULARY, recipe=Recipe.BF16, device=device)
        if config.has_tied_head:
            self.head.weight = self.embedding.weight
        self.reset_parameters(config.seed)
        if config.compile:
            for block in self.blocks:
                block.compile()

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Matrices normal with variance 1 / fan in; those that write to the residual stream / (2 layers) of that.

        A head that is not tied is no exception; the embedding then is normal with variance 1.
        """
        device = self.norm.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                weight.fill_(1)
                continue
            is_table = weight is self.embedding.weight and weight is not self.head.weight
            std = 1.0 if is_table else weight.shape[-1] ** -0.5
            if name.endswith(("attention.out.weight", ".w2")):
                std /= math.sqrt(2 * len(self.blocks))
            weight.normal_(0, std, generator=generator)

    def forward(self, tokens_BS: Int[Tensor, "B S"]) -> Float32[Tensor, "B S V"]:
        x_BSH = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BSV: Tensor = self.head(self.norm(x_BSH)).float()
        return logits_BSV

    def embed(self, tokens_BS: Int[Tensor, "B S"]) -> BFloat16[Tensor, "B S H"]:
        """What the first block gets."""
        return F.embedding(tokens_BS, self.embedding.weight).to(torch.bfloat16)

    def loss(self, tokens_BS1: Int[Tensor, "B S+1"]) -> Float32[Tensor, ""]:
        """Mean cross entropy of every token but the first given those before it, in nats."""
        logits_BSV = self(tokens_BS1[:, :-1])
        return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten().long())

    def moe_layers(self) -> list[MoE]:
        """The mixtures of experts, in order."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoE)]

    def prepare_weights(self) -> None:
        """Make the FP8 copies of all weights once, for all passes until the optimizer's next step."""
        for module in self.modules():
            if isinstance(module, Experts | Linear):
                module.prepare_weights()

    def update_router_biases(self) -> Float32[Tensor, ""]:
        """`TopKRouter.update_bias` by the last forward pass.

        Returns:
            The tokens of the busiest expert of any layer, as a multiple of what balanced experts would get.
        """
        loads = []
        for moe in self.moe_layers():
            assert moe.group_sizes_E is not None
            moe.router.update_bias(moe.group_sizes_E)
            loads.append(moe.group_sizes_E.max() * moe.router.num_experts / moe.group_sizes_E.sum())
        return torch.stack(loads).max() if loads else self.norm.weight.new_ones(())

    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    def num_active_parameters(self) -> int:
        """Parameters that a token meets: those of its experts, and all that are no expert's."""
        idle = 0
        for moe in self.moe_layers():
            weights = moe.experts.w1.numel() + moe.experts.w2.numel()
            idle += weights - weights * moe.router.top_k // moe.router.num_experts
        return self.num_parameters() - idle
