"""Cached and uncached results agree at every position, for every prompt length and every way to cut it.

The reference is the dense model of `oracle`. Float64 shows that the mathematics is the same: 1e-9 on logits of
magnitude 1. Float32 shows that nothing is lost on the way: 1e-4.

**Near-ties.** Two places of the model are not continuous: which experts the router takes, and which token is the
most likely. Where the float64 oracle says that the last expert taken leads the first one left out by less than 1e-3
in log probability (a hundred times what float32 gets wrong there), rounding may choose either, and both are right:
such an example is passed over in float32, and so is one whose two best tokens are closer than 1e-3 in a comparison
of tokens. In float64 nothing is passed over.
"""
import pytest
import torch
from hypothesis import assume, event, given, settings, strategies as st

import gptoss_lite.attention as attention
import gptoss_lite.rows as rows
from gptoss_lite.cache import MixedKVCache
from gptoss_lite.config import gptoss_tiny
from gptoss_lite.generation import _attn_forward_layer, forward_step, generate, prefill
from oracle import (SIZES, YARN, Case, cached_logits, cases, config, dense, dense_logits, examples, random_ids,
                    random_model, sizes, splits, worst)

EXACT, SINGLE, TIE, SEEN = 1e-9, 1e-4, 1e-3, 1e-2
if settings.get_current_profile_name() == "thorough":  # of some thousand random models one or two round ten times worse
    SINGLE, SEEN = 10*SINGLE, SEEN/10                  # than the rest, or hardly notice the window

# ---- the cases prove something ---------------------------------------------------------------------------------

@pytest.mark.parametrize("i", range(len(SIZES)))
def test_sizes_differ_pairwise(i):
    # a multi-query model has as many query heads as a group has, a multi-head model as many key heads as query heads
    twice = {3: ["n_rep"], 4: ["n_kv_heads"]}.get(i, [])
    cfg = config(**SIZES[i])
    named = dict(zip("n_heads n_kv_heads n_rep head_dim d_model ffn_dim n_routed_experts vocab_size".split(), sizes(cfg)))
    for name in twice: del named[name]
    assert len(set(named.values())) == len(named), named

@examples(40)
@given(cases())
def test_oracle_tells_mistakes(case):
    "A window of W ± 1, dropped sinks and sinks that are not clamped are further off than any bound of this file"
    model, ids = case.model(), case.ids
    right = dense(model, ids)
    if case.binds:
        for window in {case.cfg.window_size + 1, max(case.cfg.window_size - 1, 1)} - {case.cfg.window_size}:
            assert worst(dense_logits(model, ids, window=window), right.logits) > SEEN, f"window {window}"
    if case.cfg.sink_bias:
        assert worst(dense_logits(model, ids, sinks=False), right.logits) > SEEN
        assert worst(dense_logits(model, ids, clamp=False), right.logits) > 1000*EXACT
        assert right.sink_share > 0.99

# ---- through the cache -----------------------------------------------------------------------------------------

@examples(100)
@given(cases())
def test_cached_equals_oracle_float64(case):
    event(f"the window binds: {case.binds}; a call after the first has more than one token: {any(n > 1 for n in case.split[1:])}")
    got = cached_logits(case.model(), case.ids, case.split)
    assert got.dtype == torch.float64 and got.shape == (case.B, case.T, case.cfg.vocab_size)
    assert worst(got, dense_logits(case.model(), case.ids)) <= EXACT

@examples(40)
@given(cases())
def test_cached_equals_oracle_float32(case):
    model = case.model(torch.float32)
    right = dense(model, case.ids)
    assume(right.margin > TIE)
    got = cached_logits(model, case.ids, case.split)
    assert got.dtype == torch.float32
    assert worst(got, right.logits) <= SINGLE

@examples(15)
@given(cases(max_window=40))
def test_cached_equals_oracle_wide_windows(case):
    "Windows beyond the smallest block of the band, up to 200 tokens"
    assert worst(cached_logits(case.model(), case.ids, case.split), dense_logits(case.model(), case.ids)) <= EXACT

@pytest.mark.parametrize("split", [[640], [128]*5, [129]*4 + [124], [127]*5 + [5], [600, 1, 1, 38], [1, 300, 2, 337]], ids=str)
def test_the_default_window(split):
    cfg = config(**SIZES[4], window_size=128, n_layers=2)
    model, ids = random_model(cfg, 9), random_ids(cfg, 2, 640, 9)
    assert worst(cached_logits(model, ids, split), dense_logits(model, ids)) <= EXACT

