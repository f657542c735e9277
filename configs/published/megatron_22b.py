"""Megatron 22B, as NVIDIA timed it.

source      Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models"
            (arXiv 2205.05198), tables 3 and 5
parameters  22,074,273,792
hardware    8 A100s with 80 GB
result      1.10 s per iteration: an MFU of 41.5 %, an HFU of 43.7 %
differs     in nothing: like this config, it has biases, tied embeddings, learned positions and dropout

    python accounting.py configs/published/megatron_22b.py --gpu=a100-80gb
"""

vocab_size = 51200
block_size = 2048
n_layer = 48
n_head = 64
n_embd = 6144
bias = True
dropout = 0.1  # Megatron-LM's default; the rate changes no FLOPs and no bytes, but dropout needs masks
attn_dropout = 0.1

batch_size = 4
gradient_accumulation_steps = 1
max_iters = 1  # only single iterations were timed
