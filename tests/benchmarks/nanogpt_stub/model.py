"""A stand-in for nanoGPT's model.py: it has the same interface and parameter names, but no biases and no dropout."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

print("This line must not be taken for an answer of benchmarks/worker.py.")


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.ln_1, self.ln_2 = (nn.LayerNorm(c.n_embd, bias=False) for _ in range(2))
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = self.linear(c, 1, 3), self.linear(c, 1, 1)
        self.mlp.c_fc, self.mlp.c_proj = self.linear(c, 1, 4), self.linear(c, 4, 1)

    def linear(self, c, i, o):
        return nn.Linear(i * c.n_embd, o * c.n_embd, bias=False)

    def forward(self, x):
        parts = self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.attn.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        assert not c.bias and c.dropout == 0
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c.vocab_size, c.n_embd),
                "wpe": nn.Embedding(c.block_size, c.n_embd),
                "h": nn.ModuleList(Layer(c) for _ in range(c.n_layer)),
                "ln_f": nn.LayerNorm(c.n_embd, bias=False),
            }
        )

    def forward(self, x, y=None):
        t = self.transformer
        h = t.wte(x) + t.wpe(torch.arange(x.shape[1], device=x.device))
        for layer in t.h:
            h = layer(h)
        logits = F.linear(t.ln_f(h), t.wte.weight)
        return logits, None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=None):
        assert temperature == 1.0 and top_k == 1
        for _ in range(n):
            idx = torch.cat((idx, self(idx)[0][:, -1:].argmax(-1)), 1)
        return idx
