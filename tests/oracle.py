"""A second model, written from the mathematics alone, and what the tests build their cases from.

`dense_logits` reads a model's weights and configuration and calls nothing else of the library: rotation by complex
numbers, one dense band mask over the whole sequence, the sink as one more column of the softmax, every expert on
every token and a mask of the chosen ones. It computes in float64 whatever the model's type, so a comparison in
float32 or bfloat16 measures the library's rounding and nothing of ours.
"""
import math
from dataclasses import dataclass

import torch
from hypothesis import settings, strategies as st

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.config import ModelConfig
from gptoss_lite.generation import forward_step
from gptoss_lite.model import GPTOSS

# ---- the oracle ------------------------------------------------------------------------------------------------

def frequencies(cfg):
    "Radians per token of each pair: kept where it turns often within the original context, else divided by the scale"
    L, D, base = cfg.yarn_original_max_seq_len, cfg.head_dim, math.log(cfg.rope_theta)
    at = lambda turns: D/2 * (math.log(L) - math.log(2*math.pi) - math.log(turns)) / base
    low, high = at(cfg.yarn_beta_fast), at(cfg.yarn_beta_slow)
    if cfg.yarn_truncate: low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D-1)
    freqs = []
    for i in range(D//2):
        plain = math.exp(-2*i/D*base)
        slow = 0. if i <= low else 1. if i >= high else (i - low)/(high - low)
        freqs.append(plain*(1 - slow + slow/cfg.yarn_scale_factor))
    return torch.tensor(freqs, dtype=torch.float64)

def turns(cfg, positions, windowed):
    "What each pair is multiplied by, `(T, D/2)` complex"
    factor = 0.1*math.log(cfg.yarn_scale_factor) + 1 if cfg.yarn_mscale and cfg.yarn_scale_factor > 1 else 1.
    angle = positions.double()[:, None] * frequencies(cfg)
    turn = torch.complex(angle.cos(), angle.sin()) * factor
    mode = cfg.rope_global or ("pruned" if cfg.yarn_prune_rope_global else "full")
    if not windowed: turn[:, :{"pruned": cfg.head_dim//4, "full": 0, "none": cfg.head_dim//2}[mode]] = 1
    return turn

def rotate(x, turn): # `(B, heads, T, D)`, pairs (2i, 2i+1)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs*turn).flatten(-2)

def rms_norm(x, weight, eps): return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

def swiglu(x, w1, w2, w3):
    a = x @ w1.T
    return (a / (1 + (-a).exp()) * (x @ w3.T)) @ w2.T

@dataclass
class Dense:
    logits: torch.Tensor  # `(B, T, V)` float64
    margin: float # the smallest gap in log probability between the last expert chosen and the first one not
    sink_share: float # the largest share of a row's mass that a sink took

@torch.no_grad()
def dense(model, ids, *, window=None, sinks=True, clamp=True, positions=None):
    """The whole sequence at once, in float64. `window`, `sinks`, `clamp` and `positions` make deliberate mistakes:
    another window, dropped sinks, sinks not clamped, other positions."""
    cfg, P = model.cfg, {n: p.double() for n, p in model.state_dict().items()}
    (B, T), H, Hkv, D = ids.shape, cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
    W = window or cfg.window_size
    t = torch.arange(T)
    gap = t[:, None] - t[None]  # by the place in the sequence, whatever the positions
    if positions is None: positions = t
    kinds = cfg.layer_types or tuple(("windowed", "global")[i % 2] for i in range(cfg.n_layers))
    x, margin, share = P["embed.weight"][ids], math.inf, 0.
    for i, kind in enumerate(kinds):
        L = {n.removeprefix(f"blocks.{i}."): p for n, p in P.items() if n.startswith(f"blocks.{i}.")}
        h = rms_norm(x, L["norm1.weight"], cfg.rms_norm_eps)
        heads = lambda w, n: (h @ w.T).reshape(B, T, n, D).transpose(1, 2)
        w_k, w_v = L["attn.kv_proj.weight"].split(Hkv*D)
        q, k, v = heads(L["attn.q_proj.weight"], H), heads(w_k, Hkv), heads(w_v, Hkv)
        turn = turns(cfg, positions, kind == "windowed")
        q, k = rotate(q, turn), rotate(k, turn)
        of = torch.arange(H) // (H//Hkv)  # the key head of each query head
        scores = torch.einsum("bhtd,bhsd->bhts", q, k[:, of]) / math.sqrt(D)
        see = (gap >= 0) & (gap < W) if kind == "windowed" else gap >= 0
        scores[:, :, ~see] = -math.inf
        if cfg.sink_bias and sinks:
            sink = L["attn.sink_bias"].clamp(-10, 15) if clamp else L["attn.sink_bias"]
            scores = torch.cat([scores, sink[None, :, None, None].expand(B, H, T, 1)], -1)
        p = scores.softmax(-1)
        if scores.shape[-1] > T: share = max(share, p[..., -1].max().item())
        out = torch.einsum("bhts,bhsd->bthd", p[..., :T], v[:, of]).reshape(B, T, H*D)
        x = x + out @ L["attn.o_proj.weight"].T
        h = rms_norm(x, L["norm2.weight"], cfg.rms_norm_eps)
        E, A = cfg.n_routed_experts, cfg.n_activated_experts
        logp = (h @ L["moe.router.gate.weight"].T).log_softmax(-1)
        rank = (logp[..., None, :] > logp[..., :, None]).sum(-1)  # how many experts are more likely
        weight = logp.exp() * (rank < A)
        weight = weight / weight.sum(-1, keepdim=True)
        if A < E:
            ordered = logp.sort(-1, descending=True).values
            margin = min(margin, (ordered[..., A-1] - ordered[..., A]).min().item())
        expert = lambda where, e: swiglu(h, *(L[f"moe.{where}.{e}.w{n}.weight"] for n in (1, 2, 3)))
        x = x + sum(weight[..., e, None] * expert("experts", e) for e in range(E))
        x = x + sum(expert("shared_experts", s) for s in range(cfg.n_shared_experts))
    head = P["embed.weight" if cfg.weight_tying else "head.weight"]
    return Dense(rms_norm(x, P["norm.weight"], cfg.rms_norm_eps) @ head.T, margin, share)

def dense_logits(model, ids, **mistakes): return dense(model, ids, **mistakes).logits

# ---- random models ---------------------------------------------------------------------------------------------

STD = 0.3  # of every matrix; at the usual 0.02 attention is next to uniform and a wrong window moves nothing

# Sizes above 1 differ pairwise within a row, so that swapped axes are a shape error or another number. The last two
# rows are multi-query (one key head) and multi-head (a key head for each query head).
SIZES = [dict(n_heads=6, n_kv_heads=2, head_dim=8, d_model=20, ffn_dim=14, n_routed_experts=5, n_activated_experts=4, vocab_size=31),
         dict(n_heads=8, n_kv_heads=4, head_dim=6, d_model=15, ffn_dim=10, n_routed_experts=7, n_activated_experts=3, vocab_size=29),
         dict(n_heads=12, n_kv_heads=3, head_dim=2, d_model=14, ffn_dim=9, n_routed_experts=8, n_activated_experts=5, vocab_size=33),
         dict(n_heads=5, n_kv_heads=1, head_dim=12, d_model=18, ffn_dim=22, n_routed_experts=4, n_activated_experts=2, vocab_size=37),
         dict(n_heads=3, n_kv_heads=3, head_dim=10, d_model=26, ffn_dim=16, n_routed_experts=6, n_activated_experts=1, vocab_size=41)]

YARN = [dict(yarn_scale_factor=4, yarn_original_max_seq_len=64, rope_theta=50, yarn_beta_fast=8),
        dict(yarn_scale_factor=32, yarn_original_max_seq_len=4096, rope_theta=150000, yarn_truncate=False),
        dict(yarn_scale_factor=8, yarn_original_max_seq_len=32, rope_theta=300, yarn_mscale=False, yarn_beta_fast=5),
        dict(yarn_scale_factor=1)]

def config(**changes):
    "A small configuration; what is not said is what the first rows say"
    return ModelConfig(**{**SIZES[0], **YARN[0], **dict(n_layers=3, window_size=3, n_shared_experts=1), **changes})

def random_model(cfg, seed=0, dtype=torch.float64, std=STD):
    """Every tensor random. One sink of three lies above the clamp and one below it; the first one of each layer is
    moderate, so that dropping the sinks is always seen."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda p: torch.randn(p.shape, generator=g, dtype=torch.float64)
    model = GPTOSS(cfg).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "sink" in name:
                p.copy_(draw(p))
                p[0] += 1.5
                p[1::3], p[2::3] = 15.5 + p[1::3].abs(), -10.5 - p[2::3].abs()
            elif "norm" in name: p.copy_(1 + STD*draw(p))
            else: p.copy_(std*draw(p))
    return model.to(dtype).eval().requires_grad_(False)

def random_ids(cfg, B, T, seed=0):
    return torch.randint(cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(1000 + seed))

def sizes(cfg):
    return [cfg.n_heads, cfg.n_kv_heads, cfg.n_rep, cfg.head_dim, cfg.d_model, cfg.ffn_dim, cfg.n_routed_experts, cfg.vocab_size]

@dataclass
class Case:
    cfg: ModelConfig
    seed: int
    B: int
    T: int
    split: list # sizes of the calls, T in all

    def model(self, dtype=torch.float64): return random_model(self.cfg, self.seed, dtype)
    @property
    def ids(self): return random_ids(self.cfg, self.B, self.T, self.seed)
    @property
    def binds(self): # whether some query has lost a key to the window
        return self.T > self.cfg.window_size and "windowed" in (self.cfg.layer_types or ("windowed",))

@st.composite
def cases(draw, max_window=8, **fixed):
    "Any model, any window, prompts of 1 to 5 windows, any split into calls"
    W, B = draw(st.sampled_from(range(max_window, 0, -1))), draw(st.sampled_from([3, 2, 1]))
    near = [t for t in (W-1, W, W+1, 2*W, 5*W) if t >= 1]  # where it goes wrong first
    T = draw(st.sampled_from(["long", "any", "near"]))
    T = draw({"long": st.integers(2*W, 5*W), "any": st.integers(1, 5*W), "near": st.sampled_from(near)}[T])
    n = draw(st.sampled_from([3, 4, 2, 1]))
    shape = draw(st.sampled_from([s for s in SIZES if B == 1 or B not in (s["n_heads"], s["n_kv_heads"])]))
    cfg = config(**{**shape, **draw(st.sampled_from(YARN)), **dict(
        window_size=W, n_layers=n,
        layer_types=draw(st.none() | st.none() | st.lists(st.sampled_from(["windowed", "global"]), min_size=n, max_size=n)),
        rope_global=draw(st.sampled_from([None, "pruned", "full", "none"])),
        n_shared_experts=draw(st.integers(0, 2)), sink_bias=draw(st.integers(0, 4)) > 0,
        weight_tying=draw(st.booleans())), **fixed})
    return Case(cfg, draw(st.integers(0, 9999)), B, T, draw(splits(T, W)))

@st.composite
def splits(draw, T, W):
    "Sizes of the calls, T in all: token by token, all at once, around the window, or cut anywhere"
    how = draw(st.sampled_from(["any", "near", "any", "near", "all", "one"]))
    if how == "near": n = max(1, W + draw(st.integers(-1, 1)))
    if how == "any": cuts = sorted(draw(st.sets(st.integers(1, T-1), min_size=1, max_size=6))) if T > 1 else []
    else: cuts = list(range({"one": 1, "all": T}.get(how) or n, T, {"one": 1, "all": T}.get(how) or n))
    return [b - a for a, b in zip([0, *cuts], [*cuts, T])]

# ---- runs of the library ---------------------------------------------------------------------------------------

@torch.no_grad()
def cached_logits(model, ids, split, cache=None):
    "Logits at every position, through the cache, `split` tokens at a time"
    cache, sinks, out, start = MixedKVCache() if cache is None else cache, {}, [], 0
    for n in split:
        out.append(model.logits(forward_step(model, ids[:, start:start+n], start, cache, sinks)))
        start += n
    assert start == ids.shape[1]
    return torch.cat(out, 1)

def worst(a, b): # the largest difference; never NaN without saying so
    d = (a.double() - b.double()).abs().max().item()
    return math.inf if math.isnan(d) else d

def examples(n):
    "`n` examples; in the profile `thorough` 30 times as many, and other ones each time"
    return settings(max_examples=30*n if settings.get_current_profile_name() == "thorough" else n)

# ---- what a cache holds ----------------------------------------------------------------------------------------

def raw(x): return x.contiguous().view(torch.uint8).clone()  # bytes: slots not written yet may hold NaN

def snapshot(cache):
    "All that can be seen of a cache, for `same`"
    tensors = [x for kv in cache.windowed_kv + cache.global_kv if kv for x in kv[:2]]
    numbers = [kv and kv[2:] for kv in cache.windowed_kv]
    return dict(tensors=[raw(x) for x in tensors], places=[x.data_ptr() for x in tensors], numbers=numbers,
                lengths=list(cache.global_lengths), caps=list(cache.global_caps), n_tokens=cache.n_tokens, len=len(cache),
                nbytes=cache.nbytes, used=cache.used_nbytes, pending=None if cache.pending is None else cache.pending.tolist())

def same(a, b):
    assert a.keys() == b.keys()
    for key in a.keys() - {"tensors"}: assert a[key] == b[key], key
    assert len(a["tensors"]) == len(b["tensors"])
    for x, y in zip(a["tensors"], b["tensors"]): assert torch.equal(x, y), "stored keys or values changed"
