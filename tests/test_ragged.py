"""Rows that go their own ways: texts of different lengths, rows that end, and every way through a cache held to one uncached run.

Tokens are compared with greedy decoding by the dense oracle, and the log-probabilities of all words at every step with its
own: 1e-9 in float64, 1e-4 in float32 (where near-ties are passed over, as in `test_exact`)."""
import copy
import tempfile

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, strategies as st

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.files import load_cache, save_cache
from gptoss_lite.generation import generate, prefill, score, stream
from gptoss_lite.lookup import generate_with_lookup
from gptoss_lite.ragged import Packed, RaggedKVCache, steps
from oracle import SIZES, cases, config, dense, dense_logits, examples, random_ids, random_model, worst

CFG = config()
V, W = CFG.vocab_size, CFG.window_size
EXACT, SINGLE, TIE = 1e-9, 1e-4, 1e-3

@pytest.fixture
def model(): return random_model(CFG)

def prompts(lengths, seed=0, cfg=CFG): return [random_ids(cfg, 1, n, seed + 10*i)[0] for i, n in enumerate(lengths)]

def all_logp(out):
    "The log-probabilities of all words at each new step, `(B, N, V)`, from `return_dict=True, top_logprobs=V`"
    return torch.zeros_like(out["top_logprobs"]).scatter(-1, out["top_ids"], out["top_logprobs"])

def check(model, prompt, N, ids, logp, tol):
    "One row's text and log-probabilities against the oracle's reading of the finished text"
    right, T = dense(model, ids[None]), len(prompt)
    want = right.logits[0, T-1:-1]
    assert torch.equal(ids[:T], prompt) and len(ids) == T + N
    best = want.topk(2, -1)
    if tol != EXACT: assume(right.margin > TIE and (best.values[:, 0] - best.values[:, 1]).min() > TIE)
    assert torch.equal(ids[T:], best.indices[:, 0])
    if logp is not None: assert worst(logp, want.log_softmax(-1)) <= tol

ragged = st.tuples(cases(max_window=5), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 25))

@pytest.mark.parametrize("dtype,tol", [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=str)
@examples(25)
@given(drawn=ragged)
def test_each_row_gets_what_it_gets_alone(dtype, tol, drawn):
    case, lengths, chunk = drawn
    model, texts, N = case.model(dtype), prompts(lengths, case.seed, case.cfg), 6
    cache = RaggedKVCache()
    out = generate(model, texts, N, 0, cache=cache, prefill_chunk=chunk, return_dict=True, top_logprobs=case.cfg.vocab_size)
    assert out["ids"].shape == (len(texts), max(lengths) + N)
    assert out["prompt_lengths"].tolist() == lengths and out["lengths"].tolist() == [n + N for n in lengths]
    assert cache.lengths == [n + N - 1 for n in lengths]
    for row, logp, text in zip(out["ids"], all_logp(out), texts):
        n = len(text) + N
        check(model, text, N, row[:n], logp, tol)
        assert (row[n:] == 0).all()
        assert worst(score(model, row[None, :n])[0, len(text)-1:], logp.gather(-1, row[len(text):n, None])[:, 0]) <= tol
    if tol == EXACT: assert torch.equal(out["ids"], generate(model, texts, N, 0, use_cache=False))

@examples(15)
@given(drawn=ragged, turns=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=3))
def test_turns(drawn, turns):
    "Each row has a conversation of its own, with turns of its own length"
    case, lengths, chunk = drawn
    model, cache = case.model(), RaggedKVCache()
    said = prompts(lengths, case.seed, case.cfg)
    out = generate(model, said, 3, 0, cache=cache)
    said = [row[:len(s) + 3] for row, s in zip(out, said)]
    for i, (asked, n) in enumerate(turns):
        new = [t[:(asked + b) % 7] for b, t in enumerate(prompts([7]*len(said), i, case.cfg))]
        out = generate(model, new, n, 0, cache=cache, prefill_chunk=chunk)
        said = [torch.cat([s, row[:len(t) + n]]) for s, t, row in zip(said, new, out)]
        assert cache.lengths == [len(s) - 1 for s in said]
        for s, t in zip(said, new):
            start = len(s) - n
            assert torch.equal(s[start:], dense_logits(model, s[None])[0, start-1:-1].argmax(-1))

