"""Golden vectors: inputs and right bytes of every op in plain files, for anyone in any language.

    python -m mxsim.validate.golden golden/

writes them; golden/README.md says what is in them. The right bytes are the NumPy simulator's (`mxsim.blocks`).
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mxsim.blocks import FP8_1X128, FP8_128X128, BlockTensor, ScaleRule, fp8_gemm
from mxsim.formats import E2M1, E4M3, Rounding
from mxsim.validate import golden_inputs as make
from mxsim.validate.reference import LeafKind, expected

FORMAT_VERSION = 1  # of the files' layout
SET_VERSION = "1.0"  # of the cases and bytes: goes up with every change of either
GEMM = "fp8_gemm"

Array = np.ndarray
_ALIGNMENT = 16
_STOCHASTIC = {"rounding": Rounding.STOCHASTIC, "seed": 0x123456789ABC}  # both words of the key; exact as a double
# element in the files -> NumPy's dtype of it
DTYPES = {"e2m1x2": "u1", "e4m3": "u1", "e8m0": "u1", "f16": "<u2", "bf16": "<u2", "f32": "<u4", "i64": "<i8"}
_OF_LEAF = {
    LeafKind.FP4_CODES: "e2m1x2",
    LeafKind.FP8_CODES: "e4m3",
    LeafKind.E8M0_SCALES: "e8m0",
    LeafKind.FP32_SCALES: "f32",
    LeafKind.BF16_VALUES: "bf16",
    LeafKind.SIZES: "i64",
}


@dataclass(frozen=True)
class Vector:
    """One array: its element as the files call it, and its bits."""

    name: str
    dtype: str
    bits: Array


@dataclass(frozen=True)
class GoldenCase:
    """What goes into an op, and what must come out."""

    op: str
    name: str
    options: Mapping[str, Any]
    inputs: tuple[Vector, ...]
    outputs: tuple[Vector, ...]


def golden_cases() -> Iterator[GoldenCase]:
    """Every case, op after op."""
    fp4_blocks, fp8_blocks = make.bf16_blocks(32, E2M1, 1), make.bf16_blocks(128, E4M3, 2)
    x32, x128 = make.as_rows(fp4_blocks, 128), make.as_rows(fp8_blocks, 128)
    sizes = [0, 1, 37, 128, 0, 129, 5]  # experts; blocks of 128 rows that are short, full, and one row
    ragged: dict[str, Any] = {"group_sizes": sizes}
    rows = sum(sizes)
    fp4, fp4_tall = make.fp4_rows(96, 128, 3), make.fp4_rows(rows, 64, 4)
    fp8, fp8_tall = make.fp8_rows(96, 128, 5), make.fp8_rows(rows, 128, 6)
    x_tall = np.resize(x128, (rows, 128))
    x_columns = np.ascontiguousarray(np.resize(x128, (-(-len(x128) // 32) * 32, 128)).T)
    w = np.resize(x32, (3, 160, 144))  # the first tile holds NaN and infinity; others are ordinary, zeros, subnormal
    w[0, 128:] = make.draw(7, w[0, 128:].shape, 0x3C00, 0x4100)
    w[1] = make.draw(8, w[1].shape, 0x3C00, 0x4100)
    w[2] = make.draw(9, w[2].shape, 0, 2) * 0x8000
    w[2, 128:] |= make.draw(12, w[2, 128:].shape, 0, 0x80).astype(np.uint16)

    for rule in ScaleRule:
        yield _case("bf16_to_fp4_row", rule.name, {"scale_rule": rule}, x=x32)
    yield _case("bf16_to_fp4_row", "from-f32", {"scale_rule": ScaleRule.EVEN}, x=make.float32_rows(13))
    yield _case("bf16_to_fp4_row", "from-f16", {"scale_rule": ScaleRule.FLOOR}, x=make.float16_rows(10))
    yield _case("bf16_to_fp4_row", "stochastic", {"scale_rule": ScaleRule.RCEIL, **_STOCHASTIC}, x=x32)
    for rule in ScaleRule:
        yield _case("fp8_row_to_fp4_row", rule.name, {"scale_rule": rule}, codes=fp8[0], scales=fp8[1])
    for headroom in range(7):
        yield _case("fp4_row_to_fp8_row", f"headroom-{headroom}", {"headroom": headroom}, codes=fp4[0], scales=fp4[1])
    fp4_wide = make.fp4_rows(rows, 128, 11)
    yield _case("fp4_row_to_fp8_row", "ragged", {**ragged, "row_multiple": 16}, codes=fp4_wide[0], scales=fp4_wide[1])
    for headroom in (6, 3, 0):
        tall = {"codes": fp4_tall[0], "scales": fp4_tall[1]}
        yield _case("fp4_row_to_fp8_col", f"headroom-{headroom}", {"headroom": headroom}, **tall)
        yield _case("fp4_row_to_fp8_col", f"ragged-headroom-{headroom}", {"headroom": headroom, **ragged}, **tall)
    yield _case("fp8_row_to_fp8_col", "dense", {}, codes=fp8_tall[0], scales=fp8_tall[1])
    yield _case("fp8_row_to_fp8_col", "ragged", ragged, codes=fp8_tall[0], scales=fp8_tall[1])
    yield _case("bf16_to_fp8_row", "dense", {}, x=x128)
    yield _case("bf16_to_fp8_row", "ragged", ragged, x=x_tall)
    yield _case("bf16_to_fp8_row", "stochastic", _STOCHASTIC, x=x128)
    yield _case("bf16_to_fp8_col", "dense", {}, x=x_columns)
    yield _case("bf16_to_fp8_col", "ragged", ragged, x=x_tall)
    yield _case("bf16_to_fp8_tile", "plain", {}, w=w)
    yield _case("bf16_to_fp8_tile", "transposed", {"transpose": True}, w=w)
    fused = {"scale_rule": ScaleRule.EVEN, "headroom": 6}
    yield _case("bf16_to_fp4_and_fp8_row", "dense", fused, x=x32)
    yield _case("bf16_to_fp4_and_fp8_row", "ragged", {**fused, **ragged}, x=np.resize(x32, (rows, 128)))
    yield _case("bf16_to_fp4_and_fp8_row", "stochastic", {**fused, **_STOCHASTIC}, x=x32)
    every_scale = np.arange(256, dtype=np.uint8).reshape(64, 4)
    yield _case("fp4_to_bf16", "every-code-at-every-scale", {}, codes=np.resize(fp4[0], (64, 64)), scales=every_scale)
    yield _case("fp8_row_to_ragged", "ragged", ragged, codes=fp8_tall[0], scales=fp8_tall[1])
    yield from _gemm_cases()


def _case(op: str, name: str, options: Mapping[str, Any], **inputs: Array) -> GoldenCase:
    leaves = expected(op, inputs, dict(options))
    return GoldenCase(
        op,
        name,
        {key: value.name if isinstance(value, Enum) else value for key, value in options.items()},
        tuple(_input_vector(op, key, array) for key, array in inputs.items()),
        tuple(Vector(leaf.name, _OF_LEAF[leaf.kind], leaf.bits) for leaf in leaves),
    )


def _input_vector(op: str, name: str, array: Array) -> Vector:
    if array.dtype == np.uint8:
        is_fp4 = op.startswith("fp4")
        return Vector(name, "e8m0" if name == "scales" else "e2m1x2" if is_fp4 else "e4m3", array)
    dtype, bits = {"uint16": ("bf16", "u2"), "float16": ("f16", "u2"), "float32": ("f32", "u4")}[str(array.dtype)]
    return Vector(name, dtype, array.view(bits))


def _gemm_cases() -> Iterator[GoldenCase]:
    import ml_dtypes

    m, n, k = 15, 20, 384
    a, b = make.gemm_operand(m, k, 20), make.gemm_operand(n, k, 30)
    sa, sb, sb_tile = make.gemm_scales(m, 3, 40), make.gemm_scales(n, 3, 42), make.gemm_scales(1, 3, 44)
    a_nan, sa_nan, sb_nan = a.copy(), sa.copy(), sb.copy()
    a_nan[0, 5], sa_nan[1, 2], sb_nan[3, 0] = 0x7F, np.nan, np.inf

    def case(name: str, sources: tuple[Array, Array, Array, Array], split_k: int, out: str) -> GoldenCase:
        fmt = FP8_1X128 if sources[3].shape[0] == n else FP8_128X128
        dtype, bits = (np.dtype(ml_dtypes.bfloat16), "u2") if out == "bf16" else (np.dtype(np.float32), "u4")
        left, right = BlockTensor(sources[0], sources[1], FP8_1X128), BlockTensor(sources[2], sources[3], fmt)
        product = fp8_gemm(left, right, split_k=split_k, out=dtype).view(bits)
        names = ("a_codes", "a_scales", "b_codes", "b_scales")
        inputs = tuple(_input_vector(GEMM, key, array) for key, array in zip(names, sources, strict=True))
        return GoldenCase(GEMM, name, {"split_k": split_k, "out": out}, inputs, (Vector("out", out, product),))

    build = partial(case, sources=(a, sa, b, sb))
    yield build("1x128-by-1x128", split_k=1, out="f32")
    yield build("1x128-by-1x128-bf16", split_k=1, out="bf16")
    yield build("1x128-by-1x128-split", split_k=3, out="f32")
    yield case("1x128-by-128x128", (a, sa, b, sb_tile), 1, "f32")
    yield case("nan", (a_nan, sa_nan, b, sb_nan), 1, "f32")


# ------------------------------------------------------------------------------------------------------------- files
def write(folder: Path) -> str:
    """Write the set into a folder, which is made if missing, and return its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, bytearray] = {}
    cases = [
        {
            "op": case.op,
            "name": case.name,
            "options": dict(case.options),
            "inputs": [_stored(stored, case.op, vector) for vector in case.inputs],
            "outputs": [_stored(stored, case.op, vector) for vector in case.outputs],
        }
        for case in golden_cases()
    ]
    files = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in stored.items()}
    content = {"format_version": FORMAT_VERSION, "set_version": SET_VERSION, "files": files, "cases": cases}
    manifest = {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(), **content}
    for name, data in stored.items():
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_text(_json_text(manifest), encoding="utf-8")
    (folder / "manifest.txt").write_text(_plain_text(manifest), encoding="utf-8")
    return str(manifest["sha256"])


