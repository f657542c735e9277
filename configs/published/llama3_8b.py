"""Llama 3 8B, Meta's base model.

source      Grattafiori et al., 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3
parameters  8,030,261,248, as in its published weights
hardware    H100s with 80 GB
result      torchtitan measured 5,959 tokens/s on an H100 at T = 8,192, 34.89 % MFU (pull request 996)

    python accounting.py configs/published/llama3_8b.py --gpu=h100-sxm
"""

vocab_size = 128256
block_size = 8192
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
d_ff = 14336
norm = "rmsnorm"
pos = "rope"
rope_theta = 500000.0
activation = "swiglu"
tie_weights = False

batch_size = 1
gradient_accumulation_steps = 2048  # 16 M tokens; published only for the 405B model
max_iters = 15e12 // (2048 * 8192)  # 15 T tokens
