"""GPT-2 (124 M) from scratch, on 300 G tokens of text, with a global batch of 0.5 M tokens.

hardware    one NVIDIA A100 SXM4 40 GB
duration    predicted: 23.4 days on one a100-40gb at 40 % MFU; not measured
expected    a validation loss of about 2.85 on OpenWebText; nanoGPT published it for the same model, batch and
            learning-rate schedule; not measured here

    python data/prepare.py openwebtext --input=FOLDER_OF_TEXT --tokenizer=gpt2
    python accounting.py configs/gpt2.py --gpu=a100-40gb
    python train.py configs/gpt2.py
    python sample.py out-gpt2 --prompt="The history of"
"""

dataset = "openwebtext"
vocab_size = 50304  # GPT-2's 50,257, padded to a multiple of 64
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
init = "gpt2"

batch_size = 12
gradient_accumulation_steps = 40
max_iters = 600000
lr_decay_iters = 600000
warmup_iters = 2000
learning_rate = 0.0006
min_lr = 6e-05
beta2 = 0.95
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10
out_dir = "out-gpt2"
