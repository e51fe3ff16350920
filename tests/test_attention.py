"""Attention against its dense definition, against transformers' own GPT-OSS, and at the edges where kernels break."""
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import gptoss_lite.attention as attention
from gptoss_lite.attention import (SINK_CLAMP_MAX, SINK_CLAMP_MIN, GPTOSSAttention, apply_sink, attend, attend_band, attend_blocks,
                                   attend_full, attend_plain, attend_split, causal_attention, manual_causal_attention, merge, repeat_kv,
                                   split_pays, visible)
from oracle import config, examples, random_ids, random_model, worst

INF = torch.inf

@pytest.fixture(params=["kernel", "blocks"])
def path(request, monkeypatch):
    "torch's own kernel, and what runs where there is none"
    if request.param == "blocks": monkeypatch.setattr(attention, "_flash", None)
    elif attention._flash is None: pytest.skip("this torch has no such kernel")
    return request.param

def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

def qkv(B=2, Hkv=3, G=2, T=5, S=7, D=4, seed=0, dtype=torch.float64):
    return rand(B, Hkv*G, T, D, seed=seed, dtype=dtype), *(rand(B, Hkv, S, D, seed=seed+i, dtype=dtype) for i in (1, 2))

def reference(q, k, v, sinks=None, window=None):
    "Row by row with loops and Python's own slices: nothing shared with any other definition"
    B, H, T, D = q.shape
    S, G, out = k.shape[2], H // k.shape[1], torch.zeros(*q.shape, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for h in range(H):
        for t in range(T):
            p = S - T + t  # this query's position
            first = 0 if window is None else max(0, p - window + 1)
            keys, values = k[:, h//G, first:p+1], v[:, h//G, first:p+1]
            scores = (keys @ q[:, h, t, :, None])[..., 0] / D**0.5
            top = scores.max(-1, keepdim=True).values
            if sinks is not None: top = top.clamp(min=sinks[h].double())
            e = (scores - top).exp()
            total = e.sum(-1, keepdim=True) + (0 if sinks is None else (sinks[h].double() - top).exp())
            out[:, h, t] = ((e/total)[..., None] * values).sum(1)
    return out

# ---- against the dense definitions -----------------------------------------------------------------------------

shapes = dict(B=st.integers(1, 3), Hkv=st.integers(1, 4), G=st.integers(1, 4), T=st.integers(1, 12), past=st.integers(0, 12),
              D=st.integers(1, 9), W=st.none() | st.integers(1, 26), seed=st.integers(0, 999),
              sinks=st.sampled_from(["none", "random", "-inf", "some -inf", "large"]))

def make_sinks(kind, H, seed, dtype=torch.float64):
    s = 3*rand(H, seed=seed+7, dtype=dtype)
    if kind == "none": return None
    if kind == "-inf": s[:] = -INF
    if kind == "some -inf": s[::2] = -INF
    if kind == "large": s = s*20
    return s

def check_values(B, Hkv, G, T, past, D, W, seed, sinks):
    q, k, v = qkv(B, Hkv, G, T, T+past, D, seed)
    s = make_sinks(sinks, Hkv*G, seed)
    right = reference(q, k, v, s, W)
    assert worst(manual_causal_attention(q, k, v, s, W), right) < 1e-12
    got = causal_attention(q, k, v, s, W)
    assert got.shape == q.shape and got.dtype == q.dtype and worst(got, right) < 1e-12

@examples(120)
@given(**shapes)
def test_values(**case): check_values(**case)

@examples(120)
@given(**shapes)
def test_values_in_blocks(**case):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(attention, "_flash", None)
        check_values(**case)

@examples(80)
@given(**shapes)
def test_gradients(B, Hkv, G, T, past, D, W, seed, sinks):
    q, k, v = (x.requires_grad_() for x in qkv(B, Hkv, G, T, T+past, D, seed))
    s = make_sinks(sinks, Hkv*G, seed)
    if s is not None: s.requires_grad_()
    xs, up = [x for x in (q, k, v, s) if x is not None], rand(*q.shape, seed=seed+5)
    grads = [torch.autograd.grad((f(q, k, v, s, W)*up).sum(), xs) for f in (causal_attention, manual_causal_attention)]
    for a, b in zip(*grads): assert worst(a, b) < 1e-11
    assert worst(causal_attention(q, k, v, s, W), causal_attention(*(x.detach() for x in (q, k, v)),
                                                                   None if s is None else s.detach(), W)) < 1e-12

@pytest.mark.parametrize("one", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("T", [5, 7])
def test_gradient_of_one_alone(one, T):
    xs = dict(zip("qkv", qkv(T=T)), sinks=rand(6, seed=9))
    xs[one].requires_grad_()
    a, b = (torch.autograd.grad(f(*xs.values()).square().sum(), xs[one])[0] for f in (causal_attention, manual_causal_attention))
    assert worst(a, b) < 1e-11

@pytest.mark.parametrize("T,S", [(T, S) for S in (1, 2, 7, 64, 65, 130) for T in sorted({1, 2, S-1, S}) if 1 <= T <= S])
def test_window_around_the_length(S, T, path):
    "W = 1 and W within one of S, where a window begins or ceases to bind"
    q, k, v = qkv(T=T, S=S, seed=S)
    s, full = rand(6, seed=3), causal_attention(q, k, v, rand(6, seed=3))
    for W in {1, 2, S-1, S, S+1} - {0}:
        got = causal_attention(q, k, v, s, W)
        assert worst(got, reference(q, k, v, s, W)) < 1e-12
        assert (worst(got, full) < 1e-12) == (W >= S)
        if W + 1 <= S: assert worst(got, reference(q, k, v, s, W+1)) > 1e-3
    one = v[:, :, S-T:].repeat_interleave(2, 1)  # a window of one key: its value, less the sink's share
    assert worst(causal_attention(q, k, v, None, 1), one) < 1e-12

def test_the_last_queries_not_the_first():
    "T < S means the last T positions; a mask aligned at the top left would let row 0 see key 0 only"
    q, k, v = qkv(T=2, S=6)
    whole = causal_attention(torch.cat([rand(2, 6, 4, 4, seed=8), q], 2), k, v)
    assert worst(causal_attention(q, k, v), whole[:, :, -2:]) < 1e-12
    top_left = causal_attention(torch.cat([q, rand(2, 6, 4, 4, seed=8)], 2), k, v)[:, :, :2]
    assert worst(causal_attention(q, k, v), top_left) > 1e-2

def test_any_order_for_one_query(path):
    "One new token sees all that it is given, so the order of the keys does not matter"
    q, k, v = qkv(T=1, S=7)
    perm = torch.tensor([3, 6, 0, 2, 5, 1, 4])
    for W in (None, 7, 9): assert worst(causal_attention(q, k, v, rand(6), W), causal_attention(q, k[:, :, perm], v[:, :, perm], rand(6), W)) < 1e-12

LAYOUTS = dict(heads_last=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
               part=lambda x: torch.cat([x, x*torch.nan], 2)[:, :, :x.shape[2]],
               transposed=lambda x: x.mT.contiguous().mT,
               spread=lambda x: torch.stack([x, x*torch.nan], -1)[..., 0])

@pytest.mark.parametrize("W", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout, W, path):
    "torch's CPU kernel ignores the stride of the last dimension: it must not be called with another one than 1"
    f, (q, k, v) = LAYOUTS[layout], qkv()
    assert worst(causal_attention(f(q), f(k), f(v), rand(6), W), causal_attention(q, k, v, rand(6), W)) < 1e-12

def test_repeat_kv():
    x = torch.arange(2*3*1*1.).view(2, 3, 1, 1)
    assert repeat_kv(x, 2)[..., 0, 0].tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]

def test_visible():
    assert visible(3, 5, 2).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert visible(2, 3).int().tolist() == [[1, 1, 0], [1, 1, 1]]

def refused(what):
    "What `causal_attention` must not take: the arguments, the error, and words of its message"
    q, k, v = qkv()
    match what:
        case "heads": return (q[:, :5], k, v), ValueError, ["q has 5 heads", "3", "multiple"]
        case "too many queries": return (rand(2, 6, 8, 4), k, v), ValueError, ["q has 8 tokens", "7"]
        case "no queries": return (q[:, :, :0], k, v), ValueError, ["q has shape (2, 6, 0, 4)", "at least 1"]
        case "no rows": return (q[:0], k[:0], v[:0]), ValueError, ["q has shape (0, 6, 5, 4)", "at least 1"]
        case "q has three dimensions": return (q[0], k, v), ValueError, ["q has shape (6, 5, 4)", "four dimensions"]
        case "k has three dimensions": return (q, k[0], v[0]), ValueError, ["k has shape (3, 7, 4)", "four dimensions"]
        case "v is shorter": return (q, k, v[:, :, 1:]), ValueError, ["v has shape (2, 3, 6, 4)", "(2, 3, 7, 4)"]
        case "batch": return (q, k[:1], v[:1]), ValueError, ["q has batch", "(2, 4)", "(1, 4)"]
        case "k of another dtype": return (q, k.float(), v.float()), ValueError, ["k has dtype torch.float32", "float64", "convert"]
        case "v of another dtype": return (q, k, v.half()), ValueError, ["v has dtype torch.float16", "float64", "convert"]
        case "v on another device": return (q, k, v.to("meta")), ValueError, ["v has device meta", "cpu", "convert"]
        case "q is a list": return (q.tolist(), k, v), TypeError, ["q is a list", "tensor", "convert"]
        case "v is nothing": return (q, k, None), TypeError, ["v is a NoneType", "tensor"]
        case "sinks in a list": return (q, k, v, [0.]*6), TypeError, ["sink_bias is a list", "tensor", "(6,)"]
        case "a sink": return (q, k, v, 0.5), TypeError, ["sink_bias is a float", "tensor"]
        case "too few sinks": return (q, k, v, rand(3)), ValueError, ["sink_bias has shape (3,)", "(6,)"]
        case "window 0": return (q, k, v, None, 0), ValueError, ["window=0", "at least 1", "None"]
        case "window is no int": return (q, k, v, None, 2.0), TypeError, ["window=2.0", "int", "None"]
        case "window is a bool": return (q, k, v, None, True), TypeError, ["window=True", "int", "None"]

REFUSED = [c.strip().split('"')[1] for c in open(__file__, encoding="utf-8") if c.strip().startswith("case ")]

@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, grad):
    "The argument, its value, the limit and the way out, whichever path would have run"
    args, exc, words = refused(what)
    if grad and isinstance(args[0], torch.Tensor): args[0].requires_grad_()
    with pytest.raises(exc) as e: causal_attention(*args)
    for word in words: assert word in str(e.value), (word, str(e.value))
    assert ";" in str(e.value), f"no way out: {e.value}"

