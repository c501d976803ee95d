"""BlockTensor knows its size, checks what it is made of, and passes through ml_dtypes and files bit for bit."""

import copy
import json
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mxsim.blocks import (
    BLOCK_FORMATS,
    FP8_1X128,
    FP8_128X1,
    FP8_128X128,
    MXFP4,
    MXFP6_E3M2,
    MXFP8_E4M3,
    NVFP4,
    BlockTensor,
    ScaleRule,
    fp4_row_to_fp8_col,
    quantize,
)
from mxsim.formats import unpack
from tests.blocks.adversarial import random_bit_patterns
from tests.blocks.oracle_blocks import LAYOUTS, axes_of, block_lengths, num_blocks
from tests.blocks.pairs import assert_tensors_equal, quantize_as_named
from tests.compare import assert_codes_equal

EACH_FORMAT = pytest.mark.parametrize("name", [*LAYOUTS])
SUFFIXES = pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
SHAPES = [(1, 1), (3, 33), (5, 128), (130, 7), (2, 3, 31), (1, 2, 1, 257), (0, 5), (5, 0)]


def some_tensor(name: str, shape=(130, 141), axis: int | None = None) -> BlockTensor:
    """Every kind of scale, NaN among them."""
    return quantize_as_named(random_bit_patterns(shape, len(shape)), name, axis=axis)


# ---------------------------------------------------------------------------------------------------- block formats
def test_the_table_of_block_formats_is_the_specifications():
    assert list(BLOCK_FORMATS) == list(LAYOUTS)
    for name, layout in LAYOUTS.items():
        fmt = BLOCK_FORMATS[name]
        assert (fmt.name, str(fmt)) == (name, name)
        assert (fmt.element.name, fmt.scale.name, fmt.block_shape) == (layout.element.name, layout.scale, layout.block)
        assert fmt.block_size == layout.block[0] * layout.block[1]
        assert fmt.default_scale_rule == (None if layout.default_rule is None else ScaleRule[layout.default_rule])
        assert fmt.tensor_scaled == (name == "NVFP4")


def test_bits_per_element_of_whole_blocks():
    bits = {name: fmt.bits_per_element for name, fmt in BLOCK_FORMATS.items()}
    assert bits == {
        "MXFP4": 4.25,
        "MXFP6_E2M3": 6.25,
        "MXFP6_E3M2": 6.25,
        "MXFP8_E4M3": 8.25,
        "MXFP8_E5M2": 8.25,
        "MXINT8": 8.25,
        "NVFP4": 4.5,
        "FP8_1X128": 8.25,
        "FP8_128X1": 8.25,
        "FP8_128X128": 8 + 32 / 128**2,
    }


def test_a_token_of_7168_takes_3808_bytes_in_MXFP4_and_7392_in_FP8():
    x = np.zeros((1, 7168), np.float32)
    assert (quantize(x, MXFP4).nbytes, quantize(x, FP8_1X128).nbytes) == (3808, 7392)


# ------------------------------------------------------------------------------------------------------------- bytes
@EACH_FORMAT
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nbytes_counts_what_is_stored(name, shape):
    bits = LAYOUTS[name].element.bits
    for axis in axes_of(name, len(shape)):
        t = some_tensor(name, shape, axis)
        scales = num_blocks(shape, block_lengths(name, len(shape), axis))
        row_bytes = sum(1 for start in range(0, shape[-1] * bits, 8))  # whole bytes for each row
        stored = int(np.prod(shape[:-1])) * row_bytes
        stored += int(np.prod(scales)) * (4 if LAYOUTS[name].scale == "FP32" else 1) + (4 if name == "NVFP4" else 0)
        assert t.nbytes == stored
        assert t.nbytes == t.packed().nbytes + t.scales.nbytes + (4 if name == "NVFP4" else 0)
        if t.codes.size:
            assert t.bits_per_element == 8 * stored / t.codes.size


