"""GPT-3 175B, the largest of OpenAI's eight models.

source      Brown et al., 2020, "Language Models are Few-Shot Learners" (arXiv 2005.14165), table 2.1, appendix D
parameters  174,604,259,328; the paper has 175.0 B, and 174,600 M in table D.1
hardware    V100s; their number is not published
result      3.14e23 FLOPs, 3,640 PF-days, for 300 G tokens: 6 N D
differs     in the paper, every other layer has banded attention; here all are dense: at most 1.4 % more FLOPs

    python accounting.py configs/published/gpt3_175b.py --gpu=v100-sxm-32gb
"""

vocab_size = 50257
block_size = 2048
n_layer = 96
n_head = 96
n_embd = 12288
bias = True

batch_size = 1
gradient_accumulation_steps = 1536  # as in Megatron-LM; the paper's 3.2 M tokens are no whole number of sequences
max_iters = 300e9 // (1536 * 2048)  # 300 G tokens
