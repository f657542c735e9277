"""GPT-2 small as OpenAI published it.

source      Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", table 2
parameters  124,439,808; the table prints 117 M, which OpenAI's repository calls an error
hardware    not published; nanoGPT measured 0.755 s for 100 sequences on an A100 40 GB, 37.14 % MFU
result      nanoGPT calculated 3.46 days for 300 G tokens on 8 A100s at 30 % MFU

    python accounting.py configs/published/gpt2.py --gpu=a100-40gb
"""

vocab_size = 50257
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
bias = True

batch_size = 1
gradient_accumulation_steps = 512
max_iters = 300e9 // (512 * 1024)  # nanoGPT's 300 G tokens; OpenAI did not publish a number
