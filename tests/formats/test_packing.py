"""pack and unpack: little-endian bit order, against a bit string written out."""

import numpy as np
import pytest

from mxsim.formats import BF16, E2M1, E2M3, E3M2, E4M3, FloatFormat, encode, pack, unpack
from tests.compare import assert_codes_equal


def pack_by_bits(codes, bits: int) -> list[int]:
    """The definition: code i is bits [i * bits, (i + 1) * bits) of one long integer, which is then cut into bytes."""
    word = sum(int(c) << (i * bits) for i, c in enumerate(codes))
    return list(word.to_bytes(-(-len(codes) * bits // 8), "little"))


def test_by_hand():
    assert pack(np.array([1, 2, 3, 4], np.uint8), E2M1).tolist() == [0x21, 0x43]
    assert pack(np.array([1, 15, 9], np.uint8), E2M1).tolist() == [0xF1, 0x09]
    # 000001 000010 000011 000100, lowest bits first: 10000001 00110000 00010000
    assert pack(np.array([1, 2, 3, 4], np.uint8), E2M3).tolist() == [0b10000001, 0b00110000, 0b00010000]
    assert pack(np.array([63], np.uint8), E3M2).tolist() == [0b00111111]
    assert unpack(np.array([0x21, 0x43], np.uint8), E2M1).tolist() == [1, 2, 3, 4]
    assert unpack(np.array([0b10000001, 0b00110000, 0b00010000], np.uint8), E2M3).tolist() == [1, 2, 3, 4]


def test_every_pair_of_4_bit_codes():
    low, high = np.meshgrid(np.arange(16), np.arange(16))
    codes = np.stack([low, high], axis=-1).astype(np.uint8)  # (16, 16, 2)
    packed = pack(codes, E2M1)
    assert packed.dtype == np.uint8
    assert_codes_equal(packed[..., 0], (low | high << 4).astype(np.uint8))
    assert_codes_equal(unpack(packed, E2M1), codes)


def test_every_6_bit_code_in_every_place_and_many_quadruples():
    rng = np.random.default_rng(14)
    codes = rng.integers(0, 64, (4096, 4), dtype=np.uint8)
    for place in range(4):
        codes[64 * place : 64 * place + 64] = 0b101010
        codes[64 * place : 64 * place + 64, place] = np.arange(64)
    packed = pack(codes, E2M3)
    want = np.array([pack_by_bits(row, 6) for row in codes], np.uint8)
    assert_codes_equal(packed, want, None, "6 bits")
    assert_codes_equal(pack(codes, E3M2), want)
    assert_codes_equal(unpack(packed, E2M3), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 33])
def test_any_width_and_tail(bits, count):
    codes = np.random.default_rng(count).integers(0, 2**bits, count, dtype=np.uint8)
    packed = pack(codes, bits)
    assert packed.tolist() == pack_by_bits(codes, bits)
    assert_codes_equal(unpack(packed, bits, count), codes)
    everything = unpack(packed, bits)
    assert everything.size == packed.size * 8 // bits
    assert_codes_equal(everything[:count], codes)
    assert not everything[count:].any()


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 8), (1, 1, 1), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("fmt", [E2M1, E2M3, E4M3], ids=str)
def test_the_last_axis_is_packed_row_by_row(shape, fmt):
    codes = np.random.default_rng(15).integers(0, fmt.num_codes, shape, dtype=np.uint8)
    packed = pack(codes, fmt)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * fmt.bits // 8))
    for index in np.ndindex(shape[:-1]):
        assert packed[index].tolist() == pack_by_bits(codes[index], fmt.bits)
    assert_codes_equal(unpack(packed, fmt, shape[-1]), codes)


def test_non_contiguous_input_is_read_in_logical_order():
    codes = np.random.default_rng(16).integers(0, 16, (10, 24), dtype=np.uint8)
    for view in (codes.T, codes[::2, ::3], codes[::-1, ::-1], np.broadcast_to(codes[0], (3, 24))):
        assert_codes_equal(pack(view, E2M1), pack(np.ascontiguousarray(view), E2M1))
    packed = pack(codes, E2M1)
    for view in (packed.T, packed[::2], packed[:, ::-2]):
        assert_codes_equal(unpack(view, E2M1), unpack(np.ascontiguousarray(view), E2M1))


def test_any_integer_dtype_and_lists():
    for dtype in (np.int8, np.uint16, np.int64, np.uint64, ">i4"):
        assert pack(np.array([1, 2, 3], dtype), E2M1).tolist() == [0x21, 0x03]
    assert pack([1, 2, 3], E2M1).tolist() == [0x21, 0x03]
    assert pack([], E2M1).shape == (0,)


def test_a_width_names_the_same_layout_as_a_format():
    codes = encode(np.linspace(-6, 6, 33), E2M1)
    assert_codes_equal(pack(codes, 4), pack(codes, E2M1))
    assert_codes_equal(pack(codes, FloatFormat("E3M0", 3, 0)), pack(codes, E2M1))


def test_the_input_is_left_alone():
    codes = np.arange(5, dtype=np.uint8)
    packed = pack(codes, E4M3)
    packed[:] = 0
    assert codes.tolist() == [0, 1, 2, 3, 4]
    data = np.arange(5, dtype=np.uint8)
    unpack(data, E4M3)[:] = 0
    assert data.tolist() == [0, 1, 2, 3, 4]


def test_the_byte_order_is_torchs():
    torch = pytest.importorskip("torch")
    codes = np.arange(16, dtype=np.uint8)
    packed = torch.from_numpy(pack(codes, E2M1))
    assert packed.view(torch.float4_e2m1fn_x2).view(torch.uint8).tolist() == [0x10 + 0x22 * i for i in range(8)]
    assert_codes_equal(unpack(packed, E2M1), codes)


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match=r"pack: codes holds.*16.*4 bits"):
        pack(np.array([0, 16]), E2M1)
    with pytest.raises(ValueError, match="pack: codes holds -1"):
        pack(np.array([-1, 3]), E2M1)
    with pytest.raises(ValueError, match=r"pack: codes.*axis"):
        pack(np.uint8(3), E2M1)
    for bad in ([1.0], [True], ["1"]):
        with pytest.raises(TypeError, match="pack: codes has dtype"):
            pack(bad, E2M1)
    for bits in (0, 9, -4, BF16):
        with pytest.raises(ValueError, match="pack"):
            pack([1], bits)
    for data in ([1, 2], np.zeros(3, np.int8), np.zeros(3, np.float32)):
        with pytest.raises(TypeError, match="unpack: data has dtype"):
            unpack(data, E2M1)
    with pytest.raises(ValueError, match=r"unpack: data.*axis"):
        unpack(np.uint8(3), E2M1)
    for count in (-1, 5):
        with pytest.raises(ValueError, match=f"unpack: count is {count}"):
            unpack(np.zeros(2, np.uint8), E2M1, count)
    for width in ("E2M1", 4.5, None):
        with pytest.raises(TypeError):
            pack([1], width)