@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-11), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("B, Hkv, G, D, S", [(1, 2, 2, 96, 16384), (2, 3, 1, 5, 16385), (3, 1, 4, 8, 17151), (1, 2, 3, 12, 20000), (2, 2, 5, 7, 16500), (1, 2, 2, 4, 16383)])
def test_one_token_over_many_keys(B, Hkv, G, D, S, dtype, atol):
    "Decode over a long history: slots of a larger buffer, sinks, and one dominant key; also where `attend_split` does not pay"
    g = torch.Generator().manual_seed(S)
    q, sink = torch.randn(B, Hkv*G, 1, D, generator=g, dtype=dtype), torch.randn(Hkv*G, generator=g, dtype=dtype)
    k, v = (torch.randn(B, Hkv, S + 300, D, generator=g, dtype=dtype)[:, :, :S] for _ in "kv")
    k[:, :, S//2] *= 20
    assert split_pays(q.view(B, Hkv, G, D), S) == (G <= 4 and S >= 16384 and torch.backends.mkl.is_available())
    got, want = causal_attention(q, k, v, sink), manual_causal_attention(q.double(), k.double(), v.double(), sink.double())
    assert got.dtype == dtype and (got - want).abs().max() < atol
    for a, b in zip(attend_split(q.view(B, Hkv, G, D), k, v), attend_plain(q.view(B, Hkv, G, D).double(), k.double(), v.double())):
        assert (a - b).abs().max() < atol*10

# ---- against transformers --------------------------------------------------------------------------------------

@pytest.mark.parametrize("W", [None, 1, 3, 6, 7])
@pytest.mark.parametrize("T,S", [(7, 7), (1, 7), (4, 7)])
def test_equals_transformers_gpt_oss(T, S, W, path):
    "The eager attention of transformers' GPT-OSS, with its sinks and a mask for its sliding window"
    hf = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers.masking_utils import sliding_window_overlay
    q, k, v = qkv(T=T, S=S, D=8, seed=T+S)
    s = 2*rand(6, seed=4)
    at = torch.arange(S)
    sees = lambda p, j: j <= p and (W is None or bool(sliding_window_overlay(W)(0, 0, p, j)))  # their rule for the window
    mask = torch.tensor([[0. if sees(p, j) else -INF for j in at] for p in at[S-T:]], dtype=torch.float64)
    module = SimpleNamespace(num_key_value_groups=2, sinks=s, training=False)
    theirs, _ = hf.eager_attention_forward(module, q, k, v, mask[None, None], scaling=8**-0.5)
    theirs = theirs.transpose(1, 2)
    assert worst(causal_attention(q, k, v, s, W), theirs) < 1e-12
    assert worst(manual_causal_attention(q, k, v, s, W), theirs) < 1e-12
    assert worst(causal_attention(q, k, v, None, W), theirs) > 1e-2  # and the sinks count

# ---- partial results -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("R,S,D,causal", [(5, 5, 4, False), (5, 5, 4, True), (1, 1, 1, False), (1, 1, 1, True), (3, 9, 8, False),
                                          (33, 33, 96, False), (33, 33, 96, True), (2, 1500, 5, False)])
