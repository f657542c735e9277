"""What a technique changes: where the trainer has it, the difference of two predictions; else what a pencil gives."""

import json

import pytest

import accounting
from config import Config, resolve
from estimate import cluster
from estimate.predict import predict
from estimate.techniques import lines, techniques
from hardware.accelerators import accelerator
from hardware.spec import DeviceSpec

A100 = accelerator("a100-40gb")
GPT2 = resolve(Config(vocab_size=50304, batch_size=12, gradient_accumulation_steps=40), A100)
ROWS = {row["technique"]: row for row in techniques(GPT2, A100)}
KINDS = {
    "llama": {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False},
    "mlp": {"model": "mlp"},
    "odd": {"batch_size": 1, "gradient_accumulation_steps": 1, "dtype": "float32"},
}


def peak(**changes):
    return predict(resolve(Config(**{"vocab_size": 50304, "batch_size": 12} | changes), A100), A100)["memory"]["peak"]


def test_settings_of_the_trainer_are_two_predictions():
    assert ROWS["bfloat16 matmuls"]["without"][0] == peak(dtype="float32")
    assert ROWS["chunked loss"]["without"][0] == peak(loss_chunk=None)
    assert ROWS["bfloat16 matmuls"]["with"] == ROWS["chunked loss"]["with"] == ROWS["accumulation"]["without"]
    halved = {"batch_size": 6, "gradient_accumulation_steps": 80, "loss_chunk": 512}
    assert ROWS["accumulation"]["with"][0] == peak(**halved)
    assert {row["without"][1] for name, row in ROWS.items() if "cache" not in name} == {ROWS["chunked loss"]["with"][1]}


def test_what_a_pencil_gives():
    B, T, C, L, H = 12, 1024, 768, 12, 12
    flash = ROWS["flash attention"]
    assert flash["without"][0] - flash["with"][0] == 2 * L * B * H * T * T
    assert flash["without"][2] - flash["with"][2] == 40 * 10 * 2 * L * B * H * T * T
    recomputation = ROWS["recomputation"]
    block = 2 * B * T * 8 * C * C + 4 * B * T * T * C  # FLOPs of its forward, without the last matmul
    assert recomputation["with"][1] - recomputation["without"][1] == 40 * L * block
    assert recomputation["with"][0] == peak(recompute="block", loss_chunk=512)
    assert ROWS["sharding (ZeRO-3), 8"]["with"][0] == cluster.on_cluster(GPT2, A100, 8)["peak"]
    cache = ROWS["key-value cache"]
    assert cache["with"][0] == 2 * L * C * 2 * T
    assert cache["without"][1] / cache["with"][1] > 700  # most of 1,024: the head runs once in both


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_and_device_has_its_page(kind):
    for spec in (A100, accelerator("v100"), DeviceSpec("a CPU", "cpu", dtypes=("float32", "bfloat16"))):
        config = resolve(Config(**{"vocab_size": 300, "n_layer": 3, "n_embd": 96, "n_head": 4} | KINDS[kind]), spec)
        rows = techniques(config, spec)
        names = [row["technique"] for row in rows]
        assert ("flash attention" in names) == (config.model == "transformer")
        assert ("accumulation" in names) == (config.batch_size % 2 == 0)
        assert all(type(x) is int for row in rows for side in ("without", "with") for x in row[side])
        assert all(len(line) <= 120 for line in lines(rows))


def test_the_command_prints_it(capsys):
    assert accounting.main(["--vocab_size=50304", "--gpu=a100-40gb", "--techniques"]) == 0
    assert "flash attention" in capsys.readouterr().out
    assert accounting.main(["--vocab_size=50304", "--gpu=a100-40gb", "--techniques", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(ROWS)
    assert accounting.main(["--vocab_size=50304", "--techniques", "--compare"]) == 2
