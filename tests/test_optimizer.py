"""AdamW against torch's, clipping against torch's, and what a schedule may never do."""

import itertools
import math

import pytest
import torch
from torch import nn

from config import Config
from optimizer import AdamW, LossScale, clip_factor, compiled_update, gradient_norm, learning_rate, parameter_groups


def small_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


@pytest.mark.parametrize("gradient_size", [1.0, 1e-8])
def test_equals_torch_over_20_steps_with_exaggerated_settings(gradient_size):
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(parameter_groups(ours, 0.5), 0.1, (0.9, 0.95))
    reference = torch.optim.AdamW(parameter_groups(theirs, 0.5), lr=0.1, betas=(0.9, 0.95))
    for step in range(20):
        x = torch.randn(4, 5, dtype=torch.float64)
        optimizer.lr = reference.param_groups[0]["lr"] = reference.param_groups[1]["lr"] = 0.1 / (step + 1)
        for model in (ours, theirs):
            model.zero_grad()
            (model(x).square().sum() * gradient_size).backward()
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-12)
    for p, (m, v) in zip(optimizer.parameters, optimizer.state(), strict=True):
        state = reference.state[dict(zip(ours.parameters(), theirs.parameters(), strict=True))[p]]
        torch.testing.assert_close(m, state["exp_avg"], rtol=0, atol=1e-12)
        torch.testing.assert_close(v, state["exp_avg_sq"], rtol=0, atol=1e-12)


def test_decay_acts_on_the_weight_and_never_on_the_moments():
    weight = nn.Parameter(torch.full((2, 2), 3.0))
    weight.grad = torch.zeros(2, 2)
    optimizer = AdamW([{"params": [weight], "weight_decay": 0.5}], 0.1, (0.9, 0.99))
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 3.0 * (1 - 0.1 * 0.5)))
    assert all(not moment.any() for moment in optimizer.state()[0])


