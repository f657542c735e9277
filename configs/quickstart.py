"""A small Transformer on the Python standard library, byte by byte: the README's first command."""

dataset = "stdlib"
vocab_size = 257
block_size = 256
n_layer = 4
n_head = 4
n_embd = 256
norm = "rmsnorm"
pos = "rope"
qk_norm = True
activation = "relu2"
tie_weights = False

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 800
lr_decay_iters = 800
warmup_iters = 50
learning_rate = 3e-3
min_lr = 3e-5
beta2 = 0.95

eval_interval = 400
eval_iters = None
log_interval = 10
out_dir = "out-quickstart"
