"""Prompt lookup: greedy decoding in fewer passes, whatever is proposed, and a cache that holds what greedy decoding leaves."""
import pytest
import torch
from hypothesis import assume, event, given, strategies as st

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.generation import generate
from gptoss_lite.lookup import distinct_experts, generate_with_lookup, pass_cost, propose, stream_with_lookup
from gptoss_lite.roofline import decode_cost
from oracle import cases, config, dense, dense_logits, examples, random_ids, random_model, worst

CFG = config()
V, W = CFG.vocab_size, CFG.window_size

@pytest.fixture
def model(): return random_model(CFG)

# ---- the proposal ----------------------------------------------------------------------------------------------

def by_loop(ids, ngram, n):
    "The latest earlier place of the last tokens, and what follows it, going on into itself"
    for at in range(len(ids) - 1, ngram - 1, -1):
        if ids[at-ngram:at] == ids[len(ids)-ngram:]:
            text = list(ids)
            for i in range(n): text.append(text[at + i])
            return text[len(ids):]
    return []

@examples(200)
@given(ids=st.lists(st.integers(0, 3), max_size=25), ngram=st.integers(1, 5), n=st.integers(0, 9))
def test_proposals(ids, ngram, n):
    assert propose(torch.tensor(ids, dtype=torch.long), ngram, n).tolist() == by_loop(ids, ngram, n)

# ---- the text --------------------------------------------------------------------------------------------------

def some_right(model, prompt, N, seed, right):
    "Proposals of random length, of which the head is right with some probability a token"
    whole, g = generate(model, prompt, N, 0)[0], torch.Generator().manual_seed(seed)
    def proposer(text, n):
        n = int(torch.randint(n + 1, (), generator=g)) if n > 0 else 0
        draft = whole[len(text):len(text)+n].clone()
        wrong = torch.rand(len(draft), generator=g) > right
        draft[wrong] = torch.randint(model.cfg.vocab_size, (int(wrong.sum()),), generator=g)
        return draft
    return proposer

@examples(30)
@given(case=cases(max_window=5), ngram=st.integers(1, 4), n_draft=st.integers(1, 7), chunk=st.integers(1, 9), right=st.sampled_from([None, 0., 0.7, 1.]))
def test_the_text_is_that_of_greedy_decoding(case, ngram, n_draft, chunk, right):
    "Tokens, logits of everything that was kept, and what the cache holds; rings of any window, drafts longer than it"
    model, prompt, N = case.model(), case.ids[:1], 30
    cache, logits, kept, sizes = MixedKVCache(rewind=n_draft + 1), [], [], []
    model.head.register_forward_hook(lambda m, args, out: logits.append(out[0]))
    proposer = None if right is None else some_right(model, prompt, N, case.seed, right)
    logits.clear()
    for new in stream_with_lookup(model, prompt, N, ngram=ngram, n_draft=n_draft, cache=cache, prefill_chunk=chunk, proposer=proposer):
        kept.append(logits[-1][:len(new)])
        sizes.append(len(new))
        assert 1 <= len(new) <= n_draft + 1
    ids = torch.cat([prompt, torch.cat(kept).argmax(-1)[None]], 1)
    right = dense_logits(model, ids)
    assert worst(torch.cat(kept), right[0, case.T-1:-1]) <= 1e-9
    assert torch.equal(ids[:, case.T:], right[:, case.T-1:-1].argmax(-1))
    event(f"passes save something: {len(sizes) < N}")
    plain = MixedKVCache()
    assert torch.equal(generate(model, prompt, N, 0, cache=plain), ids)
    assert cache.n_tokens == plain.n_tokens and torch.equal(cache.pending, plain.pending)
    for i, kind in enumerate(case.cfg.kinds):
        for x, y in zip(cache.get(i, kind == "windowed"), plain.get(i, kind == "windowed")): assert worst(x, y) < 1e-9

@examples(10)
@given(case=cases(max_window=5), n_draft=st.integers(1, 7))
def test_float32(case, n_draft):
    model, prompt, N = case.model(torch.float32), case.ids[:1], 20
    ids = generate_with_lookup(model, prompt, N, ngram=1, n_draft=n_draft)
    right = dense(model, ids)
    best = right.logits[0, case.T-1:-1].topk(2, -1)
    assume(right.margin > 1e-3 and (best.values[:, 0] - best.values[:, 1]).min() > 1e-3)
    assert torch.equal(ids[0, case.T:], best.indices[:, 0])

def test_passes(model):
    "All right: one token of the prompt and then the longest draft and one; all wrong: one a pass"
    prompt = random_ids(CFG, 1, 9)
    whole = generate(model, prompt, 41, 0)
    sizes = lambda f: [len(n) for n in stream_with_lookup(model, prompt, 41, n_draft=4, proposer=f)]
    assert sizes(lambda text, n: whole[0, len(text):len(text)+n]) == [1] + [5]*8
    assert sizes(lambda text, n: (whole[0, len(text):len(text)+n] + 1) % V) == [1]*41
    assert sizes(lambda text, n: text[:0]) == [1]*41
    assert sum(sizes(lambda text, n: whole[0, len(text):len(text)+99])) == 41, "a proposer that proposes too much is cut"

