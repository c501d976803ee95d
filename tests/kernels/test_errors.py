"""What is refused, with which exception, in which words; the simulator's words where it refuses the same."""

import re

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxsim import blocks, kernels
from mxsim.blocks import ScaleRule
from mxsim.kernels.arguments import first_not_a_power_of_two
from tests.kernels import cases
from tests.kernels.expected import fp8, mxfp4

pytestmark = pytest.mark.usefixtures("host_library")
X = torch.ones(6, 256, dtype=torch.bfloat16)
FP4, FP8 = cases.fp4_rows(6, 256), cases.fp8_rows(6, 256)
META = torch.device("meta")

# op, what it is given instead, exception, message
REFUSED = [
    (kernels.bf16_to_fp4_row, [X.double()], {}, TypeError,
     "bf16_to_fp4_row: x has dtype torch.float64, needed bfloat16, float16 or float32"),
    (kernels.bf16_to_fp4_row, [X.int()], {}, TypeError, "x has dtype torch.int32, needed"),
    (kernels.bf16_to_fp8_row, [X.float()], {}, TypeError,
     "bf16_to_fp8_row: x has dtype torch.float32, needed bfloat16"),
    (kernels.bf16_to_fp8_col, [X.half()], {}, TypeError, "x has dtype torch.float16, needed bfloat16"),
    (kernels.bf16_to_fp8_tile, [X.half()], {}, TypeError,
     "bf16_to_fp8_tile: w has dtype torch.float16, needed bfloat16"),
    (kernels.bf16_to_fp4_and_fp8_row, [X.half()], {}, TypeError, "x has dtype torch.float16, needed bfloat16"),
    (kernels.bf16_to_fp4_row, [np.ones((2, 32), np.float32)], {}, TypeError,
     "bf16_to_fp4_row: x is a ndarray, needed a torch tensor"),
    (kernels.fp4_row_to_fp8_row, [FP4[0].short(), FP4[1]], {}, TypeError,
     "codes has dtype torch.int16, needed uint8 or float4_e2m1fn_x2"),
    (kernels.fp4_row_to_fp8_col, [FP4[0], FP4[1].float()], {}, TypeError,
     "scales has dtype torch.float32, needed uint8 or float8_e8m0fnu"),
    (kernels.fp8_row_to_fp4_row, [FP8[0].view(torch.float8_e5m2), FP8[1]], {}, TypeError,
     "codes has dtype torch.float8_e5m2, needed uint8 or float8_e4m3fn"),
    (kernels.fp8_row_to_fp4_row, [FP8[0], FP8[1].double()], {}, TypeError,
     "scales has dtype torch.float64, needed float32"),
    (kernels.fp8_row_to_fp8_col, [FP8[0], None], {}, TypeError, "scales is a NoneType, needed a torch tensor"),
    # shapes
    (kernels.bf16_to_fp4_row, [X[:, :33]], {}, ValueError,
     "bf16_to_fp4_row: the last axis of x has 33 elements, which is not a multiple of 32"),
    (kernels.bf16_to_fp8_row, [X[:, :32]], {}, ValueError, "has 32 elements, which is not a multiple of 128"),
    (kernels.bf16_to_fp8_col, [X[:, :16]], {}, ValueError, "has 16 elements, which is not a multiple of 32"),
    (kernels.bf16_to_fp4_and_fp8_row, [X[:, :96]], {}, ValueError, "has 96 elements, which is not a multiple of 128"),
    (kernels.fp4_row_to_fp8_row, [FP4[0][:, :16], FP4[1][:, :1]], {}, ValueError,
     "the last axis of codes has 32 elements, which is not a multiple of 128"),
    (kernels.fp4_row_to_fp8_col, [FP4[0][:, :8], FP4[1][:, :1]], {}, ValueError,
     "the last axis of codes has 16 elements, which is not a multiple of 32"),
    (kernels.fp4_to_bf16, [FP4[0][:, :8], FP4[1][:, :1]], {}, ValueError, "which is not a multiple of 32"),
    (kernels.fp8_row_to_fp8_col, [FP8[0][:, :64], FP8[1]], {}, ValueError, "which is not a multiple of 128"),
    (kernels.bf16_to_fp4_row, [X[0, 0]], {}, ValueError, "bf16_to_fp4_row: x has no axes, needed at least 1"),
    (kernels.bf16_to_fp8_tile, [X[0]], {}, ValueError, "bf16_to_fp8_tile: w has 1 axes, needed at least 2"),
    (kernels.fp4_row_to_fp8_row, [FP4[0], FP4[1][:, :4]], {}, ValueError,
     "scales has shape (6, 4), needed (6, 8) for MXFP4 codes of shape (6, 128)"),
    (kernels.fp4_to_bf16, [FP4[0], FP4[1][:5]], {}, ValueError, "scales has shape (5, 8), needed (6, 8)"),
    (kernels.fp8_row_to_fp4_row, [FP8[0], FP8[1].t()], {}, ValueError,
     "scales has shape (2, 6), needed (6, 2) for FP8_1X128 codes of shape (6, 256)"),
    (kernels.fp8_row_to_fp8_col, [FP8[0].view(2, 3, 256), FP8[1]], {}, ValueError,
     "scales has shape (6, 2), needed (2, 3, 2)"),
    # devices
    (kernels.fp4_row_to_fp8_row, [FP4[0].to(META), FP4[1]], {}, ValueError,
     "scales is on cpu, needed meta, where codes is"),
    (kernels.bf16_to_fp8_row, [X], {"group_sizes": torch.empty(2, dtype=torch.int64, device=META)}, ValueError,
     "group_sizes is on meta, needed cpu"),
    # keywords
    *((kernels.fp4_row_to_fp8_row, FP4, {"headroom": h}, ValueError,
       f"fp4_row_to_fp8_row: headroom is {h!r}, needed an integer 0 to 6") for h in (-1, 7, 2.0, "3", None, True)),
    (kernels.fp4_row_to_fp8_col, FP4, {"headroom": 7}, ValueError, "fp4_row_to_fp8_col: headroom is 7, needed"),
    (kernels.bf16_to_fp4_and_fp8_row, [X], {"headroom": 7}, ValueError, "headroom is 7, needed an integer 0 to 6"),
    (kernels.bf16_to_fp4_row, [X], {"scale_rule": "floor"}, TypeError,
     "bf16_to_fp4_row: scale_rule is 'floor', needed a ScaleRule or None"),
    (kernels.fp8_row_to_fp4_row, FP8, {"scale_rule": 0}, TypeError, "scale_rule is 0, needed a ScaleRule or None"),
    *((kernels.bf16_to_fp8_row, [X], {"group_sizes": [6], "row_multiple": m}, ValueError,
       f"bf16_to_fp8_row: row_multiple is {m!r}, needed an integer of 1 or more") for m in (0, -4, 1.0, None, False)),
]  # fmt: skip

