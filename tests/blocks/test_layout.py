"""Blocks lie where the specification says: any axis, tails, sizes beyond a chunk, empty tensors, any strides."""

import math
import sys

import ml_dtypes
import numpy as np
import pytest

from mxsim.blocks import BLOCK_FORMATS, MXFP4, MXFP8_E5M2, MXINT8, BlockTensor, quantize
from mxsim.formats import philox_bits
from tests import oracle
from tests.blocks.adversarial import wide_range
from tests.blocks.oracle_blocks import LAYOUTS, MX, axes_of, block_lengths, num_blocks, quantize_by_fractions
from tests.blocks.oracle_table import quantize_by_table
from tests.blocks.pairs import assert_quantized_equal, assert_tensors_equal, quantize_as_named
from tests.compare import assert_floats_equal

CHUNK = 2**17  # the package works on pieces of about this many elements
EACH_FORMAT = pytest.mark.parametrize("name", [*LAYOUTS])
POWER_OF_TWO = [name for name in LAYOUTS if name != "NVFP4"]
NEED_TWO_AXES = ("FP8_128X1", "FP8_128X128")


# -------------------------------------------------------------------------------------------------- axes and tails
@EACH_FORMAT
@pytest.mark.parametrize("shape", [(4, 3, 2), (2, 3, 17), (1, 33, 2), (35, 1, 2), (2, 2, 1, 5)], ids=str)
def test_any_axis_of_a_small_tensor(name, shape):
    x = wide_range(shape, 1, (-4, 4))
    for axis in axes_of(name, x.ndim):
        want = quantize_by_fractions(x, name, axis=axis)
        for spelled in (axis, axis + x.ndim):
            got = quantize_as_named(x, name, axis=spelled)
            assert_quantized_equal(got, want, x, f"{name} along {spelled}")
            assert got.axis == axis
            assert got.shape == x.shape


@pytest.mark.parametrize("name", POWER_OF_TWO)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257])
def test_every_tail(name, size):
    for shape in ((3, size), (size, 3), (2, size, 2)):
        x = wide_range(shape, size)
        for axis in axes_of(name, x.ndim):
            got = quantize_as_named(x, name, axis=axis)
            assert_quantized_equal(got, quantize_by_table(x, name, axis=axis), x, f"{name} {shape} along {axis}")


@EACH_FORMAT
def test_a_tail_is_what_zeros_would_make_of_it(name):
    rows, columns = LAYOUTS[name].block
    shape = (3 if rows == 1 else rows + 9, 3 if columns == 1 else columns + 9)
    x = wide_range(shape, 2, (-3, 3))
    padded = np.pad(x, [(0, -shape[0] % rows), (0, -shape[1] % columns)])
    got, want = quantize_as_named(x, name), quantize_as_named(padded, name)
    assert (got.codes == want.codes[: shape[0], : shape[1]]).all()
    assert_floats_equal(got.scales.astype(np.float32), want.scales.astype(np.float32))


@pytest.mark.parametrize("name", POWER_OF_TWO)  # NVFP4's tensor scale is everybody's
def test_blocks_do_not_mix(name):
    """A block alone has the codes and the scale that it has inside its tensor."""
    rows, columns = LAYOUTS[name].block
    x = wide_range((2 * rows + 1, 2 * columns + 1), 3)
    whole = quantize_as_named(x, name)
    for i in range(3 if rows > 1 else 2):
        for j in range(3 if columns > 1 else 2):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            alone = quantize_as_named(x[part], name)
            assert (alone.codes == whole.codes[part]).all()
            assert alone.scales == whole.scales[i, j]


@pytest.mark.parametrize("name", MX)
def test_a_vector_is_one_row(name):
    x = wide_range((75,), 4)
    got, want = quantize_as_named(x, name), quantize_as_named(x[None], name)
    assert (got.codes == want.codes[0]).all()
    assert (got.scales == want.scales[0]).all()
    assert (got.scales.shape, got.axis) == ((3,), -1)
    assert_tensors_equal(quantize_as_named(x, name, axis=0), got)


