"""The models: a Transformer, which is GPT-2 or Llama with the right settings, and an MLP after Bengio et al. 2003.

All layers are made of `nn.Parameter`. einops rearranges axes; it raises an error if a shape does not match its pattern.

Shapes:  B batch   T positions of the input   S positions in the cache   C width (n_embd)   V vocabulary
         L blocks   H query heads   K key-value heads   D width of a head (head_dim)   F width inside the MLP (d_ff)
"""

import math
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ops.attention import TiledAttention
from ops.choices import attention_kind, operation_dtype
from ops.linear import linear
from ops.loss import ChunkedCrossEntropy
from ops.rms_norm import RMSNormFunction


def xavier_std(fan_in: int, fan_out: int) -> float:
    """Return the standard deviation that preserves the scale of activations and gradients (Glorot and Bengio 2010).

    In forward, a sum over fan_in terms preserves the variance if the weights have variance 1 / fan_in. In backward, a
    sum over fan_out terms needs 1 / fan_out. The variance 2 / (fan_in + fan_out) lies between the two.
    """
    return math.sqrt(2 / (fan_in + fan_out))


class Linear(nn.Module):
    """y = x W^T + b. Several fan_outs share one matrix and one matmul, but each part is initialised separately."""

    def __init__(self, fan_in: int, *fan_outs: int, bias: bool = False, residual: bool = False):
        super().__init__()
        self.fan_in, self.fan_outs = fan_in, fan_outs
        self.residual = residual  # whether its output is added to the residual stream
        self.weight = nn.Parameter(torch.empty(sum(fan_outs), fan_in))
        self.bias = nn.Parameter(torch.empty(sum(fan_outs))) if bias else None

    def forward(self, x: Float[Tensor, "*batch fan_in"]) -> Float[Tensor, "*batch fan_out"]:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis. Input and output are float32, as the residual stream is."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.weight = nn.Parameter(torch.empty(c.n_embd))
        self.bias = nn.Parameter(torch.empty(c.n_embd)) if c.bias and c.norm == "layernorm" else None

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        if self.config.norm == "rmsnorm":
            return RMSNormFunction.apply(x, self.weight, self.config.norm_eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.config.norm_eps)


def rotate(x: Float[Tensor, "B T N D"], cos: Float[Tensor, "T 1 R"], sin: Float[Tensor, "T 1 R"]) -> Tensor:
    """Rotate channel pairs (i, i + D/2) by the angles of their position: RoPE (Su et al. 2021), with Llama's pairs.

    The axes of heads and positions are swapped after this; otherwise the output of attention would have to be copied.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class KVCache:
    """The keys and values of earlier positions, (L, B, K, S, D) each: 2 L K D elements per token and sequence."""

    def __init__(self, config, batch_size: int, device):
        dtype = getattr(torch, operation_dtype("attention", config.dtype, torch.device(device).type))
        shape = (config.n_layer, batch_size, config.n_kv_head, config.block_size, config.head_dim)
        self.k, self.v = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
        self.length = 0  # positions filled, the same in every layer

    def append(self, layer: int, k: Float[Tensor, "B K T D"], v: Float[Tensor, "B K T D"]):
        """Append k and v. Return all keys and values of this layer, (B, K, S, D) each."""
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention. If n_kv_head < n_head, groups of query heads share a key-value head (GQA)."""

    def __init__(self, config, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = layer
        queries, keys = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
        self.qkv = Linear(c.n_embd, queries, keys, keys, bias=c.bias)
        self.proj = Linear(queries, c.n_embd, bias=c.bias, residual=True)

    def forward(self, x: Float[Tensor, "B T C"], angles=None, cache: KVCache | None = None) -> Float[Tensor, "B T C"]:
        c = self.config
        split = "b t (n d) -> b t n d"  # the matmul's result has no name, so that it is freed if q, k and v are copies
        q, k, v = (rearrange(part, split, d=c.head_dim) for part in self.qkv(x).split(self.qkv.fan_outs, dim=-1))
        matmuls = v.dtype  # float32 without autocast
        if c.qk_norm:
            q, k = RMSNormFunction.apply(q, None, c.norm_eps), RMSNormFunction.apply(k, None, c.norm_eps)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        kind = attention_kind(c.dtype, x.device.type, cache is not None, c.attn_dropout)
        dtype = getattr(torch, operation_dtype(kind, c.dtype, x.device.type))
        q, k, v = (rearrange(part.to(dtype), "b t n d -> b n t d") for part in (q, k, v))
        past = cache.length if cache else 0
        if cache:
            k, v = cache.append(self.layer, k, v)
        mask = None
        if past and q.shape[2] > 1:  # several new positions after old ones: torch has no built-in mask for this
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(past)
        # The dtype is that of ops/choices.py on every device.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            if kind == "tiled attention":
                y = TiledAttention.apply(q, k, v).to(matmuls)
            else:
                y = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=not past and q.shape[2] > 1,
                    dropout_p=c.attn_dropout if self.training else 0.0, enable_gqa=c.n_kv_head != c.n_head,
                )  # fmt: skip
        return self.proj(rearrange(y, "b n t d -> b t (n d)"))


