"""Llama 3 70B, Meta's base model.

source      Grattafiori et al., 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3
parameters  70,553,706,496, as in its published weights
hardware    H100s with 80 GB
result      an exercise of the scaling book: 6.3e24 FLOPs for 15 T tokens, 44 days on 8,960 TPU v5p at 40 % MFU

    python accounting.py configs/published/llama3_70b.py --gpu=h100-sxm
"""

vocab_size = 128256
block_size = 8192
n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
d_ff = 28672
norm = "rmsnorm"
pos = "rope"
rope_theta = 500000.0
activation = "swiglu"
tie_weights = False

batch_size = 1
gradient_accumulation_steps = 2048  # 16 M tokens; published only for the 405B model
max_iters = 15e12 // (2048 * 8192)  # 15 T tokens
