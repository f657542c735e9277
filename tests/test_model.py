"""The models against transformers' GPT-2 and Llama, decoding against the full forward, and initialisation."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from config import Config, resolve
from hardware.spec import DeviceSpec
from model import KVCache, build, next_token
from ops.linear import linear
from ops.rms_norm import RMSNormFunction

CPU = DeviceSpec("a CPU", "cpu", dtypes=("float32", "bfloat16"))
TINY = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "block_size": 16,
    "vocab_size": 65,
    "batch_size": 2,
    "dtype": "float32",
}
LLAMA = {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False}
SHAPES = {
    "gpt2": {"bias": True},
    "gpt2 without bias": {},
    "llama": LLAMA,
    "qk_norm, relu2, wide heads": {**LLAMA, "activation": "relu2", "qk_norm": True, "head_dim": 12, "n_kv_head": 1},
    "mlp": {"model": "mlp", "mlp_context": 4},
    "mlp with rmsnorm": {"model": "mlp", "mlp_context": 1, "norm": "rmsnorm", "tie_weights": False, "bias": True},
}
TRANSFORMERS = {name: shape for name, shape in SHAPES.items() if shape.get("model") != "mlp"}


def config_of(**settings):
    return resolve(Config(**{**TINY, **settings}), CPU)


def model_of(seed=0, **settings):
    model = build(config_of(**settings))
    model.init_weights(seed)
    return model


def tokens(config, length=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (config.batch_size, length or config.block_size), generator=generator)


def randomise(model):
    """Give every parameter a value that an error would show through: gains are not 1, biases and heads not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model


# --- equal to a trusted implementation, forward and backward