@EACH_FORMAT
def test_bits_per_element_is_the_formats_for_whole_blocks(name):
    t = some_tensor(name, (256, 256))
    assert t.bits_per_element == BLOCK_FORMATS[name].bits_per_element + (32 / 256**2 if name == "NVFP4" else 0)


@EACH_FORMAT
def test_packed_codes_unpack_to_the_codes(name):
    t = some_tensor(name)
    assert_codes_equal(unpack(t.packed(), t.format.element, t.shape[-1]), t.codes)


def test_packed_MXFP4_has_element_0_in_the_low_nibble():
    assert quantize([[4.0, -6.0, 1.0]], MXFP4).packed().tolist() == [[0xF6, 0x02]]


# --------------------------------------------------------------------------------------------------------- ml_dtypes
@EACH_FORMAT
def test_to_and_from_ml_dtypes_is_identity(name):
    for axis in axes_of(name, 2):
        t = some_tensor(name, axis=axis)
        codes, scales = t.to_ml_dtypes()
        back = BlockTensor.from_ml_dtypes(codes, scales, t.format, axis=axis, tensor_scale=t.tensor_scale)
        assert_tensors_equal(back, t)
        assert (codes.shape, scales.shape) == (t.codes.shape, t.scales.shape)
        assert np.shares_memory(codes, t.codes)


