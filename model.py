"""The models: a Transformer (GPT-2 and Llama are two settings of it) and an MLP in the manner of Bengio et al. 2003.

Everything is made of `nn.Parameter`; axes move through einops, whose patterns raise when a shape is not what they say.

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

from attention import TiledAttention
from hardware import attention_kind, operation_dtype
from loss import ChunkedCrossEntropy


def xavier_std(fan_in: int, fan_out: int) -> float:
    """Return the standard deviation that keeps the scale of activations and of gradients (Glorot and Bengio 2010).

    Forward, a sum over fan_in terms keeps its variance if weights have 1 / fan_in; backward, over fan_out, 1 / fan_out:
    the variance 2 / (fan_in + fan_out) lies between the two.
    """
    return math.sqrt(2 / (fan_in + fan_out))


def linear(x: Float[Tensor, "*batch n"], weight: Float[Tensor, "m n"], bias=None) -> Float[Tensor, "*batch m"]:
    """x W^T + b. A single row on a CPU, generation's, is taken by slices of W, which all cores share: torch gives a
    matrix times a vector to one of them, and takes its slow path where the vector is not a transposed row.
    """
    m, n = weight.shape
    own = operation_dtype("row product", "autocast", x.device.type) == "autocast"
    if own or x.numel() != n or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    slices = next((s for s in range(max(2, torch.get_num_threads()), 257) if m % s == 0), None)
    if slices is None:
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        row = x.to(weight.dtype).reshape(1, 1, n).expand(slices, 1, n)
        y = torch.bmm(rearrange(weight, "(s m) n -> s m n", s=slices), row.mT).view(*x.shape[:-1], m)
    return y if bias is None else y + bias


class Linear(nn.Module):
    """y = x W^T + b. Several fan_outs share one matrix: one matmul, but each part initialised as its own."""

    def __init__(self, fan_in: int, *fan_outs: int, bias: bool = False, residual: bool = False):
        super().__init__()
        self.fan_in, self.fan_outs = fan_in, fan_outs
        self.residual = residual  # whether it writes to the residual stream
        self.weight = nn.Parameter(torch.empty(sum(fan_outs), fan_in))
        self.bias = nn.Parameter(torch.empty(sum(fan_outs))) if bias else None

    def forward(self, x: Float[Tensor, "*batch fan_in"]) -> Float[Tensor, "*batch fan_out"]:
        return linear(x, self.weight, self.bias)


class RMSNormFunction(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps), computed in float32 (Zhang and Sennrich 2019).

    Written out because torch's own is a composite on a CPU that saves two float32 copies of x; this one saves x as it
    is, and one number per row, on every device.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        y = x32 * rstd
        return y if weight is None else y.mul_(weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        dweight = None
        if weight is not None:
            dweight = (dy * normed).flatten(0, -2).sum(0)
            dy = dy * weight
        # y = x r with r = (mean x^2 + eps)^(-1/2), so dr/dx = -x r^3 / C:  dx = r (dy - y mean(dy y))
        dx = torch.addcmul(dy, normed, (dy * normed).mean(-1, keepdim=True), value=-1).mul_(rstd)
        return dx.to(x.dtype), dweight, None


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis; takes and returns the float32 residual stream."""

    def __init__(self, kind: str, width: int, eps: float, bias: bool):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias and kind == "layernorm" else None

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        if self.kind == "rmsnorm":
            return RMSNormFunction.apply(x, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def rotate(x: Float[Tensor, "B T N D"], cos: Float[Tensor, "T 1 R"], sin: Float[Tensor, "T 1 R"]) -> Tensor:
    """Rotate channel pairs (i, i + D/2) by their position's angles: RoPE (Su et al. 2021), in Llama's pairing.

    Done before heads and positions change places: afterwards the attention's output would need a copy.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class KVCache:
    """Keys and values of the positions seen so far, (L, B, K, S, D) each: 2 L K D elements per token and sequence."""

    def __init__(self, config, batch_size: int, device):
        dtype = getattr(torch, operation_dtype("attention", config.dtype, torch.device(device).type))
        shape = (config.n_layer, batch_size, config.n_kv_head, config.block_size, config.head_dim)
        self.k, self.v = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
        self.length = 0  # positions filled, the same in every layer

    def append(self, layer: int, k: Float[Tensor, "B K T D"], v: Float[Tensor, "B K T D"]):
        """Store k and v behind what is there; return all keys and values of this layer, (B, K, S, D)."""
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention; with n_kv_head < n_head, groups of query heads share a key-value head (GQA)."""

    def __init__(self, config, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.qkv = Linear(
            c.n_embd, c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.n_kv_head * c.head_dim, bias=c.bias
        )
        self.proj = Linear(c.n_head * c.head_dim, c.n_embd, bias=c.bias, residual=True)

    def forward(self, x: Float[Tensor, "B T C"], angles=None, cache: KVCache | None = None) -> Float[Tensor, "B T C"]:
        c = self.config
        q, k, v = (
            rearrange(part, "b t (n d) -> b t n d", d=c.head_dim) for part in self.qkv(x).split(self.qkv.fan_outs, -1)
        )
        matmuls = v.dtype  # float32 outside of autocast
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
        if past and q.shape[2] > 1:  # several new positions after old ones: no built-in mask has this shape
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(past)
        own_dtype = (
            nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
        )  # the table's, everywhere
        with own_dtype:
            if kind == "tiled attention":
                y = TiledAttention.apply(q, k, v).to(matmuls)
            else:
                y = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=not past and q.shape[2] > 1,
                    dropout_p=c.attn_dropout if self.training else 0.0, enable_gqa=c.n_kv_head != c.n_head,
                )  # fmt: skip
        return self.proj(rearrange(y, "b n t d -> b t (n d)"))


class FeedForward(nn.Module):
    """Two matmuls around a non-linearity; three with swiglu (Shazeer 2020), whose gate and value are one matrix."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.up = Linear(c.n_embd, *([c.d_ff] * (2 if c.activation == "swiglu" else 1)), bias=c.bias)
        self.down = Linear(c.d_ff, c.n_embd, bias=c.bias, residual=True)

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        h = self.up(x)
        if self.config.activation == "gelu":
            h = F.gelu(h)
        elif self.config.activation == "relu2":
            h = F.relu(h)
            h = h * h  # not a power: autocast takes powers to float32 on CUDA and leaves them on a CPU
        else:
            gate, value = h.chunk(2, dim=-1)
            h = F.silu(gate) * value
        return self.down(h)


class Block(nn.Module):
    """Pre-norm residual block: attention (in a Transformer), then the feed-forward layer."""

    def __init__(self, config, layer: int, attention: bool):
        super().__init__()
        c = self.config = config
        if attention:
            self.norm1 = Norm(c.norm, c.n_embd, c.norm_eps, c.bias)
            self.attn = Attention(c, layer)
        self.norm2 = Norm(c.norm, c.n_embd, c.norm_eps, c.bias)
        self.mlp = FeedForward(c)

    def forward(self, x: Float[Tensor, "B T C"], angles=None, cache: KVCache | None = None) -> Float[Tensor, "B T C"]:
        if hasattr(self, "attn"):
            attend = recomputed(self.attn) if self.config.recompute == "attention" else self.attn
            x = x + self.dropout(attend(self.norm1(x), angles, cache))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def dropout(self, x):
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x


def recomputed(module):
    """Return the module as a function that keeps its inputs alone, and runs again in backward for what that needs."""
    if not torch.is_grad_enabled():
        return module
    c = module.config
    return partial(checkpoint, module, use_reentrant=False, preserve_rng_state=bool(c.dropout or c.attn_dropout))


class LanguageModel(nn.Module):
    """What both models share: residual blocks, a last norm, the head, the loss and generation. How a token is embedded,
    each says itself: embed(idx, start) takes (B, T) ids, the first at position start, and returns (B, T, C).
    """

    attention = False

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.wte = nn.Parameter(torch.empty(c.vocab_size, c.n_embd))
        self.blocks = nn.ModuleList(Block(c, layer, self.attention) for layer in range(c.n_layer))
        self.norm = Norm(c.norm, c.n_embd, c.norm_eps, c.bias)
        self.head = None if c.tie_weights else nn.Parameter(torch.empty(c.vocab_size, c.n_embd))

    def angles(self, start: int, length: int):
        """Return the cosines and sines that rotate positions start .. start + length, where the model has RoPE."""
        return None

    def hidden(self, idx: Int[Tensor, "B T"], cache: KVCache | None = None) -> Float[Tensor, "B T C"]:
        """Return the last norm's output; with a cache, idx continues what the cache holds."""
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

    def logits(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch V"]:
        return linear(x, self.wte if self.head is None else self.head)

    def forward(self, idx: Int[Tensor, "B T"], targets: Int[Tensor, "B T"] | None = None, cache=None, scale=1.0):
        """Return the logits (B, T, V); where targets are given, scale times the mean loss in nats per token instead."""
        x = self.hidden(idx, cache)
        if targets is None:
            return self.logits(x)
        if self.config.loss_chunk:
            dtype = getattr(torch, operation_dtype("matmul", self.config.dtype, x.device.type))
            x, head = rearrange(x.to(dtype), "b t c -> (b t) c"), self.wte if self.head is None else self.head
            return ChunkedCrossEntropy.apply(x, head, targets.flatten(), scale, self.config.loss_chunk)
        # float32 for the loss, as on every device; no name holds the logits, so they die as soon as they are used
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), targets.flatten()) * scale

    @torch.no_grad()
    def generate(self, idx: Int[Tensor, "B T"], n_tokens: int, temperature=1.0, top_k=None, top_p=None, generator=None):
        """Yield n_tokens times the next token of each sequence, (B,).

        Where the context outgrows block_size, its last half is prefilled anew, positions counted from 0 again.
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
            token = sample(self.logits(self.hidden(new, cache)[:, -1]).float(), temperature, top_k, top_p, generator)
            yield token
            new = rearrange(token, "b -> b 1")
            context = torch.cat((context[:, -size:], new), dim=1)

    def init_weights(self, seed: int):
        """Draw every weight: matrices by Xavier's rule, or all with GPT-2's standard deviation of 0.02.

        What writes to the residual stream is scaled by 1 / sqrt(2 L), so that the stream's variance does not grow with
        depth (GPT-2). The first loss is ln V: an untied head starts at zero, and a tied one is small enough for logits
        of variance 1/16. An embedding row is picked, not summed over: its fan_in is 1, so an untied one has variance 1.
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
            for table in self.tables():
                table.normal_(0, embedding_std, generator=draw)
            if self.head is not None:
                self.head.normal_(0, 0.02 if gpt2 else 0.0, generator=draw)

    def tables(self):
        """Return the embedding tables."""
        return [self.wte]


