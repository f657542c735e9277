"""The tiled attention against torch's, and what must not matter to it."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from estimate.layers import tile_elements
from measure.step import profiled_peak
from ops import choices
from ops.attention import TiledAttention
from ops.choices import score_tiles

SHAPES = [  # B, H, K, T, D
    (1, 1, 1, 1, 2), (2, 3, 3, 5, 4), (2, 4, 4, 128, 8), (1, 4, 2, 129, 16), (2, 6, 1, 200, 8), (1, 2, 2, 515, 4),
    (3, 4, 2, 640, 4),
]  # fmt: skip


@pytest.fixture(params=["tiles as they are", "one head at a time", "few queries, several heads"])
def tiles(request, monkeypatch):
    if request.param != "tiles as they are":
        monkeypatch.setattr(choices, "MAX_SCORES_PER_TILE", 1 if "one" in request.param else 5000)
        monkeypatch.setattr(choices, "MIN_QUERIES_PER_TILE", 3)


def inputs(B, H, K, T, D, dtype=torch.float32):
    """Return (q, k, v) and the gradient of y; like the model's, they are views of one projection."""
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(B, T, 2 * H + 2 * K, D, generator=draw, dtype=torch.promote_types(dtype, torch.float32))
    q, k, v, dy = parts.to(dtype).transpose(1, 2).split((H, K, K, H), 1)
    return [x.requires_grad_() for x in (q.detach(), k.detach(), v.detach())], dy


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def results(attend, inputs, dy):
    """Return attend's output and its gradients."""
    y = attend(*inputs)
    return y, *torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_torchs_in_float32(shape, tiles):
    for ours, theirs in zip(
        results(TiledAttention.apply, *inputs(*shape)), results(torchs, *inputs(*shape)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_near_to_the_exact_gradients_as_torchs(shape, dtype, tiles):
    """In 16 bits both round; the exact gradients are those of the same inputs in float64."""
    x, dy = inputs(*shape, dtype)
    exact = results(torchs, [t.detach().double().requires_grad_() for t in x], dy.double())
    for ours, theirs, true in zip(results(TiledAttention.apply, x, dy), results(torchs, x, dy), exact, strict=True):
        size = true.norm() + 1e-9
        off, theirs_off = ((t.double() - true).norm() / size for t in (ours, theirs))
        assert off <= 2 * max(theirs_off, torch.finfo(dtype).eps), (off, theirs_off)


def test_gradients_by_finite_differences(tiles):
    x, _ = inputs(1, 2, 1, 7, 4, torch.float64)
    assert torch.autograd.gradcheck(TiledAttention.apply, x)


def test_no_position_sees_a_later_one(tiles):
    (q, k, v), _ = inputs(2, 4, 2, 300, 8)
    with torch.no_grad():
        before = TiledAttention.apply(q, k, v)
        for x in (q, k, v):
            x[:, :, 200:] = torch.randn_like(x[:, :, 200:])
        after = TiledAttention.apply(q, k, v)
    assert torch.equal(before[:, :, :200], after[:, :, :200])
    assert not torch.isclose(before[:, :, 200:], after[:, :, 200:]).all(-1).any()


def test_queries_keys_and_values_are_all_that_is_kept(tiles):
    x, _ = inputs(2, 4, 2, 300, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        TiledAttention.apply(*x)
    assert [t.numel() for t in kept] == [t.numel() for t in x]
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), torch.no_grad():
        TiledAttention.apply(*x)
    assert not kept


@pytest.mark.parametrize(
    "n, g, length", [(1, 1, 1), (12, 1, 1024), (48, 1, 64), (8, 4, 1000), (3, 8, 5000), (2, 1, 30_000)]
)
def test_the_tiles_are_each_score_once_and_few_at_a_time(n, g, length):
    seen = torch.zeros(n, length, dtype=torch.int64)
    for heads, queries in score_tiles(n, g, length):
        seen[heads, queries] += 1
        scores = (heads.stop - heads.start) * g * (queries.stop - queries.start) * queries.stop
        a_quarter_of_one = heads.stop - heads.start == 1 and queries.stop - queries.start <= -(-length // 4)
        assert scores <= choices.MAX_SCORES_PER_TILE or a_quarter_of_one
    assert (seen == 1).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_held_at_most_is_what_is_predicted(shape, tiles):
    B, H, K, T, D = shape
    x, dy = inputs(*shape)
    numbers = {"q": B * H * T * D, "kv": 2 * B * K * T * D}
    forward, backward = tile_elements(*shape)
    kept = numbers["q"] + numbers["kv"]
    found, y, _ = profiled_peak(lambda: TiledAttention.apply(*x), [], torch.device("cpu"))
    small = 64 * 8  # bytes by which the allocator rounds up what is tiny
    assert abs(found - 4 * (kept + numbers["q"] + forward)) <= small
    found, *_ = profiled_peak(lambda: torch.autograd.grad(y, x, dy), [], torch.device("cpu"))
    assert abs(found - 4 * (kept + backward)) <= small


def test_tiles_of_different_sizes_agree():
    found = []
    for queries, scores in itertools.product((1, 7, 64), (1, 10_000, 10**9)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choices, "MAX_SCORES_PER_TILE", scores)
            patch.setattr(choices, "MIN_QUERIES_PER_TILE", queries)
            found.append(results(TiledAttention.apply, *inputs(2, 4, 2, 60, 8)))
    for one, other in itertools.pairwise(found):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
