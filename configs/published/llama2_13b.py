"""Llama 2 13B, Meta's base model.

source      Touvron et al., 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models" (arXiv 2307.09288)
parameters  13,015,864,320, as in its published weights
hardware    A100s with 80 GB

    python accounting.py configs/published/llama2_13b.py --gpu=a100-80gb
"""

vocab_size = 32000
block_size = 4096
n_layer = 40
n_head = 40
n_embd = 5120
d_ff = 13824
norm = "rmsnorm"
pos = "rope"
activation = "swiglu"
tie_weights = False

batch_size = 1
gradient_accumulation_steps = 1024  # 4 M tokens
max_iters = 2e12 // (1024 * 4096)  # 2 T tokens
