"""Megatron 175B, GPT-3's shape, as NVIDIA timed it.

source      Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models"
            (arXiv 2205.05198), tables 3 and 5
parameters  174,615,846,912
hardware    64 A100s of 80 GB
result      13.75 s an iteration: an MFU of 51.4 %, an HFU of 52.8 %
differs     nothing: Megatron's GPT has biases, tied embeddings, learned positions and dropout, as here

    python accounting.py configs/published/megatron_175b.py --gpu=a100-80gb
"""

vocab_size = 51200
block_size = 2048
n_layer = 96
n_head = 96
n_embd = 12288
bias = True
dropout = 0.1  # Megatron-LM's default rate; it changes no FLOPs, and bytes only by being there
attn_dropout = 0.1

batch_size = 1
gradient_accumulation_steps = 64
max_iters = 1  # an iteration was timed; no run was made
