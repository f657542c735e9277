"""Llama 2 70B, Meta's base model.

source      Touvron et al., 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models" (arXiv 2307.09288)
parameters  68,976,648,192, as in its published weights
hardware    A100s with 80 GB
result      the cache takes 327,680 bytes per token in 16 bits: 10 GiB for 32,768 tokens, 80 GiB without GQA

    python accounting.py configs/published/llama2_70b.py --gpu=a100-80gb
"""

vocab_size = 32000
block_size = 4096
n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
d_ff = 28672
norm = "rmsnorm"
pos = "rope"
activation = "swiglu"
tie_weights = False

batch_size = 1
gradient_accumulation_steps = 1024  # 4 M tokens
max_iters = 2e12 // (1024 * 4096)  # 2 T tokens