# ---- all ways through a cache ----------------------------------------------------------------------------------

def way(name, model, text, N, V):
    "Generate greedily in some way; ids and, where the way gives them, all log-probabilities of the last part"
    more = dict(return_dict=True, top_logprobs=V)
    go = lambda ids, n, cache, **kw: generate(model, ids[None], n, 0, cache=cache, **kw)
    cache, none = MixedKVCache(rewind=9), text[:0]
    if name == "cached": first, out = text[:0], go(text, N, cache, **more)
    elif name == "looked up": return generate_with_lookup(model, text[None], N, ngram=2, n_draft=4)[0], None
    elif name == "ragged":
        out = generate(model, [text, text[:1], text.flip(0)], N, 0, **more)
        first, out = text[:0], {k: v[:1, :len(text) + N] if k == "ids" else v[:1] for k, v in out.items()}
    else:
        first = go(text, 3, cache)[0]
        if name == "resumed": pass
        elif name == "forked":
            other, cache = cache, cache.fork()
            go(none, 5, other) # the parent goes on first, the child must not see it
        elif name == "copied": cache = copy.deepcopy(cache)
        elif name == "restored":
            mark = cache.snapshot()
            go(text, 5, cache)
            cache.restore(mark)
        elif name == "rewound":
            waiting = cache.pending
            with torch.no_grad(): prefill(model, text[None, :6], cache) # the pending token and six others
            cache.rewind(len(text[:6]) + 1)
            cache.pending = waiting
        elif name == "selected": cache = cache.repeat(3).select([1])
        elif name == "saved and loaded":
            with tempfile.TemporaryDirectory() as folder:
                save_cache(cache, f"{folder}/cache.safetensors", model, first[None])
                cache, ids = load_cache(f"{folder}/cache.safetensors", model)
            assert torch.equal(ids[0], first[:-1])
        out = go(none, N - 3, cache, **more)
    return torch.cat([first, out["ids"][0]]), all_logp(out)[0]

WAYS = ["cached", "resumed", "forked", "copied", "restored", "rewound", "selected", "saved and loaded", "ragged", "looked up"]

@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype,tol", [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=str)
@examples(6)
@given(case=cases(max_window=5))
def test_every_way_is_one_uncached_run(name, dtype, tol, case):
    model, text, N = case.model(dtype), case.ids[0], 12
    ids, logp = way(name, model, text, N, case.cfg.vocab_size)
    n = 0 if logp is None else len(logp)
    check(model, ids[:len(ids)-n] if n else text, n or N, ids, logp, tol)
    check(model, text, N, ids, None, tol)

# ---- rows that end ---------------------------------------------------------------------------------------------

def cut(row, T, ends, pad):
    "What a row is, by the rule: the same text up to its first end token, and then padding"
    at = next((i for i, t in enumerate(row[T:].tolist()) if t in ends), None)
    return row if at is None else F.pad(row[:T+at+1], (0, len(row) - T - at - 1), value=pad)

@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("ends,pad", [(3, None), ([3, 17, 9], None), ([3, 17, 9], 30), (tuple(range(V)), 5), ([], 2)], ids=str)
def test_rows_end_by_themselves(model, use_cache, temperature, ends, pad):
    prompt, N, seeds = random_ids(CFG, 5, 6), 24, [5, 6, 7, 8, 9]
    whole = generate(model, prompt, N, temperature, seed=seeds)
    out = generate(model, prompt, N, temperature, seed=seeds, use_cache=use_cache, eos_token_id=ends, pad_token_id=pad, return_dict=True)
    several = [ends] if isinstance(ends, int) else list(ends)
    fill = pad if pad is not None else several[0]
    want = torch.stack([cut(row, 6, several, fill) for row in whole])
    assert torch.equal(out["ids"], want) and out["ids"].shape == (5, 30)
    for row, n, reason in zip(want, out["lengths"].tolist(), out["reasons"]):
        assert (reason == "eos") == (row[n-1].item() in several) and (row[n:] == fill).all()
        assert not set(row[6:n-1].tolist()) & set(several) and (reason == "eos" or n == 30)
    written = (out["lengths"] - 6).tolist()
    assert all((lp[n:] == 0).all() and (lp[:n] < 0).all() for lp, n in zip(out["logprobs"], written))
    tokens = list(stream(model, prompt, N, temperature, seed=seeds, use_cache=use_cache, eos_token_id=ends, pad_token_id=pad))
    assert len(tokens) == max(written) and torch.equal(torch.stack(tokens, 1), want[:, 6:6+len(tokens)])