class Transformer(LanguageModel):
    """A decoder-only Transformer (Vaswani et al. 2017), pre-norm as GPT-2 and Llama have it."""

    attention = True

    def __init__(self, config):
        super().__init__(config)
        self.wpe = None
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

    def tables(self):
        return [self.wte] if self.wpe is None else [self.wte, self.wpe]


class MLP(LanguageModel):
    """A windowed language model: the embeddings of the last mlp_context tokens, concatenated, through residual layers.

    After Bengio et al. 2003, with today's residual blocks. Positions before the sequence count as zero embeddings.
    """

    def __init__(self, config):
        super().__init__(config)
        self.mix = Linear(config.mlp_context * config.n_embd, config.n_embd, bias=config.bias)

    def embed(self, idx: Int[Tensor, "B T"], start: int) -> Float[Tensor, "B T C"]:
        m = self.config.mlp_context
        x = F.pad(F.embedding(idx, self.wte), (0, 0, m - 1, 0))
        return self.mix(rearrange(x.unfold(1, m, 1), "b t c m -> b t (m c)")).float()


def sample(logits: Float[Tensor, "B V"], temperature=1.0, top_k=None, top_p=None, generator=None) -> Int[Tensor, " B"]:
    """Draw one token per row: the largest where temperature is 0; else among the top_k, within probability top_p."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.max(-1, keepdim=True).values) / temperature  # so that a tiny temperature cannot overflow
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1]))  # by index: equal logits must not let in a k + 1st
        logits = torch.full_like(logits, -math.inf).scatter(-1, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # mass before each token: the first to cross top_p stays
        probabilities = probabilities.scatter(-1, order, ordered.masked_fill(before >= top_p, 0))
    return rearrange(torch.multinomial(probabilities, 1, generator=generator), "b 1 -> b")


def autocast(config, device: torch.device):
    """Return the context in which matmuls compute in the config's dtype."""
    return torch.autocast(device.type, dtype=getattr(torch, config.dtype), enabled=config.dtype != "float32")


def build(config) -> LanguageModel:
    """Return the model a resolved config describes, its weights not yet drawn."""
    return {"transformer": Transformer, "mlp": MLP}[config.model](config)
