"""What `encode` accepts as values: each kind gives the codes of the same real numbers, and the rest is refused."""

import ml_dtypes
import numpy as np
import pytest

from mxsim.formats import BF16, E2M1, E4M3, E5M2, E8M0, FP32, Rounding, decode, encode, philox_bits, round_to
from tests import oracle
from tests.compare import assert_codes_equal
from tests.formats.table_codec import encode_by_table

VALUES = np.array([0.0, -0.0, 0.25, -0.75, 1.25, 3.5, -5.0, 6.0, 448.0, -0.3125])  # exact in every float of 16 bits
WANT = encode_by_table(VALUES, oracle.E4M3)
INTEGERS = [0, 1, -1, 3, 17, -25, 100]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ">f2", ">f4", ">f8", "<f4"])
def test_every_float_dtype_gives_the_same_codes(dtype):
    x = VALUES.astype(dtype)
    assert_codes_equal(encode(x, E4M3), WANT, VALUES, str(dtype))


@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [
        (ml_dtypes.float8_e4m3fn, E4M3),
        (ml_dtypes.float8_e5m2, E5M2),
        (ml_dtypes.float8_e8m0fnu, E8M0),
        (ml_dtypes.float4_e2m1fn, E2M1),
        (ml_dtypes.bfloat16, BF16),
    ],
    ids=str,
)
def test_ml_dtypes_arrays_are_read_as_their_values(dtype, fmt):
    codes = np.arange(fmt.num_codes, dtype=fmt.code_dtype)
    codes = codes[np.isfinite(decode(codes, fmt))]
    x = codes.view(dtype)
    assert_codes_equal(encode(x, fmt), codes, codes, f"{dtype} to {fmt}")
    assert_codes_equal(encode(x, FP32), decode(codes, fmt).view(np.uint32), codes, f"{dtype} to FP32")


@pytest.mark.parametrize(
    "name",
    ["float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fnuz", "float8_e5m2fnuz"],
)
def test_the_other_ml_dtypes_floats_are_read_too(name):
    x = np.array([0.5, -1.5, 2.0, -0.0]).astype(getattr(ml_dtypes, name))
    assert encode(x, E2M1).tolist() == [1, 11, 4, 0 if name.endswith("fnuz") else 8]


@pytest.mark.parametrize("value", [1.5, -0.0, 3, np.float16(1.5), np.float32(-2.25), np.float64(0.1), np.int8(-3)])
def test_scalars_give_a_zero_dimensional_code(value):
    got = encode(value, E4M3)
    assert got.shape == ()
    assert got.dtype == np.uint8
    assert int(got) == oracle.encode(float(value), oracle.E4M3)
    assert round_to(value, E4M3).shape == ()
    assert encode(ml_dtypes.bfloat16(1.5), E4M3) == 0x3C


@pytest.mark.parametrize(
    "values", [[0.25, -0.75], (0.25, -0.75), [[0.25], [-0.75]], [np.float32(0.25), np.float32(-0.75)], [0.25, -3]]
)
def test_lists_and_tuples(values):
    array = np.array(values, np.float64)
    assert_codes_equal(encode(values, E4M3), encode_by_table(array, oracle.E4M3), array)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.int64, ">i4", int, np.uint8, np.uint16, np.uint32, np.uint64, ">u2"]
)
def test_integers_are_exact(dtype):
    dtype = np.dtype(dtype)
    values = [abs(v) for v in INTEGERS] if dtype.kind == "u" else INTEGERS
    want = [oracle.encode(v, oracle.E4M3) for v in values]
    assert encode(np.array(values, dtype), E4M3).tolist() == want
    extremes = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype) if dtype.itemsize < 8 else np.array([-1, 1])
    want = [oracle.encode(int(v), oracle.FP32) for v in extremes]
    assert encode(extremes, FP32).tolist() == want


def test_integers_up_to_2_to_the_53_are_taken_and_larger_ones_refused():
    edge = [2**53, -(2**53), 2**53 - 1]
    assert encode(edge, FP32).tolist() == [oracle.encode(v, oracle.FP32) for v in edge]
    for bad in (2**53 + 1, -(2**53) - 1, [1, 2**60], np.uint64(2**63), np.array([-(2**63)])):
        with pytest.raises(ValueError, match=r"encode: values holds an integer beyond 2\*\*53"):
            encode(bad, E4M3)


