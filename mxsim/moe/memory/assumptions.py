"""What the estimate takes for granted: each a parameter with its source, or the word "inferred"."""

from dataclasses import dataclass, field, fields


def _parameter(value: float, source: str) -> float:
    result: float = field(default=value, metadata={"source": source})
    return result


@dataclass(frozen=True)
class Assumptions:
    """Of a training run with Megatron's 1F1B pipeline; the defaults are the paper's Table 1 as far as it can be told.

    Two are calibrated on that table: optimizer_bytes, a whole number that stands for a configuration which exists, on
    its five memory shares, and other_us on its five throughputs. `describe` has the source of each.
    """

    sequence: int = field(default=4096, metadata={"source": "the paper"})
    micro_batch: int = field(default=1, metadata={"source": "arXiv 2511.02302, the same laboratory"})
    num_gpus: int = field(default=256, metadata={"source": "the paper"})
    weight_bytes: float = _parameter(2, "BF16")
    gradient_bytes: float = _parameter(2, "inferred: BF16 gradients, the smallest that Megatron's optimizer takes")
    optimizer_bytes: float = _parameter(
        6,
        "calibrated; inferred to be BF16 moments and the lower 16 bits of an FP32 master weight, whose upper bits are "
        "the BF16 weight (Megatron's precision-aware Adam)",
    )
    fp8_weight_copies: float = _parameter(
        2, "TransformerEngine on Hopper: FP8 GEMMs read rows and columns of a weight, each one byte and a scale"
    )
    rows_over_balanced: float = _parameter(1.0, "inferred: balanced routing")
    capacity_share: float = _parameter(
        81559 * 2**20 / 80e9, "nvidia-smi of an H100 80GB: 81559 MiB, 1.069 of its nominal 80e9 bytes"
    )
    reserve_gb: float = _parameter(1.5, "inferred: CUDA context, communication buffers, fragmentation")
    gemm_tflop_per_s: float = _parameter(
        990.0, "benchmarks/results/moe_h200.json: FP8 GEMMs of the expert layer, forward and backward, on an H200"
    )
    bf16_gemm_tflop_per_s: float = _parameter(749.0, "the same file: the same GEMMs in BF16")
    attention_tflop_per_s: float = _parameter(400.0, "inferred: a causal flash kernel on an H100, forward and backward")
    memory_tb_per_s: float = _parameter(2.9, "H100 datasheet 3.35 TB/s times a copy's 0.88 of it on the H200 here")
    dispatch_gb_per_s: float = _parameter(282.0, "measured here: all_to_all_single between two H200, 256 MiB")
    exposed_dispatch: float = _parameter(0.0, "inferred: FP8 and MXFP4 are as fast at equal scope, so it is hidden")
    other_us: float = _parameter(
        440.0,
        "calibrated: per token, all that is not GEMM, attention, conversion or dispatch; bubble and waiting too",
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            counts = f.name in {"sequence", "micro_batch", "num_gpus"}
            if isinstance(value, bool) or not isinstance(value, int if counts else (int, float)):
                raise TypeError(f"Assumptions: {f.name} is {value!r}, needed {'an integer' if counts else 'a number'}")
            if not 0 <= value < float("inf"):
                raise ValueError(f"Assumptions: {f.name} is {value}, needed a finite number of 0 or more")
            if (counts or f.name.endswith("_per_s")) and value == 0:
                raise ValueError(f"Assumptions: {f.name} is 0, needed more")

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.sequence * self.micro_batch

    def describe(self) -> list[tuple[str, float, str]]:
        """(name, value, source) of each."""
        return [(f.name, getattr(self, f.name), f.metadata["source"]) for f in fields(self)]