@pytest.mark.slow
@pytest.mark.parametrize("layer_types", [["windowed", "global"], ["global", "windowed"]], ids=str)
def test_past_the_default_chunk(layer_types):
    "Prompts around 2,048 tokens, where `generate` begins a second chunk"
    cfg = config(**SIZES[4], window_size=128, n_layers=2, layer_types=layer_types)
    model, ids = random_model(cfg, 9), random_ids(cfg, 1, 2200, 9)
    right = dense_logits(model, ids)
    for T in (2047, 2048, 2049, 2176, 2200):
        out = generate(model, ids[:, :T], 1, 0)
        assert out[0, -1] == right[0, T-1].argmax()
        assert worst(prefill(model, ids[:, :T], MixedKVCache()), right[:, T-1]) <= EXACT

@pytest.mark.parametrize("W,T", [(W, T) for W in (1, 2, 5) for T in sorted({1, W-1, W, W+1, 2*W-1, 2*W, 2*W+1, 5*W}) if T])
def test_edges(W, T):
    "Prompts around the window, in one call, in W - 1, W, W + 1 at a time, and token by token"
    cfg = config(**SIZES[2], window_size=W)
    model, ids = random_model(cfg, 7), random_ids(cfg, 2, T, 7)
    right = dense_logits(model, ids)
    for n in {1, max(W-1, 1), W, W+1, T}:
        split = [n]*(T//n) + ([T % n] if T % n else [])
        assert worst(cached_logits(model, ids, split), right) <= EXACT, split

@examples(25)
@given(cases(), st.integers(1, 7))
def test_prefill_is_the_last_position(case, chunk):
    model = case.model()
    got = prefill(model, case.ids, MixedKVCache(), chunk=chunk)
    assert got.shape == (case.B, case.cfg.vocab_size)
    assert worst(got, dense_logits(model, case.ids)[:, -1]) <= EXACT

# ---- with matrices read in slabs -------------------------------------------------------------------------------

def in_slabs(monkeypatch, slab_linear=rows.slab_linear):
    "These models are too small to be cut; now they are cut all the same. Returns the rows of each product that was."
    seen = []
    def noted(x, weight, slabs):
        seen.append(x.numel() // x.shape[-1])
        return slab_linear(x, weight, slabs)
    monkeypatch.setattr(rows, "MIN_NUMEL", 0)
    monkeypatch.setattr(rows, "slab_linear", noted)
    return seen

@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="without MKL no matrix is cut")
@pytest.mark.parametrize("i,B", [(i, B) for i in range(len(SIZES)) for B in (1, 2, 3)])
@pytest.mark.parametrize("layout", [0, 200, 2**14], ids=["rows", "both", "columns"])
def test_slabs(i, B, layout, monkeypatch):
    "Decoding one token, a few and many in a call, in both layouts of the slabs"
    seen = in_slabs(monkeypatch)
    monkeypatch.setattr(rows, "COLUMN_NBYTES", layout)
    cfg = config(**SIZES[i], window_size=4)
    model, ids = random_model(cfg, i), random_ids(cfg, B, 20, i)
    right = dense_logits(model, ids)
    for split in ([20], [9, 1, 1, 1, 2, 3, 3], [1]*20):
        assert worst(cached_logits(model, ids, split), right) <= EXACT, split
    assert B in seen and max(seen) <= rows.FEW_ROWS
    single = random_model(cfg.replace(n_activated_experts=cfg.n_routed_experts), i, torch.float32) # no near-ties
    assert worst(cached_logits(single, ids, [9, 1, 1, 1, 2, 3, 3]), dense_logits(single, ids)) <= SINGLE

@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="without MKL no matrix is cut")
def test_slabs_in_their_own_order_are_wrong(monkeypatch):
    "Results that are not put back row by row: right for one sequence, wrong for two"
    def unswapped(x, weight, slabs):
        y = torch.bmm(x.reshape(1, -1, x.shape[-1]).expand(slabs, -1, -1), weight.unflatten(0, (slabs, -1)).mT)
        return y.reshape(*x.shape[:-1], len(weight))
    in_slabs(monkeypatch, unswapped)
    model, ids = random_model(config(), 1), random_ids(config(), 2, 6, 1)
    right = dense_logits(model, ids)
    assert worst(cached_logits(model, ids[:1], [1]*6), right[:1]) <= EXACT
    assert worst(cached_logits(model, ids, [1]*6), right) > SEEN

# ---- without a cache -------------------------------------------------------------------------------------------

@examples(40)
@given(cases(), st.sampled_from([torch.float64, torch.float32]))
def test_forward_equals_oracle(case, dtype):
    model = case.model(dtype)
    right = dense(model, case.ids)
    if dtype == torch.float32: assume(right.margin > TIE)
    logits, aux = model(case.ids)
    assert logits.dtype == dtype and aux.shape == ()
    assert worst(logits, right.logits) <= (EXACT if dtype == torch.float64 else SINGLE)