def gpt2(c):
    """Return transformers' GPT-2 of our config c, and which of its tensors each of ours holds."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.block_size,
            n_embd=c.n_embd,
            n_layer=c.n_layer,
            n_head=c.n_head,
            activation_function="gelu",
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    )
    names = {"wte": ["wte.weight"], "wpe": ["wpe.weight"], "norm.weight": ["ln_f.weight"], "norm.bias": ["ln_f.bias"]}
    inside = {"norm1": "ln_1", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "norm2": "ln_2",
              "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}  # fmt: skip
    for layer, (ours, theirs), kind in itertools.product(range(c.n_layer), inside.items(), ("weight", "bias")):
        names[f"blocks.{layer}.{ours}.{kind}"] = [f"h.{layer}.{theirs}.{kind}"]
    return model, {ours: [f"transformer.{theirs[0]}"] for ours, theirs in names.items()}


def llama(c):
    """Return transformers' Llama of our config c, and which of its tensors each of ours holds, one above the other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.n_embd,
            intermediate_size=c.d_ff,
            num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head,
            num_key_value_heads=c.n_kv_head,
            head_dim=c.head_dim,
            max_position_embeddings=c.block_size,
            rms_norm_eps=c.norm_eps,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        )
    )
    names = {"wte": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"], "head": ["lm_head.weight"]}
    for layer in range(c.n_layer):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        names |= {
            f"{ours}.norm1.weight": [f"{theirs}.input_layernorm.weight"],
            f"{ours}.attn.qkv.weight": [f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv"],
            f"{ours}.attn.proj.weight": [f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.norm2.weight": [f"{theirs}.post_attention_layernorm.weight"],
            f"{ours}.mlp.up.weight": [f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up")],
            f"{ours}.mlp.down.weight": [f"{theirs}.mlp.down_proj.weight"],
        }
    return model, names


@pytest.mark.parametrize("family, settings", [(gpt2, {"bias": True}), (llama, LLAMA)])
def test_equals_transformers_forward_and_backward(family, settings):
    ours = randomise(model_of(**settings))
    theirs, names = family(ours.config)
    own, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert own.keys() == names.keys() and {n for parts in names.values() for n in parts} == other.keys()

    def turned(n, tensor):  # a weight of their Conv1D is (in, out)
        return tensor.T if ".c_" in n and tensor.dim() == 2 else tensor

    with torch.no_grad():
        for name, parts in names.items():
            pieces = own[name].split([turned(n, other[n]).shape[0] for n in parts])
            for n, piece in zip(parts, pieces, strict=True):
                other[n].copy_(turned(n, piece))
    idx = tokens(ours.config)
    targets = tokens(ours.config, seed=1)
    loss = ours(idx, targets)
    logits = theirs(idx).logits
    reference = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours(idx), logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    loss.backward()
    reference.backward()
    for name, parts in names.items():
        expected = torch.cat([turned(n, other[n].grad) for n in parts])
        torch.testing.assert_close(
            own[name].grad, expected, rtol=1e-3, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("gain", [True, False])
def test_rmsnorm_equals_torch_and_saves_its_input_as_it_is(gain):
    torch.manual_seed(0)
    x, dy = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 5, 8)
    weight = torch.randn(8, requires_grad=True) if gain else None
    inputs = [x, weight] if gain else [x]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours = RMSNormFunction.apply(x, weight, 1e-5)
    theirs = F.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(theirs, inputs, dy), strict=True):
        torch.testing.assert_close(a, b)
    assert sorted(t.numel() for t in saved) == sorted([x.numel(), 15] + [8] * gain)


def test_rmsnorm_of_bfloat16_is_computed_in_float32():
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    y = RMSNormFunction.apply(x, None, 1e-5)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.rms_norm(x.float(), (64,), None, 1e-5))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert gradient.dtype == torch.bfloat16


# --- what must not matter does not


@pytest.mark.parametrize("shape", SHAPES)
def test_no_position_sees_a_later_one(shape):
    model = randomise(model_of(**SHAPES[shape])).eval()
    idx = tokens(model.config)
    changed = idx.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % model.config.vocab_size
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_the_mlp_sees_its_window_and_nothing_before():
    model = randomise(model_of(model="mlp", mlp_context=4)).eval()
    idx = tokens(model.config)
    outside, inside = idx.clone(), idx.clone()
    outside[:, :6] = (outside[:, :6] + 1) % model.config.vocab_size
    inside[:, 6] = (inside[:, 6] + 1) % model.config.vocab_size
    torch.testing.assert_close(model(idx)[:, 9:], model(outside)[:, 9:])
    assert not torch.allclose(model(idx)[:, 9], model(inside)[:, 9])


@pytest.mark.parametrize("shape", TRANSFORMERS)
@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 1, 4, 5]])
def test_decoding_with_the_cache_equals_the_full_forward(shape, pieces):
    model = randomise(model_of(**SHAPES[shape])).eval()
    idx = tokens(model.config)
    cache = KVCache(model.config, len(idx), "cpu")
    with torch.no_grad():
        decoded = torch.cat([model(piece, cache=cache) for piece in idx.split(pieces, dim=1)], dim=1)
        torch.testing.assert_close(decoded, model(idx), rtol=1e-4, atol=1e-5)
    assert cache.length == 16 and cache.k.shape[2] == model.config.n_kv_head


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt_length", [1, 7, 16, 25])
def test_greedy_generation_equals_the_full_forward_also_past_block_size(shape, prompt_length):
    model = randomise(model_of(**SHAPES[shape])).eval()
    size = model.config.block_size
    idx = tokens(model.config, prompt_length)
    generated = torch.stack(list(model.generate(idx, 40, temperature=0)), dim=1)
    window = idx[:, -size:]  # what the model attends to: past block_size, the last half is taken and grows again
    for i in range(40):
        if window.shape[1] > size:
            window = window[:, -(size // 2) :]
        expected = model(window)[:, -1].argmax(-1)
        assert torch.equal(generated[:, i], expected), f"token {i}"
        window = torch.cat((window, expected[:, None]), dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "m, n, bias", [(64, 48, False), (65, 7, True), (50257, 3, False), (263, 8, True), (6, 1, True)]
)
def test_a_single_row_times_a_matrix_is_computed_in_float32_by_slices(m, n, bias, dtype):
    """It goes by slices where the height divides into some; 263 is prime. Autocast rounds no copy of the weights."""
    torch.manual_seed(0)
    weight, x, b = torch.randn(m, n), torch.randn(1, 1, n), torch.randn(m) if bias else None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        y = linear(x, weight, b)
    rounded = dtype == "bfloat16" and m == 263
    torch.testing.assert_close(y.float(), F.linear(x, weight, b), **({"rtol": 0, "atol": 0.1} if rounded else {}))
    assert y.dtype == (torch.bfloat16 if rounded else torch.float32) and y.shape == (1, 1, m)
    assert linear(x.requires_grad_(), weight, b).grad_fn is not None  # with a gradient wanted it is torch's own


def test_tied_weights_are_one_tensor_after_building_moving_stepping_and_copying():
    model = model_of()
    assert model.head is None
    model.to(torch.device("cpu"))
    names = [name for name, _ in model.named_parameters()]
    assert "wte" in names and "head" not in names
    (model(tokens(model.config), tokens(model.config))).backward()
    lookups = model.wte.grad.clone()
    assert lookups.abs().sum(1).gt(0).all()  # every row gets a gradient: from the head, picked or not


@pytest.mark.parametrize("dropout", [{"dropout": 0.3}, {"attn_dropout": 0.3}])
def test_dropout_acts_in_training_only(dropout):
    model = randomise(model_of(**dropout))
    idx = tokens(model.config)
    model.eval()
    assert torch.equal(model(idx), model(idx))
    torch.testing.assert_close(model(idx), randomise(model_of()).eval()(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))


def test_bfloat16_follows_float32():
    losses = {}
    for dtype in ("float32", "bfloat16"):
        model = model_of(dtype=dtype, **LLAMA)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[dtype] = []
        for step in range(60):
            idx = tokens(model.config, 17, seed=step % 4)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = model(idx[:, :-1], idx[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[dtype].append(loss.item())
    apart = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    assert losses["float32"][-1] < 0.6 * losses["float32"][0]
    assert 0 < max(apart) < 0.15


def test_under_autocast_the_residual_stream_and_the_loss_stay_in_float32():
    model = model_of(dtype="bfloat16", **LLAMA)
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, args, y, name=name: seen.update({name: y.dtype}))
    idx = tokens(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)
    assert loss.dtype == torch.float32
    expected = {"blocks.0": torch.float32, "blocks.0.norm1": torch.float32, "blocks.0.attn.qkv": torch.bfloat16,
                "blocks.0.mlp": torch.bfloat16, "norm": torch.float32}  # fmt: skip
    assert {name: seen[name] for name in expected} == expected


# --- initialisation


@pytest.mark.parametrize("vocab_size", [65, 50304])
@pytest.mark.parametrize("n_embd", [128, 768])
@pytest.mark.parametrize("tie_weights", [True, False])
def test_the_first_loss_is_ln_v(vocab_size, n_embd, tie_weights):
    model = model_of(vocab_size=vocab_size, n_embd=n_embd, tie_weights=tie_weights)
    idx, targets = tokens(model.config), tokens(model.config, seed=1)
    assert math.isclose(model(idx, targets).item(), math.log(vocab_size), rel_tol=0.02)


def spread(x):
    return x.detach().float().std().item()


def test_xavier_standard_deviations_by_kind_of_tensor():
    c = config_of(
        n_embd=256, n_layer=8, vocab_size=2000, tie_weights=False, n_kv_head=2, activation="swiglu", bias=True
    )
    model = build(c)
    model.init_weights(0)
    block = model.blocks[0]
    q, k, v = block.attn.qkv.weight.split(block.attn.qkv.fan_outs)
    for part in (q, k, v, *block.mlp.up.weight.chunk(2)):
        assert math.isclose(spread(part), math.sqrt(2 / (256 + len(part))), rel_tol=0.03)
    assert math.isclose(spread(block.mlp.down.weight), math.sqrt(2 / (c.d_ff + 256) / 16), rel_tol=0.03)
    assert math.isclose(spread(model.wte), 1.0, rel_tol=0.03) and not model.head.any()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    assert vectors and all(torch.equal(p, torch.full_like(p, p[0].item())) and p[0] in (0, 1) for p in vectors)


def test_gpt2_standard_deviations():
    model = model_of(init="gpt2", n_embd=256, n_layer=8, vocab_size=2000, tie_weights=False)
    for p in (model.wte, model.wpe, model.head, model.blocks[0].attn.qkv.weight, model.blocks[3].mlp.up.weight):
        assert math.isclose(spread(p), 0.02, rel_tol=0.03)
    for p in (model.blocks[0].attn.proj.weight, model.blocks[7].mlp.down.weight):
        assert math.isclose(spread(p), 0.02 / 4, rel_tol=0.03)


def test_the_seed_decides_the_weights():
    one, same, other = model_of(seed=1), model_of(seed=1), model_of(seed=2)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.wte, other.wte)


# --- sampling


def test_temperature_zero_is_greedy_and_tiny_temperatures_nearly():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)) * 100
    assert torch.equal(next_token(logits, temperature=0), logits.argmax(-1))
    assert torch.equal(next_token(logits, temperature=1e-8), logits.argmax(-1))


