"""The nanoGPT README's CPU run: a 0.8 M parameter GPT-2 on tinyshakespeare, character by character.

hardware    two CPU cores
duration    1.0 minutes of training on two cores with bfloat16 matmuls
expected    a validation loss of 1.90 nats per character, over the whole split; records/shakespeare_char has other seeds

    python data/prepare.py shakespeare_char
    python train.py configs/shakespeare_char.py
    python sample.py out-shakespeare-char --prompt="ROMEO:"
"""

dataset = "shakespeare_char"
vocab_size = 65
block_size = 64
n_layer = 4
n_head = 4
n_embd = 128
init = "gpt2"

batch_size = 12
gradient_accumulation_steps = 1
max_iters = 2000
lr_decay_iters = 2000
warmup_iters = 100
learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99

eval_interval = 250
eval_iters = None
log_interval = 10
always_save_checkpoint = False
out_dir = "out-shakespeare-char"
seed = 1
