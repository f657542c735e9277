"""Megatron 175B, which has the shape of GPT-3, as NVIDIA timed it.

source      Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models"
            (arXiv 2205.05198), tables 3 and 5
parameters  174,615,846,912
hardware    64 A100s with 80 GB
result      13.75 s per iteration: an MFU of 51.4 %, an HFU of 52.8 %
differs     in nothing: like this config, it has biases, tied embeddings, learned positions and dropout

    python accounting.py configs/published/megatron_175b.py --gpu=a100-80gb
"""

vocab_size = 51200
block_size = 2048
n_layer = 96
n_head = 96
n_embd = 12288
bias = True
dropout = 0.1  # Megatron-LM's default; the rate changes no FLOPs and no bytes, but dropout needs masks
attn_dropout = 0.1

batch_size = 1
gradient_accumulation_steps = 64
max_iters = 1  # only single iterations were timed