def test_vectors_do_not_decay_and_every_parameter_is_in_one_group_once():
    model = small_model()
    model.tied = nn.Linear(7, 3)
    model.tied.weight = model[2].weight
    decay, rest = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decay["params"]) and all(p.dim() == 1 for p in rest["params"])
    grouped = [id(p) for p in decay["params"] + rest["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == {id(p) for p in model.parameters()}


def test_compiled_it_is_the_same_but_for_rounding_and_one_kernel_serves_all_shapes():
    kernel, trouble = compiled_update(torch.device("cpu"))
    assert trouble is None
    shapes = [(3, 5), (1,), (7,), (40, 33), (0,), (16,), (2, 3, 4)]
    torch.manual_seed(0)
    eager, compiled = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimizers = [AdamW(parameter_groups(nn.ParameterList(p), 0.5), 0.1, (0.9, 0.95)) for p in (eager, compiled)]
    optimizers[1].in_one_pass = kernel
    with torch.compiler.set_stance("fail_on_recompile"):
        for apply in (True, False, True, True):
            gradients = [torch.randn(shape) * (1 if apply else math.nan) for shape in shapes]
            gradients[3] = gradients[3].mT.contiguous().mT  # not in the order of its parameter: left to the eager one
            for parameters, optimizer in zip((eager, compiled), optimizers, strict=True):
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient.clone(memory_format=torch.preserve_format)
                optimizer.step(torch.tensor(0.5), apply=torch.tensor(apply))
            for p, q in zip(eager, compiled, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    for own, other in zip(*(optimizer.state() for optimizer in optimizers), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("earlier_steps", [0, 3])
def test_a_step_with_non_finite_gradients_changes_nothing(bad, earlier_steps):
    model = small_model(torch.float32)
    optimizer = AdamW(parameter_groups(model, 0.5), 0.1, (0.9, 0.95))

    def take_step(poison):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        if poison:
            optimizer.parameters[-1].grad.view(-1)[1] = bad
        norm = gradient_norm(optimizer.parameters)
        optimizer.step(clip_factor(norm, 1.0), apply=norm.isfinite())

    for _ in range(earlier_steps):
        take_step(poison=False)
    before = [t.clone() for t in [*model.parameters(), *itertools.chain(*optimizer.state()), optimizer.step_count]]
    take_step(poison=True)
    after = [*model.parameters(), *itertools.chain(*optimizer.state()), optimizer.step_count]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    take_step(poison=False)
    assert optimizer.step_count.item() == earlier_steps + 1
    assert all(p.isfinite().all() for p in model.parameters()) and not torch.equal(before[0], model[0].weight)


def test_moments_of_low_precision_weights_are_float32():
    model = small_model(torch.bfloat16)
    optimizer = AdamW(parameter_groups(model, 0.1), 0.1, (0.9, 0.95))
    model(torch.randn(4, 5, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    assert {t.dtype for t in itertools.chain(*optimizer.state())} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e6, None])
def test_clipping_equals_torch(limit):
    ours, theirs = small_model(torch.float32), small_model(torch.float32)
    for model in (ours, theirs):
        model(torch.ones(4, 5)).square().sum().backward()
    norm = gradient_norm(list(ours.parameters()))
    reference = nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if limit is None else limit)
    torch.testing.assert_close(norm, reference)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad * clip_factor(norm, limit), q.grad)


def test_the_step_leaves_the_gradients_as_they_are():
    model = small_model(torch.float32)
    model(torch.ones(4, 5)).square().sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    AdamW(parameter_groups(model, 0.1), 0.1, (0.9, 0.95)).step(grad_scale=torch.tensor(0.5))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def learning_rates(**settings):
    config = Config(**settings)
    return [learning_rate(step, config) for step in range(config.max_iters + 1)]


def test_warm_up_starts_above_zero_and_the_cosine_ends_at_min_lr():
    lrs = learning_rates(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=100, max_iters=120)
    assert lrs[0] > 0 and lrs[10] == 1.0 == max(lrs) and lrs[100:] == [0.1] * 21
    assert lrs[:11] == sorted(lrs[:11]) and lrs[10:] == sorted(lrs[10:], reverse=True)
    assert max(abs(a - b) for a, b in itertools.pairwise(lrs)) < 0.1  # no jump
    assert math.isclose(lrs[55], (1.0 + 0.1) / 2)  # half-way down the cosine


@pytest.mark.parametrize(
    "warmup, decay, maximum, decay_lr", list(itertools.product([0, 1, 5, 50], [0, 1, 5, 50], [0, 1, 20], [True, False]))
)
def test_the_schedule_is_finite_and_in_range_for_every_combination(warmup, decay, maximum, decay_lr):
    lrs = learning_rates(
        learning_rate=1.0, min_lr=0.1, warmup_iters=warmup, lr_decay_iters=decay, max_iters=maximum, decay_lr=decay_lr
    )
    assert all(math.isfinite(lr) and 0 < lr <= 1 for lr in lrs)


def test_a_linear_decay_falls_by_the_same_amount_each_step():
    lrs = learning_rates(
        learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=100, max_iters=120, decay_shape="linear"
    )
    assert lrs[100:] == [0.1] * 21
    assert all(math.isclose(a - b, 0.9 / 90) for a, b in itertools.pairwise(lrs[10:101]))


def test_without_decay_the_rate_stays_at_its_peak():
    assert learning_rates(learning_rate=1.0, warmup_iters=3, max_iters=9, decay_lr=False)[3:] == [1.0] * 7


def test_loss_scale_halves_on_overflow_and_doubles_after_2000_good_steps():
    scale, good, bad = LossScale("float16", "cpu"), torch.tensor(True), torch.tensor(False)
    scale.update(bad)
    assert scale.scale.item() == 2.0**15
    for _ in range(1999):
        scale.update(good)
    assert scale.scale.item() == 2.0**15
    scale.update(good)
    assert scale.scale.item() == 2.0**16 and scale.good_steps.item() == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_have_no_loss_scale(dtype):
    scale = LossScale(dtype, "cpu")
    scale.update(torch.tensor(False))
    assert scale.scale.item() == 1.0
