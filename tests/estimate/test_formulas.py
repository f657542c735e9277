"""The page of formulas: each of its sums is asserted, where it is worked out, to be the prediction's own."""

import pytest

import accounting
from cli.units import mib
from config import Config, resolve
from estimate.formulas import explain
from estimate.predict import predict
from hardware.accelerators import accelerator
from hardware.spec import DeviceSpec

SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 300, "batch_size": 3}
SHAPES = {
    "gpt2": {"bias": True},
    "gpt2 without bias, untied": {"tie_weights": False, "dropout": 0.1},
    "llama": {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False},
    "swiglu with bias, wide heads": {"activation": "swiglu", "bias": True, "head_dim": 24, "n_kv_head": 1},
    "rmsnorm with bias": {"norm": "rmsnorm", "bias": True, "qk_norm": True, "pos": "rope", "activation": "relu2"},
    "mlp": {"model": "mlp"},
    "mlp with bias": {"model": "mlp", "bias": True, "mlp_context": 3, "activation": "swiglu", "tie_weights": False},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_page_adds_up_for_every_shape(shape, dtype):
    for spec in (accelerator("a100-40gb"), DeviceSpec("a CPU", "cpu", dtypes=("float32", "bfloat16"))):
        config = resolve(Config(**{**SMALL, **SHAPES[shape], "dtype": dtype}), spec)
        page = "\n".join(explain(config, spec, 0.4))
        prediction = predict(config, spec)
        for n in (prediction["model"]["params"], prediction["flops"]["per_token"], prediction["flops"]["per_step"]):
            assert f"{n:,}" in page
        assert mib(prediction["memory"]["peak"]) in page
        assert ("unknown" in page) == (spec.kind == "cpu")


def test_the_command_prints_the_page_in_reading_order(capsys):
    assert accounting.main(["--gpu=a100-40gb", "--explain", *(f"--{k}={v}" for k, v in SMALL.items())]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split(" (")[0] for line in lines if line and not line.startswith(" ")]
    assert heads == ["Letters", "Parameters", "FLOPs a token", "Memory", "Time"]
    assert max(map(len, lines)) <= 120
