"""The command `ceilings`: what it prints and what it writes to hardware.local.json. No times are checked."""

from benchmarks import __main__
from hardware import machine
from measure import operations


def test_ceilings_are_printed_and_written(monkeypatch, capsys, quick, rows_of):
    written = []
    monkeypatch.setattr(machine, "write_local", written.append)
    monkeypatch.setattr(operations, "operation_seconds", lambda op, device: [1e-3])
    tiny = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=8", "--batch_size=2", "--vocab_size=65"]
    rows = {row["what"]: row["value"] for row in rows_of("ceilings", "--device=cpu", *tiny)}
    assert rows["matmul of 2048 cubed, float32"] == 2048e9 and rows["copy, bytes read and written"] == 2e9
    assert written[0].peak("float32") == 2048e9 and written[0].bandwidth == 2e9
    assert rows["operations timed"] == sum(map(len, written[0].op_times.values())) > 30
    assert __main__.main(["ceilings", "--device=cpu", *tiny]) == 0
    assert "matmul of 256 cubed" in capsys.readouterr().out
