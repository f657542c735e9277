"""The formulas that papers print, against their own tables, and where they part from the prediction."""

import math
from dataclasses import replace

import pytest

from config import resolve
from estimate.predict import predict
from hardware.accelerators import accelerator
from tests.estimate.helpers import GPT2, message_of
from tests.estimate.published_formulas import korthikanti_activation_bytes, zero_bytes_per_gpu


def test_zero_divides_7_5b_parameters_over_64_cards():
    """Rajbhandari et al. 2020, figure 1: 120, 31.4, 16.6 and 1.9 GB."""
    assert [zero_bytes_per_gpu(7.5e9, 64, stage) / 1e9 for stage in range(4)] == [120, 31.40625, 16.640625, 1.875]
    assert len({zero_bytes_per_gpu(1e9, 1, stage) for stage in range(4)}) == 1


# s, b, h, a, layers of the models in Korthikanti et al. 2022, table 3
MEGATRON = {"22B": (2048, 4, 6144, 64, 48), "175B": (2048, 1, 12288, 96, 96), "530B": (2048, 1, 20480, 128, 105),
            "1T": (2048, 1, 25600, 160, 128)}  # fmt: skip
# GB per card at t = 8 by the formulas of table 2: TP; TP, SP; TP, selective; all three; full
ACTIVATIONS = {"22B": (63.6, 42.5, 31.4, 10.27, 4.83), "175B": (55.6, 34.4, 31.4, 10.27, 4.83),
               "530B": (92.5, 54.0, 57.3, 18.72, 8.81), "1T": (140.9, 82.2, 87.2, 28.52, 13.42)}  # fmt: skip


@pytest.mark.parametrize("name", MEGATRON)
def test_activations_of_megatron_by_korthikantis_formulas(name):
    variants = [(False, "none"), (True, "none"), (False, "selective"), (True, "selective"), (False, "full")]
    for (sequence_parallel, recompute), expected in zip(variants, ACTIVATIONS[name], strict=True):
        n_bytes = korthikanti_activation_bytes(
            *MEGATRON[name], t=8, sequence_parallel=sequence_parallel, recompute=recompute
        )
        assert math.isclose(n_bytes / 1e9, expected, rel_tol=0.002)


@pytest.mark.parametrize("name, share", [("175B", 80), ("530B", 64)])
def test_scores_are_5as_over_h_of_34(name, share):
    """The paper's section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG 530B."""
    s, b, h, a, _ = MEGATRON[name]
    whole = korthikanti_activation_bytes(s, b, h, a)
    assert whole == s * b * h * (34 + share)
    assert whole - korthikanti_activation_bytes(s, b, h, a, recompute="selective") == s * b * h * share


def test_the_formulas_for_large_models_do_not_hold_for_small_ones():
    """sbh(34 + 5as/h) a layer leaves out the loss, most of what GPT-2 124M keeps; fused attention keeps no scores."""
    h100 = accelerator("h100-sxm")
    config = resolve(replace(GPT2, batch_size=4, loss_chunk=None), h100)
    theirs = korthikanti_activation_bytes(1024, 4, 768, 12, n_layer=12, recompute="selective")
    memory = predict(config, h100)["memory"]
    assert memory["loss"] > theirs and 1 < memory["activations"] / theirs < 1.25


@pytest.mark.parametrize(
    "ask, words",
    [
        (lambda: zero_bytes_per_gpu(1e9, 8, 4), "stage=4"),
        (lambda: zero_bytes_per_gpu(1e9, 0, 3), "n_gpus=0"),
        (lambda: korthikanti_activation_bytes(2048, 1, 128, 8, recompute="some"), "recompute='some'"),
        (lambda: korthikanti_activation_bytes(2048, 1, 128, 8, t=0), "t=0"),
    ],
)
def test_mistakes_are_one_line(ask, words):
    assert words in message_of(ask)