def test_lse_is_a_natural_logarithm(R, S, D, causal, dtype, tol, path):
    q, k, v = rand(2, 3, R, D, dtype=dtype), rand(2, 3, S, D, seed=1, dtype=dtype), rand(2, 3, S, D, seed=2, dtype=dtype)
    out, lse = attend(q, k, v, causal)
    assert out.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    scores = q.double() @ k.double().mT / D**0.5
    if causal: scores = scores.masked_fill(torch.ones(R, S).triu(1).bool(), -INF)
    assert worst(lse, scores.exp().sum(-1).log()) < tol
    assert worst(out, scores.softmax(-1) @ v.double()) < tol
    if path == "kernel":
        for block in (1, 4, 1024):
            for a, b in zip((out, lse), attend_blocks(q, k, v, causal, block)): assert worst(a, b) < tol

def test_attend_refuses_a_causal_rectangle():
    with pytest.raises(ValueError, match="3 rows and 5 keys"): attend(rand(1, 1, 3, 4), rand(1, 1, 5, 4), rand(1, 1, 5, 4), causal=True)

@pytest.mark.parametrize("R,S", [(0, 3), (3, 0), (0, 0)])
def test_empty_sides(R, S, path):
    "torch's kernel kills the process on an empty side: it must not be called with one"
    out, lse = attend(rand(2, 3, R, 4), rand(2, 3, S, 4), rand(2, 3, S, 4))
    assert out.shape == (2, 3, R, 4) and (out == 0).all() and (lse == -INF).all()

