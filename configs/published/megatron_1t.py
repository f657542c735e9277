"""Megatron 1T, as NVIDIA timed it.

source      Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models"
            (arXiv 2205.05198), tables 3 and 5
parameters  1,008,038,758,400
hardware    512 A100s with 80 GB
result      71.49 s per iteration: an MFU of 56.3 %, an HFU of 57.0 %
differs     in nothing: like this config, it has biases, tied embeddings, learned positions and dropout

    python accounting.py configs/published/megatron_1t.py --gpu=a100-80gb
"""

vocab_size = 51200
block_size = 2048
n_layer = 128
n_head = 160
n_embd = 25600
bias = True
dropout = 0.1  # Megatron-LM's default; the rate changes no FLOPs and no bytes, but dropout needs masks
attn_dropout = 0.1

batch_size = 1
gradient_accumulation_steps = 512
max_iters = 1  # only single iterations were timed