RAGGED = [
    (kernels.bf16_to_fp8_row, [X]),
    (kernels.bf16_to_fp8_col, [X]),
    (kernels.bf16_to_fp4_and_fp8_row, [X]),
    (kernels.fp4_row_to_fp8_row, FP4),
    (kernels.fp4_row_to_fp8_col, FP4),
    (kernels.fp8_row_to_fp8_col, FP8),
    (kernels.fp8_row_to_ragged, FP8),
]
EACH_RAGGED = pytest.mark.parametrize("op, inputs", RAGGED, ids=[op.__name__ for op, _ in RAGGED])


@pytest.mark.parametrize("op, inputs, keywords, error, message", REFUSED)
def test_refused(op, inputs, keywords, error, message):
    with pytest.raises(error, match=re.escape(message)) as raised:
        op(*inputs, **keywords)
    assert str(raised.value).startswith(f"{op.__name__}: ")


@EACH_RAGGED
@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ([3, 4], ValueError, "group_sizes sum to 7, needed 6, the rows of "),
        ([], ValueError, "group_sizes sum to 0, needed 6"),
        ([8, -2], ValueError, "group_sizes holds -2, needed sizes of 0 or more"),
        (torch.tensor([8, -2]), ValueError, "group_sizes holds -2, needed sizes of 0 or more"),
        (torch.tensor([3, 4], dtype=torch.int32), ValueError, "group_sizes sum to 7, needed 6"),
        (np.array([3, 4]), ValueError, "group_sizes sum to 7, needed 6"),
        ([2**62, 2**62, 2**62, 2**62, 6], ValueError, f"group_sizes sum to {2**64 + 6}, needed 6"),
        ([6.0], TypeError, "group_sizes is a list of float, needed a list of integers"),
        ([[6]], TypeError, "group_sizes is a list of list, needed a list of integers"),
        (torch.tensor([6.0]), TypeError, "group_sizes is torch.float32 of shape (1,), needed a list of integers"),
        (torch.tensor([[6]]), TypeError, "group_sizes is torch.int64 of shape (1, 1), needed a list of integers"),
        (torch.tensor(6), TypeError, "group_sizes is torch.int64 of shape (), needed a list of integers"),
        (np.array([6.0]), TypeError, "group_sizes is float64 of shape (1,), needed a list of integers"),
        (6, TypeError, "group_sizes is a int, needed a list of integers or a tensor"),
        ("6", TypeError, "group_sizes is a str, needed a list of integers or a tensor"),
    ],
)
def test_group_sizes_that_do_not_fit(op, inputs, sizes, error, message):
    with pytest.raises(error, match=re.escape(f"{op.__name__}: {message}")):
        op(*inputs, group_sizes=sizes)