def test_top_k_of_one_equals_argmax_over_many_draws_even_among_equals():
    logits = torch.zeros(10_000, 7)
    assert len(next_token(logits, top_k=1).unique()) == 1
    logits = torch.randn(10_000, 7)
    assert torch.equal(next_token(logits, top_k=1), logits.argmax(-1))


ALL = {0, 1, 2, 3}


@pytest.mark.parametrize(
    "restriction, allowed",
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, ALL),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 1.0}, ALL),
    ],
)
def test_only_what_is_allowed_is_drawn_and_all_of_it(restriction, allowed):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    assert set(next_token(logits, **restriction).tolist()) == allowed


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = next_token(probabilities.log().expand(40_000, 4), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.bincount() / 40_000, probabilities, rtol=0, atol=0.01)


@pytest.mark.parametrize("settings", SHAPES.values(), ids=SHAPES)
def test_gradients_reach_every_parameter(settings):
    model = randomise(model_of(**settings))
    model(tokens(model.config), tokens(model.config)).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_bfloat16_config_computes_outside_of_autocast_too():
    """It computes in float32 there, but for a CPU's attention."""
    model = randomise(model_of(dtype="bfloat16", dropout=0.0))
    idx = tokens(model.config)
    with torch.no_grad():
        plain = model(idx, idx)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(idx, idx), plain, rtol=2e-2, atol=2e-2)


# --- recomputation


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.1, "attn_dropout": 0.1}, {"loss_chunk": 7}, {"model": "mlp"}])
@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recomputation_changes_no_bit_of_loss_and_gradients(recompute, settings):
    idx = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))

    def run(how):
        model = randomise(model_of(**{"dropout": 0.0, "vocab_size": 50, "dtype": "bfloat16"} | settings, recompute=how))
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(idx, idx)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    for kept, again in zip(run("none"), run(recompute), strict=True):
        assert torch.equal(kept, again)
