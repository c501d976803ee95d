"""Inputs that made other libraries fail: each is answered rightly here, or refused for a reason that is listed."""

from functools import cache

import numpy as np
import pytest

from mxsim.blocks import MXFP4, fp4_row_to_fp8_row, quantize
from mxsim.formats import E2M1, encode
from tests.cases import adapter as reasons
from tests.cases.adapter import Adapter
from tests.cases.bug_cases import CASES, Unsupported, check, self_check

SKIPPED = {
    "e2m1-nan": reasons.NO_NAN_CODE,
    "block-second-device": reasons.NO_DEVICES,
    "unpack-split16": reasons.NO_GGML,
    "fp4-fp8-saturates": reasons.NO_HEADROOM_ABOVE_6,
    "ue8m0-pack": reasons.NO_UE8M0,
    "scale-padding-fill": reasons.NO_PADDING,
    **{f"swizzle-{i}": reasons.NO_SWIZZLE for i in range(9)},
    **{f"swizzle-size-{i}": reasons.NO_SWIZZLE for i in range(5)},
    "index-silu-quant": reasons.NO_OFFSETS,
    "index-moe-stack": reasons.NO_OFFSETS,
    "index-mxfp8": reasons.NO_OFFSETS,
}


class Recording:
    """The adapter, keeping the reason of every refusal; an operation that it lacks is an error, not a skip."""

    def __init__(self):
        self.refusals: list[str] = []

    def __getattr__(self, operation):
        method = getattr(Adapter(), operation, None)
        if method is None:
            pytest.fail(f"the adapter has no {operation}")

        def call(**arguments):
            try:
                return method(**arguments)
            except Unsupported as refusal:
                self.refusals.append(str(refusal))
                raise

        return call


@cache
def outcome(case_id: str) -> tuple[str, str, frozenset[str]]:
    """(status, detail, reasons of the refusals) of a case."""
    (case,) = (c for c in CASES if c["id"] == case_id)
    recording = Recording()
    status, detail = check(recording, case)
    return status, detail, frozenset(recording.refusals)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_case(case):
    status, detail, refusals = outcome(case["id"])
    if case["id"] in SKIPPED:
        assert (status, refusals) == ("skip", {SKIPPED[case["id"]]})
    else:
        assert status == "ok", f"{case['fault']}: {detail} ({case['note']}; {case['src'][0]})"


def test_exactly_the_listed_cases_are_skipped():
    skipped = {case["id"] for case in CASES if outcome(case["id"])[0] == "skip"}
    assert skipped == set(SKIPPED)
    assert (len(CASES), len(skipped)) == (98, 23)


@pytest.mark.slow
def test_the_cases_agree_with_their_own_reference():
    with np.errstate(all="ignore"):
        assert self_check() == 0


def test_what_is_skipped_as_refused_is_refused():
    with pytest.raises(ValueError, match="no code"):
        encode([float("nan")], E2M1)
    source = quantize(np.ones((1, 128), np.float32), MXFP4)
    with pytest.raises(ValueError, match="headroom is 7"):
        fp4_row_to_fp8_row(source, headroom=7)


def test_a_wrong_answer_would_be_seen():
    class Wrong(Adapter):
        def encode_e4m3(self, x, overflow, src="f32"):
            return np.asarray(super().encode_e4m3(x, overflow, src)) ^ 1

    assert {check(Wrong(), case)[0] for case in CASES if case["op"] == "encode_e4m3"} == {"FAIL"}