@pytest.mark.parametrize("name", MX)
def test_down_the_columns_is_along_the_rows_of_the_transpose(name):
    x = wide_range((70, 41), 5)
    down, along = quantize_as_named(x, name, axis=0), quantize_as_named(x.T, name)
    assert (down.codes == along.codes.T).all()
    assert (down.scales == along.scales.T).all()
    assert down.axis == -2


def test_FP8_columns_are_FP8_rows_of_the_transpose():
    x = wide_range((300, 5), 6)
    down, along = quantize_as_named(x, "FP8_128X1"), quantize_as_named(x.T, "FP8_1X128")
    assert (down.codes == along.codes.T).all()
    assert (down.scales == along.scales.T).all()
    assert_tensors_equal(quantize_as_named(x, "FP8_128X1", axis=-2), down)
    assert (quantize_as_named(x, "FP8_1X128", axis=0).scales == down.scales).all()


# -------------------------------------------------------------------------------------------------- beyond one chunk
LARGE = {
    "long rows": (2, 2 * CHUNK + 45),
    "many rows": (4001, 70),
    "one long vector": (3 * CHUNK + 7,),
    "long columns": (CHUNK + 37, 3),
    "stack of small matrices": (3000, 5, 20),
    "stack of large matrices": (3, 150, 600),
    "wide and flat": (3, CHUNK + 1, 1),
    "little more than a block high": (130, 3001),
    "rows of exactly a chunk": (3, CHUNK),
}


