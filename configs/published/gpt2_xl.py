"""GPT-2 XL as OpenAI published it.

source      Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", table 2
parameters  1,557,611,200; the table prints 1,542 M, which OpenAI's repository calls an error
hardware    not published

    python accounting.py configs/published/gpt2_xl.py --gpu=a100-80gb
"""

vocab_size = 50257
block_size = 1024
n_layer = 48
n_head = 25
n_embd = 1600
bias = True

batch_size = 1
gradient_accumulation_steps = 512
max_iters = 300e9 // (512 * 1024)  # nanoGPT's 300 G tokens; OpenAI did not publish a number
