"""Saved tensors in MXFP4: what is decoded, what is left alone, bytes, lifetimes, and a transformer that trains."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mxsim import blocks  # noqa: E402
from mxsim.blocks import ScaleRule  # noqa: E402
from mxsim.moe.compression import compress_activations  # noqa: E402

BF16 = torch.bfloat16
GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _same_numbers_whichever_tests_run():
    GENERATOR.manual_seed(0)


def randn(*shape: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def decoded(x: torch.Tensor, rule: ScaleRule | None = None) -> torch.Tensor:
    """The simulator's account of x in MXFP4 and back."""
    values = blocks.quantize(x.detach().float().numpy(), blocks.MXFP4, scale_rule=rule).dequantize()
    return torch.from_numpy(values.astype(ml_dtypes.bfloat16).view(np.int16)).view(BF16)


def leaf(*shape: int, dtype=BF16) -> torch.Tensor:
    return randn(*shape, dtype=dtype).requires_grad_()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 50, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)
        self.checkpointing: dict[str, bool] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, **self.checkpointing)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def transformer() -> tuple[Transformer, torch.Tensor]:
    torch.manual_seed(0)
    return Transformer().bfloat16(), torch.randint(50, (2, 33))


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.parameters()])


def run(model: Transformer, ids: torch.Tensor, **options):
    """(loss, gradients, report)."""
    model.zero_grad()
    with compress_activations(min_elements=64, **options) as compression:
        loss = model(ids)
    loss.backward()
    return loss.detach(), gradients(model), compression.report()


