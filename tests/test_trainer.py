"""One optimizer step as a run takes it: accumulation, clipping, gradients that are not finite, the loss scale."""

import itertools
import json
import math

import pytest
import torch

import trainer
from run import checkpoint
from tests.training import PEAK, read_metrics


def test_accumulation_changes_neither_the_gradients_nor_the_figures(run, tmp_path):
    run(out="whole", max_iters=6, batch_size=8)
    run(out="parts", max_iters=6, batch_size=2, gradient_accumulation_steps=4)
    weights = [checkpoint.load(tmp_path / out)["weights"] for out in ("whole", "parts")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-5, atol=1e-5)
    runs = [read_metrics(tmp_path / out)[0] for out in ("whole", "parts")]
    for one, other in zip(*runs, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    flops = [
        json.loads((tmp_path / out / "ledger.json").read_text())["measured"]["flops_per_step"]
        for out in ("whole", "parts")
    ]
    assert flops[0] == flops[1]
    for record in itertools.chain(runs[0][1:], runs[1][1:]):
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(8 * 16)
        assert record["mfu"] * record["step_s"] * PEAK == pytest.approx(flops[0])


@pytest.mark.parametrize("grad_clip", [0.1, None])
def test_gradients_are_clipped_to_the_norm_that_is_set(run, tmp_path, grad_clip):
    run(max_iters=1, grad_clip=grad_clip, beta1=0.9)
    moments = checkpoint.load(tmp_path / "out")["optimizer"]
    first = torch.stack([m.norm() for name, m in moments.items() if name.startswith("exp_avg.")]).norm()
    norm = read_metrics(tmp_path / "out")[0][0]["grad_norm"]  # before clipping
    assert norm > 0.2 and first == pytest.approx((1 - 0.9) * (grad_clip or norm), rel=1e-4)


# --- gradients that are not finite


def spoil(monkeypatch, bad_steps, value):
    """Make the gradients of some steps hold a value; return a list that fills with what each step changed."""
    build, changed = trainer.build, []

    def build_spoiled(config):
        model, backwards = build(config), itertools.count()

        def hook(grad):
            if next(backwards) not in bad_steps:
                return grad
            grad = grad.clone()
            grad[-1, -1] = value
            return grad

        model.blocks[0].mlp.up.weight.register_hook(hook)
        return model

    class Watched(trainer.AdamW):
        def step(self, *args, **kwargs):
            tensors = [*self.parameters, *self.exp_avg, *self.exp_avg_sq, self.step_count]
            before = [t.detach().clone() for t in tensors]
            super().step(*args, **kwargs)
            changed.append([not torch.equal(old, new) for old, new in zip(before, tensors, strict=True)])

    monkeypatch.setattr(trainer, "build", build_spoiled)
    monkeypatch.setattr(trainer, "AdamW", Watched)
    return changed


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_without_finite_gradients_changes_nothing(run, tmp_path, monkeypatch, value):
    changed = spoil(monkeypatch, {2}, value)
    printed = run(max_iters=5, grad_clip=0)  # without clipping, nothing but the check stands in between
    assert [any(step) for step in changed] == [True, True, False, True, True]
    steps, _ = read_metrics(tmp_path / "out")
    assert [r["grad_norm"] is None for r in steps] == [False, False, True, False, False]
    assert all(math.isfinite(r["loss"]) for r in steps)
    assert printed.count("not finite") == 1
    assert "step 3: its gradients are not finite, so the step was skipped" in printed
    assert checkpoint.load(tmp_path / "out")["optimizer"]["step_count"] == 4


def test_float16_halves_its_loss_scale_at_an_overflow(run, tmp_path, monkeypatch):
    changed = spoil(monkeypatch, {1}, math.inf)
    printed = run(max_iters=3, dtype="float16")
    assert "note        float16: the loss is scaled" in printed
    skipped = [not any(step) for step in changed]
    assert skipped[1] and not all(skipped)
    assert checkpoint.load(tmp_path / "out")["optimizer"]["loss_scale"] == 2.0 ** (16 - sum(skipped))
    assert [r["grad_norm"] is None for r in read_metrics(tmp_path / "out")[0]] == skipped
