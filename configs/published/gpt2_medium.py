"""GPT-2 medium as OpenAI published it.

source      Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", table 2
parameters  354,823,168; the table prints 345 M, which OpenAI's repository calls an error
hardware    not published

    python accounting.py configs/published/gpt2_medium.py --gpu=a100-40gb
"""

vocab_size = 50257
block_size = 1024
n_layer = 24
n_head = 16
n_embd = 1024
bias = True

batch_size = 1
gradient_accumulation_steps = 512
max_iters = 300e9 // (512 * 1024)  # nanoGPT's 300 G tokens; OpenAI did not publish a number