@pytest.mark.parametrize(
    "name, shape",
    [
        pytest.param(name, shape, id=f"{name}-{label}")
        for name in ("MXFP4", "MXFP8_E4M3", "FP8_1X128", "FP8_128X1", "FP8_128X128")
        for label, shape in LARGE.items()
        if len(shape) > 1 or name not in NEED_TWO_AXES
    ],
)
def test_chunks_leave_no_seams(name, shape):
    spec = LAYOUTS[name].element
    numbers = [oracle.decode(c, spec) for c in range(1 << spec.bits)]
    values = np.array([-0.0 if n == (True, "finite", 0) else n.value if n.magnitude else 0 for n in numbers], float)
    values[[n.kind == "nan" for n in numbers]] = np.nan
    x = wide_range(shape, 7)
    x.reshape(-1)[:: x.size // 5 + 1] = np.nan
    for axis in axes_of(name, x.ndim):
        lengths = block_lengths(name, x.ndim, axis)
        blocks = num_blocks(shape, lengths)
        if math.prod(blocks) * math.prod(lengths) > 10 * CHUNK:
            continue  # nearly all padding: slow, and no other than the rest
        got = quantize_as_named(x, name, axis=axis)
        assert_quantized_equal(got, quantize_by_table(x, name, axis=axis), x, f"{name} along {axis}")
        scales = got.scale_values()
        for i, length in enumerate(lengths):
            scales = scales.repeat(length, axis=i)
        scales = scales[tuple(slice(n) for n in shape)]
        assert_floats_equal(got.dequantize(np.float64), np.where(np.isnan(scales), np.nan, values[got.codes] * scales))


def test_chunks_of_random_bits_follow_the_elements():
    for shape, axis in (((2, CHUNK + 40), -1), ((CHUNK + 40, 2), -2), ((500, 40, 9), -2)):
        x = wide_range(shape, 8)
        words = philox_bits(9, shape)
        want = quantize_by_table(x, "MXFP4", axis=axis, rounding="STOCHASTIC", random_words=words, k=9)
        got = quantize_as_named(x, "MXFP4", axis=axis, rounding="STOCHASTIC", random_words=words, k=9)
        assert_quantized_equal(got, want, x)


def test_NVFP4_takes_one_tensor_scale_over_all_chunks():
    x = np.zeros((3, CHUNK), np.float32)
    x[:, ::16] = 1.0
    x[-1, -1] = 2688.0
    t = quantize_as_named(x, "NVFP4")
    assert t.tensor_scale == 1.0
    assert (t.scales[-1, -1], t.codes[-1, -1]) == (0x7E, 7)  # 448 and 6
    first = quantize_as_named(x[:1], "NVFP4")
    assert first.tensor_scale == np.float32(1) / np.float32(2688)


# ------------------------------------------------------------------------------------------------------------ empty
@pytest.mark.parametrize(
    "name, shape",
    [
        (name, shape)
        for name in LAYOUTS
        for shape in [(0,), (0, 5), (5, 0), (0, 0), (3, 0, 4), (0, 3, 4), (3, 4, 0), (200, 0), (0, 200)]
        if len(shape) > 1 or name not in NEED_TWO_AXES
    ],
)
def test_empty_tensors_in_every_position(name, shape):
    x = np.zeros(shape, np.float32)
    for axis in axes_of(name, x.ndim):
        t = quantize_as_named(x, name, axis=axis)
        assert t.codes.shape == t.shape == shape
        assert t.scales.shape == num_blocks(shape, block_lengths(name, x.ndim, axis))
        assert t.tensor_scale == (1 if name == "NVFP4" else None)
        assert t.dequantize().shape == t.dequantize(np.float64).shape == shape
        assert t.packed().size == 0
        assert np.isnan(t.bits_per_element)


# ---------------------------------------------------------------------------------------------------------- strides
def layouts_of(x: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays equal to x, laid out otherwise."""
    wide = np.full((*x.shape[:-1], 3 * x.shape[-1] + 1), 7e8, x.dtype)
    wide[..., 1::3] = x
    flipped = np.ascontiguousarray(x[::-1, ..., ::-1])
    unaligned = np.frombuffer(b"\x00" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    return {
        "Fortran order": np.asfortranarray(x),
        "every third element": wide[..., 1::3],
        "negative strides": flipped[::-1, ..., ::-1],
        "transposed back": np.ascontiguousarray(x.T).T,
        "unaligned and read-only": unaligned,
        "the other byte order": x.astype(x.dtype.newbyteorder()),
    }


@EACH_FORMAT
def test_strides_do_not_matter(name):
    x = wide_range((33, 5, 150), 10)
    for axis in axes_of(name, 3):
        want = quantize_as_named(x, name, axis=axis)
        for label, view in layouts_of(x).items():
            before = view.tobytes()
            assert_tensors_equal(quantize_as_named(view, name, axis=axis), want, f"{name} along {axis}, {label}")
            assert view.tobytes() == before, label


@EACH_FORMAT
def test_broadcast_views_are_read_element_by_element(name):
    column, row = wide_range((140, 1), 11), wide_range((1, 140), 12)
    for x in (np.broadcast_to(column, (140, 130)), np.broadcast_to(row, (130, 140))):
        for axis in axes_of(name, 2):
            got = quantize_as_named(x, name, axis=axis)
            assert_tensors_equal(got, quantize_as_named(np.ascontiguousarray(x), name, axis=axis))


@EACH_FORMAT
def test_the_input_is_never_modified(name):
    x = wide_range((130, 140), 13)
    x[0, 0], x[129, 139] = np.nan, -np.inf
    before = x.tobytes()
    writeable = quantize_as_named(x, name)
    assert x.tobytes() == before
    assert not np.shares_memory(writeable.codes, x)
    x.setflags(write=False)
    assert_tensors_equal(quantize_as_named(x, name), writeable)
    codes, scales = writeable.codes.tobytes(), writeable.scales.tobytes()
    writeable.dequantize()
    assert (writeable.codes.tobytes(), writeable.scales.tobytes()) == (codes, scales)


def test_block_tensors_of_any_strides_decode_alike():
    t = quantize(wide_range((70, 64), 14), MXFP4)
    apart = BlockTensor(np.asfortranarray(t.codes), t.scales[::-1].copy()[::-1], MXFP4)
    assert_floats_equal(apart.dequantize(), t.dequantize())
    assert (apart.packed() == t.packed()).all()


# ----------------------------------------------------------------------------------------------------------- dtypes
SMALL = np.arange(-120, 120).reshape(3, 80)  # held exactly by every dtype below but the 8-bit floats


@pytest.mark.parametrize(
    "dtype",
    [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64],
    ids=lambda d: d.__name__,
)
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E5M2, MXINT8], ids=str)
def test_the_dtype_of_x_does_not_matter(dtype, fmt):
    assert_tensors_equal(quantize(SMALL.astype(dtype), fmt), quantize(SMALL.astype(np.float64), fmt))
    assert_tensors_equal(quantize(SMALL.tolist(), fmt), quantize(SMALL.astype(np.float64), fmt))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "float6_e3m2fn"])
@EACH_FORMAT
def test_small_floats_of_ml_dtypes_are_read_exactly(dtype, name):
    bits = {"float4_e2m1fn": 4, "float6_e3m2fn": 6}.get(dtype, 8)
    x = np.resize(np.arange(1 << bits, dtype=np.uint8), (130, 128)).view(getattr(ml_dtypes, dtype))
    assert_tensors_equal(quantize_as_named(x, name), quantize_as_named(x.astype(np.float64), name))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@EACH_FORMAT
def test_torch_tensors_are_read_exactly(dtype, name):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(wide_range((140, 130), 15, (-8, 5)).clip(-400, 400)).to(getattr(torch, dtype))
    want = quantize_as_named(x.to(torch.float64).numpy(), name)
    bits = x.view(torch.uint8).clone()
    assert_tensors_equal(quantize_as_named(x, name), want)
    assert_tensors_equal(quantize_as_named(x.T, name), quantize_as_named(x.T.to(torch.float64).numpy(), name))
    assert_tensors_equal(quantize_as_named(x[1::2, 3:], name), quantize_as_named(x[1::2, 3:].clone(), name))
    if dtype in ("float32", "bfloat16"):
        assert_tensors_equal(quantize_as_named(x.clone().requires_grad_(), name), want)
    assert torch.equal(x.view(torch.uint8), bits)


def test_random_bits_may_be_a_torch_tensor():
    torch = pytest.importorskip("torch")
    x = wide_range((3, 40), 16)
    words = philox_bits(1, x.shape)
    want = quantize_as_named(x, "MXFP4", rounding="STOCHASTIC", random_words=words, k=8)
    as_uint8 = torch.from_numpy((words & 0xFF).astype(np.uint8))
    assert_tensors_equal(quantize_as_named(x, "MXFP4", rounding="STOCHASTIC", random_words=as_uint8, k=8), want)


def test_a_tensor_that_is_not_on_the_CPU_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="needed a dense CPU tensor"):
        quantize(torch.empty(3, 4, device="meta"), MXFP4)
    with pytest.raises(TypeError, match="needed a dense CPU tensor"):
        quantize(torch.eye(3).to_sparse(), MXFP4)
    with pytest.raises(TypeError, match="x has dtype"):
        quantize(torch.ones(3, dtype=torch.complex64), MXFP4)
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16], ids=lambda d: d.__name__)
def test_signalling_NaNs_poison_without_a_warning(fmt, dtype):
    bits = {"float16": 0x7C01, "float32": 0x7F800001, "float64": 0x7FF0000000000001, "bfloat16": 0x7F81}
    name = np.dtype(dtype).name
    x = np.full((2, 3), bits[name], f"u{np.dtype(dtype).itemsize}").view(dtype)
    assert np.isnan(quantize(x, fmt).dequantize()).all()