@pytest.mark.parametrize("at", [9, 10, 14, 17])
def test_an_end_token_in_a_draft(model, at):
    prompt = random_ids(CFG, 1, 9)
    whole = generate(model, prompt, 30, 0)
    stop, cache, plain = whole[0, at].item(), MixedKVCache(rewind=9), MixedKVCache()
    knows = lambda text, n: whole[0, len(text):len(text)+n]
    out = generate_with_lookup(model, prompt, 30, eos_token_id=[stop], cache=cache, proposer=knows)
    assert torch.equal(out, generate(model, prompt, 30, 0, eos_token_id=stop, cache=plain))
    assert cache.n_tokens == plain.n_tokens and torch.equal(cache.pending, plain.pending)
    assert torch.equal(generate(model, prompt[:, :0], 5, 0, cache=cache), generate(model, prompt[:, :0], 5, 0, cache=plain))

@pytest.mark.parametrize("N", [0, 1, 2])
def test_few_tokens(model, N):
    prompt, cache, plain = random_ids(CFG, 1, 9), MixedKVCache(rewind=9), MixedKVCache()
    assert torch.equal(generate_with_lookup(model, prompt, N, cache=cache), generate(model, prompt, N, 0, cache=plain))
    assert cache.n_tokens == plain.n_tokens and torch.equal(cache.pending, plain.pending)

def test_turns(model):
    cache, said = MixedKVCache(rewind=9), torch.zeros(1, 0, dtype=torch.long)
    for i, (asked, n) in enumerate([(6, 9), (0, 4), (11, 0), (3, 20)]):
        new = random_ids(CFG, 1, asked, i)
        out = generate_with_lookup(model, new, n, cache=cache, ngram=1)
        said = torch.cat([said, new], 1)
        assert torch.equal(torch.cat([said, out[:, asked:]], 1), generate(model, said, n, 0))
        said = torch.cat([said, out[:, asked:]], 1)

def test_up_to_the_cap_and_reserved(model):
    "Drafts never need room beyond prompt and new tokens"
    cache, places = MixedKVCache(rewind=9, max_tokens=50), set()
    for _ in stream_with_lookup(model, random_ids(CFG, 1, 20), 30, ngram=1, cache=cache): places.add(cache.global_kv[1][0].data_ptr())
    assert cache.n_tokens == 49 and cache.global_caps[1] == 50 and len(places) == 1
    with pytest.raises(ValueError, match="max_tokens=50"): generate_with_lookup(model, random_ids(CFG, 1, 20), 31, cache=MixedKVCache(rewind=9, max_tokens=50))

# ---- what can go wrong -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("change,exc,words", [
    (dict(cache=MixedKVCache()), ValueError, ["takes back 0", "at least 9", "rewind=9"]), (dict(cache=MixedKVCache(rewind=8)), ValueError, ["8", "at least 9"]),
    (dict(input_ids=random_ids(CFG, 2, 5)), ValueError, ["2 rows: must be 1"]), (dict(ngram=0), ValueError, ["ngram=0"]),
    (dict(n_draft=0), ValueError, ["n_draft=0"]), (dict(n_draft=2.), TypeError, ["n_draft=2.0"]), (dict(max_new_tokens=-1), ValueError, ["max_new_tokens=-1"]),
    (dict(input_ids=torch.tensor([[V]])), ValueError, [f"0..{V-1}"]), (dict(eos_token_id=V), ValueError, ["eos_token_id"]), (dict(cache={}), TypeError, ["dict"])], ids=str)
def test_refused(model, change, exc, words):
    for f in (stream_with_lookup, generate_with_lookup):
        with pytest.raises(exc) as e: f(model, **{**dict(input_ids=random_ids(CFG, 1, 5), max_new_tokens=6), **change})
        for w in words: assert w in str(e.value), str(e.value)

def test_without_the_rewind_it_is_another_text(model):
    class NeverBack(MixedKVCache):
        def rewind(self, n): pass
    prompt = random_ids(CFG, 1, 9)
    whole = generate(model, prompt, 40, 0)
    wrong = lambda text, n: (whole[0, len(text):len(text)+n] + 1) % V
    assert torch.equal(generate_with_lookup(model, prompt, 40, proposer=wrong), whole)
    assert not torch.equal(generate_with_lookup(model, prompt, 40, proposer=wrong, cache=NeverBack(rewind=9)), whole)

def test_a_stream_notices_that_its_cache_was_used(model):
    cache, prompt = MixedKVCache(rewind=9), random_ids(CFG, 1, 9)
    s = stream_with_lookup(model, prompt, 9, cache=cache)
    next(s)
    generate(model, prompt[:, :0], 1, 0, cache=cache)
    with pytest.raises(ValueError, match="used or reset by another call"): next(s)

# ---- what it costs ---------------------------------------------------------------------------------------------

def test_costs():
    cfg = config()
    assert pass_cost(cfg, 50, 1) == decode_cost(cfg, 50)
    assert pass_cost(cfg, 50, 6).flops == 6*decode_cost(cfg, 50).flops
    assert distinct_experts(cfg, 1) == cfg.n_activated_experts and distinct_experts(cfg, 99) == pytest.approx(cfg.n_routed_experts)
