"""A language model without attention: residual layers on the concatenated embeddings of the last 8 characters.

hardware    two CPU cores
duration    1.6 minutes of training on two cores with bfloat16 matmuls
expected    a validation loss of 1.57 nats per character, over the whole split

    python data/prepare.py shakespeare_char
    python train.py configs/mlp.py
    python sample.py out-mlp --prompt="ROMEO:"
"""

dataset = "shakespeare_char"
vocab_size = 65
model = "mlp"
mlp_context = 8
block_size = 64
n_layer = 4
n_embd = 128

batch_size = 32
gradient_accumulation_steps = 1
max_iters = 2000
lr_decay_iters = 2000
warmup_iters = 100
learning_rate = 2e-3
min_lr = 1e-4
beta2 = 0.99

eval_interval = 500
eval_iters = None
log_interval = 10
out_dir = "out-mlp"
