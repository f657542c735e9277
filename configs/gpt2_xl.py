"""GPT-2 XL (1.56 B) from scratch, on 300 G tokens of text, with a global batch of 0.5 M tokens.

hardware    one NVIDIA A100 SXM4 80 GB
duration    predicted: 281.0 days on one a100-80gb at 40 % MFU; not measured
expected    not known; OpenAI trained its model of this size on another corpus, with other settings

    python data/prepare.py openwebtext --input=FOLDER_OF_TEXT --tokenizer=gpt2
    python accounting.py configs/gpt2_xl.py --gpu=a100-80gb
    python train.py configs/gpt2_xl.py
    python sample.py out-gpt2-xl --prompt="The history of"
"""

dataset = "openwebtext"
vocab_size = 50304  # GPT-2's 50,257, padded to a multiple of 64
block_size = 1024
n_layer = 48
n_head = 25
n_embd = 1600
init = "gpt2"

batch_size = 12
gradient_accumulation_steps = 40
max_iters = 600000
lr_decay_iters = 600000
warmup_iters = 2000
learning_rate = 0.0002
min_lr = 2e-05
beta2 = 0.95
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10
out_dir = "out-gpt2-xl"
