"""Llama 3 405B, Meta's base model.

source      Grattafiori et al., 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3
parameters  405,853,388,800, as in its published weights
hardware    16,384 H100s with 80 GB; 30.84 M GPU-hours according to the model card
result      3.8e25 FLOPs for 15.6 T tokens; 400 TFLOP/s per GPU, 41 % MFU (table 4)

    python accounting.py configs/published/llama3_405b.py --gpu=h100-sxm
"""

vocab_size = 128256
block_size = 8192
n_layer = 126
n_head = 128
n_kv_head = 8
n_embd = 16384
d_ff = 53248
norm = "rmsnorm"
pos = "rope"
rope_theta = 500000.0
activation = "swiglu"
tie_weights = False

batch_size = 1
gradient_accumulation_steps = 2048  # 16 M tokens, the last of three sizes; before, 4 M (with T = 4,096) and 8 M
max_iters = 15.6e12 // (2048 * 8192)  # 15.6 T tokens
