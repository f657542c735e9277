"""The loss of nanoGPT's CPU run in a third of its time: tinyshakespeare by characters, 0.77 M parameters.

It differs from that run by rotary positions, RMSNorm (on queries and keys too), squared ReLU, an untied head that
starts at zero, two wider blocks instead of four, five times the learning rate, and a linear decay to zero.

hardware    two CPU cores
duration    0.3 minutes of training on two cores with bfloat16 matmuls
expected    a validation loss of 1.88 nats per character, over the whole split; 1.84 and 1.85 with seeds 1 and 2

    python data/prepare.py shakespeare_char
    python train.py configs/shakespeare_fast.py
    python sample.py out-shakespeare-fast --prompt="ROMEO:"
"""

dataset = "shakespeare_char"
vocab_size = 65
block_size = 64
n_layer = 2
n_head = 4
n_embd = 176
norm = "rmsnorm"
pos = "rope"
qk_norm = True
activation = "relu2"
tie_weights = False

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 600
lr_decay_iters = 600
warmup_iters = 80
learning_rate = 5e-3
min_lr = 0.0
decay_shape = "linear"
weight_decay = 0.3

eval_interval = 300
eval_iters = None
log_interval = 10
always_save_checkpoint = False
out_dir = "out-shakespeare-fast"
