"""The committed golden vectors: complete, unchanged, found out when changed, equal to the host build, read from C++."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import oracle
from tests.compare import assert_codes_equal

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.blocks import ScaleRule  # noqa: E402
from mxsim.formats import Rounding  # noqa: E402
from mxsim.validate import OPS, golden  # noqa: E402

GOLDEN = Path(__file__).parents[2] / "golden"
NAN_PAYLOADS = {"f32": 0x7F800000, "bf16": 0x7F80}


def _loader():
    spec = importlib.util.spec_from_file_location("golden_load", GOLDEN / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = _loader().load(GOLDEN)
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['op']}-{case['name']}")


# ---------------------------------------------------------------------------------------------------------- the files
def test_writing_the_set_anew_gives_the_same_files(tmp_path):
    assert golden.write(tmp_path) == MANIFEST["sha256"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted({*MANIFEST["files"], "manifest.json", "manifest.txt"})
    for name in names:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name


def test_no_other_file_lies_there_and_the_set_is_small():
    files = {path.name: path.stat().st_size for path in GOLDEN.iterdir() if path.is_file()}
    assert files.keys() == {*MANIFEST["files"], "manifest.json", "manifest.txt", "README.md", "load.py", "load.hpp"}
    assert sum(files.values()) < 3_000_000
    assert f"{len(CASES)} cases" in (GOLDEN / "README.md").read_text()


@pytest.mark.parametrize("name", [*MANIFEST["files"], "manifest.json"])
def test_one_changed_byte_is_found_out(tmp_path, name):
    folder = shutil.copytree(GOLDEN, tmp_path / "golden")
    data = bytearray((folder / name).read_bytes())
    place = data.index(b"FLOOR") if name == "manifest.json" else len(data) // 2
    data[place] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match="does not have the hash"):
        _loader().load(folder)


def test_another_format_version_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({**MANIFEST, "format_version": 2}))
    with pytest.raises(ValueError, match="format_version is 2"):
        _loader().load(tmp_path)


def test_the_loader_needs_numpy_only():
    imported = set(re.findall(r"^(?:import|from) (\w+)", (GOLDEN / "load.py").read_text(), re.M))
    assert imported == {"hashlib", "json", "sys", "pathlib", "numpy"}


# -------------------------------------------------------------------------------------------------------- the content
def test_every_op_is_there():
    assert {case["op"] for case in CASES} == {*OPS, golden.GEMM}
    for op in ("bf16_to_fp4_row", "fp8_row_to_fp4_row"):
        assert {c["options"]["scale_rule"] for c in CASES if c["op"] == op} == set(ScaleRule.__members__)
    assert {c["options"].get("headroom") for c in CASES if c["op"] == "fp4_row_to_fp8_row"} >= set(range(7))


def test_the_special_values_are_there():
    (rows,) = (c for c in CASES if c["op"] == "bf16_to_fp4_row" and c["name"] == "RCEIL")
    magnitudes = rows["inputs"]["x"] & 0x7FFF
    assert {0x0000, 0x8000, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0} <= set(rows["inputs"]["x"].ravel().tolist())
    assert ((magnitudes > 0) & (magnitudes < 0x80)).any()
    scales = rows["outputs"]["scales"]
    assert {0, 0xFF} <= set(scales.ravel().tolist())
    assert (scales[scales != 0xFF].max()) >= 252
    nibbles = rows["outputs"]["codes"]
    assert set((nibbles & 15).ravel().tolist()) == set((nibbles >> 4).ravel().tolist()) == set(range(16))
    (fp4,) = (c for c in CASES if c["op"] == "fp4_row_to_fp8_row" and c["name"] == "headroom-6")
    gaps = np.ptp(fp4["inputs"]["scales"].astype(int), axis=1)
    assert {*range(24)} <= set(gaps.tolist())
    (values,) = (c for c in CASES if c["op"] == "fp4_to_bf16")
    assert set(values["inputs"]["scales"].ravel().tolist()) == set(range(256))
    sizes = {size for case in CASES for size in case["options"].get("group_sizes", [])}
    assert sizes == {0, 1, 5, 37, 128, 129}


@pytest.mark.parametrize("rule", ScaleRule.__members__)
def test_the_bytes_of_a_rule_are_those_of_the_rationals(rule):
    """The oracle in Fractions shares no code with the simulator."""
    (case,) = (c for c in CASES if c["op"] == "bf16_to_fp4_row" and c["name"] == rule)
    x = (case["inputs"]["x"].astype(np.uint32) << 16).view(np.float32).reshape(-1, 32)
    answers = [oracle.quantize_block(block.tolist(), oracle.E2M1, rule) for block in x]
    codes = np.array([codes for codes, _ in answers], np.uint8)
    assert_codes_equal(case["outputs"]["codes"].reshape(-1, 16), codes[:, ::2] | codes[:, 1::2] << 4)
    assert_codes_equal(case["outputs"]["scales"].reshape(-1), np.array([scale for _, scale in answers], np.uint8))


def test_the_stochastic_bytes_are_those_of_the_rationals_and_philox():
    (case,) = (c for c in CASES if c["op"] == "bf16_to_fp4_row" and c["name"] == "stochastic")
    (nearest,) = (c for c in CASES if c["op"] == "bf16_to_fp4_row" and c["name"] == case["options"]["scale_rule"])
    x = (case["inputs"]["x"].astype(np.uint32) << 16).view(np.float32).reshape(-1, 32)
    words = [oracle.random_word(i, case["options"]["seed"]) for i in range(x.size)]
    codes = [
        oracle.quantize_block(
            block.tolist(), oracle.E2M1, case["options"]["scale_rule"], "STOCHASTIC", random=words[32 * i : 32 * i + 32]
        )[0]
        for i, block in enumerate(x)
    ]
    codes = np.array(codes, np.uint8)
    assert_codes_equal(case["outputs"]["codes"].reshape(-1, 16), codes[:, ::2] | codes[:, 1::2] << 4)
    assert (case["outputs"]["codes"] != nearest["outputs"]["codes"]).any()
    assert_codes_equal(case["outputs"]["scales"], nearest["outputs"]["scales"])


# ------------------------------------------------------------------------------------------------- torch and the host
def _tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    floats = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[bits.dtype.itemsize]
    tensor = torch.from_numpy(bits.view(signed).copy())
    return tensor.view(floats[dtype]) if dtype in floats else tensor


def _leaves(results) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [leaf for result in results if result is not None for leaf in _leaves(result)]


def _bits(x: torch.Tensor, like: np.ndarray) -> np.ndarray:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return x.contiguous().view(integers).numpy().view(like.dtype)


def _without_payload(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype not in NAN_PAYLOADS:
        return bits
    infinity = NAN_PAYLOADS[dtype]
    return np.where(bits & (2 * infinity - 1 & ~(infinity << 1)) > infinity, infinity + 1, bits)


@by_name
def test_the_kernels_give_these_bytes(case):
    """On the CPU: the host build, or what stands in for it without a compiler."""
    manifest = MANIFEST["cases"][next(i for i, other in enumerate(CASES) if other is case)]
    tensors = [_tensor(case["inputs"][v["name"]], v["dtype"]) for v in manifest["inputs"]]
    options = dict(case["options"])
    if case["op"] == golden.GEMM:
        out = {"f32": torch.float32, "bf16": torch.bfloat16}[options.pop("out")]
        results = [kernels.fp8_gemm_emulated(*tensors, **options, out_dtype=out)]
    else:
        for name, enum in (("scale_rule", ScaleRule), ("rounding", Rounding)):
            if name in options:
                options[name] = enum[options[name]]
        results = _leaves(getattr(kernels, case["op"])(*tensors, **options))
    assert len(results) == len(manifest["outputs"])
    for result, v in zip(results, manifest["outputs"], strict=True):
        want = case["outputs"][v["name"]]
        got = _bits(result, want)
        if case["op"] != golden.GEMM:
            got, want = (_without_payload(bits, v["dtype"]) for bits in (got, want))
        assert_codes_equal(got, want, label=f"{case['op']} {case['name']} {v['name']}")


# ---------------------------------------------------------------------------------------------------------------- C++
PROGRAM = r"""
#include <cstdio>
#include "load.hpp"