def test_ended_rows_are_not_fed(model):
    fed = []
    model.embed.register_forward_hook(lambda m, args, out: fed.append(args[0].numel()))
    cache, prompt = RaggedKVCache(), random_ids(CFG, 5, 6)
    out = generate(model, prompt, 40, 1., seed=list(range(5)), eos_token_id=[3, 17, 9], cache=cache, return_dict=True)
    written = (out["lengths"] - 6).tolist()
    assert len(set(written)) > 2, "the rows end at different steps"
    assert fed == [30] + [sum(n > i for n in written) for i in range(1, max(written))]
    assert cache.lengths == [n + 5 for n in written]
    for c, row, n in zip(cache.rows, out["ids"], out["lengths"].tolist()):
        alone = MixedKVCache()
        with torch.no_grad(): prefill(model, row[None, :n-1], alone)
        assert torch.equal(c.pending, row[None, n-1:n])
        for i, kind in enumerate(CFG.kinds):
            for x, y in zip(c.get(i, kind == "windowed"), alone.get(i, kind == "windowed")): assert worst(x, y) < 1e-12

def test_one_row_that_ends_keeps_its_mixed_cache(model):
    prompt, cache = random_ids(CFG, 1, 6), MixedKVCache()
    whole = generate(model, prompt, 30, 0)
    stop = whole[0, 20].item()
    out = generate(model, prompt, 30, 0, eos_token_id=stop, cache=cache)
    n = 6 + whole[0, 6:].tolist().index(stop) + 1
    assert cache.n_tokens == n - 1 and cache.pending.item() == stop and torch.equal(out, cut(whole[0], 6, [stop], stop)[None])
    assert torch.equal(generate(model, prompt[:, :0], 5, 0, cache=cache), whole[:, n:n+5])

def test_a_batch_that_stays_together_has_one_cache(model):
    cache, prompt = MixedKVCache(), random_ids(CFG, 3, 6)
    generate(model, prompt, 5, 0, cache=cache)
    assert cache.batch_size == 3 and cache.n_tokens == 10
    apart = RaggedKVCache()
    assert torch.equal(generate(model, prompt, 5, 0, cache=apart), generate(model, prompt, 5, 0)) and apart.lengths == [10]*3

# ---- the result ------------------------------------------------------------------------------------------------

def test_return_dict(model):
    prompt = random_ids(CFG, 2, 6)
    out = generate(model, prompt, 9, 1.3, 0.9, seed=1, repetition_penalty=1.5, return_dict=True)
    assert torch.equal(out["ids"], generate(model, prompt, 9, 1.3, 0.9, seed=1, repetition_penalty=1.5))
    assert out["top_ids"].shape == out["top_logprobs"].shape == (2, 9, 5) and out["reasons"] == ["length"]*2
    want = dense_logits(model, out["ids"]).log_softmax(-1)[:, 5:-1]
    assert worst(out["logprobs"], want.gather(-1, out["ids"][:, 6:, None])[..., 0]) < EXACT, "the model's own, before penalty, temperature and filters"
    assert worst(out["top_logprobs"], want.topk(5).values) < EXACT and torch.equal(out["top_ids"], want.topk(5).indices)
    none = generate(model, prompt, 0, return_dict=True, top_logprobs=0)
    assert torch.equal(none["ids"], prompt) and none["logprobs"].shape == (2, 0) and none["top_ids"].shape == (2, 0, 0)
    assert generate(model, prompt, 2, 0, return_dict=True, top_logprobs=99)["top_ids"].shape == (2, 2, V)