@pytest.mark.parametrize("bad", [2**64, -(2**70), [1, 2**100]], ids=repr)
def test_integers_beyond_64_bits_are_refused_too(bad):
    with pytest.raises((ValueError, TypeError), match="encode: values"):
        encode(bad, E4M3)


@pytest.mark.parametrize(
    "bad",
    [
        1j,
        np.zeros(2, np.complex64),
        np.zeros(2, np.longdouble),
        "1.5",
        ["1.5"],
        b"1",
        None,
        [None, 1.0],
        object(),
        np.array([1.5, 2.5], object),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([1], "timedelta64[s]"),
        {"a": 1},
        np.zeros(2, [("a", np.float32)]),
        np.zeros(2, "V4"),
        np.array([1, 2], ml_dtypes.int4),
        True,
        np.array([True, False]),
    ],
    ids=lambda v: f"{type(v).__name__}-{getattr(v, 'dtype', '' if type(v) is object else v)}",
)
def test_what_is_no_real_number_is_refused_by_name(bad):
    for function in (encode, round_to):
        with pytest.raises(TypeError, match="encode: values has dtype"):
            function(bad, E4M3)


def test_a_ragged_list_is_refused():
    with pytest.raises(ValueError, match="encode: values is no array"):
        encode([[1.0, 2.0], [3.0]], E4M3)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 5), (2, 3, 4), (1,), ()])
def test_shape_is_kept(shape):
    x = np.ones(shape, np.float32)
    assert encode(x, E4M3).shape == decode(encode(x, E4M3), E4M3).shape == round_to(x, E4M3).shape == shape
    assert encode(x, E4M3).dtype == np.uint8
    r = philox_bits(0, shape)
    assert encode(x, E4M3, rounding=Rounding.STOCHASTIC, random_bits=r).shape == shape
    assert encode([], E4M3).shape == (0,)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_strided_views_are_read_in_logical_order(dtype):
    x = np.random.default_rng(17).standard_normal((12, 20)).astype(dtype)
    frozen = x.copy()
    frozen.setflags(write=False)
    views = [x.T, x[::2, 1::3], x[::-1, ::-1], np.asfortranarray(x), np.broadcast_to(x[0], (3, 20)), frozen, x[:, :1]]
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(dtype).reshape(x.shape)
    for view in [*views, unaligned]:
        assert_codes_equal(encode(view, E4M3), encode_by_table(view, oracle.E4M3), view)
    r = philox_bits(1, (20, 12))
    got = encode(x.T, E4M3, rounding=Rounding.STOCHASTIC, random_bits=r)
    assert_codes_equal(got, encode_by_table(x.T, oracle.E4M3, "STOCHASTIC", r=r), x.T)
    got = encode(x, E4M3, rounding=Rounding.STOCHASTIC, random_bits=r.T)
    assert_codes_equal(got, encode_by_table(x, oracle.E4M3, "STOCHASTIC", r=r.T), x)


def test_the_input_is_left_alone():
    x = np.array([-1.3, np.inf, 1e-40], np.float32)
    before = x.copy()
    encode(x, E4M3)
    round_to(x, FP32)[:] = 0
    encode(x, FP32)[:] = 0
    assert x.tobytes() == before.tobytes()


