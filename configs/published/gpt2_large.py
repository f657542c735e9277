"""GPT-2 large as OpenAI published it.

source      Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", table 2
parameters  774,030,080; the table prints 762 M, which OpenAI's repository calls an error
hardware    not published

    python accounting.py configs/published/gpt2_large.py --gpu=a100-80gb
"""

vocab_size = 50257
block_size = 1024
n_layer = 36
n_head = 20
n_embd = 1280
bias = True

batch_size = 1
gradient_accumulation_steps = 512
max_iters = 300e9 // (512 * 1024)  # nanoGPT's 300 G tokens; OpenAI did not publish a number
