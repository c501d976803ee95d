"""Every kind of file and dtype comes back bit for bit; every damaged file gives one line."""

import importlib.util
import io
import json
import math
import struct
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mxsim.analysis import TensorFileError, open_tensors

RANDOM = np.random.default_rng(0)
NUMPY_FLOATS = [np.dtype(name) for name in ("<f2", "<f4", "<f8", ">f2", ">f4", ">f8")]
SHAPES = [(), (0,), (7,), (3, 5), (2, 3, 4), (2, 0, 3)]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """By hand, so that dtypes which no NumPy writer knows can be written."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read(path: Path) -> dict[str, np.ndarray]:
    with open_tensors(path) as tensors:
        loaded = {t.name: np.array(t.load()) for t in tensors if t.problem is None}
        for t in tensors:
            if t.problem is None:
                assert loaded[t.name].shape == t.shape
                assert t.size == math.prod(t.shape)
                t.release()
                np.testing.assert_array_equal(np.array(t.load()), loaded[t.name])  # valid after release
    return loaded


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


# ------------------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NUMPY_FLOATS, ids=str)
def test_npy_and_npz_round_trip(tmp_path, dtype, shape):
    x = np.asarray(RANDOM.standard_normal(shape)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x, y=-x)
    np.savez_compressed(tmp_path / "c.npz", x=x)
    assert_same_bits(read(tmp_path / "x.npy")["x"], x)
    assert_same_bits(read(tmp_path / "x.npz")["y"], -x)
    assert_same_bits(read(tmp_path / "c.npz")["x"], x)


def test_fortran_order_npy(tmp_path):
    x = np.asfortranarray(RANDOM.standard_normal((3, 4, 5)))
    np.save(tmp_path / "x.npy", x)
    np.testing.assert_array_equal(read(tmp_path / "x.npy")["x"], x)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("F64", np.float64),
        ("F32", np.float32),
        ("F16", np.float16),
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_every_float_dtype_of_safetensors(tmp_path, name, dtype):
    dtype = np.dtype(dtype)
    content = RANDOM.integers(0, 256, 24 * dtype.itemsize, np.uint8).tobytes()
    write_safetensors(tmp_path / "x.safetensors", {"pad": ("U8", (8,), bytes(8)), "x": (name, (4, 6), content)})
    with open_tensors(tmp_path / "x.safetensors") as tensors:
        (x,) = (t for t in tensors if t.name == "x")
        assert x.problem is None
        assert x.dtype == dtype.name
        assert np.array(x.load()).view(np.uint8).tobytes() == content
        assert next(t for t in tensors if t.name == "pad").problem == "not floating-point"


def test_packed_dtypes_of_safetensors_are_named_and_not_read(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"x": ("F4", (4, 6), bytes(12)), "y": ("F32", (1,), bytes(4))})
    with open_tensors(tmp_path / "x.safetensors") as tensors:
        packed, plain = tensors
        assert (packed.dtype, packed.shape) == ("F4", (4, 6))
        assert "packed" in packed.problem
        assert plain.problem is None


def test_pt_round_trip_with_nested_names(tmp_path):
    torch = pytest.importorskip("torch")
    w = torch.randn(4, 6).bfloat16()
    content = {
        "model": {"w": w, "t": torch.randn(3, 4).t()},
        "list": [torch.arange(3), torch.nn.Parameter(torch.ones(2))],
    }
    for name, options in (("new.pt", {}), ("old.pth", {"_use_new_zipfile_serialization": False})):
        torch.save({**content, "step": 3, "none": None}, tmp_path / name, **options)
        loaded = read(tmp_path / name)
        assert set(loaded) == {"model.w", "model.t", "list.1"}
        assert loaded["model.w"].view(np.uint16).tobytes() == w.view(torch.uint16).numpy().tobytes()
        np.testing.assert_array_equal(loaded["model.t"], content["model"]["t"].numpy())


def test_pt_says_what_it_cannot_give(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"sparse": torch.eye(3).to_sparse(), "complex": torch.ones(2, dtype=torch.complex64)}, tmp_path / "x.pt")
    with open_tensors(tmp_path / "x.pt") as tensors:
        problems = {t.name: t.problem for t in tensors}
    assert "sparse" in problems["sparse"]
    assert problems["complex"] == "complex"


@pytest.mark.parametrize(
    "array, problem",
    [
        (np.arange(3), "not floating-point"),
        (np.ones(3, bool), "not floating-point"),
        (np.ones(3, complex), "complex"),
        (np.ones(3, ml_dtypes.bfloat16), "cannot say bfloat16"),
        (np.zeros(3, [("a", "f4")]), "no floating-point"),
        (np.array(["a"]), "no floating-point"),
        (np.array([{}], dtype=object), "Python objects"),
    ],
    ids=["int", "bool", "complex", "bfloat16", "struct", "text", "object"],
)
def test_what_is_no_real_number_is_named_and_never_unpickled(tmp_path, array, problem):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=array)
    for path in (tmp_path / "x.npy", tmp_path / "x.npz"):
        with open_tensors(path) as tensors:
            assert problem in tensors[0].problem


def test_patterns_choose_tensors(tmp_path):
    np.savez(tmp_path / "x.npz", **{"a.w": np.ones(1), "a.b": np.ones(1), "c.w": np.ones(1)})
    with open_tensors(tmp_path / "x.npz", ["a.*", "c.w"]) as tensors:
        assert [t.name for t in tensors] == ["a.w", "a.b", "c.w"]
    with (
        pytest.raises(TensorFileError, match=r"none of its 3 tensors fits b\*"),
        open_tensors(tmp_path / "x.npz", ["b*"]),
    ):
        pass


# ---------------------------------------------------------------------------------------------------- what goes wrong
def load_all(path: Path) -> None:
    with open_tensors(path) as tensors:
        for tensor in tensors:
            if tensor.problem is None:
                np.array(tensor.load())


def error_of(path: Path) -> str:
    """The one line; loading is part of reading."""
    with pytest.raises(TensorFileError) as caught:
        load_all(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 260
    return message


def test_paths_that_are_no_files(tmp_path):
    assert error_of(tmp_path / "missing.npy").endswith("no such file")
    assert error_of(tmp_path).endswith("is a directory")
    assert error_of(Path("/dev/null")).endswith("not a regular file")
    (tmp_path / "x.txt").write_text("1 2 3")
    assert "unknown kind of file '.txt'" in error_of(tmp_path / "x.txt")
    assert error_of(tmp_path / ("x" * 300 + ".npy")).endswith("name too long")


def file_bytes(kind: str) -> bytes:
    buffer = io.BytesIO()
    x = RANDOM.standard_normal((20, 10)).astype(np.float32)
    if kind == "npy":
        np.save(buffer, x)
    elif kind == "npz":
        np.savez(buffer, x=x, y=x)
    elif kind == "npz compressed":
        np.savez_compressed(buffer, x=x)
    elif kind == "safetensors":
        import safetensors.numpy

        return safetensors.numpy.save({"x": x, "y": x})
    else:
        torch = pytest.importorskip("torch")
        torch.save({"x": torch.from_numpy(x)}, buffer)
    return buffer.getvalue()


KINDS = ["npy", "npz", "npz compressed", "safetensors", "pt"]


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_at_any_place_is_one_line(tmp_path, kind):
    whole = file_bytes(kind)
    path = tmp_path / f"x.{kind.split()[0]}"
    places = {*range(0, 200, 7), *range(0, len(whole), max(1, len(whole) // 60)), len(whole) - 1}
    for place in sorted(places):
        path.write_bytes(whole[:place])
        error_of(path)


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_one_line(tmp_path, kind):
    path = tmp_path / f"x.{kind.split()[0]}"
    whole = file_bytes(kind)
    for content in (b"", b"\0" * 1000, b"hello, this is text\n" * 50, bytes(RANDOM.integers(0, 256, 2000, np.uint8))):
        path.write_bytes(content)
        error_of(path)
        path.write_bytes(whole[:6] + content)
        error_of(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_is_one_line_or_harmless(tmp_path, kind):
    whole = file_bytes(kind)
    path = tmp_path / f"x.{kind.split()[0]}"
    for place in range(0, min(len(whole), 700), 5):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        try:
            load_all(path)
        except TensorFileError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_one_line(tmp_path, kind):
    for other in KINDS:
        if other.split()[0] != kind.split()[0]:
            path = tmp_path / f"x.{other.split()[0]}"
            path.write_bytes(file_bytes(kind))
            message = error_of(path)
            if other == "pt" and importlib.util.find_spec("torch") is None:
                assert "needs torch" in message
            else:
                assert "is damaged" in message or "holds no tensors" in message


def test_a_header_that_promises_more_than_there_is_allocates_nothing(tmp_path):
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + bytes(64)
    (tmp_path / "x.npy").write_bytes(content)
    error_of(tmp_path / "x.npy")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content)
    assert "promises" in error_of(tmp_path / "x.npz")


def test_an_archive_without_arrays_is_said_to_hold_none(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert error_of(tmp_path / "x.npz").endswith("holds no tensors")


def test_pickled_code_in_a_pt_file_does_not_run(tmp_path):
    pytest.importorskip("torch")
    import pickle

    (tmp_path / "x.pt").write_bytes(pickle.dumps(print))
    assert "holds more than tensors" in error_of(tmp_path / "x.pt")


def test_without_torch_a_pt_file_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.pt").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert error_of(tmp_path / "x.pt").endswith("a .pt file needs torch; install it: pip install torch")