VARIANTS = [dict(layer_types=["global", "windowed", "windowed"]), dict(layer_types=["windowed"]*3), dict(layer_types=["global"]*3),
            dict(n_layers=1), dict(rope_global="full"), dict(rope_global="none"), dict(yarn_prune_rope_global=False),
            dict(yarn_mscale=False), dict(yarn_truncate=False), dict(n_shared_experts=0), dict(n_shared_experts=3),
            dict(sink_bias=False), dict(weight_tying=False), dict(n_activated_experts=5),
            dict(n_routed_experts=1, n_activated_experts=1), dict(rms_norm_eps=0.1)]

@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_variants(change):
    cfg = config(**change)
    model, ids = random_model(cfg, 3), random_ids(cfg, 3, 11, 3)
    right = dense_logits(model, ids)
    assert worst(model(ids)[0], right) <= EXACT
    assert worst(cached_logits(model, ids, [4, 1, 1, 5]), right) <= EXACT
    base = config()
    if sizes(cfg) == sizes(base) and cfg.n_layers == base.n_layers and cfg.kinds == base.kinds and \
       cfg.n_shared_experts == base.n_shared_experts and cfg.sink_bias and cfg.weight_tying:
        plain = random_model(base, 3)
        plain.load_state_dict(model.state_dict())
        assert worst(plain(ids)[0], right) > 1e-4, "the variant makes no difference here"

@pytest.mark.parametrize("mode", ["full", "pruned"])
def test_positions_of_forward(mode):
    "Positions are absolute, and scores see their differences: a shift moves nothing, a stretch does"
    model, ids = random_model(config(rope_global=mode), 5), random_ids(config(), 2, 10, 5)
    at = torch.arange(10) + 1000
    assert worst(model(ids, at)[0], dense_logits(model, ids, positions=at)) <= EXACT
    assert worst(model(ids, at)[0], model(ids)[0]) <= EXACT
    assert worst(model(ids, torch.arange(10)*2)[0], model(ids)[0]) > SEEN

# ---- greedy tokens ---------------------------------------------------------------------------------------------

@examples(10)
@given(cases(max_window=6, n_layers=2, layer_types=None), st.sampled_from([torch.float64, torch.float32]), st.integers(1, 9))
def test_greedy_tokens_for_64_steps(case, dtype, chunk):
    """The tokens of `generate` with and without a cache are those of the oracle: one dense pass over the finished
    sequence must choose each of its tokens from the ones before it, which is greedy decoding by induction."""
    model, T, N = case.model(dtype), case.T, 64
    out = generate(model, case.ids, N, temperature=0, prefill_chunk=chunk)
    assert out.shape == (case.B, T + N) and torch.equal(out[:, :T], case.ids)
    right = dense(model, out)
    best = right.logits[:, T-1:-1].topk(2, -1)
    if dtype == torch.float32: assume(right.margin > 1e-4 and (best.values[..., 0] - best.values[..., 1]).min() > 1e-3)
    assert torch.equal(out[:, T:], best.indices[..., 0])
    assert torch.equal(out, generate(model, case.ids, N, temperature=0, use_cache=False))

# ---- deliberate mistakes ---------------------------------------------------------------------------------------

class AppendThenGet(MixedKVCache):
    "What the specification's prefill does: store the chunk, then attend over what the ring still holds"
    def update(self, layer_idx, k_rot, v, is_windowed, window=None):
        self.append(layer_idx, k_rot, v, is_windowed, window)
        return self.get(layer_idx, is_windowed)

