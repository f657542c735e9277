"""PaLM 540B, Google's largest of the three.

source      Chowdhery et al., 2022, "PaLM: Scaling Language Modeling with Pathways" (arXiv 2204.02311), sections 2, 4.1
parameters  540,358,649,856; the paper: 540.35 B
hardware    6,144 TPU v4 chips
result      238.3 k tokens/s: an MFU of 46.2 %, of 45.7 % without attention
differs     the paper's blocks run attention and MLP side by side behind one norm, here in turn behind a norm each:
            the same FLOPs, 118 x 18,432 = 2,174,976 parameters more

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
gradient_accumulation_steps = 2048  # 4 M tokens, after 512 and 1,024 sequences
max_iters = 780e9 // (2048 * 2048)  # 780 G tokens
