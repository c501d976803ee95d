"""The shipped slices of a real model are the ones that their provenance file describes."""

import hashlib
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "paper_figures" / "data"
PROVENANCE = json.loads((FOLDER / "minilm_slices.json").read_text(encoding="utf-8"))
DATA = (FOLDER / PROVENANCE["file"]).read_bytes()
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Layout: uint64 header size, JSON header, tensors. Read here by hand, so that any release of a reader serves."""
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


TENSORS = read_safetensors(DATA)


def test_file_is_the_one_in_the_provenance() -> None:
    assert hashlib.sha256(DATA).hexdigest() == PROVENANCE["sha256"]
    assert len(DATA) == PROVENANCE["bytes"]


def test_text_is_the_one_that_the_model_read() -> None:
    text = (FOLDER / PROVENANCE["text"]["file"]).read_bytes()
    assert hashlib.sha256(text).hexdigest() == PROVENANCE["text"]["sha256"]


def test_data_stay_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("minilm_*")) <= 2_500_000


def test_provenance_names_every_tensor() -> None:
    assert set(TENSORS) == set(PROVENANCE["tensors"])


@pytest.mark.parametrize("name", sorted(PROVENANCE["tensors"]))
def test_tensor_is_as_described(name: str) -> None:
    tensor, described = TENSORS[name], PROVENANCE["tensors"][name]
    assert list(tensor.shape) == described["shape"]
    assert tensor.dtype.name == described["dtype"]
    assert all(size % 128 == 0 for size in tensor.shape), "whole 128 x 128 tiles"

    values = tensor.astype(np.float64)
    assert np.isfinite(values).all()
    centered = values - values.mean()
    assert np.abs(values).max() == described["amax"]
    assert values.std() == pytest.approx(described["std"], rel=1e-9)
    assert (centered**4).mean() / values.var() ** 2 == pytest.approx(described["kurtosis"], rel=1e-9)