# ------------------------------------------------------------------------------------------------- decoded values
@pytest.mark.parametrize("rule", [None, ScaleRule.EVEN])
def test_the_gradient_is_that_of_the_decoded_activation(rule):
    x, w = randn(64, 96), leaf(48, 96)
    grad = randn(64, 48)
    with compress_activations(scale_rule=rule) as compression:
        y = F.linear(x, w)
    y.backward(grad)
    assert torch.equal(bits(y), bits(F.linear(x, w)))
    assert torch.equal(bits(w.grad), bits(grad.t() @ decoded(x, rule)))
    report = compression.report()
    assert (report.num_compressed, report.bytes_before, report.bytes_after) == (1, 64 * 96 * 2, 64 * 96 * 17 // 32)
    assert report.bytes_saved == 64 * 96 * 47 // 32
    assert str(report) == (
        "1 tensors compressed from 12,288 to 3,264 bytes (0 saves shared them), 0 saves kept as they are"
    )


def test_an_activations_blocks_lie_along_its_last_axis_whatever_its_strides():
    w = leaf(64, 96)
    for x in (randn(96, 64).t(), randn(64, 160)[:, 32:128], randn(64, 2, 96)[:, 1]):
        assert not x.is_contiguous()
        w.grad = None
        with compress_activations() as compression:
            y = x * w
        y.sum().backward()
        assert compression.report().num_compressed == 1
        assert torch.equal(w.grad, decoded(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_compressed_where_asked(dtype):
    x = randn(64, 96, dtype=dtype)
    x[0, 0] = 65504.0  # EVEN rounds it to 65536
    coarse = decoded(x, ScaleRule.EVEN).float()
    assert coarse[0, 0] == 65536.0
    if dtype == torch.float16:
        coarse[0, 0] = 65504.0
    for dtypes, want in (((BF16,), x), ((BF16, dtype), coarse.to(dtype))):
        w = leaf(64, 96, dtype=dtype)
        with compress_activations(dtypes=dtypes, scale_rule=ScaleRule.EVEN):
            y = x * w
        y.sum().backward()
        assert w.grad.dtype == dtype
        assert torch.equal(w.grad, want)


def test_a_nan_or_an_infinity_makes_its_32_elements_nan():
    x, w = randn(64, 96), leaf(64, 96)
    x[3, 40], x[5, 0] = torch.nan, torch.inf
    with compress_activations():
        y = x * w
    y.nan_to_num(0, 0, 0).sum().backward()
    want = torch.zeros(64, 96, dtype=torch.bool)
    want[3, 32:64] = want[5, :32] = True
    assert torch.equal(w.grad.isnan(), want)


# ------------------------------------------------------------------------------------------------- what is left alone
@pytest.mark.parametrize(
    "x",
    [
        randn(64, 100),  # no multiple of 32
        randn(100, 32),  # small
        randn(96)[:, None].expand(96, 96),
        randn(1, 96).expand(96, 96),
        randn(64, 96, dtype=torch.float32),
        randn(64, 96, dtype=torch.float16),
        randn(64, 96, dtype=torch.float64),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)} {x.stride()}",
)
def test_other_activations_are_kept(x):
    w = torch.ones(x.shape, dtype=x.dtype, requires_grad=True)
    with compress_activations() as compression:
        y = x * w
    y.sum().backward()
    assert torch.equal(w.grad, x)
    report = compression.report()
    assert (report.num_compressed, report.num_kept, report.bytes_before) == (0, 1, 0)


def test_integers_and_tensor_subclasses_are_kept():
    class Marked(torch.Tensor):
        pass

    w = leaf(64, 96)
    with compress_activations() as compression:
        F.embedding(torch.zeros(128, 64, dtype=torch.int64), w)
        w * randn(64, 96).as_subclass(Marked)
    assert compression.report().num_compressed == 0


@pytest.mark.parametrize(
    "of_parameter",
    [
        lambda p: p,
        lambda p: p.t(),
        lambda p: p.detach().requires_grad_(),
        lambda p: p.unsqueeze(0).expand(2, 64, 64).reshape(2, 64, 64)[0],
        lambda p: p.view(2, 32, 64).transpose(0, 1).reshape(64, 64),
        lambda p: p.float().t().contiguous().bfloat16(),
        lambda p: p.chunk(1)[0].unbind(0)[0].expand(64, 64).clone(),
    ],
)
def test_parameters_their_casts_and_views_are_kept(of_parameter):
    x, p = leaf(128, 64), nn.Parameter(randn(64, 64))
    w = of_parameter(p)
    with compress_activations() as compression:
        y = (x * 1.0) @ w
    grad = randn(*y.shape)
    y.backward(grad)
    assert torch.equal(x.grad, grad @ w.detach().t())
    assert compression.report().num_compressed == 1  # x * 1.0


def test_autocasts_copies_of_weights_are_kept():
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    x = randn(64, 64, dtype=torch.float32)
    with compress_activations() as compression, torch.autocast("cpu", dtype=BF16):
        model(x).sum().backward()
    assert compression.report().num_compressed == 3  # x, GELU's input and result
    with torch.autocast("cpu", dtype=BF16):
        h = model[0](x).detach().requires_grad_()
        with compress_activations() as compression:
            y = model[2](h)
        y.sum().backward()
    assert torch.equal(h.grad, torch.ones(64, 64, dtype=BF16) @ model[2].weight.detach().bfloat16())


def test_select_has_the_last_word():
    seen = []

    def select(t: torch.Tensor) -> bool:
        seen.append(t.shape)
        return t.shape[0] == 128

    w = leaf(96, 96)
    with compress_activations(select=select) as compression:
        for rows in (64, 128, 1):  # one row: too small to be asked about
            randn(rows, 96) @ w
    assert seen == [(64, 96), (128, 96)]
    report = compression.report()
    assert (report.num_compressed, report.num_kept) == (1, 2)


# ------------------------------------------------------------------------------------------------- saved again
def test_a_tensor_saved_again_is_stored_once():
    x = randn(4, 32, 96)
    weights = [leaf(96, 96) for _ in range(4)]
    with compress_activations() as compression:
        outs = [
            F.linear(x, weights[0]),
            x.view(128, 96) @ weights[1],
            x[:2] @ weights[2],
            x.reshape(2, 64, 96) @ weights[3],
        ]
    for y in outs:
        y.sum().backward()
    report = compression.report()
    assert (report.num_compressed, report.num_shared) == (2, 2)  # the half is a tensor of its own
    assert report.bytes_before == (128 + 64) * 96 * 2
    want = decoded(x.view(128, 96))
    assert torch.equal(weights[1].grad, want.t() @ torch.ones(128, 96, dtype=BF16))
    assert torch.equal(weights[2].grad, want[:64].t() @ torch.ones(64, 96, dtype=BF16))


def test_another_last_axis_is_another_tensor():
    """The same bytes, other blocks."""
    x = randn(32, 192)
    with compress_activations() as compression:
        a, b = leaf(32, 192), leaf(192, 32)
        y, z = x * a, x.view(192, 32) * b
    (y.sum() + z.sum()).backward()
    assert compression.report().num_compressed == 2
    assert torch.equal(b.grad, decoded(x.view(192, 32)))


def test_a_transpose_is_another_tensor():
    x, a, b = randn(96, 96), leaf(96, 96), leaf(96, 96)
    with compress_activations():
        y, z = x * a, x.t() * b
    (y + z).sum().backward()
    assert torch.equal(a.grad, decoded(x))
    assert torch.equal(b.grad, decoded(x.t().contiguous()))


def test_memory_used_again_is_another_tensor():
    """An activation's address returns with a later one of its size; its codes must not."""
    pairs, losses = [], []
    addresses: set[int] = set()
    with compress_activations() as compression:
        for _ in range(500):
            x, w = randn(64, 96), leaf(64, 96)
            pairs.append((w, decoded(x)))
            losses.append((x * w).sum())
            if x.data_ptr() in addresses:
                break
            addresses.add(x.data_ptr())
            del x
        else:
            pytest.fail("no address came back")
    torch.stack(losses).sum().backward()
    assert compression.report().num_compressed == len(pairs)
    for w, want in pairs:
        assert torch.equal(w.grad, want)


def test_a_compressed_tensor_modified_in_place_gives_what_was_saved():
    x, a, b = randn(64, 96), leaf(64, 96), leaf(64, 96)
    with compress_activations() as compression:
        before = decoded(x)
        y = x * a
        x.add_(1.0)
        z = x * b
    (y + z).sum().backward()
    assert torch.equal(a.grad, before)
    assert torch.equal(b.grad, decoded(x))
    assert (compression.report().num_compressed, compression.report().num_shared) == (2, 0)


def test_a_kept_tensor_modified_in_place_is_refused():
    x, w = randn(64, 100), leaf(64, 100)
    with compress_activations():
        y = x * w
    x.add_(1.0)
    with pytest.raises(RuntimeError, match=r"shape \(64, 100\) that backward needs was modified in place"):
        y.sum().backward()


# ------------------------------------------------------------------------------------------------- lifetimes
def test_originals_are_freed_and_codes_after_them():
    w = leaf(96, 96)
    with compress_activations() as compression:
        x = randn(64, 96)
        storage = weakref.ref(x)
        y = x @ w
        del x
        assert storage() is None
        assert len(compression._stored) == 1
    y.sum().backward()
    del y
    assert len(compression._stored) == 0
    assert compression.report().num_compressed == 1


@pytest.mark.parametrize("columns", [96, 100])
def test_a_node_that_saves_its_own_result_is_freed(columns):
    gc.collect()
    gc.disable()
    try:
        with compress_activations():
            y = leaf(64, columns).exp()
        result = weakref.ref(y)
        del y
        assert result() is None
    finally:
        gc.enable()


def test_backward_may_run_twice_and_inside():
    x, w = randn(64, 96), leaf(64, 96)
    with compress_activations() as compression:
        y = (x * w).sum()
        y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(w.grad, 2 * decoded(x))
    with compression:
        x * w
    assert compression.report().num_compressed == 2


def test_second_derivatives_pass_through():
    w = leaf(64, 96)
    with compress_activations():
        (grad,) = torch.autograd.grad((w * 1.0).pow(3).sum(), w, create_graph=True)
    grad.sum().backward()
    torch.testing.assert_close(w.grad, 6 * decoded(w), rtol=0.02, atol=0.0)


# ------------------------------------------------------------------------------------------------- a transformer
def test_a_transformer_keeps_its_loss_and_nearly_its_gradients():
    model, ids = transformer()
    loss = model(ids)
    loss.backward()
    exact = gradients(model)
    compressed_loss, near, report = run(model, ids)
    assert torch.equal(loss.detach(), compressed_loss)
    assert report.num_compressed > 10
    assert not torch.equal(exact, near)
    assert F.cosine_similarity(exact, near, dim=0) > 0.98
    assert (near - exact).norm() < 0.2 * exact.norm()
    none_loss, same, kept = run(model, ids, select=lambda t: False)
    assert torch.equal(none_loss, loss)
    assert torch.equal(same, exact)
    assert kept.num_compressed == 0


def test_bytes_are_those_of_the_tensors_saved():
    """A second account, of the storages that plain autograd keeps alive and of what lives under the context."""
    model, ids = transformer()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    originals: dict[tuple[int, int, int], torch.Tensor] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        is_weight = t.untyped_storage().data_ptr() in parameters
        if t.dtype == BF16 and t.numel() >= 64 and t.shape[-1] % 32 == 0 and not is_weight:
            originals[t.data_ptr(), t.numel(), t.shape[-1]] = t.detach()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = model(ids)
    report = run(model, ids)[2]
    assert report.num_compressed == len(originals)
    assert report.bytes_before == sum(t.nbytes for t in originals.values())
    assert report.bytes_after * 64 == report.bytes_before * 17
    del loss


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_checkpointed_regions_save_their_inputs_in_mxfp4(checkpointing):
    model, ids = transformer()
    loss = model(ids)
    loss.backward()
    exact = gradients(model)
    model.checkpointing = checkpointing
    compressed_loss, near, report = run(model, ids)
    assert torch.equal(loss.detach(), compressed_loss)
    assert F.cosine_similarity(exact, near, dim=0) > 0.98
    # the inputs of two blocks and of the head
    assert report.num_compressed == 3
    assert report.bytes_before == (2 * 33 + 2 * 33 + 2 * 32) * 64 * 2


def test_contexts_nest_and_the_inner_one_counts():
    x, w = randn(64, 96), leaf(64, 96)
    with compress_activations() as outer:
        x * w
        with compress_activations(select=lambda t: False) as inner:
            y = x * w
        x * w
    y.sum().backward()
    assert torch.equal(w.grad, x)
    assert (outer.report().num_compressed, inner.report().num_compressed, inner.report().num_kept) == (2, 0, 1)


def test_a_compiled_model_runs_under_it():
    model, ids = transformer()
    loss = model(ids)
    loss.backward()
    exact = gradients(model)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    with compress_activations(min_elements=64) as compression:
        compressed_loss = compiled(ids)
    compressed_loss.backward()
    torch.testing.assert_close(compressed_loss, loss, rtol=1e-2, atol=0)
    assert F.cosine_similarity(exact, gradients(model), dim=0) > 0.95
    assert compression.report().num_compressed > 10


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"min_elements": -1}, ValueError, "min_elements is -1"),
        ({"min_elements": 2.5}, ValueError, "min_elements is 2.5"),
        ({"scale_rule": "even"}, TypeError, "scale_rule is 'even'"),
        ({"select": 3}, TypeError, "select is 3"),
        ({"dtypes": BF16}, ValueError, "dtypes is torch.bfloat16, needed some of"),
        ({"dtypes": (torch.float64,)}, ValueError, "dtypes is"),
    ],
)
def test_bad_input_is_named(options, error, message):
    with pytest.raises(error, match=message):
        compress_activations(**options)


@pytest.mark.gpu
def test_memory_on_cuda_falls_by_the_bytes_reported():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]).bfloat16().cuda()
    x = torch.randn(2048, 1024, device="cuda", dtype=BF16)
    model(x).sum().backward()  # workspaces
    held = []
    for select in (lambda t: False, None):
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        with compress_activations(select=select) as compression:
            y = model(x)
        held.append(torch.cuda.memory_allocated() - before - y.nbytes)
        del y
    report = compression.report()
    # 4 inputs and 4 of GELU; x lives on in this test. Sizes are multiples of 512, as the allocator rounds them.
    assert (report.num_compressed, report.bytes_before) == (8, 8 * x.nbytes)
    assert held[0] - held[1] == report.bytes_saved - x.nbytes


def test_frozen_weights_are_kept():
    """They live on anyway: a copy would cost memory, and give the inputs another gradient."""
    linear = torch.nn.Linear(256, 256, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(64, 256).bfloat16().requires_grad_()
    dy = torch.randn(64, 256).bfloat16()
    (want,) = torch.autograd.grad(linear(x), x, dy)
    with compress_activations() as compression:
        y = linear(x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], want)
    assert (compression.report().num_compressed, compression.report().num_kept) == (0, 1)
