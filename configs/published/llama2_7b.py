"""Llama 2 7B, Meta's base model.

source      Touvron et al., 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models" (arXiv 2307.09288)
parameters  6,738,415,616, as in its published weights
hardware    A100s with 80 GB
result      calflops counts 850 GMACs in a forward of 128 tokens; the cache takes 524,288 bytes per token in 16 bits

    python accounting.py configs/published/llama2_7b.py --gpu=a100-80gb
"""

vocab_size = 32000
block_size = 4096
n_layer = 32
n_head = 32
n_embd = 4096
d_ff = 11008
norm = "rmsnorm"
pos = "rope"
activation = "swiglu"
tie_weights = False

batch_size = 1
gradient_accumulation_steps = 1024  # 4 M tokens
max_iters = 2e12 // (1024 * 4096)  # 2 T tokens