class FeedForward(nn.Module):
    """Two matmuls with a non-linearity in between. For swiglu (Shazeer 2020), the first makes both gate and value."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.up = Linear(c.n_embd, *([c.d_ff] * (2 if c.is_gated else 1)), bias=c.bias)
        self.down = Linear(c.d_ff, c.n_embd, bias=c.bias, residual=True)

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        h = self.up(x)
        if self.config.activation == "gelu":
            h = F.gelu(h)
        elif self.config.activation == "relu2":
            h = F.relu(h)
            h = h * h  # not h**2, which autocast computes in float32 on CUDA, but not on a CPU
        else:
            gate, value = h.chunk(2, dim=-1)
            h = F.silu(gate) * value
        return self.down(h)


class Block(nn.Module):
    """Pre-norm residual block: attention, which only a Transformer has, then the feed-forward layer."""

    def __init__(self, config, layer: int, attention: bool):
        super().__init__()
        c = self.config = config
        if attention:
            self.norm1 = Norm(c)
            self.attn = Attention(c, layer)
        self.norm2 = Norm(c)
        self.mlp = FeedForward(c)

    def forward(self, x: Float[Tensor, "B T C"], angles=None, cache: KVCache | None = None) -> Float[Tensor, "B T C"]:
        if hasattr(self, "attn"):
            attend = recomputed(self.attn) if self.config.recompute == "attention" else self.attn
            x = x + self.dropout(attend(self.norm1(x), angles, cache))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def dropout(self, x):
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x


def recomputed(module):
    """Return the module as a function that saves only its inputs for backward, which runs the module again."""
    if not torch.is_grad_enabled():
        return module
    c = module.config
    return partial(checkpoint, module, use_reentrant=False, preserve_rng_state=bool(c.dropout or c.attn_dropout))


class LanguageModel(nn.Module):
    """What both models share: residual blocks, a last norm, the head, the loss and generation. Subclasses define
    embed(idx, start), which takes (B, T) ids, the first of them at position start, and returns (B, T, C).
    """

    attention = False

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.wte, self.wpe = nn.Parameter(torch.empty(c.vocab_size, c.n_embd)), None  # tokens; learned positions
        self.blocks = nn.ModuleList(Block(c, layer, self.attention) for layer in range(c.n_layer))
        self.norm = Norm(c)
        self.head = None if c.tie_weights else nn.Parameter(torch.empty(c.vocab_size, c.n_embd))

    def angles(self, start: int, length: int):
        """Return the cosines and sines that rotate the `length` positions from start on; None without RoPE."""
        return None

    def hidden(self, idx: Int[Tensor, "B T"], cache: KVCache | None = None) -> Float[Tensor, "B T C"]:
        """Return the output of the last norm. If there is a cache, idx continues the tokens in it."""
        start = cache.length if cache else 0
        x = self.embed(idx, start)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        angles = self.angles(start, idx.shape[1])
        for block in self.blocks:
            run = recomputed(block) if self.config.recompute == "block" else block
            x = run(x, angles, cache)
        if cache:
            cache.length += idx.shape[1]
        return self.norm(x)

    @property
    def head_weight(self) -> Float[Tensor, "V C"]:
        return self.wte if self.head is None else self.head

    def logits(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch V"]:
        return linear(x, self.head_weight)

    def forward(self, idx: Int[Tensor, "B T"], targets: Int[Tensor, "B T"] | None = None, cache=None, scale=1.0):
        """Return the logits (B, T, V) or, if targets are given, scale times the mean loss in nats per token."""
        x = self.hidden(idx, cache)
        if targets is None:
            return self.logits(x)
        if self.config.loss_chunk:
            dtype = getattr(torch, operation_dtype("matmul", self.config.dtype, x.device.type))
            x = rearrange(x.to(dtype), "b t c -> (b t) c")
            return ChunkedCrossEntropy.apply(x, self.head_weight, targets.flatten(), scale, self.config.loss_chunk)
        # The loss is in float32 on every device. The logits have no name, so they are freed as soon as they are used.
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), targets.flatten()) * scale

    @torch.no_grad()
    def generate(self, idx: Int[Tensor, "B T"], n_tokens: int, temperature=1.0, top_k=None, top_p=None, generator=None):
        """Yield the next token of each sequence, (B,), n_tokens times.

        If the context exceeds block_size, the cache is filled again with its last half, whose positions start at 0.
        """
        size = self.config.block_size
        cache = KVCache(self.config, idx.shape[0], idx.device) if self.attention else None
        context = new = idx[:, -size:]
        for _ in range(n_tokens):
            if cache and cache.length + new.shape[1] > size:
                cache.length = 0
                context = new = context[:, -max(1, size // 2) :]
            elif not cache:
                context = new = context[:, -self.config.mlp_context :]
            logits = self.logits(self.hidden(new, cache)[:, -1]).float()
            token = next_token(logits, temperature, top_k, top_p, generator)
            yield token
            new = rearrange(token, "b -> b 1")
            context = torch.cat((context[:, -size:], new), dim=1)

    def init_weights(self, seed: int):
        """Draw all weights: matrices by Xavier's rule, or everything with GPT-2's standard deviation of 0.02.

        Layers that add to the residual stream are scaled by 1 / sqrt(2 L), so that its variance does not grow with the
        depth (GPT-2). The first loss is about ln V: an untied head is zero, and a tied one so small that the logits
        have variance 1/16. An embedding row is looked up, so its fan_in is 1, and an untied embedding has variance 1.
        """
        c, draw = self.config, torch.Generator().manual_seed(seed)
        gpt2 = c.init == "gpt2"
        tied_std = min(xavier_std(c.n_embd, c.vocab_size), 0.25 / math.sqrt(c.n_embd))
        embedding_std = 0.02 if gpt2 else tied_std if c.tie_weights else 1.0
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, Norm):
                    module.weight.fill_(1)
                if isinstance(module, (Norm, Linear)) and module.bias is not None:
                    module.bias.zero_()
                if isinstance(module, Linear):
                    for part in module.weight.split(module.fan_outs):
                        std = 0.02 if gpt2 else xavier_std(module.fan_in, part.shape[0])
                        part.normal_(0, std / math.sqrt(2 * c.n_layer) if module.residual else std, generator=draw)
            for table in (self.wte,) if self.wpe is None else (self.wte, self.wpe):
                table.normal_(0, embedding_std, generator=draw)
            if self.head is not None:
                self.head.normal_(0, 0.02 if gpt2 else 0.0, generator=draw)


class Transformer(LanguageModel):
    """A decoder-only Transformer (Vaswani et al. 2017), with the norms before the layers, as in GPT-2 and Llama."""

    attention = True

    def __init__(self, config):
        super().__init__(config)
        if config.pos == "learned":
            self.wpe = nn.Parameter(torch.empty(config.block_size, config.n_embd))
        else:
            rates = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
            angles = torch.arange(config.block_size, dtype=torch.float32)[:, None, None] * rates  # (T, 1, D/2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def embed(self, idx: Int[Tensor, "B T"], start: int) -> Float[Tensor, "B T C"]:
        x = F.embedding(idx, self.wte)
        return x if self.wpe is None else x + self.wpe[start : start + idx.shape[1]]

    def angles(self, start: int, length: int):
        if self.wpe is not None:
            return None
        return self.cos[start : start + length], self.sin[start : start + length]


class MLP(LanguageModel):
    """A language model without attention: it concatenates the embeddings of the last mlp_context tokens.

    It follows Bengio et al. 2003, but with residual blocks. Positions before the sequence have zero embeddings.
    """

    def __init__(self, config):
        super().__init__(config)
        self.mix = Linear(config.mlp_context * config.n_embd, config.n_embd, bias=config.bias)

    def embed(self, idx: Int[Tensor, "B T"], start: int) -> Float[Tensor, "B T C"]:
        m = self.config.mlp_context
        x = F.pad(F.embedding(idx, self.wte), (0, 0, m - 1, 0))
        return self.mix(rearrange(x.unfold(1, m, 1), "b t c m -> b t (m c)")).float()


def next_token(logits: Float[Tensor, "B V"], temperature=1.0, top_k=None, top_p=None, generator=None) -> Tensor:
    """Draw one token per row, (B,). Temperature 0 takes the likeliest one; top_k and top_p exclude unlikely ones."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.max(-1, keepdim=True).values) / temperature  # no overflow, however small temperature is
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1]))  # by index, so that equal logits do not admit more than k
        logits = torch.full_like(logits, -math.inf).scatter(-1, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # sum before each token; the first one to reach top_p stays
        probabilities = probabilities.scatter(-1, order, ordered.masked_fill(before >= top_p, 0))
    return rearrange(torch.multinomial(probabilities, 1, generator=generator), "b 1 -> b")


def autocast(config, device: torch.device):
    """Return the context manager in which matmuls compute in the config's dtype."""
    return torch.autocast(device.type, dtype=getattr(torch, config.dtype), enabled=config.dtype != "float32")


def build(config) -> LanguageModel:
    """Return the model of a resolved config. Its weights are not yet initialised."""
    return {"transformer": Transformer, "mlp": MLP}[config.model](config)
