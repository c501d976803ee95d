"""What only a GPU can show: streams, graphs, compilation, other devices, bounds. For bits see `mxsim validate`."""

import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels, validate  # noqa: E402
from mxsim.blocks import MXFP4, quantize  # noqa: E402
from mxsim.formats import Rounding, philox_bits  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 260, 512
SIZES = [0, 100, 1, 0, 150, 9]
DRAWN = {"rounding": Rounding.STOCHASTIC, "seed": 2**63 + 5}


def bits(result: object) -> list[torch.Tensor]:
    """Every tensor of a result as CPU bytes."""
    if result is None:
        return []
    if isinstance(result, torch.Tensor):
        return [result.detach().contiguous().view(torch.uint8).cpu()]
    return [tensor for part in result for tensor in bits(part)]  # type: ignore[attr-defined]


def equal(a: object, b: object) -> bool:
    pairs = list(zip(bits(a), bits(b), strict=True))
    return bool(pairs) and all(torch.equal(x, y) for x, y in pairs)


def values(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-9, 9, (rows, 1), generator=generator)
    )
    return x.bfloat16()


def operators(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Every op on the device of x, dense, and ragged with sizes in a list and on the device."""
    fp4, fp8 = kernels.bf16_to_fp4_row(x), kernels.bf16_to_fp8_row(x)
    on_device = torch.tensor(SIZES, device=x.device)
    dense = {
        "bf16_to_fp4_row": lambda: kernels.bf16_to_fp4_row(x),
        "float32_to_fp4_row": lambda: kernels.bf16_to_fp4_row(x.float()),
        "fp4_to_bf16": lambda: kernels.fp4_to_bf16(*fp4),
        "fp8_row_to_fp4_row": lambda: kernels.fp8_row_to_fp4_row(fp8.codes, fp8.scales),
        "bf16_to_fp8_tile": lambda: kernels.bf16_to_fp8_tile(x),
        "bf16_to_fp8_tile transposed": lambda: kernels.bf16_to_fp8_tile(x, transpose=True),
    }
    for label, sizes in (("dense", None), ("list", SIZES), ("device", on_device)):
        dense |= {
            f"fp4_row_to_fp8_row {label}": lambda s=sizes: kernels.fp4_row_to_fp8_row(*fp4, group_sizes=s),
            f"fp4_row_to_fp8_col {label}": lambda s=sizes: kernels.fp4_row_to_fp8_col(*fp4, group_sizes=s),
            f"fp8_row_to_fp8_col {label}": lambda s=sizes: kernels.fp8_row_to_fp8_col(*fp8[:2], group_sizes=s),
            f"bf16_to_fp8_row {label}": lambda s=sizes: kernels.bf16_to_fp8_row(x, group_sizes=s),
            f"bf16_to_fp8_col {label}": lambda s=sizes: kernels.bf16_to_fp8_col(x, group_sizes=s),
            f"fused {label}": lambda s=sizes: kernels.bf16_to_fp4_and_fp8_row(x, group_sizes=s),
        }
        dense |= {
            f"stochastic bf16_to_fp8_row {label}": lambda s=sizes: kernels.bf16_to_fp8_row(x, group_sizes=s, **DRAWN),
            f"fused stochastic {label}": lambda s=sizes: kernels.bf16_to_fp4_and_fp8_row(x, group_sizes=s, **DRAWN),
        }
    for label, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        dense[f"stochastic {label}_to_fp4_row"] = lambda d=dtype: kernels.bf16_to_fp4_row(x.to(d), **DRAWN)
    for label, sizes in (("list", SIZES), ("device", on_device)):
        dense[f"fp8_row_to_ragged {label}"] = lambda s=sizes: kernels.fp8_row_to_ragged(*fp8[:2], group_sizes=s)
    return dense


def chunk_bytes(name: str, result: object) -> list[torch.Tensor]:
    """As `bits`, without what an upper-bound allocation leaves unspecified."""
    if not name.endswith("device"):
        return bits(result)
    if name.startswith("fused"):
        fp4, fp8 = result  # type: ignore[misc]
        return bits(fp4) + chunk_bytes("device", fp8)
    codes, scales, padded = result  # type: ignore[misc]
    total = int(padded.sum())
    if codes.dim() == 2:  # rows
        return bits((codes[:total], scales[: total * COLUMNS // 128], padded))
    return bits((codes[: total * COLUMNS], scales[: total // 128], padded))


NAMES = list(operators(values()))


@pytest.mark.parametrize("name", NAMES)
def test_cuda_and_cpu_give_the_same_bytes(name: str) -> None:
    got = chunk_bytes(name, operators(values().cuda())[name]())
    want = chunk_bytes(name, operators(values())[name]())
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_the_quick_validation_is_clean() -> None:
    assert validate.run(device="cuda", size="quick").ok


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_replays_on_new_values(name: str) -> None:
    x = values().cuda()
    run = operators(x)[name]
    graph = torch.cuda.CUDAGraph()
    run()  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run()
    want = chunk_bytes(name, run())
    for tensor in (t for part in captured for t in (part if isinstance(part, tuple) else (part,)) if t is not None):
        tensor.view(torch.uint8).fill_(0xA5) if tensor.is_contiguous() else None
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(chunk_bytes(name, captured), want, strict=True))


def test_kernels_run_on_the_current_stream() -> None:
    x = values(8192, 4096).cuda()
    want = kernels.bf16_to_fp4_row(x)
    y = torch.empty_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the copy below must wait for it, and the kernel for the copy
        y.copy_(x)
        got = kernels.bf16_to_fp4_row(y)
    stream.synchronize()
    assert equal(got, want)


def test_a_thread_that_never_used_cuda_can_call_them() -> None:
    x = values().cuda()
    want, got = kernels.bf16_to_fp4_row(x), []
    thread = threading.Thread(target=lambda: got.append(kernels.bf16_to_fp4_row(x)))
    thread.start()
    thread.join()
    assert equal(got[0], want)


def test_two_threads_do_not_mix_their_arguments() -> None:
    inputs = [values(64 + i, 256).cuda() for i in range(8)]
    want = [bits(kernels.bf16_to_fp8_row(x)) for x in inputs]
    failures: list[int] = []

    def hammer(i: int) -> None:
        for _ in range(200):
            if not all(
                torch.equal(a, b) for a, b in zip(bits(kernels.bf16_to_fp8_row(inputs[i])), want[i], strict=True)
            ):
                failures.append(i)

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_compiled_functions_give_the_same_bytes() -> None:
    x = values().cuda()

    def round_trip(x: torch.Tensor) -> object:
        fp4, fp8 = kernels.bf16_to_fp4_and_fp8_row(x * 2)
        drawn = kernels.bf16_to_fp4_row(x, rounding=Rounding.STOCHASTIC, seed=3)
        return fp4, fp8, kernels.fp4_row_to_fp8_col(*fp4), kernels.fp4_to_bf16(*fp4), drawn

    assert equal(torch.compile(round_trip, fullgraph=True)(x), round_trip(x))


def test_autocast_changes_nothing() -> None:
    x = values().cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        got = kernels.bf16_to_fp8_row(x)
    assert equal(got, kernels.bf16_to_fp8_row(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_any_device_index_works_while_another_is_current(name: str) -> None:
    torch.cuda.set_device(0)
    result = operators(values().to("cuda:1"))[name]()
    assert torch.cuda.current_device() == 0
    want = operators(values())[name]()
    assert all(torch.equal(g, w) for g, w in zip(chunk_bytes(name, result), chunk_bytes(name, want), strict=True))


def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = 2**31 // 7168 + 130, 7168
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB of device memory")
    x = torch.randn(128, columns, device="cuda", dtype=torch.bfloat16).repeat(rows // 128 + 1, 1)[:rows]
    x[-130:] *= 3
    tail = slice(rows - rows % 128 - 128, rows - rows % 128)  # the last whole block of 128 rows
    small = x[tail].clone()
    fp4 = kernels.bf16_to_fp4_row(x)
    want = kernels.bf16_to_fp4_row(small)
    assert equal((fp4.codes[tail], fp4.scales[tail]), want)
    fp8 = kernels.fp4_row_to_fp8_row(*fp4)
    assert equal(
        (fp8.codes[tail], fp8.scales[tail].contiguous()),
        kernels.fp4_row_to_fp8_row(*want)._replace(scales=kernels.fp4_row_to_fp8_row(*want).scales.contiguous())[:2],
    )
    back = kernels.fp8_row_to_fp4_row(fp8.codes, fp8.scales)
    assert equal(
        (back.codes[tail], back.scales[tail]), kernels.fp8_row_to_fp4_row(*kernels.fp4_row_to_fp8_row(*want)[:2])
    )
    del fp8, back
    cols = kernels.fp4_row_to_fp8_col(*fp4)
    want_cols = kernels.fp4_row_to_fp8_col(*want)
    assert equal(cols.codes[:, tail], want_cols.codes)
    assert equal(cols.scales[tail.start // 128], want_cols.scales[0])


def test_stochastic_draws_beyond_2_to_the_32_elements() -> None:
    rows, columns = 2**32 // 8192 + 4, 8192
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB of device memory")
    x = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-8:] = torch.randn(8, columns, device="cuda", dtype=torch.bfloat16)
    got = kernels.bf16_to_fp4_row(x, rounding=Rounding.STOCHASTIC, seed=11)
    draws = philox_bits(11, (8, columns), start=(rows - 8) * columns)
    want = quantize(x[-8:].cpu(), MXFP4, rounding=Rounding.STOCHASTIC, random_bits=draws)
    assert torch.equal(got.codes[-8:].cpu(), torch.from_numpy(want.packed()))


def test_a_captured_graph_repeats_its_seed() -> None:
    x = values().cuda()
    graph = torch.cuda.CUDAGraph()
    want = kernels.bf16_to_fp4_row(x, rounding=Rounding.STOCHASTIC, seed=12)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = kernels.bf16_to_fp4_row(x, rounding=Rounding.STOCHASTIC, seed=12)
    for _ in range(2):
        got.codes.zero_()
        graph.replay()
        assert torch.equal(got.codes, want.codes)


def test_a_scale_that_is_no_power_of_two_poisons_its_blocks_and_check_raises() -> None:
    fp8 = kernels.bf16_to_fp8_row(values().cuda())
    scales = fp8.scales.clone()
    scales[3, 1] = 3.0
    poisoned = kernels.fp8_row_to_fp4_row(fp8.codes, scales)
    assert poisoned.scales[3, 4:8].tolist() == [0xFF] * 4
    assert int(poisoned.codes[3, 64:128].max()) == 0
    with pytest.raises(ValueError, match=r"scale 3\.0 at index \(3, 1\)"):
        kernels.fp8_row_to_fp4_row(fp8.codes, scales, check=True)


@pytest.mark.parametrize("sizes", [[-5, 100], [10**9, 10**9], [10, 10], [2**62, -(2**62)]], ids=str)
def test_wrong_sizes_on_the_device_write_nothing_outside(sizes: list[int]) -> None:
    x = values().cuda()
    fp4, fp8 = kernels.bf16_to_fp4_row(x), kernels.bf16_to_fp8_row(x)
    on_device = torch.tensor(sizes, device="cuda")
    guard = torch.full((1 << 20,), 0x5A, dtype=torch.uint8, device="cuda")
    for run in (
        lambda: kernels.fp4_row_to_fp8_row(*fp4, group_sizes=on_device),
        lambda: kernels.fp4_row_to_fp8_col(*fp4, group_sizes=on_device),
        lambda: kernels.fp8_row_to_fp8_col(*fp8[:2], group_sizes=on_device),
        lambda: kernels.bf16_to_fp8_row(x, group_sizes=on_device),
        lambda: kernels.bf16_to_fp8_col(x, group_sizes=on_device),
        lambda: kernels.bf16_to_fp4_and_fp8_row(x, group_sizes=on_device),
    ):
        run()
        torch.cuda.synchronize()
    assert bool((guard == 0x5A).all())
    with pytest.raises(ValueError, match="group_sizes"):
        kernels.bf16_to_fp8_row(x, group_sizes=on_device, check=True)