@pytest.mark.parametrize("op", [kernels.fp8_row_to_fp4_row, kernels.fp8_row_to_fp8_col], ids=lambda o: o.__name__)
@pytest.mark.parametrize("scale", [3.0, 0.0, -0.0, -2.0, np.inf, -np.inf, 1.5 * 2.0**-140, 1 + 2.0**-23])
@pytest.mark.parametrize("layout", [lambda s: s, lambda s: s.t().contiguous().t()], ids=["rows", "columns"])
@pytest.mark.usefixtures("backend")
def test_the_first_scale_that_is_no_power_of_two_is_named(op, scale, layout):
    codes, scales = cases.fp8_rows(40, 512, seed=1)
    scales = scales.clone()
    scales[7, 3] = scales[8, 0] = scales[39, 3] = scale
    scales = layout(scales)
    words = f"{op.__name__}: scale {np.float32(scale)} at index (7, 3) is neither a positive power of two nor NaN"
    with pytest.raises(ValueError, match=re.escape(words)):
        op(codes, scales)
    with pytest.raises(ValueError, match=re.escape(words)):
        getattr(blocks, op.__name__)(fp8(codes, scales))
    with pytest.raises(ValueError, match=re.escape("at index (1, 1, 1, 3) is neither")):
        op(codes.view(5, 2, 4, 512)[:, :, 1:2].repeat(1, 1, 2, 1)[1:], torch.full((4, 2, 2, 4), 1.0).index_put(
            tuple(torch.tensor([i]) for i in (1, 1, 1, 3)), torch.tensor(scale)))  # fmt: skip


@pytest.mark.parametrize("scale", [float("nan"), 2.0**-149, 2.0**127])
def test_scales_at_the_ends_and_NaN_are_accepted(scale):
    codes, scales = FP8[0], torch.full((6, 2), scale)
    kernels.fp8_row_to_fp4_row(codes, scales)
    kernels.fp8_row_to_fp4_row(codes, scales, check=True)
    kernels.fp8_row_to_fp8_col(codes, -scales if scale != scale else scales, check=True)


def words_of(call) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_the_simulator_says_the_same():
    t4, t8 = mxfp4(*FP4), fp8(*FP8)
    pairs = [
        (lambda: kernels.fp4_row_to_fp8_row(*FP4, headroom=7), lambda: blocks.fp4_row_to_fp8_row(t4, headroom=7)),
        (lambda: kernels.fp4_row_to_fp8_col(*FP4, headroom=-1), lambda: blocks.fp4_row_to_fp8_col(t4, headroom=-1)),
        (
            lambda: kernels.fp8_row_to_fp4_row(*FP8, scale_rule="even"),
            lambda: blocks.fp8_row_to_fp4_row(t8, scale_rule="even"),
        ),
        (
            lambda: kernels.fp8_row_to_fp8_col(*FP8, group_sizes=[7, -1]),
            lambda: blocks.fp8_row_to_fp8_col(t8, group_sizes=[7, -1]),
        ),
    ]
    for of_the_op, of_the_simulator in pairs:
        assert words_of(of_the_op) == words_of(of_the_simulator)
    sums = [
        words_of(lambda: kernels.fp4_row_to_fp8_col(*FP4, group_sizes=[7])),
        words_of(lambda: blocks.fp4_row_to_fp8_col(t4, group_sizes=[7])),
    ]
    assert sums[0].replace("rows of codes", "rows of t") == sums[1]


def test_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        kernels.bf16_to_fp4_row(X, ScaleRule.FLOOR)
    with pytest.raises(TypeError, match="positional"):
        kernels.fp4_row_to_fp8_row(*FP4, 6)


def test_an_operator_called_directly_checks_as_well():
    with pytest.raises(TypeError, match="needed bfloat16, float16 or float32"):
        torch.ops.mxsim.bf16_to_fp4_row(X.double(), 0)
    with pytest.raises(ValueError, match="group_sizes sum to 5"):
        torch.ops.mxsim.bf16_to_fp8_row.ragged(X, None, [5], 4)


# ------------------------------------------------------------------------------------------------ check on a device
def test_what_is_checked_on_a_device_is_what_the_host_refuses():
    every_kind = [1.0, 2.0**-126, 2.0**-127, 2.0**-149, 2.0**127, float("nan"), -float("nan")]
    refused = [0.0, -0.0, -1.0, 3.0, float("inf"), -float("inf"), 3 * 2.0**-149, 2.0**-126 + 2.0**-149]
    accepted = torch.tensor(every_kind * 8).reshape(-1, 4)
    assert first_not_a_power_of_two(accepted) is None
    assert first_not_a_power_of_two(accepted[:0]) is None
    codes = torch.zeros(accepted.shape[0], 512, dtype=torch.uint8)
    kernels.fp8_row_to_fp4_row(codes, accepted)
    for scale in refused:
        for layout in (lambda s: s, lambda s: s.t().contiguous().t()):
            scales = accepted.clone()
            scales[5, 2] = scales[6, 0] = scale
            assert first_not_a_power_of_two(layout(scales)) == 22, scale
            with pytest.raises(ValueError, match=r"at index \(5, 2\)"):
                kernels.fp8_row_to_fp4_row(codes, layout(scales), check=True)


def test_nothing_is_read_back_under_capture(monkeypatch):
    with FakeTensorMode():
        scales = torch.empty(2, 2, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="fp8_row_to_fp4_row: check is True, which reads the device back"):
        kernels.fp8_row_to_fp4_row(scales, scales, check=True)