int main(int, char** argv) {
  for (const golden::Case& c : golden::load(argv[1])) {
    std::printf("%s %s", c.op.c_str(), c.name.c_str());
    for (const auto& [name, items] : c.options) {
      std::printf(" %s=", name.c_str());
      for (const std::string& item : items) std::printf("%s,", item.c_str());
    }
    for (const auto* arrays : {&c.inputs, &c.outputs})
      for (const auto& [name, array] : *arrays) {
        uint64_t sum = 1469598103934665603u;  // FNV-1a
        for (const uint8_t byte : array.bytes) sum = (sum ^ byte) * 1099511628211u;
        if (array.dtype == "bf16") {
          try {
            array.as<uint8_t>();
            return 3;
          } catch (const std::runtime_error&) {
          }
        }
        std::printf(" %s:%s", name.c_str(), array.dtype.c_str());
        for (const int64_t size : array.shape) std::printf(":%lld", static_cast<long long>(size));
        std::printf(":%016llx", static_cast<unsigned long long>(sum));
      }
    std::printf("\n");
  }
}
"""


def _fnv(data: bytes) -> int:
    value = 1469598103934665603
    for byte in data:
        value = (value ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return value


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "main.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{GOLDEN}", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "main"


def test_cpp_reads_the_same_cases_and_bytes(program):
    printed = subprocess.run([program, GOLDEN], check=True, capture_output=True, text=True).stdout
    expected = []
    for case, manifest in zip(CASES, MANIFEST["cases"], strict=True):
        words = [case["op"], case["name"]]
        for name, value in sorted(case["options"].items()):
            words.append(f"{name}={''.join(f'{item},' for item in (value if isinstance(value, list) else [value]))}")
        for kind in ("inputs", "outputs"):
            for v in sorted(manifest[kind], key=lambda v: v["name"]):
                bits = case[kind][v["name"]]
                sizes = "".join(f":{size}" for size in bits.shape)
                words.append(f"{v['name']}:{v['dtype']}{sizes}:{_fnv(bits.tobytes()):016x}")
        expected.append(" ".join(words))
    assert printed.splitlines() == expected


@pytest.mark.parametrize(
    "lines, message",
    [
        ("input x bf16 fp4_to_bf16.bin 0 1 4", "not understood: 'input x"),
        ("option headroom 1 6", "not understood: 'option"),
        ("case a b\ninputs x bf16 fp4_to_bf16.bin 0 1 4", "not understood: 'inputs"),
        ("case a b\ninput x float fp4_to_bf16.bin 0 1 4", "no array in 'input x float"),
        ("case a b\ninput x bf16 fp4_to_bf16.bin 0 1 -4", "no array in"),
        ("case a b\ninput x bf16 fp4_to_bf16.bin 0 2 4", "no array in"),
        ("case a b\ninput x bf16 fp4_to_bf16.bin 0 1 4000000", "fp4_to_bf16.bin: too short"),
    ],
)
def test_cpp_refuses_a_damaged_manifest(program, tmp_path, lines, message):
    shutil.copy(GOLDEN / "fp4_to_bf16.bin", tmp_path)
    (tmp_path / "manifest.txt").write_text(f"mxsim-golden 1 {MANIFEST['sha256']}\n{lines}\n")
    result = subprocess.run([program, tmp_path], capture_output=True, text=True)
    assert result.returncode != 0
    assert message in result.stderr


def test_cpp_refuses_a_folder_without_the_set(program, tmp_path):
    result = subprocess.run([program, tmp_path], capture_output=True, text=True)
    assert result.returncode != 0
    assert "manifest.txt: missing" in result.stderr
