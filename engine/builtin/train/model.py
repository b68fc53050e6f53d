"""The model: a Llama whose parameters carry the Hugging Face names, so that export is a copy."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

SHORT = 512  # tokens; up to here plain products beat the fused attention's backward pass on a CPU

@dataclasses.dataclass
class Config:
    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 768
    context: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5


class Norm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def linear(i, o):
    layer = nn.Linear(i, o, bias=False)
    nn.init.normal_(layer.weight, std=i ** -0.5)
    return layer


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, x, rope):
        b, t, _ = x.shape
        c = self.c
        q = rotate(self.q_proj(x).view(b, t, c.heads, c.head_dim), rope).transpose(1, 2)
        k = rotate(self.k_proj(x).view(b, t, c.kv_heads, c.head_dim), rope).transpose(1, 2)
        v = self.v_proj(x).view(b, t, c.kv_heads, c.head_dim).transpose(1, 2)
        k, v = (y.repeat_interleave(c.heads // c.kv_heads, 1) for y in (k, v))
        q, k = q.to(v.dtype), k.to(v.dtype)
        if t > SHORT:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            y = (q @ k.transpose(2, 3) * c.head_dim ** -0.5).float().masked_fill(future, -1e9).softmax(-1).to(v.dtype) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(c.hidden, c.ffn), linear(c.hidden, c.ffn), linear(c.ffn, c.hidden)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)

    def forward(self, x, rope):
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """forward takes token ids [batch, tokens] and gives hidden states after the last norm; logits are a product with the embedding."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = Norm(c.hidden, c.eps)
        inv = c.theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.context).float(), inv)
        self.register_buffer("rope", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        rope = self.rope[:, :ids.shape[1], None, :]
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)

    def logits(self, hidden):
        return F.linear(hidden, self.embed_tokens.weight)


def rotate(x, rope):
    """Rotary embedding in Hugging Face's layout: the halves of a head are the two coordinates."""
    cos, sin = rope[0], rope[1]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