def test_rows_that_see_nothing():
    q, k, v = rand(2, 3, 4, 5), rand(2, 3, 6, 5, seed=1), rand(2, 3, 6, 5, seed=2)
    mask = torch.ones(4, 6).bool()
    mask[1] = mask[3] = False
    out, lse = attend_plain(q, k, v, mask)
    assert (out[:, :, [1, 3]] == 0).all() and (lse[:, :, [1, 3]] == -INF).all()
    whole = attend_plain(q, k, v)
    assert worst(out[:, :, [0, 2]], whole[0][:, :, [0, 2]]) < 1e-12
    with_sink = apply_sink(out, lse, torch.tensor([0.5, -INF, 3.]))  # -inf meets -inf in head 1
    assert (with_sink[:, :, [1, 3]] == 0).all()
    for a, b in zip(merge((out, lse), whole), whole):  # nothing adds nothing ...
        row = slice(1, 2)
        assert worst(a[:, :, row], b[:, :, row]) < 1e-12
    both = merge((out, lse), (out, lse))  # ... and nothing twice is nothing
    assert (both[0][:, :, 1] == 0).all() and (both[1][:, :, 1] == -INF).all() and both[0].isfinite().all()

def test_nothing_under_no_sink():
    "A row without keys under a sink of -inf: 0, not NaN"
    out = apply_sink(torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -INF), torch.tensor([-INF]))
    assert (out == 0).all()