@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_lists_of_other_kinds(model, dtype):
    texts = [t.to(dtype) for t in prompts([3, 8])]
    out = generate(model, texts, 4, 0)
    assert out.dtype == dtype and torch.equal(out, generate(model, tuple(texts), 4, 0))
    assert torch.equal(out[1:, :12], generate(model, texts[1][None], 4, 0))
    one = MixedKVCache()
    assert torch.equal(generate(model, [texts[0]], 4, 0, cache=one), out[:1, :7]) and one.n_tokens == 6

def test_no_new_tokens(model):
    cache, texts = RaggedKVCache(), prompts([1, 7, 3])
    out = generate(model, texts, 0, cache=cache, pad_token_id=9)
    assert out.tolist() == [F.pad(t, (0, 7 - len(t)), value=9).tolist() for t in texts]
    assert cache.lengths == [0, 6, 2] and [c.pending.item() for c in cache.rows] == [t[-1].item() for t in texts]
    assert torch.equal(generate(model, [t[:0] for t in texts], 5, 0, cache=cache)[1], generate(model, texts[1][None], 5, 0)[0, 7:])

BAD = {
    "an empty list": (dict(input_ids=[]), ValueError, ["empty list"]),
    "lists of numbers": (dict(input_ids=[[1, 2], [3]]), TypeError, ["list of list", "(T,)"]),
    "two dimensions": (dict(input_ids=[torch.zeros(1, 3, dtype=torch.long)]), ValueError, ["(1, 3)", "(T,)"]),
    "mixed types": (dict(input_ids=[torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.int32)]), ValueError, ["int32", "alike"]),
    "floats": (dict(input_ids=[torch.zeros(3)]), TypeError, ["float32", "integers"]),
    "an empty text": (dict(input_ids=prompts([3, 1])[:1] + [torch.zeros(0, dtype=torch.long)]), ValueError, ["(1, 0)", "at least 1"]),
    "an id too large": (dict(input_ids=[torch.tensor([3, V])]), ValueError, [f"0..{V-1}"]),
    "one cache for several texts": (dict(cache=MixedKVCache()), ValueError, ["MixedKVCache", "RaggedKVCache", "2 rows"]),
    "one cache for rows that end": (dict(input_ids=random_ids(CFG, 2, 5), eos_token_id=3, cache=MixedKVCache()), ValueError, ["RaggedKVCache", "eos_token_id"]),
    "a cache of other rows": (dict(cache=RaggedKVCache([MixedKVCache() for _ in range(3)])), ValueError, ["2 rows, the cache 3"]),
    "the cap": (dict(cache=RaggedKVCache(max_tokens=8)), ValueError, ["max_tokens=8"]),
    "a cache to replay": (dict(cache=RaggedKVCache(), use_cache=False), ValueError, ["use_cache=False"]),
    "eos too large": (dict(eos_token_id=V), ValueError, ["eos_token_id", f"0..{V-1}"]),
    "eos below 0": (dict(eos_token_id=[3, -1]), ValueError, ["eos_token_id=-1"]),
    "eos as text": (dict(eos_token_id="end"), TypeError, ["eos_token_id='end'", "int"]),
    "eos as bool": (dict(eos_token_id=True), TypeError, ["eos_token_id=True"]),
    "pad as text": (dict(pad_token_id="pad"), TypeError, ["pad_token_id='pad'", "int"]),
    "top_logprobs": (dict(top_logprobs=-1), ValueError, ["top_logprobs=-1"]),
}

@pytest.mark.parametrize("what", BAD)
def test_refused(model, what):
    change, exc, words = BAD[what]
    with pytest.raises(exc) as e: generate(model, **{**dict(input_ids=prompts([3, 5]), max_new_tokens=6), **change})
    for w in words: assert w in str(e.value), str(e.value)
    cache = change.get("cache")
    assert not isinstance(cache, RaggedKVCache) or len(cache.rows) in (0, 3), "a refusal changes nothing"