class TestTorch:
    """CPU tensors are read without a change of value; the rest is refused."""

    torch = pytest.importorskip("torch")

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
    def test_float_tensors(self, name):
        x = self.torch.tensor(VALUES.tolist(), dtype=getattr(self.torch, name))
        assert_codes_equal(encode(x, E4M3), WANT, VALUES, name)

    @pytest.mark.parametrize(
        ("name", "fmt"),
        [("float8_e4m3fn", E4M3), ("float8_e5m2", E5M2), ("float8_e8m0fnu", E8M0), ("bfloat16", BF16)],
    )
    def test_every_code_of_the_narrow_dtypes(self, name, fmt):
        codes = np.arange(fmt.num_codes, dtype=fmt.code_dtype)
        codes = codes[np.isfinite(decode(codes, fmt))]
        x = self.torch.from_numpy(codes).view(getattr(self.torch, name))
        assert_codes_equal(encode(x, fmt), codes, codes, name)
        assert_codes_equal(encode(x, FP32), decode(codes, fmt).view(np.uint32), codes, name)

    @pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
    def test_fnuz_tensors(self, name):
        x = self.torch.tensor([0.5, -1.5, 2.0]).to(getattr(self.torch, name))
        assert encode(x, E2M1).tolist() == [1, 11, 4]

    @pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64"])
    def test_integer_tensors(self, name):
        x = self.torch.tensor([0, 1, 3, 100], dtype=getattr(self.torch, name))
        assert encode(x, E4M3).tolist() == [oracle.encode(v, oracle.E4M3) for v in (0, 1, 3, 100)]

    @pytest.mark.parametrize("name", ["bfloat16", "float32", "float64"])
    def test_a_tensor_that_requires_grad_is_detached(self, name):
        x = self.torch.tensor([1.25, -3.5], dtype=getattr(self.torch, name), requires_grad=True)
        assert encode(x, E2M1).tolist() == [2, 14]
        assert encode(x * 2, E2M1).tolist() == [4, 15]
        assert x.requires_grad

    @pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn"])
    def test_views_and_shapes(self, name):
        x = self.torch.arange(24, dtype=self.torch.float32).reshape(4, 6).to(getattr(self.torch, name))
        whole = encode(x, E4M3)
        assert_codes_equal(encode(x.T, E4M3), whole.T)
        assert_codes_equal(encode(x[1::2, ::3], E4M3), whole[1::2, ::3])
        assert_codes_equal(encode(x[:1].expand(3, 6), E4M3), np.broadcast_to(whole[:1], (3, 6)))
        assert encode(x[0, 5], E4M3).shape == ()
        assert encode(x[:0], E4M3).shape == (0, 6)
        assert decode(encode(x, E4M3), E4M3).shape == (4, 6)

    def test_negated_views_and_parameters(self):
        z = self.torch.tensor([1 + 2j, 3 - 4j])
        assert encode(z.conj().imag, E2M1).tolist() == [12, 6]
        assert encode(self.torch.nn.Parameter(self.torch.tensor([1.0])), E2M1).tolist() == [2]

    def test_codes_and_draws_may_be_tensors(self):
        x = self.torch.tensor([1.0, 2.75])
        codes = self.torch.from_numpy(encode(x, E2M1))
        assert decode(codes, E2M1).tolist() == [1.0, 3.0]
        r = self.torch.tensor([0, 7])
        assert encode(x, E2M1, rounding=Rounding.STOCHASTIC, random_bits=r, num_random_bits=3).tolist() == [2, 4]

    def test_the_result_does_not_share_memory(self):
        x = self.torch.tensor([1.0, 2.0])
        round_to(x, FP32)[:] = 0
        assert x.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("name", ["complex64", "bool", "float4_e2m1fn_x2"])
    def test_other_dtypes_are_refused(self, name):
        x = self.torch.zeros(2, dtype=self.torch.uint8).view(self.torch.bool)
        x = x.to(self.torch.complex64) if name == "complex64" else x.view(getattr(self.torch, name))
        with pytest.raises(TypeError, match="encode: values"):
            encode(x, E2M1)

    def test_a_tensor_elsewhere_is_refused(self):
        with pytest.raises(TypeError, match=r"encode: values is a torch tensor on meta"):
            encode(self.torch.zeros(2, device="meta"), E2M1)
        sparse = self.torch.zeros(2, 2).to_sparse()
        with pytest.raises(TypeError, match="encode: values is a torch tensor"):
            encode(sparse, E2M1)


def test_a_masked_element_has_no_value():
    x = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    with pytest.raises(TypeError, match="values is a masked array with masked elements"):
        encode(x, E4M3)
    assert encode(np.ma.masked_array([1.0, 2.0]), E4M3).tolist() == [0x38, 0x40]
