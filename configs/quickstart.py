"""A small Transformer on the Python standard library, with a vocabulary of 4,096 tokens: the README's first command.

hardware    two CPU cores; the data set is the standard library of the interpreter that runs this
duration    2.5 minutes of training on two cores with bfloat16 matmuls
expected    a validation loss of 4.00 nats per token of 3.6 bytes, 1.59 bits per byte, over the whole split

    python train.py configs/quickstart.py
    python sample.py out-quickstart --prompt="def main("
"""

dataset = "stdlib"
vocab_size = 4096
block_size = 128
n_layer = 4
n_head = 3
n_embd = 192
norm = "rmsnorm"
pos = "rope"
qk_norm = True
activation = "relu2"
tie_weights = False

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 1600
lr_decay_iters = 1600
warmup_iters = 100
learning_rate = 4e-3
min_lr = 0.0
decay_shape = "linear"

eval_interval = 800
eval_iters = None
log_interval = 10
out_dir = "out-quickstart"