def _stored(stored: dict[str, bytearray], op: str, vector: Vector) -> dict[str, Any]:
    """Append the vector to the op's file, unless the same bytes are there; where it lies."""
    data = vector.bits.astype(DTYPES[vector.dtype]).tobytes()
    name = f"{op}.bin"
    file = stored.setdefault(name, bytearray())
    offset = file.find(data) if data else 0
    while offset > 0 and offset % _ALIGNMENT:
        offset = file.find(data, offset + 1)
    if offset < 0:
        file.extend(bytes(-len(file) % _ALIGNMENT))
        offset = len(file)
        file.extend(data)
    return {
        "name": vector.name,
        "dtype": vector.dtype,
        "shape": list(vector.bits.shape),
        "file": name,
        "offset": offset,
    }


def _json_text(manifest: dict[str, Any]) -> str:
    """A line for each case, so that a change is one line of a diff."""
    lines = [json.dumps(case) for case in manifest["cases"]]
    head = json.dumps({key: value for key, value in manifest.items() if key != "cases"}, indent=1)
    return head.removesuffix("\n}") + ',\n "cases": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _plain_text(manifest: dict[str, Any]) -> str:
    """The same in words between blanks, for a reader without a JSON parser."""
    lines = [f"mxsim-golden {FORMAT_VERSION} {manifest['sha256']}"]
    for case in manifest["cases"]:
        lines.append(f"case {case['op']} {case['name']}")
        for key, value in case["options"].items():
            items = value if isinstance(value, list) else [value]
            lines.append(" ".join(["option", key, str(len(items)), *(str(item) for item in items)]))
        for kind in ("input", "output"):
            for v in case[f"{kind}s"]:
                sizes = " ".join(str(size) for size in [len(v["shape"]), *v["shape"]])
                lines.append(f"{kind} {v['name']} {v['dtype']} {v['file']} {v['offset']} {sizes}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m mxsim.validate.golden", description="Write the golden vectors.")
    parser.add_argument("folder", type=Path, help="where to; made if missing")
    print(write(parser.parse_args().folder))
