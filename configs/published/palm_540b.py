"""PaLM 540B, the largest of Google's three models.

source      Chowdhery et al., 2022, "PaLM: Scaling Language Modeling with Pathways" (arXiv 2204.02311), sections 2, 4.1
parameters  540,358,649,856; the paper has 540.35 B
hardware    6,144 TPU v4 chips
result      238.3 k tokens/s: an MFU of 46.2 %, or 45.7 % without attention
differs     in the paper, attention and MLP of a block are parallel and share a norm; here they are sequential, with
            a norm each: the same FLOPs, but 118 x 18,432 = 2,174,976 more parameters

    python accounting.py configs/published/palm_540b.py --gpu=tpu-v4
"""

vocab_size = 256000
block_size = 2048
n_layer = 118
n_head = 48
n_kv_head = 1
n_embd = 18432
head_dim = 256
d_ff = 73728
pos = "rope"
activation = "swiglu"

batch_size = 1
gradient_accumulation_steps = 2048  # 4 M tokens, the last of three sizes; before, 512 and 1,024
max_iters = 780e9 // (2048 * 2048)  # 780 G tokens
