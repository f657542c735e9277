"""The chunked loss against torch's, and what must not matter to it."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from ops.loss import ChunkedCrossEntropy, turn_into_gradient

R, C, V = 50, 24, 300
CHUNKS = (1, 7, 25, 32, 50, 64)


def inputs(dtype, seed=0, rows=R, vocabulary=V):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, C, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(
        vocabulary, C, generator=draw, dtype=torch.promote_types(dtype, torch.float32)
    ).requires_grad_()
    return x, weight, torch.randint(vocabulary, (rows,), generator=draw)


def plain(x, weight, targets, scale=1.0):
    """Return the loss and its gradients, by autograd through torch's cross-entropy."""
    logits = F.linear(x, weight.to(x.dtype)).to(weight.dtype)
    loss = F.cross_entropy(logits, targets) * scale
    return loss, *torch.autograd.grad(loss, (x, weight))


def chunked(x, weight, targets, chunk, scale=1.0):
    loss = ChunkedCrossEntropy.apply(x, weight, targets, scale, chunk)
    return loss, *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_equal_to_torchs_in_float32(chunk):
    for ours, torchs in zip(chunked(*inputs(torch.float32), chunk), plain(*inputs(torch.float32)), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype, eps", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_as_near_to_the_exact_gradients_as_torchs(dtype, eps, chunk):
    """In 16 bits both round; the exact gradients are those of the same inputs in float64."""
    x, weight, targets = inputs(dtype)
    exact = plain(x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_(), targets)
    ours, torchs = chunked(x, weight, targets, chunk), plain(x, weight, targets)
    for mine, reference, true in zip(ours, torchs, exact, strict=True):
        scale = true.abs().max()
        off, reference_off = ((t.double() - true).abs().max() / scale for t in (mine, reference))
        assert off <= 2 * max(reference_off, eps), (off, reference_off)


def test_gradients_by_finite_differences():
    x, weight, targets = inputs(torch.float64, rows=5, vocabulary=11)
    # the softmax is in float32: the steps are wide, the bound is float32's
    assert torch.autograd.gradcheck(
        lambda x, w: ChunkedCrossEntropy.apply(x, w, targets, 1.0, 2), (x, weight), eps=1e-2, atol=2e-3, rtol=1e-2
    )


def test_the_number_of_tokens_at_a_time_does_not_matter():
    found = [chunked(*inputs(torch.float32), chunk) for chunk in CHUNKS]
    for one, other in itertools.pairwise(found):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [0.25, 3.0, torch.tensor(2.0**16)])
def test_a_scale_is_in_the_loss_and_in_the_gradients(scale):
    found, expected = chunked(*inputs(torch.float32), 7, scale), plain(*inputs(torch.float32), scale)
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours / scale, torchs / scale, rtol=1e-5, atol=1e-7)


def test_what_the_loss_is_multiplied_by_behind_it_counts_too_and_twice_is_twice():
    x, weight, targets = inputs(torch.float32)
    loss = ChunkedCrossEntropy.apply(x, weight, targets, 1.0, 7)
    once = torch.autograd.grad(loss * 3, (x, weight), retain_graph=True)
    again = torch.autograd.grad(loss * 3, (x, weight))
    for a, b, c in zip(once, again, plain(*inputs(torch.float32), 3.0)[1:], strict=True):
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)
        assert torch.equal(a, b)


def test_float16_gradients_do_not_underflow_where_the_loss_is_scaled():
    logits, ids = torch.randn(9, V, generator=torch.Generator().manual_seed(1)).half(), torch.arange(9)
    lost, kept = logits.clone(), logits.clone()
    turn_into_gradient(lost, ids, 1e-6)
    turn_into_gradient(kept, ids, 1e-6 * 2**16)
    assert (lost == 0).float().mean() > 0.9 and (kept == 0).sum() == 0


def test_nothing_is_kept_where_no_gradient_is_wanted():
    x, weight, targets = inputs(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), torch.no_grad():
        loss = ChunkedCrossEntropy.apply(x, weight, targets, 1.0, 7)
    assert not kept and not loss.requires_grad
    torch.testing.assert_close(loss, plain(*inputs(torch.float32))[0])


@pytest.mark.parametrize("bad", [-1, V])
def test_an_id_outside_the_vocabulary_is_an_error(bad):
    x, weight, targets = inputs(torch.float32)
    targets[3] = bad
    with pytest.raises(RuntimeError, match="out of bounds"):
        ChunkedCrossEntropy.apply(x, weight, targets, 1.0, 7)
