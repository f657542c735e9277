"""nanoGPT's tasks: its training, and how its weights and batches are exchanged with ours."""

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import nanogpt, turns
from cli.errors import ConfigError
from model import build


def test_nanogpt_trains(checkout, tmp_path, config_of):
    turns.write_tokens(tmp_path, 65, 5000)
    torch.manual_seed(0)
    training = nanogpt.NanoGPTTraining(config_of(tmp_path, warmup_iters=0, learning_rate=1e-2), checkout)
    positions = training.model.transformer.wpe.weight
    before = positions.clone()
    losses = training.run(2)["losses"]
    assert len(losses) == 2 and all(map(np.isfinite, losses)) and not before.equal(positions)
    assert all(p.grad is None for p in training.model.parameters())
    x, y = training.batch
    assert x.shape == y.shape == (12, 64) and x[:, 1:].equal(y[:, :-1])


def test_weights_are_copied_by_name(checkout, config_of):
    config = config_of("x/y")
    ours, theirs = build(config), nanogpt.nanogpt_model(config, checkout)
    ours.init_weights(0)
    with torch.no_grad():
        for own, other in nanogpt.matching_parameters(ours, theirs):
            other.copy_(own)
    idx = torch.arange(20).view(2, 10)
    torch.testing.assert_close(ours(idx), theirs(idx)[0])
    theirs.more = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="1 parameters more"):
        nanogpt.matching_parameters(ours, theirs)
    with pytest.raises(ConfigError, match="has no transformer"):
        nanogpt.matching_parameters(ours, nn.Linear(2, 2))


def test_from_nanogpts_weights_and_on_its_batches_our_losses_are_its_losses(checkout, tmp_path, config_of):
    turns.write_tokens(tmp_path, 65, 5000)
    config = config_of(tmp_path, warmup_iters=3, learning_rate=1e-2, lr_decay_iters=20, weight_decay=0.0)
    theirs, ours = zip(*nanogpt.train_both(config, checkout, 20), strict=True)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert max(theirs) - min(theirs) > 0.01 and len(set(theirs)) == 20