# ---- packed ----------------------------------------------------------------------------------------------------

@examples(30)
@given(seed=st.integers(0, 999), held=st.lists(st.integers(0, 12), min_size=1, max_size=4), W=st.integers(1, 5), data=st.data())
def test_a_packed_update_is_that_of_each_text(seed, held, W, data):
    new = [data.draw(st.integers(1, 8)) for _ in held]
    g = torch.Generator().manual_seed(seed)
    kv = lambda n: torch.randn(2, 1, 3, n, 4, generator=g)
    caches, others = [MixedKVCache() for _ in held], [MixedKVCache() for _ in held]
    for a, b, n in zip(caches, others, held):
        if n:
            x = kv(n)
            for c in (a, b): c.append(0, *x, True, W); c.append(1, *x, False)
    packed, x = Packed(caches, new), kv(sum(new))
    assert packed.positions().tolist() == [h + i for h, n in zip(held, new) for i in range(n)]
    for layer, windowed in ((0, True), (1, False)):
        seen = zip(*packed.update(layer, *x, windowed, W))
        for b, k, v, got in zip(others, x[0].split(new, 2), x[1].split(new, 2), seen):
            for mine, theirs in zip(got, b.update(layer, k, v, windowed, W)): assert torch.equal(mine, theirs)

def test_a_step_of_several_caches_is_undone_in_all():
    caches = [MixedKVCache() for _ in range(3)]
    k = torch.randn(1, 2, 5, 4)
    with pytest.raises(KeyboardInterrupt):
        with steps(caches):
            for c in caches[:2]: c.append(0, k, k, True, 3); c.pending = k
            raise KeyboardInterrupt
    assert [c.n_tokens for c in caches] == [0]*3 and all(c.pending is None and not c.buffers for c in caches)

def test_shared_beginnings(model):
    "Forks of a cache that has read what all begin with: stored once until they go on, and each row is what it is afresh"
    system, texts = MixedKVCache(), prompts([4, 1, 9])
    with torch.no_grad(): prefill(model, random_ids(CFG, 1, 30, 7), system)
    cache = RaggedKVCache([system.fork() for _ in texts])
    out = generate(model, texts, 8, 0, cache=cache)
    for t, row in zip(texts, out):
        afresh = torch.cat([random_ids(CFG, 1, 30, 7), t[None]], 1)
        assert torch.equal(row[:len(t) + 8], generate(model, afresh, 8, 0)[0, 30:])
    assert system.n_tokens == 30 and cache.used_nbytes == sum(c.used_nbytes for c in cache.rows) <= cache.nbytes
    cache.reset()
    assert cache.rows == [] and generate(model, texts[:1], 1, 0, cache=cache).shape == (1, 5)

# ---- score -----------------------------------------------------------------------------------------------------

@examples(25)
@given(case=cases(), chunk=st.integers(1, 30), few=st.integers(1, 500))
def test_score(case, chunk, few):
    model = case.model()
    want = dense_logits(model, case.ids)[:, :-1].log_softmax(-1).gather(-1, case.ids[:, 1:, None])[..., 0]
    got = score(model, case.ids, chunk=chunk, max_logits=few)
    assert got.shape == (case.B, case.T - 1) and got.dtype == torch.float64
    if case.T > 1: assert worst(got, want) <= EXACT

def test_score_leaves_the_model_as_it_was(model):
    model.train()
    heads = []
    model.head.register_forward_hook(lambda m, args, out: heads.append(out.numel()))
    assert not score(model, random_ids(CFG, 2, 30).int(), max_logits=200).requires_grad and model.training
    assert max(heads) <= 200 and sum(heads) == 2*29*V
    with pytest.raises(ValueError, match="at least 1 row"): score(model, random_ids(CFG, 2, 0))
    with pytest.raises(ValueError, match="chunk=0"): score(model, random_ids(CFG, 2, 3), chunk=0)

def test_one_cache_cannot_be_two_rows():
    cache = MixedKVCache()
    with pytest.raises(ValueError, match="same cache twice.*fork"): RaggedKVCache([cache, MixedKVCache(), cache])