def dense_attention(q, k, v, sink_bias=None, window=None):
    "Stands in for `causal_attention`: the last S positions against the last T of them, which T > S may be here"
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    gap = torch.arange(T)[:, None] - torch.arange(S) + (S - T)
    scores = (q @ k.mT) / q.shape[-1]**0.5
    scores = scores.masked_fill((gap < 0) | (gap >= (window or T + S)), -torch.inf)
    scores = torch.cat([scores, sink_bias[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :S] @ v

@pytest.mark.parametrize("W", [1, 2, 3, 7])
@pytest.mark.parametrize("layer_types", [None, ["windowed"]*3], ids=["mixed", "windowed"])
def test_append_then_get_is_wrong(W, layer_types, monkeypatch):
    "It agrees up to W tokens, so a test with short prompts never sees it; at W + 1 the first queries have lost their keys"
    monkeypatch.setattr(attention, "causal_attention", dense_attention)
    cfg = config(window_size=W, layer_types=layer_types)
    model, ids = random_model(cfg, 2), random_ids(cfg, 2, 3*W, 2)
    right = dense_logits(model, ids)
    for T in range(1, W+1):
        assert worst(cached_logits(model, ids[:, :T], [T], AppendThenGet()), right[:, :T]) <= EXACT
    for T in range(W+1, 3*W+1):
        assert worst(cached_logits(model, ids[:, :T], [T], AppendThenGet()), right[:, :T]) > SEEN
        assert worst(cached_logits(model, ids[:, :T], [T]), right[:, :T]) <= EXACT  # the cache itself passes here, too
    if W > 1:  # chunks after the ring has turned
        assert worst(cached_logits(model, ids, [1]*W + [2]*W, AppendThenGet()), right) > SEEN
    assert worst(cached_logits(model, ids, [1]*(3*W), AppendThenGet()), right) <= EXACT  # token by token it is right

@torch.no_grad()
def decoded(model, ids, prompt, position):
    "Logits after each of the tokens that follow the prompt, each at `position(n)`, n tokens being in the cache"
    cache, out = MixedKVCache(), []
    forward_step(model, ids[:, :prompt], 0, cache)
    for n in range(prompt, ids.shape[1]):
        x = model.embed(ids[:, n:n+1])
        for i, block in enumerate(model.blocks): x = _attn_forward_layer(block, i, x, torch.tensor([position(n)]), cache)
        out.append(model.logits(x))
    return torch.cat(out, 1)

def test_relative_positions_at_decode_are_wrong():
    cfg = config()
    model, ids = random_model(cfg, 4), random_ids(cfg, 2, 12, 4)
    right = dense_logits(model, ids)[:, 5:]
    assert worst(decoded(model, ids, 5, lambda n: n), right) <= EXACT
    for wrong in (lambda n: n - 5, lambda n: 0, lambda n: min(n, cfg.window_size - 1), lambda n: n + 1):
        assert worst(decoded(model, ids, 5, wrong), right) > SEEN

# ---- bfloat16 --------------------------------------------------------------------------------------------------

def rms(x): return x.double().square().mean().sqrt().item()

@examples(20)
@given(st.integers(0, 9999), st.integers(1, 8), st.integers(1, 4), st.data())
def test_bfloat16(seed, W, n_layers, data):
    """bfloat16 keeps 8 bits, so one rounding is wrong by up to u = 2⁻⁹ of its number. A block rounds about 12 times on
    the way of its residual (two norms, queries, keys, values, the rotation, attention, its projection, an expert's
    three products, two sums), the ends of the model thrice. Independent roundings add like the root of their number;
    what the network makes of each we take as a factor 4, since a softmax and a norm may enlarge it. So the rms error
    of the logits is at most 4u·√(12 L + 3) of their rms: 5.6 % for four layers. All experts are taken: a router
    that must choose would turn rounding into a jump. The same bound holds between two ways to cut the tokens."""
    T = data.draw(st.integers(1, 5*W))
    cfg = config(window_size=W, n_layers=n_layers, n_activated_experts=5)
    model, ids = random_model(cfg, seed, torch.bfloat16), random_ids(cfg, 2, T, seed)
    right = dense_logits(model, ids)
    bound = 4*2**-9*(12*n_layers + 3)**0.5 * rms(right)
    a, b = (cached_logits(model, ids, data.draw(splits(T, W))) for _ in range(2))
    assert rms(a - right) <= bound and rms(b - right) <= bound and rms(a - b) <= bound
    if n_layers > 1 and T >= 2*W: # and the bound sees a wrong window in the rows that it concerns
        assert rms((dense_logits(model, ids, window=W+1) - right)[:, W:]) > bound
    assert rms(dense_logits(model, ids, sinks=False) - right) > bound

# ---- rows of a batch -------------------------------------------------------------------------------------------

@examples(15)
@given(cases())
def test_rows_are_independent(case):
    "Each row of a batch is what it is alone: routing is per token, with no capacity that neighbours use up"
    model = case.model()
    together = cached_logits(model, case.ids, case.split)
    for b in range(case.B):
        assert worst(cached_logits(model, case.ids[b:b+1], [case.T]), together[b:b+1]) <= EXACT

def test_tiny_preset():
    cfg = gptoss_tiny()
    case = Case(cfg, 1, 2, 5*cfg.window_size, [3*cfg.window_size + 1, 1, 1, 2*cfg.window_size - 3])
    assert worst(cached_logits(case.model(), case.ids, case.split), dense_logits(case.model(), case.ids)) <= EXACT
