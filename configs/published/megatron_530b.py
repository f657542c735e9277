"""Megatron 530B, which has the shape of Megatron-Turing NLG, as NVIDIA timed it.

source      Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models"
            (arXiv 2205.05198), tables 3 and 5
parameters  529,600,819,200
hardware    280 A100s with 80 GB
result      37.83 s per iteration: an MFU of 56.0 %, an HFU of 57.0 %
            on 2,240 GPUs, 8-way data parallel: 39.15 s, an MFU of 54.2 %
differs     in nothing: like this config, it has biases, tied embeddings, learned positions and dropout

    python accounting.py configs/published/megatron_530b.py --gpu=a100-80gb
"""

vocab_size = 51200
block_size = 2048
n_layer = 105
n_head = 128
n_embd = 20480
bias = True
dropout = 0.1  # Megatron-LM's default; the rate changes no FLOPs and no bytes, but dropout needs masks
attn_dropout = 0.1

batch_size = 1
gradient_accumulation_steps = 280
max_iters = 1  # only single iterations were timed