@examples(40)
@given(cuts=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_merge_joins_disjoint_keys(cuts, seed, data):
    "In any number of parts, in any order, empty ones included, the parts make the whole"
    q, k, v = rand(2, 3, 4, 5, seed=seed), rand(2, 3, 9, 5, seed=seed+1), rand(2, 3, 9, 5, seed=seed+2)
    cuts = [0, *sorted(cuts), 9]
    parts = [attend_blocks(q, k[:, :, a:b], v[:, :, a:b]) for a, b in zip(cuts, cuts[1:])]
    res = None
    for part in data.draw(st.permutations(parts)): res = part if res is None else merge(res, part)
    for a, b in zip(res, attend_plain(q, k, v)): assert worst(a, b) < 1e-12

def test_sink_is_one_more_key():
    "`out * sigmoid(lse - sink)` is attention with one more key, whose score is the sink and whose value is 0"
    q, k, v, s = rand(2, 3, 4, 5), rand(2, 3, 6, 5, seed=1), rand(2, 3, 6, 5, seed=2), torch.tensor([-2., 0.3, 4.]).double()
    scores = torch.cat([q @ k.mT / 5**0.5, s[None, :, None, None].expand(2, 3, 4, 1)], -1)
    right = scores.softmax(-1) @ torch.cat([v, torch.zeros(2, 3, 1, 5)], 2)
    assert worst(apply_sink(*attend_plain(q, k, v), s), right) < 1e-12
    assert worst(apply_sink(*attend_plain(q, k, v), None), scores[..., :6].softmax(-1) @ v) < 1e-12
    column = (rand(2, 3, 4, 5)*0, s[None, :, None].expand(2, 3, 4))  # the sink as a partial result of its own
    assert worst(merge(attend_plain(q, k, v), column)[0], right) < 1e-12

# ---- number types ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype,tol", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("W", [None, 3])
@pytest.mark.parametrize("sinks", ["none", "random", "-inf", "large"])
@pytest.mark.parametrize("T", [1, 5, 9])
def test_large_logits(T, sinks, W, dtype, tol, path):
    "Scores of 1e5, beyond what float16 can hold, and sinks as large: finite, and within rounding of float64"
    q, k, v = qkv(T=T, S=9, D=96, seed=T, dtype=dtype)
    q, k = 200*q, 200*k
    s = make_sinks(sinks, 6, 1, dtype)
    if sinks == "large": s = 300*s
    got = causal_attention(q, k, v, s, W)
    assert got.dtype == dtype and got.isfinite().all()
    scores = q.double() @ repeat_kv(k, 2).double().mT / 96**0.5
    assert scores.abs().max() > 65504
    assert worst(got, reference(q, k, v, s, W)) < tol  # no two scores here are as close as float32's rounding, 0.01

@pytest.mark.parametrize("dtype,tol", [(torch.float16, 5e-3), (torch.bfloat16, 4e-2), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("W", [None, 3])
@pytest.mark.parametrize("sinks", ["none", "random", "-inf"])
def test_large_logits_in_training(sinks, W, dtype, tol):
    "Where no sink weighs anything, scores of -1e5 must not meet a large negative number that stands for it"
    q, k, v = qkv(T=9, S=9, D=96, dtype=dtype)
    q, k = (100*q).requires_grad_(), 100*k
    s = make_sinks(sinks, 6, 1, dtype)
    got = causal_attention(q, k, v, s, W)
    assert worst(got, reference(q.detach(), k, v, s, W)) < tol
    got.sum().backward()
    assert q.grad.isfinite().all()

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("W", [None, 3])
def test_training_equals_inference(W, dtype):
    "Both ways to attend give one result within rounding, sinks of any size included"
    q, k, v = qkv(T=9, S=9, dtype=dtype)
    u = torch.finfo(dtype).eps
    for s in (None, torch.tensor([-INF, -9e3, -10., 0., 15., 60.]).to(dtype)):
        a, b = causal_attention(q, k, v, s, W), causal_attention(q.requires_grad_(), k, v, s, W)
        assert a.dtype == b.dtype == dtype and worst(a, b) < 8*u
        q = q.detach()

# ---- memory ----------------------------------------------------------------------------------------------------

class Largest(TorchDispatchMode):
    "The most elements of any tensor that an operation gave; what a kernel keeps to itself in C++ it cannot see"
    numel = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and not self.expanded(x): self.numel = max(self.numel, x.numel())
        return out

    @staticmethod
    def expanded(x): # a view that repeats or overlaps takes no memory
        return x.numel() > x.untyped_storage().nbytes() // x.element_size()

def largest(f, *args):
    with Largest() as mode, torch.no_grad(): f(*args)
    return mode.numel

B, HKV, G, T, S, D = 1, 2, 3, 1024, 8192, 8

def test_the_counter_counts():
    q, k, v = qkv(B, HKV, G, 64, 512, D, dtype=torch.float32)
    assert largest(manual_causal_attention, q, k, v) >= B*HKV*G*64*512

def test_no_scores_of_the_whole_history(path):
    q, k, v = qkv(B, HKV, G, T, S, D, dtype=torch.float32)
    n = largest(attend_full, q, k, v)
    keys, queries = B*HKV*S*D, B*HKV*G*T*D
    if path == "kernel": assert n <= 2*max(keys, queries)
    else: assert n <= B*HKV*G*T*1024 and n < B*HKV*G*T*S / 4  # one block of keys

def test_no_scores_beyond_the_band():
    W = 128
    q, k, v = qkv(B, HKV, G, T, T+W-1, D, dtype=torch.float32)
    n = largest(attend_band, q, k, v, W)
    assert n <= B*HKV*G*T*2*W
    q2, k2, v2 = qkv(B, HKV, G, 4*T, 4*T+W-1, D, dtype=torch.float32)
    assert largest(attend_band, q2, k2, v2, W) <= 4.2*n  # linear in T

@pytest.mark.parametrize("T,W", [(2048, 128), (4097, 4096), (3000, 2900), (3000, 700), (1500, 1)])
def test_a_band_is_never_more_than_dense(T, W, path):
    "However wide the window: no tensor comes near the square, and none is larger than 2,048 queries' scores"
    G, D = 2, 4
    q, k, v = qkv(1, 1, G, T, T, D, dtype=torch.float32)
    n = largest(attend_band, q, k, v, W)
    assert n < G*T*T / 2 and n <= max(G*2048*(W+511), G*T*D)
    if path == "kernel": assert n <= max(G*512*(W+511), G*T*D)  # the mask of one block

@pytest.mark.parametrize("W", [1, 70, 600])
@pytest.mark.parametrize("T,past", [(1, 0), (600, 0), (1300, 300), (700, 1500), (2600, 10)])
def test_bands_of_many_blocks(T, past, W, path):
    "Lengths and windows beyond a block of 512 queries and a pass of 2,048, with any history"
    q, k, v = qkv(2, 1, 2, T, T+past, 3)
    for x, y in ((q, k), (q, k.transpose(0, 1).contiguous().transpose(0, 1))):  # rows of a batch that lie apart, too
        got = apply_sink(*attend_band(x, y, v, W), rand(2, seed=9))
        assert worst(got, manual_causal_attention(q, k, v, rand(2, seed=9), W)) < 1e-12

def test_no_square_in_training():
    "Nor in the pass that keeps what the gradients need, forward or backward"
    def train(q, k, v, s, W):
        with torch.enable_grad():
            q = q.detach().requires_grad_()
            causal_attention(q, k, v, s, W).sum().backward()
    q, k, v = qkv(B, HKV, G, T, T, D, dtype=torch.float32)
    for W in (None, 64):
        n = largest(train, q, k, v, rand(HKV*G, dtype=torch.float32), W)
        assert n < B*HKV*G*T*T / 4, W

def test_keys_are_never_expanded():
    "Grouped heads share keys as they lie: for one token, nothing larger than the keys themselves arises"
    q, k, v = qkv(B, HKV, 16, 1, S, D, dtype=torch.float32)
    assert largest(causal_attention, q, k, v, rand(32, dtype=torch.float32)) <= B*HKV*S*D

# ---- the layer -------------------------------------------------------------------------------------------------

def test_sinks_are_clamped_in_the_layer_alone():
    layer = GPTOSSAttention(config(), True).double()
    assert layer.sink_bias.shape == (6,) and (SINK_CLAMP_MIN, SINK_CLAMP_MAX) == (-10, 15)
    with torch.no_grad(): layer.sink_bias.copy_(torch.tensor([-11., -10, 0, 3, 15, 16]))
    assert layer.clamped_sink().tolist() == [-10, -10, 0, 3, 15, 15]
    layer.clamped_sink().sum().backward()
    assert layer.sink_bias.grad[[0, 5]].tolist() == [0, 0] and (layer.sink_bias.grad[2:4] == 1).all()
    q, k, v = qkv()
    for sink in (-30., 40.):  # the function itself takes any sink
        s = torch.full((6,), sink).double()
        assert worst(causal_attention(q, k, v, s), reference(q, k, v, s)) < 1e-12
        assert worst(causal_attention(q, k, v, s), causal_attention(q, k, v, s.clamp(-10, 15))) > 1e-8

def test_every_parameter_of_a_layer_learns():
    model, ids = random_model(config(), 1), random_ids(config(), 2, 9)
    with torch.no_grad():
        for b in model.blocks: b.attn.sink_bias.clamp_(-1, 1)
    model.requires_grad_()
    logits, aux = model(ids)
    (logits.square().mean() + aux).backward()
    for name, p in model.named_parameters(): assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name