@pytest.mark.parametrize(
    "name, codes, scales",
    [
        ("MXFP4", ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu),
        ("MXFP6_E2M3", ml_dtypes.float6_e2m3fn, ml_dtypes.float8_e8m0fnu),
        ("MXFP6_E3M2", ml_dtypes.float6_e3m2fn, ml_dtypes.float8_e8m0fnu),
        ("MXFP8_E4M3", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu),
        ("MXFP8_E5M2", ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
        ("MXINT8", np.int8, ml_dtypes.float8_e8m0fnu),
        ("NVFP4", ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn),
        ("FP8_1X128", ml_dtypes.float8_e4m3fn, np.float32),
        ("FP8_128X1", ml_dtypes.float8_e4m3fn, np.float32),
        ("FP8_128X128", ml_dtypes.float8_e4m3fn, np.float32),
    ],
)
def test_ml_dtypes_arrays_have_these_dtypes_and_mean_the_same(name, codes, scales):
    t = quantize_as_named(np.random.default_rng(0).standard_normal((130, 150)).astype(np.float32), name)
    got_codes, got_scales = t.to_ml_dtypes()
    assert (got_codes.dtype, got_scales.dtype) == (np.dtype(codes), np.dtype(scales))
    values = got_codes.astype(np.float64) / (64 if name == "MXINT8" else 1)
    rows, columns = LAYOUTS[name].block
    by_element = got_scales.astype(np.float64).repeat(rows, axis=0).repeat(columns, axis=1)[:130, :150]
    exact = values * by_element * np.float64(t.tensor_scale or 1)
    assert (exact == t.dequantize(np.float64)).all()


def test_from_ml_dtypes_takes_the_formats_own_axis():
    t = some_tensor("FP8_128X1")
    assert BlockTensor.from_ml_dtypes(*t.to_ml_dtypes(), FP8_128X1).axis == -2


def test_from_ml_dtypes_refuses_other_dtypes():
    codes, scales = some_tensor("MXFP4").to_ml_dtypes()
    with pytest.raises(TypeError, match="from_ml_dtypes: codes has dtype uint8, needed float4_e2m1fn for MXFP4"):
        BlockTensor.from_ml_dtypes(codes.view(np.uint8), scales, MXFP4)
    with pytest.raises(TypeError, match="from_ml_dtypes: codes has dtype float4_e2m1fn, needed float8_e4m3fn for"):
        BlockTensor.from_ml_dtypes(codes, scales, MXFP8_E4M3)
    with pytest.raises(TypeError, match="from_ml_dtypes: scales has dtype uint8, needed float8_e8m0fnu for MXFP4"):
        BlockTensor.from_ml_dtypes(codes, scales.view(np.uint8), MXFP4)
    with pytest.raises(ValueError, match="scales has shape"):
        BlockTensor.from_ml_dtypes(codes, scales[1:], MXFP4)


# ------------------------------------------------------------------------------------------------------- constructor
CODES, SCALES = np.zeros((3, 40), np.uint8), np.zeros((3, 2), np.uint8)


@pytest.mark.parametrize(
    "codes, scales, fmt, options, message",
    [
        (
            CODES,
            SCALES[:, :1],
            MXFP4,
            {},
            r"scales has shape \(3, 1\), needed \(3, 2\) for MXFP4 codes of shape \(3, 40\)",
        ),
        (CODES, SCALES.T, MXFP4, {}, r"scales has shape \(2, 3\), needed \(3, 2\)"),
        (CODES, SCALES, MXFP4, {"axis": 0}, r"scales has shape \(3, 2\), needed \(1, 40\)"),
        (CODES, SCALES[0], MXFP4, {}, r"scales has shape \(2,\), needed \(3, 2\)"),
        (CODES + 16, SCALES, MXFP4, {}, "codes holds 16, needed 0 to 15 for MXFP4"),
        (CODES + 64, SCALES, MXFP6_E3M2, {}, "codes holds 64, needed 0 to 63 for MXFP6_E3M2"),
        (CODES, SCALES, MXFP4, {"axis": 2}, "axis is 2, needed -2 to 1"),
        (CODES, SCALES, MXFP4, {"tensor_scale": 1.0}, "tensor_scale is 1.0, needed None for MXFP4"),
        (CODES, np.zeros((3, 3), np.uint8), NVFP4, {}, "tensor_scale is None, needed a float32 for NVFP4"),
        (CODES, np.zeros((1, 40), np.float32), FP8_128X1, {}, "axis is -1, needed -2 for FP8_128X1"),
        (
            CODES[0],
            np.zeros(1, np.float32),
            FP8_128X128,
            {},
            "the tensor has 1 axes, needed at least 2 for FP8_128X128",
        ),
        (CODES[0, 0], SCALES[0, 0], MXFP4, {}, "the tensor has 0 axes, needed at least 1"),
        (
            CODES,
            np.ones((3, 1), np.float32),
            FP8_1X128,
            {"source_rows": 41},
            "source_rows is 41, needed None or 0 to 40",
        ),
        (
            CODES,
            np.ones((3, 1), np.float32),
            FP8_1X128,
            {"source_rows": -1},
            "source_rows is -1, needed None or 0 to 40",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(codes, scales, fmt, options, message):
    with pytest.raises(ValueError, match=f"BlockTensor: {message}"):
        BlockTensor(codes, scales, fmt, **options)


@pytest.mark.parametrize(
    "codes, scales, fmt, message",
    [
        (CODES.astype(np.int8), SCALES, MXFP4, "codes has dtype int8, needed uint8"),
        (CODES.astype(np.float32), SCALES, MXFP4, "codes has dtype float32, needed uint8"),
        (CODES, SCALES.astype(np.int64), MXFP4, "scales has dtype int64, needed uint8 for MXFP4"),
        (CODES, SCALES.astype(np.float32), MXFP4, "scales has dtype float32, needed uint8 for MXFP4"),
        (CODES, np.ones((3, 1), np.float64), FP8_1X128, "scales has dtype float64, needed float32 for FP8_1X128"),
        (CODES, np.ones((3, 1), np.uint8), FP8_1X128, "scales has dtype uint8, needed float32 for FP8_1X128"),
        (CODES.tolist(), SCALES, MXFP4, "codes is a list, needed an array"),
        (CODES, SCALES.tolist(), MXFP4, "scales is a list, needed an array"),
        (CODES, SCALES, "MXFP4", "format is 'MXFP4', needed a BlockFormat"),
    ],
)
def test_parts_of_another_type_are_refused(codes, scales, fmt, message):
    with pytest.raises(TypeError, match=f"BlockTensor: {message}"):
        BlockTensor(codes, scales, fmt)


def test_the_axis_is_kept_negative():
    assert BlockTensor(CODES, SCALES, MXFP4, axis=1).axis == -1
    assert BlockTensor(CODES, np.zeros((1, 40), np.uint8), MXFP4, axis=0).axis == -2
    assert BlockTensor(CODES, np.zeros((1, 1), np.float32), FP8_128X128, axis=-2).axis == -1
    assert (BlockTensor(CODES, SCALES, MXFP4).ndim, BlockTensor(CODES, SCALES, MXFP4).shape) == (2, (3, 40))


def test_the_tensor_scale_becomes_float32():
    t = BlockTensor(CODES, np.zeros((3, 3), np.uint8), NVFP4, tensor_scale=0.1)
    assert isinstance(t.tensor_scale, np.float32)


# ------------------------------------------------------------------------------------------------------------- files
@EACH_FORMAT
@SUFFIXES
@pytest.mark.parametrize("shape", [(130, 141), (2, 3, 31), (0, 5), (5, 0)], ids=str)
def test_save_then_load_is_identity(tmp_path, name, suffix, shape):
    for axis in axes_of(name, len(shape)):
        t = some_tensor(name, shape, axis)
        path = tmp_path / f"t{suffix}"
        t.save(path)
        back = BlockTensor.load(str(path))
        assert_tensors_equal(back, t)
        assert os.listdir(tmp_path) == [path.name]


@SUFFIXES
def test_every_bit_of_a_scale_survives(tmp_path, suffix):
    bits = np.array([[0x7FC00001, 0xFF800001, 0x00000001, 0x80000000]], np.uint32)  # payloads, a subnormal, -0
    t = BlockTensor(np.zeros((1, 512), np.uint8), bits.view(np.float32), FP8_1X128)
    t.save(tmp_path / f"t{suffix}")
    assert_codes_equal(BlockTensor.load(tmp_path / f"t{suffix}").scales.view(np.uint32), bits)
    nv = BlockTensor(CODES, np.zeros((3, 3), np.uint8), NVFP4, tensor_scale=np.uint32(1).view(np.float32))
    nv.save(tmp_path / f"nv{suffix}")
    assert BlockTensor.load(tmp_path / f"nv{suffix}").tensor_scale == np.float32(2.0**-149)


@SUFFIXES
def test_columns_keep_their_source_rows(tmp_path, suffix):
    columns = fp4_row_to_fp8_col(some_tensor("MXFP4", (5, 64)))
    columns.save(tmp_path / f"c{suffix}")
    back = BlockTensor.load(tmp_path / f"c{suffix}")
    assert back.source_rows == 5
    assert_tensors_equal(back, columns)


@SUFFIXES
def test_arrays_of_any_strides_are_saved(tmp_path, suffix):
    t = some_tensor("MXFP8_E4M3")
    apart = BlockTensor(np.asfortranarray(t.codes), np.asfortranarray(t.scales), t.format)
    apart.save(tmp_path / f"t{suffix}")
    assert_tensors_equal(BlockTensor.load(tmp_path / f"t{suffix}"), t)


@SUFFIXES
def test_a_file_holds_little_more_than_nbytes(tmp_path, suffix):
    t = some_tensor("MXFP4", (256, 1024))
    t.save(tmp_path / f"t{suffix}")
    assert t.nbytes <= (tmp_path / f"t{suffix}").stat().st_size < t.nbytes + 2000


@pytest.mark.parametrize("name", ["t", "t.npy", "t.pt", "npz", ".npz"])
def test_another_suffix_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"save: .* ends in '.*', needed \.npz or \.safetensors"):
        some_tensor("MXFP4").save(tmp_path / name)
    with pytest.raises(ValueError, match=r"load: .* ends in '.*', needed \.npz or \.safetensors"):
        BlockTensor.load(tmp_path / name)
    assert os.listdir(tmp_path) == []


@SUFFIXES
def test_a_missing_file_is_named(tmp_path, suffix):
    with pytest.raises(FileNotFoundError, match=rf"load: .*missing{suffix} does not exist"):
        BlockTensor.load(tmp_path / f"missing{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"folder{suffix}"):
        BlockTensor.load(tmp_path / f"folder{suffix}")


@SUFFIXES
@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_a_truncated_file_is_named_wherever_it_ends(tmp_path, suffix, name):
    path = tmp_path / f"t{suffix}"
    some_tensor(name, (3, 40)).save(path)
    whole = path.read_bytes()
    for size in sorted({0, 1, 4, 7, 8, 9, 50, len(whole) // 3, len(whole) // 2, len(whole) - 22, len(whole) - 1}):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"load: .*t{suffix} is damaged or was not written by BlockTensor.save"):
            BlockTensor.load(path)


@SUFFIXES
def test_a_foreign_file_is_named(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    contents = [b"", b"hello", b"PK\x03\x04" + b"\x00" * 60, np.random.default_rng(0).bytes(5000)]
    contents.append(json.dumps({"a": 1}).encode())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged or was not written by"):
            BlockTensor.load(path)
    if suffix == ".npz":
        np.savez(path, codes=np.zeros((3, 20), np.uint8), scales=SCALES)
    else:
        safetensors.numpy.save_file({"codes": np.zeros((3, 20), np.uint8), "scales": SCALES}, path)
    with pytest.raises(ValueError, match="is damaged or was not written by"):
        BlockTensor.load(path)
    with path.open("wb") as file:
        np.save(file, CODES)  # an .npy under another name
    with pytest.raises(ValueError, match="is damaged or was not written by"):
        BlockTensor.load(path)


def test_a_damaged_byte_of_an_npz_is_noticed(tmp_path):
    path = tmp_path / "t.npz"
    t = some_tensor("MXFP8_E4M3", (30, 64))
    t.save(path)
    whole = bytearray(path.read_bytes())
    at = bytes(whole).index(t.packed().tobytes()[:200])
    whole[at + 100] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="is damaged"):
        BlockTensor.load(path)


def test_an_npz_with_pickles_is_not_executed(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, mxsim=np.array([{"format": "MXFP4"}], dtype=object), codes=CODES, scales=SCALES)
    with pytest.raises(ValueError, match="is damaged or was not written by"):
        BlockTensor.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "MXFP5"},
        {"format": "MXFP8_E4M3"},
        {"shape": [3, 41]},
        {"shape": [4, 40]},
        {"shape": [3, 400]},
        {"shape": "x"},
        {"axis": 0},
        {"axis": 7},
        {"source_rows": 99},
    ],
    ids=str,
)
@SUFFIXES
def test_a_header_that_does_not_fit_the_arrays_is_refused(tmp_path, suffix, change):
    path = tmp_path / f"t{suffix}"
    header = {"format": "MXFP4", "axis": -1, "shape": [3, 40], "source_rows": None}

    def write(header):
        arrays = {"codes": np.zeros((3, 20), np.uint8), "scales": SCALES}
        if suffix == ".npz":
            np.savez(path, mxsim=np.array(json.dumps(header)), **arrays)
        else:
            safetensors.numpy.save_file(arrays, path, metadata={"mxsim": json.dumps(header)})

    write(header)
    assert BlockTensor.load(path).shape == (3, 40)
    write(header | change)
    with pytest.raises(ValueError, match="is damaged or was not written by"):
        BlockTensor.load(path)
    for key in header:
        write({k: v for k, v in header.items() if k != key})
        with pytest.raises(ValueError, match="is damaged or was not written by"):
            BlockTensor.load(path)


@SUFFIXES
def test_a_save_that_fails_leaves_what_was_there(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"t{suffix}"
    t = some_tensor("MXFP4", (3, 40))
    t.save(path)
    before = path.read_bytes()

    def fails_half_way(file, *args, **kwargs):
        file.write(b"half")
        raise OSError("no space left on device")

    def fails(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", fails_half_way)
    monkeypatch.setattr(safetensors.numpy, "save", fails)
    for place in (path, tmp_path / f"new{suffix}"):
        with pytest.raises(OSError, match="no space"):
            t.save(place)
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


@SUFFIXES
def test_saving_over_a_file_replaces_it(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    for name in ("FP8_128X128", "MXFP4"):
        t = some_tensor(name)
        t.save(path)
        assert_tensors_equal(BlockTensor.load(path), t)


@SUFFIXES
def test_who_reads_the_old_file_reads_it_whole(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    some_tensor("MXFP4").save(path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        some_tensor("MXFP8_E4M3").save(path)
        assert reader.read() == before


@SUFFIXES
def test_a_folder_that_is_missing_is_an_error(tmp_path, suffix):
    with pytest.raises(FileNotFoundError):
        some_tensor("MXFP4").save(tmp_path / "nowhere" / f"t{suffix}")
    assert os.listdir(tmp_path) == []


def test_an_npz_is_a_zip_that_NumPy_reads(tmp_path):
    t = some_tensor("NVFP4")
    t.save(tmp_path / "t.npz")
    assert zipfile.is_zipfile(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz", allow_pickle=False) as file:
        assert set(file.files) == {"mxsim", "codes", "scales", "tensor_scale"}
        assert (file["codes"] == t.packed()).all()
        assert (file["scales"] == t.scales).all()


def test_a_safetensors_file_is_read_by_safetensors(tmp_path):
    t = some_tensor("FP8_1X128")
    t.save(tmp_path / "t.safetensors")
    arrays = safetensors.numpy.load_file(tmp_path / "t.safetensors")
    assert (arrays["codes"] == t.packed()).all()
    assert (arrays["scales"].view(np.uint32) == t.scales.view(np.uint32)).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"]
)
def test_copies_and_what_other_processes_receive_are_the_same_tensor(name, duplicate):
    x = random_bit_patterns((130, 130), 5)
    t = quantize(x, BLOCK_FORMATS[name])
    twin = duplicate(t)
    assert_tensors_equal(twin, t)
    assert_tensors_equal(quantize(x, twin.format), t)  # formats are equal by their fields
    assert np.array_equal(twin.dequantize(), t.dequantize(), equal_nan=True)
    assert np.array_equal(
        BlockTensor(twin.codes, twin.scales, twin.format, twin.axis, twin.tensor_scale).scales, t.scales, equal_nan=True
    )


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_link_stays_a_link(tmp_path, suffix):
    link, target = tmp_path / f"link{suffix}", tmp_path / "target"
    target.write_text("old")
    link.symlink_to(target)
    t = quantize(np.ones((2, 32)), MXFP4)
    t.save(link)
    assert link.is_symlink()
    assert_tensors_equal(BlockTensor.load(link), t)


def test_repr_is_one_short_line():
    assert repr(quantize(np.ones((4, 64)), MXFP4)) == "BlockTensor(MXFP4, 4 x 64, axis -1, 136 bytes packed)"


def test_equal_compares_every_bit():
    t = quantize(np.array([[1.0, np.nan] * 64] * 2), FP8_1X128)
    assert t.equal(quantize(np.array([[1.0, np.nan] * 64] * 2), FP8_1X128))
    assert not t.equal(BlockTensor(t.codes, -t.scales, FP8_1X128))  # another NaN
    assert not t.equal(BlockTensor(t.codes, t.scales, FP8_1X128, source_rows=1))
    assert not t.equal(quantize(np.zeros((2, 128)), FP8_1X128))
    assert not t.equal(t.codes)


def test_a_torch_dtype_is_refused_in_one_sentence():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"dequantize: dtype is torch\.bfloat16, needed NumPy's float64"):
        quantize([1.0], MXFP4).dequantize(torch.bfloat16)
