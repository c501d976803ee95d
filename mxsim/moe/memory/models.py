"""Sizes of mixture-of-experts transformers with multi-head latent attention, and their numbers of parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder of num_dense_layers dense layers, then MoE layers; every attention is latent (MLA).

    Args:
        intermediate_size: of one routed or shared expert; dense_intermediate_size: of a dense layer's MLP.
        q_lora_size: 0: queries come from the hidden state in one projection.
        rope_size: of a head's rotated part; all heads share the key's.

    Raises:
        ValueError: for a size that is no positive integer, more dense layers than layers, or top_k beyond the experts.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    dense_intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    intermediate_size: int
    num_heads: int
    q_lora_size: int
    kv_lora_size: int
    nope_size: int
    rope_size: int
    v_size: int
    vocabulary_size: int

    def __post_init__(self) -> None:
        may_be_zero = {"num_dense_layers", "num_shared_experts", "q_lora_size"}
        for name, value in vars(self).items():
            if name != "name" and (type(value) is not int or value < (0 if name in may_be_zero else 1)):
                raise ValueError(f"ModelShape: {name} is {value!r}, needed a positive integer")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"ModelShape: num_dense_layers is {self.num_dense_layers}, needed at most num_layers {self.num_layers}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"ModelShape: top_k is {self.top_k}, needed at most num_experts {self.num_experts}")

    @property
    def qkv_size(self) -> int:
        """Elements of queries, keys and values of a token, each key with its own copy of the rotated part."""
        return self.num_heads * (2 * (self.nope_size + self.rope_size) + self.v_size)

    @property
    def attention_size(self) -> int:
        """Elements of a token's attention output, the input of the output projection."""
        return self.num_heads * self.v_size

    @property
    def latent_size(self) -> int:
        """Elements of a token's compressed queries, keys and values, the rotated part of the key among them."""
        return self.q_lora_size + self.kv_lora_size + self.rope_size

    @property
    def num_up_projection_parameters(self) -> int:
        """Of the projections from latents to queries, keys and values."""
        queries = self.q_lora_size * self.num_heads * (self.nope_size + self.rope_size)
        return queries + self.kv_lora_size * self.num_heads * (self.nope_size + self.v_size)

    @property
    def num_attention_parameters(self) -> int:
        """Of a layer's projections."""
        down = self.hidden_size * self.latent_size
        if not self.q_lora_size:
            down += self.hidden_size * self.num_heads * (self.nope_size + self.rope_size)
        return down + self.num_up_projection_parameters + self.attention_size * self.hidden_size

    @property
    def num_expert_parameters(self) -> int:
        """Of one expert: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def num_dense_mlp_parameters(self) -> int:
        """Of a dense layer's MLP."""
        return 3 * self.hidden_size * self.dense_intermediate_size

    @property
    def num_embedding_parameters(self) -> int:
        """Of the embedding; the output head has as many."""
        return self.vocabulary_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All matrices: norms, biases and multi-token prediction are not counted."""
        moe = (self.num_experts + self.num_shared_experts) * self.num_expert_parameters
        moe += self.num_experts * self.hidden_size
        dense = self.num_dense_layers * self.num_dense_mlp_parameters
        attention = self.num_layers * self.num_attention_parameters
        return (self.num_layers - self.num_dense_layers) * moe + dense + attention + 2 * self.num_embedding_parameters


# Source: the config.json published with each model (hidden_size, moe_intermediate_size, kv_lora_rank, ...).
DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3",
    hidden_size=7168,
    num_layers=61,
    num_dense_layers=3,
    dense_intermediate_size=18432,
    num_experts=256,
    top_k=8,
    num_shared_experts=1,
    intermediate_size=2048,
    num_heads=128,
    q_lora_size=1536,
    kv_lora_size=512,
    nope_size=128,
    rope_size=64,
    v_size=128,
    vocabulary_size=129280,
)
DEEPSEEK_V2 = ModelShape(
    name="deepseek-v2",
    hidden_size=5120,
    num_layers=60,
    num_dense_layers=1,
    dense_intermediate_size=12288,
    num_experts=160,
    top_k=6,
    num_shared_experts=2,
    intermediate_size=1536,
    num_heads=128,
    q_lora_size=1536,
    kv_lora_size=512,
    nope_size=128,
    rope_size=64,
    v_size=128,
    vocabulary_size=102400,
)
DEEPSEEK_V2_LITE = ModelShape(
    name="deepseek-v2-lite",
    hidden_size=2048,
    num_layers=27,
    num_dense_layers=1,
    dense_intermediate_size=10944,
    num_experts=64,
    top_k=6,
    num_shared_experts=2,
    intermediate_size=1408,
    num_heads=16,
    q_lora_size=0,
    kv_lora_size=512,
    nope_size=128,
    rope_size=64,
    v_size=128,
    vocabulary_size=102400,
)
MODELS = {model.name: model for model in (DEEPSEEK_V3, DEEPSEEK_V2, DEEPSEEK_V2_LITE)}
