"""Generation: the edges of its arguments, what it leaves behind, turns that continue a cache, and sampling by exact probabilities."""
import math
import warnings

import pytest
import torch
from hypothesis import assume, given, strategies as st

import gptoss_lite.generation as generation
from gptoss_lite.attention import GPTOSSAttention
from gptoss_lite.cache import MixedKVCache
from gptoss_lite.generation import generate, nucleus, prefill, sample, stream
from gptoss_lite.model import GPTOSS
from oracle import cases, config, dense_logits, examples, random_ids, random_model, same, snapshot, worst

CFG = config()
V, L, W = CFG.vocab_size, CFG.n_layers, CFG.window_size

@pytest.fixture
def model(): return random_model(CFG)

def ids(B=2, T=8, seed=0): return random_ids(CFG, B, T, seed)

def rng(): return torch.get_rng_state().clone()

# ---- the edges -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("T", [1, W, 4*W])
def test_no_new_tokens(model, T, B, use_cache):
    prompt = ids(B, T)
    out = generate(model, prompt, 0, use_cache=use_cache)
    assert torch.equal(out, prompt) and out.dtype == prompt.dtype

def test_no_new_tokens_read_the_prompt(model):
    "All but its last token, which is then pending"
    cache = MixedKVCache()
    generate(model, ids(), 0, cache=cache)
    assert cache.n_tokens == 7 and torch.equal(cache.pending, ids()[:, 7:])
    assert torch.equal(generate(model, ids()[:, :0], 9, 0, cache=cache), generate(model, ids(), 9, 0)[:, 8:])
    one = MixedKVCache()
    generate(model, ids()[:, :1], 0, cache=one)
    assert one.n_tokens == 0 and torch.equal(one.pending, ids()[:, :1])
    generate(model, ids()[:, :0], 0, cache=one)
    assert one.n_tokens == 0 and torch.equal(one.pending, ids()[:, :1])

@pytest.mark.parametrize("temperature", [0, 0., -1, -0.0, 1e-8, 1e-40, 1e-50, 5e-324])
@pytest.mark.parametrize("top_p", [0, 1e-9, 0.9, 1, 1.])
def test_no_temperature_is_greedy(temperature, top_p):
    model = random_model(CFG, dtype=torch.float32)
    out = generate(model, ids(3), 6, temperature, top_p)
    assert torch.equal(out, generate(model, ids(3), 6, 0))
    assert torch.equal(out[:, 8:], dense_logits(model, out)[:, 7:-1].argmax(-1))

@pytest.mark.parametrize("top_p", [0, 1e-9, 1e-300, 5e-324])
def test_no_mass_keeps_one_token(model, top_p):
    assert torch.equal(generate(model, ids(), 8, 1.5, top_p), generate(model, ids(), 8, 0))

@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("B", [1, 3])
def test_one_token_prompts(model, B, use_cache):
    out = generate(model, ids(B, 1), 12, 0, use_cache=use_cache)
    assert out.shape == (B, 13) and torch.equal(out[:, 1:], dense_logits(model, out)[:, :-1].argmax(-1))

@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_integers_of_other_widths(model, dtype):
    "The answer has the prompt's type; a type that cannot be embedded is a TypeError"
    for use_cache in (True, False):
        try: out = generate(model, ids().to(dtype), 3, 0, use_cache=use_cache)
        except TypeError as e: assert "input_ids" in str(e) and str(dtype) in str(e)
        else: assert out.dtype == dtype and torch.equal(out.long(), generate(model, ids(), 3, 0))

def test_rows_do_not_mix(model):
    out = generate(model, ids(3), 10, 0)
    for b in range(3): assert torch.equal(out[b:b+1], generate(model, ids(3)[b:b+1], 10, 0))

@pytest.mark.parametrize("chunk", [1, W-1, W, W+1, 7, 1000])
def test_chunks_of_the_prompt(model, chunk):
    assert torch.equal(generate(model, ids(2, 5*W), 8, 0, prefill_chunk=chunk), generate(model, ids(2, 5*W), 8, 0, use_cache=False))

@pytest.mark.parametrize("change", [dict(layer_types=["windowed"]*3), dict(layer_types=["global"]*3), dict(sink_bias=False),
                                    dict(weight_tying=False), dict(window_size=1)], ids=str)
def test_other_models(change):
    model = random_model(config(**change))
    assert torch.equal(generate(model, ids(), 9, 0), generate(model, ids(), 9, 0, use_cache=False))

# ---- random state ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("temperature", [0, -2.5])
def test_greedy_touches_no_random_state(model, temperature, use_cache):
    before = rng()
    generate(model, ids(), 8, temperature, use_cache=use_cache)
    assert torch.equal(rng(), before)
    generate(model, ids(), 1, 0.5, use_cache=use_cache)
    assert not torch.equal(rng(), before)

def test_greedy_gives_the_same_bits_twice(model):
    caches = MixedKVCache(), MixedKVCache()
    a, b = (generate(model, ids(), 20, 0, cache=c) for c in caches)
    assert torch.equal(a, b)
    for i, kind in enumerate(CFG.kinds):
        for x, y in zip(*(c.get(i, kind == "windowed") for c in caches)): assert torch.equal(x, y)

@pytest.mark.parametrize("use_cache", [True, False])
def test_seeded_runs_repeat(model, use_cache):
    def run(seed):
        torch.manual_seed(seed)
        return generate(model, ids(), 20, 1., 0.95, use_cache)
    assert torch.equal(run(5), run(5)) and not torch.equal(run(5), run(6))

def test_cached_and_replayed_samples_are_the_same(model):
    "One draw a step in both ways, from probabilities that agree"
    out = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        out.append(generate(model, ids(), 20, 0.8, 0.9, use_cache))
    assert torch.equal(*out)

# ---- what it leaves behind -------------------------------------------------------------------------------------

@pytest.mark.parametrize("T,N", [(1, 1), (1, 5), (2*W, 1), (5, 30)])
def test_what_the_cache_holds(model, T, N):
    "prompt + N - 1 tokens; the last one chosen waits to be fed"
    cache = MixedKVCache()
    out = generate(model, ids(2, T), N, 0, cache=cache)
    assert cache.n_tokens == T + N - 1 and torch.equal(cache.pending, out[:, -1:]) and len(cache) == L
    assert (cache.seq_len(0, True), cache.seq_len(1, False)) == (min(W, T+N-1), T+N-1)
    fed = MixedKVCache()
    with torch.no_grad(): prefill(model, out[:, :-1], fed)
    for i, kind in enumerate(CFG.kinds):
        for x, y in zip(cache.get(i, kind == "windowed"), fed.get(i, kind == "windowed")): assert worst(x, y) < 1e-12

def test_steps_after_the_prompt(model):
    "N tokens cost one pass over the prompt and N - 1 steps of one token, and the head sees one position in each"
    shapes, heads = [], []
    model.blocks[0].register_forward_hook(lambda m, args, out: shapes.append(args[0].shape[1]))
    model.head.register_forward_hook(lambda m, args, out: heads.append(tuple(out.shape)))
    generate(model, ids(2, 20), 5, 0)
    assert shapes == [20, 1, 1, 1, 1] and heads == [(2, 1, V)]*5
    shapes.clear(), heads.clear()
    generate(model, ids(2, 20), 3, 0, prefill_chunk=8)
    assert shapes == [8, 8, 4, 1, 1] and heads == [(2, 1, V)]*3
    shapes.clear(), heads.clear()
    generate(model, ids(2, 20), 3, 0, use_cache=False)
    assert shapes == [20, 21, 22] and heads == [(2, 1, V)]*3

def test_global_buffers_move_once(model):
    "The final length is known, so it is reserved: storage stays where it is"
    cache, places = MixedKVCache(), set()
    for _ in stream(model, ids(), 60, 0, cache=cache): places.add(cache.global_kv[1][0].data_ptr())
    assert len(places) == 1 and cache.global_caps[1] <= 68

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
def test_modes_are_put_back(model, training, use_cache):
    model.train(training).requires_grad_()
    seen = []
    model.blocks[1].moe.register_forward_hook(lambda m, args, out: seen.append((m.training, torch.is_grad_enabled(), out[0].requires_grad)))
    generate(model, ids(), 3, 0, use_cache=use_cache)
    assert seen and set(seen) == {(False, False, False)}
    assert torch.is_grad_enabled() and all(m.training == training for m in model.modules())

def test_modes_are_put_back_after_an_error(model):
    model.train()
    def fail(*_): raise RuntimeError("broken off")
    hook = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"): generate(model, ids(), 3, 0)
    hook.remove()
    assert model.training and torch.is_grad_enabled()

def visible(cache):
    "What a cache holds, by layer, and what waits: slots that no one can see do not count"
    kv = [None if x is None else x.clone() for i, kind in enumerate(CFG.kinds) for x in cache.get(i, kind == "windowed")]
    return cache.n_tokens, len(cache), None if cache.pending is None else cache.pending.tolist(), kv

def alike(a, b): return a[:3] == b[:3] and all(x is y if x is None else torch.equal(x, y) for x, y in zip(a[3], b[3], strict=True))

def broken_off(module, call, run):
    "Run with a keyboard interrupt at this call of the module"
    calls = []
    def fail(*_):
        calls.append(1)
        if len(calls) == call: raise KeyboardInterrupt
    hook = module.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt): run()
    hook.remove()

def test_a_step_that_was_broken_off_is_undone(model):
    "The token that it fed is pending again, and the text goes on as if nothing had been"
    cache = MixedKVCache()
    first = generate(model, ids(), 3, 0, cache=cache)
    before = visible(cache)
    broken_off(model.blocks[2], 1, lambda: generate(model, ids()[:, :0], 3, 0, cache=cache))
    assert alike(visible(cache), before)
    assert torch.equal(torch.cat([first, generate(model, ids()[:, :0], 3, 0, cache=cache)], 1), generate(model, ids(), 6, 0))

@pytest.mark.parametrize("step", [0, 2])
def test_no_token_is_fed_twice(model, step, monkeypatch):
    "If choosing fails after a step, the cache and what is pending are together the tokens so far, none of them twice"
    cache, n, right = MixedKVCache(), [0], generation.sample
    def choose(logits, *args, **kwargs):
        n[0] += 1
        if n[0] > step: raise KeyboardInterrupt
        return right(logits, *args, **kwargs)
    monkeypatch.setattr(generation, "sample", choose)
    with pytest.raises(KeyboardInterrupt): generate(model, ids(), 5, 0, cache=cache)
    monkeypatch.undo()
    whole = generate(model, ids(), 6, 0)
    if step == 0:  # the prompt was not read: the call can be made again
        assert cache.n_tokens == 0 and cache.pending is None
        assert torch.equal(generate(model, ids(), 6, 0, cache=cache), whole)
    else:
        assert cache.n_tokens == 8 + step - 1 and torch.equal(cache.pending, whole[:, 8+step-1:8+step])
        assert torch.equal(generate(model, ids()[:, :0], 6 - step, 0, cache=cache), whole[:, 8+step:])

@pytest.mark.parametrize("turn", [0, 4])
def test_a_step_that_stored_nothing_can_be_repeated(model, turn):
    "Broken off before the first layer has stored a key, the next call is as if this one had not been"
    cache = MixedKVCache()
    generate(model, ids(), 3, 0, cache=cache)
    before = snapshot(cache)
    def fail(*_): raise KeyboardInterrupt
    hook = model.embed.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt): generate(model, ids(2, turn, 1), 5, 0, cache=cache)
    hook.remove()
    same(snapshot(cache), before)
    said = torch.cat([generate(model, ids(), 3, 0), ids(2, turn, 1)], 1)
    assert torch.equal(generate(model, ids(2, turn, 1), 5, 0, cache=cache)[:, turn:], generate(model, said, 5, 0)[:, -5:])

def test_cached_tensors_keep_no_graph(model):
    model.requires_grad_()
    cache = MixedKVCache()
    generate(model, ids(), 4, 0, cache=cache)
    assert not any(x.requires_grad for kv in cache.windowed_kv + cache.global_kv if kv for x in kv[:2])
    assert all(p.grad is None for p in model.parameters())

# ---- the sinks -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("use_cache", [True, False])
def test_sinks_are_clamped_once_a_call(model, use_cache, monkeypatch):
    calls, right = [], GPTOSSAttention.clamped_sink
    monkeypatch.setattr(GPTOSSAttention, "clamped_sink", lambda self: calls.append(id(self)) or right(self))
    first = generate(model, ids(), 8, 0, use_cache=use_cache)
    assert sorted(calls) == sorted(id(b.attn) for b in model.blocks)
    with torch.no_grad():
        for b in model.blocks: b.attn.sink_bias.fill_(3)  # the next call takes the values of its own time
    second = generate(model, ids(), 8, 0, use_cache=use_cache)
    assert len(calls) == 2*L and not torch.equal(first, second)
    assert torch.equal(second[:, 8:], dense_logits(model, second)[:, 7:-1].argmax(-1))

def test_the_memo_of_a_layer(model):
    memo, x = {}, model.embed(ids())
    for i, b in enumerate(model.blocks): x = generation._attn_forward_layer(b, i, x, torch.arange(8), MixedKVCache(), memo)
    assert set(memo) == {id(b.attn) for b in model.blocks}
    assert all(torch.equal(memo[id(b.attn)], b.attn.sink_bias.clamp(-10, 15)) for b in model.blocks)
    assert worst(model.logits(x), dense_logits(model, ids())) < 1e-9

@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("memo", [True, False])
def test_attn_forward_layer_alone(model, cached, tables, memo):
    "With or without a cache, a memo and ready tables it is the block"
    x, at = model.embed(ids()), torch.arange(8)
    for i, b in enumerate(model.blocks):
        t = dict(tables=b.attn.tables(at, torch.float64)) if tables else {}
        y = generation._attn_forward_layer(b, i, x, at, MixedKVCache() if cached else None, {} if memo else None, **t)
        assert worst(y, b(x, b.attn.tables(at, torch.float64))[0]) < 1e-12
        x = y

# ---- turns -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt", [1, W, 3*W+1])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_continuing_is_one_long_call(model, prompt, temperature):
    "Also after the ring has turned, and a turn of no token"
    torch.manual_seed(1)
    whole = generate(model, ids(3, prompt), 25, temperature)
    torch.manual_seed(1)
    cache, parts = MixedKVCache(), [ids(3, prompt)]
    for i, n in enumerate((1, 9, 0, 4, 11)):
        out = generate(model, ids(3, prompt) if i == 0 else ids(3, 0), n, temperature, cache=cache)
        assert out.shape == (3, n + (prompt if i == 0 else 0))
        parts.append(out[:, prompt:] if i == 0 else out)
        assert cache.n_tokens == sum(p.shape[1] for p in parts) - 1
    assert torch.equal(torch.cat(parts, 1), whole)

@examples(15)
@given(case=cases(max_window=5, n_layers=3, layer_types=None), turns=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=4))
def test_turns_with_new_ids(case, turns):
    "A conversation through one cache: each answer is that of a model that reads the whole conversation afresh"
    model, cache, said = case.model(), MixedKVCache(), torch.zeros(case.B, 0, dtype=torch.long)
    for i, (asked, n) in enumerate([(case.T, 3), *turns]):
        new = random_ids(case.cfg, case.B, asked, i)
        out = generate(model, new, n, 0, cache=cache, prefill_chunk=7)
        said = torch.cat([said, new], 1)
        assert torch.equal(out[:, :asked], new)
        assert torch.equal(torch.cat([said, out[:, asked:]], 1), generate(model, said, n, 0, use_cache=False))
        said = torch.cat([said, out[:, asked:]], 1)
        assert cache.n_tokens == said.shape[1] - 1

def test_continuing_after_a_prefill_alone(model):
    "A cache that `prefill` filled has nothing pending: the new ids follow it"
    cache = MixedKVCache()
    with torch.no_grad(): prefill(model, ids(2, 10), cache)
    assert cache.pending is None
    out = generate(model, ids(2, 4, 1), 6, 0, cache=cache)
    assert torch.equal(torch.cat([ids(2, 10), out], 1), generate(model, torch.cat([ids(2, 10), ids(2, 4, 1)], 1), 6, 0))

def test_an_empty_cache_that_is_passed_is_used(model):
    cache = MixedKVCache(max_tokens=50)
    generate(model, ids(), 3, 0, cache=cache)
    assert cache.n_tokens == 10

# ---- streaming -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("temperature", [0, 1.])
def test_stream_is_generate(model, temperature, use_cache):
    torch.manual_seed(2)
    tokens = list(stream(model, ids(3), 9, temperature, use_cache=use_cache))
    assert len(tokens) == 9 and all(t.shape == (3,) for t in tokens)
    torch.manual_seed(2)
    assert torch.equal(torch.stack(tokens, 1), generate(model, ids(3), 9, temperature, use_cache=use_cache)[:, 8:])

@pytest.mark.parametrize("use_cache", [True, False])
def test_stream_leaks_no_mode(model, use_cache):
    "Between two tokens the consumer may train"
    model.train().requires_grad_()
    for t in stream(model, ids(), 4, 0, use_cache=use_cache):
        assert torch.is_grad_enabled() and all(m.training for m in model.modules())
        model(t[:, None])[0].sum().backward()
    assert model.embed.weight.grad.abs().max() > 0

def test_streams_take_turns(model):
    "Two at once do not disturb each other"
    a, b = stream(model, ids(2, 6, 1), 10, 0), stream(model, ids(3, 9, 2), 10, 0)
    both = [(x, y) for x, y in zip(a, b)]
    assert torch.equal(torch.stack([x for x, _ in both], 1), generate(model, ids(2, 6, 1), 10, 0)[:, 6:])
    assert torch.equal(torch.stack([y for _, y in both], 1), generate(model, ids(3, 9, 2), 10, 0)[:, 9:])

def test_stream_that_is_left(model):
    "The cache of a stream that was not read to its end continues where it stopped"
    cache, got = MixedKVCache(), []
    for t in stream(model, ids(), 20, 0, cache=cache):
        got.append(t)
        if len(got) == 4: break
    assert cache.n_tokens == 8 + 3
    rest = generate(model, ids()[:, :0], 6, 0, cache=cache)
    assert torch.equal(torch.cat([torch.stack(got, 1), rest], 1), generate(model, ids(), 10, 0)[:, 8:])

def test_stream_refuses_at_once(model):
    "Not at the first token, which may never be asked for"
    with pytest.raises(ValueError, match="top_p"): stream(model, ids(), 4, top_p=2.)

def test_stream_that_is_never_read_changes_nothing(model):
    cache = MixedKVCache()
    s = stream(model, ids(), 4, 0, cache=cache)
    same(snapshot(cache), snapshot(MixedKVCache()))
    s.close()

# ---- bad input -------------------------------------------------------------------------------------------------

P = ids()
BAD = {
    "a list": (dict(input_ids=[[1, 2]]), TypeError, ["input_ids", "list"]),
    "float": (dict(input_ids=P.float()), TypeError, ["input_ids", "float32", "integers"]),
    "half": (dict(input_ids=P.half()), TypeError, ["input_ids", "float16"]),
    "bool": (dict(input_ids=P > 3), TypeError, ["input_ids", "bool"]),
    "complex": (dict(input_ids=P + 0j), TypeError, ["input_ids", "complex"]),
    "one dimension": (dict(input_ids=P[0]), ValueError, ["input_ids", "(8,)", "(B, T)"]),
    "three dimensions": (dict(input_ids=P[None]), ValueError, ["input_ids", "(1, 2, 8)", "(B, T)"]),
    "no tokens": (dict(input_ids=P[:, :0], cache=None), ValueError, ["input_ids", "(2, 0)", "at least 1"]),
    "no rows": (dict(input_ids=P[:0]), ValueError, ["input_ids", "(0, 8)", "at least 1"]),
    "id too large": (dict(input_ids=torch.tensor([[3, V], [0, 1]])), ValueError, ["input_ids", str(V), f"0..{V-1}"]),
    "id below 0": (dict(input_ids=torch.tensor([[3, -1], [0, 1]])), ValueError, ["input_ids", "-1", f"0..{V-1}"]),
    "id of 2**40": (dict(input_ids=torch.tensor([[3, 2**40], [0, 1]])), ValueError, ["input_ids", str(2**40)]),
    "new tokens below 0": (dict(max_new_tokens=-1), ValueError, ["max_new_tokens", "-1", "0"]),
    "new tokens as float": (dict(max_new_tokens=3.), TypeError, ["max_new_tokens", "3.0", "int"]),
    "new tokens as bool": (dict(max_new_tokens=True), TypeError, ["max_new_tokens", "True", "int"]),
    "new tokens as None": (dict(max_new_tokens=None), TypeError, ["max_new_tokens", "None", "int"]),
    "temperature NaN": (dict(temperature=math.nan), ValueError, ["temperature", "nan", "finite"]),
    "temperature infinite": (dict(temperature=math.inf), ValueError, ["temperature", "inf", "finite"]),
    "temperature -infinite": (dict(temperature=-math.inf), ValueError, ["temperature", "-inf", "finite"]),
    "temperature as text": (dict(temperature="hot"), TypeError, ["temperature", "hot", "number"]),
    "top_p NaN": (dict(top_p=math.nan), ValueError, ["top_p", "nan", "[0, 1]"]),
    "top_p infinite": (dict(top_p=math.inf), ValueError, ["top_p", "inf", "[0, 1]"]),
    "top_p above 1": (dict(top_p=1.0001), ValueError, ["top_p", "1.0001", "[0, 1]"]),
    "top_p below 0": (dict(top_p=-0.1), ValueError, ["top_p", "-0.1", "[0, 1]"]),
    "top_p as None": (dict(top_p=None), TypeError, ["top_p", "None", "number"]),
    "top_p greedy": (dict(top_p=7, temperature=0), ValueError, ["top_p", "7", "[0, 1]"]),
    "chunk 0": (dict(prefill_chunk=0), ValueError, ["prefill_chunk", "0", "1"]),
    "chunk as float": (dict(prefill_chunk=2.5), TypeError, ["prefill_chunk", "2.5", "int"]),
    "another batch": (dict(input_ids=ids(3)), ValueError, ["3", "2", "reset"]),
    "past the cap": (dict(max_new_tokens=31), ValueError, ["51", "max_tokens=50", "max_new_tokens=31"]),
    "prompt past the cap": (dict(input_ids=ids(2, 60)), ValueError, ["max_tokens=50"]),
    "a cache to replay": (dict(use_cache=False), ValueError, ["use_cache=False", "cache"]),
}

@pytest.mark.parametrize("call", [generate, stream])
@pytest.mark.parametrize("what", BAD)
def test_refused(model, what, call):
    "The message names the argument, its value and the limit, and neither cache nor model nor random state has changed"
    change, exc, words = BAD[what]
    cache = MixedKVCache(max_tokens=50)
    model.train()
    generate(model, ids(), 4, 0, cache=cache)  # holds 11, 1 is pending
    before, state = snapshot(cache), rng()
    with pytest.raises(exc) as e: call(model, **{**dict(input_ids=P, max_new_tokens=3, cache=cache), **change})
    for word in words: assert word in str(e.value), (word, str(e.value))
    same(snapshot(cache), before)
    assert torch.equal(rng(), state) and model.training and torch.is_grad_enabled()
    rest = generate(model, ids()[:, :0], 5, 0, cache=cache)  # and it goes on
    assert torch.equal(rest, generate(model, ids(), 9, 0)[:, 12:])

def test_up_to_the_cap(model):
    "Held, pending, prompt and new tokens together may reach the cap"
    cache = MixedKVCache(max_tokens=50)
    generate(model, ids(), 4, 0, cache=cache)
    assert generate(model, P, 30, 0, cache=cache).shape == (2, 38)
    assert cache.n_tokens == 49
    with pytest.raises(ValueError, match="max_tokens=50"): generate(model, P[:, :1], 0, cache=cache)

def other_cache(what, model):
    cfg = CFG
    match what:
        case "no cache": return {}
        case "dtype": return generated(random_model(cfg, dtype=torch.float32))
        case "window": return generated(random_model(cfg.replace(window_size=W+1)))
        case "kinds": return generated(random_model(cfg.replace(layer_types=["global", "windowed", "global"])))
        case "more layers": return generated(random_model(cfg.replace(n_layers=4)))
        case "fewer layers": return generated(random_model(cfg.replace(n_layers=2)))
        case "heads": return generated(random_model(cfg.replace(n_kv_heads=3)))
        case "head_dim": return generated(random_model(cfg.replace(head_dim=6)))
        case "device":
            cache = MixedKVCache()
            k = torch.zeros(2, cfg.n_kv_heads, 3, cfg.head_dim, dtype=torch.float64, device="meta")
            for i, kind in enumerate(cfg.kinds): cache.append(i, k, k, kind == "windowed", W)
            return cache

def generated(model):
    cache = MixedKVCache()
    generate(model, ids(), 3, 0, cache=cache)
    return cache

@pytest.mark.parametrize("what,exc,words", [
    ("no cache", TypeError, ["cache", "dict", "MixedKVCache"]), ("dtype", ValueError, ["dtype", "float32", "float64", "reset"]),
    ("window", ValueError, ["window", str(W+1), str(W), "reset"]), ("kinds", ValueError, ["reset"]),
    ("more layers", ValueError, ["4", "3", "reset"]), ("fewer layers", ValueError, ["2", "3", "reset"]),
    ("heads", ValueError, ["heads", "3", "2", "reset"]), ("head_dim", ValueError, ["head_dim", "6", "8", "reset"]),
    ("device", ValueError, ["device", "meta", "cpu", "reset"])])
def test_a_cache_that_does_not_fit(model, what, exc, words):
    cache = other_cache(what, model)
    before = None if what in ("no cache", "device") else snapshot(cache)
    for new in (0, 2):
        with pytest.raises(exc) as e: generate(model, P, new, cache=cache)
        for word in words: assert word in str(e.value), (word, str(e.value))
    if before: same(snapshot(cache), before)

def test_another_batch_with_nothing_pending(model):
    cache = MixedKVCache()
    with torch.no_grad(): prefill(model, ids(3), cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="batch size 3.*2.*reset"): generate(model, P, 2, cache=cache)
    same(snapshot(cache), before)

def test_another_batch_that_is_only_pending(model):
    "A one-token prompt of another batch leaves nothing in the layers, only what is pending"
    cache = MixedKVCache()
    generate(model, ids(3, 1), 0, cache=cache)
    with pytest.raises(ValueError, match="2.*3"): generate(model, P, 2, cache=cache)

def test_long_sequences_warn_once():
    cfg = CFG.replace(eval_max_seq_len=12)
    model = random_model(cfg)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, ids(), 4, 0)
    for call in (generate, lambda *args: list(stream(*args))):
        with pytest.warns(UserWarning, match="eval_max_seq_len=12") as seen: call(model, ids(), 5, 0)
        assert len(seen) == 1
    with pytest.warns(UserWarning): out = generate(model, ids(), 20, 0)
    assert torch.equal(out[:, 8:], dense_logits(model, out)[:, 7:-1].argmax(-1))  # positions go on

# ---- sampling --------------------------------------------------------------------------------------------------

def exact(logits, temperature, top_p):
    "Probabilities of the next token: temperature, then the fewest tokens that reach `top_p`, in Python's floats"
    z = [x/temperature for x in logits]
    e = [math.exp(x - max(z)) for x in z]
    p = [x/sum(e) for x in e]
    mass, kept = 0., []
    for i in sorted(range(len(p)), key=lambda i: -p[i]):
        kept.append(i)
        mass += p[i]
        if mass >= top_p: break
    return [p[i]/mass if i in kept else 0. for i in range(len(p))]

LOGITS = [2.1, 0.3, -1., 1.7, 0.9, -0.4, 1.1, -2.2]

def chi_square(counts, probs):
    N = sum(counts)
    assert all(c == 0 for c, p in zip(counts, probs) if p == 0), "a token outside the nucleus was drawn"
    return sum((c - N*p)**2 / (N*p) for c, p in zip(counts, probs) if p), sum(p > 0 for p in probs) - 1

@pytest.mark.parametrize("temperature,top_p,size", [(1., 1., 8), (0.7, 0.9, 4), (0.7, 1., 8), (2., 0.8, 5), (1., 0.6, 2), (1e4, 1., 8)])
def test_draws_have_the_exact_probabilities(temperature, top_p, size):
    """40,000 draws against the exact probabilities: a chi-square statistic beyond its mean by 5 of its standard
    deviations, √(2·dof), is one chance in 10⁴ at worst, and the draws are seeded. Other settings are far beyond it."""
    torch.manual_seed(0)
    N = 40_000
    counts = sample(torch.tensor([LOGITS]).expand(N, -1), temperature, top_p).bincount(minlength=8).tolist()
    probs = exact(LOGITS, temperature, top_p)
    assert sum(p > 0 for p in probs) == size
    x, dof = chi_square(counts, probs)
    assert x < dof + 5*(2*dof)**0.5
    wrong = exact(LOGITS, temperature*1.1, 1.) if temperature < 100 else exact(LOGITS, 10., 1.)
    wrong_x, wrong_dof = chi_square(counts, wrong)
    assert wrong_x > wrong_dof + 10*(2*wrong_dof)**0.5
    if temperature > 100: assert max(probs) - min(probs) < 1e-4  # a high temperature is uniform

def test_draws_of_generate(model):
    "The first new token of many equal rows, against the oracle's logits"
    torch.manual_seed(0)
    B = 4000
    out = generate(model, ids(1, 5).expand(B, -1), 1, 0.8, 0.85)[:, -1].bincount(minlength=V).tolist()
    probs = exact(dense_logits(model, ids(1, 5))[0, -1].tolist(), 0.8, 0.85)
    x, dof = chi_square(out, probs)
    assert 2 < dof < V - 5 and x < dof + 5*(2*dof)**0.5

def test_the_token_that_crosses_is_kept():
    p = torch.tensor([[.09, .5, .41], [.2, .7, .1]])
    assert torch.allclose(nucleus(p, .9), torch.tensor([[0, .5/.91, .41/.91], [.2/.9, .7/.9, 0]]), atol=1e-6)
    assert (nucleus(p, 0.4) > 0).tolist() == (nucleus(p, 0) > 0).tolist() == [[False, True, False]]*2
    assert torch.equal(nucleus(p, 1.), p) and torch.equal(nucleus(p, 1), p)

@examples(60)
@given(seed=st.integers(0, 9999), n=st.integers(1, 40), top_p=st.floats(0, 1), spread=st.floats(0.1, 5))
def test_the_nucleus_is_the_smallest(seed, n, top_p, spread):
    p = (spread*torch.randn(3, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)
    q = nucleus(p, top_p)
    assert q.shape == p.shape and ((q.sum(-1) - 1).abs() < 1e-12).all() and (q > 0).any(-1).all()
    for before, after in zip(p, q):
        kept = after > 0
        mass, least = before[kept].sum().item(), before[kept].min().item()
        assume(abs(mass - top_p) > 1e-9 and abs(mass - least - top_p) > 1e-9)
        assert mass >= top_p or kept.all()
        if kept.sum() > 1: assert mass - least < top_p  # one fewer would not reach it
        if not kept.all(): assert before[~kept].max() <= least
        assert worst(after[kept], before[kept]/mass) < 1e-12

def test_nucleus_of_a_flat_vocabulary():
    "128,000 equal probabilities in float32: sums may round, but half of the mass is half of the tokens"
    p = torch.full((1, 128_000), 1/128_000)
    for top_p in (0.01, 0.5, 0.99): assert abs((nucleus(p, top_p) > 0).sum().item()/128_000 - top_p) < 1e-3

@examples(30)
@given(seed=st.integers(0, 999), top_p=st.floats(0.05, 0.99), cold=st.floats(0.1, 2), more=st.floats(0.01, 3))
def test_a_lower_temperature_never_widens_the_nucleus(seed, top_p, cold, more):
    z = 2*torch.randn(1, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    size = lambda t: (nucleus((z/t).softmax(-1), top_p) > 0).sum().item()
    assert size(cold) <= size(cold + more)

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_of_any_size(dtype):
    "Logits of 1e30 at a temperature of 1e-8 are a point mass, not NaN"
    z = torch.tensor([[1e30, -1e30, 9e29], [-1e30, -2e30, -1e30]], dtype=dtype)
    assert sample(z, 1e-8, 1.)[0] == 0 and sample(z, 1e-8, 1.)[1] in (0, 2) and sample(z, 1e300, 0.)[0] == 0

# ---- on a GPU --------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
def test_on_a_gpu(dtype, tol):
    "The model goes to the prompt's device; logits are those of the oracle; a cache of another device is refused"
    torch.backends.cuda.matmul.allow_tf32 = False
    model, cache = random_model(CFG, dtype=dtype), MixedKVCache()
    out = generate(model, ids().cuda(), 20, 0, cache=cache)
    assert out.is_cuda and model.embed.weight.is_cuda and cache.global_kv[1][0].is_cuda
    with torch.no_grad(): got = prefill(model, out, MixedKVCache(), chunk=7)
    assert worst(got.cpu(), dense_logits(random_model(CFG, dtype=dtype), out.cpu())[:, -1]) < tol
    if dtype == torch.float64: assert torch.equal(out.cpu(), generate(random_model(CFG, dtype=dtype), ids(), 20, 0))
    with pytest.raises(ValueError, match="device"): generate(model, P, 2, cache=cache)


@pytest.mark.parametrize("where, call, read", [("embed", 3, 6), ("norm", 1, 6), ("blocks.2", 2, 3)])
def test_a_prefill_that_was_broken_off_between_chunks_goes_on(model, where, call, read):
    "Whole chunks stay, the rest of the prompt is pending; it must be read before anything new"
    cache = MixedKVCache()
    broken_off(model.get_submodule(where), call, lambda: generate(model, ids(), 3, 0, cache=cache, prefill_chunk=3))
    assert cache.n_tokens == read and torch.equal(cache.pending, ids()[:, read:])
    if read < 7:
        with pytest.raises(ValueError, match=f"{8-read} ids of a prompt that was broken off.*no column.*reset"): generate(model, ids(), 3, 0, cache=cache)
    assert torch.equal(generate(model, ids()[:, :0], 3, 0, cache=cache), generate(model, ids(), 3, 0)[:, 8:])

@pytest.mark.parametrize("meddle", [lambda m, c: generate(m, ids()[:, :0], 2, 0, cache=c), lambda m, c: c.reset()])
def test_a_stream_notices_that_its_cache_was_used(model, meddle):
    cache = MixedKVCache()
    s = stream(model, ids(), 5, 0, cache=cache)
    next(s)
    meddle(model, cache)
    with pytest.raises(ValueError, match="used or reset by another call"): next(s)

def test_two_streams_that_were_made_together_cannot_both_run(model):
    cache = MixedKVCache(max_tokens=20)
    a, b = (stream(model, ids(), 5, 0, cache=cache) for _ in range(2))
    list(a)
    with pytest.raises(ValueError, match="used or reset by another call"): next(b)

def test_inference_mode_and_autocast_can_be_left_and_entered(model):
    want, cache = generate(model, ids(), 8, 0), MixedKVCache()
    with torch.inference_mode(): a = generate(model, ids(), 4, 0, cache=cache)
    b = generate(model, ids()[:, :0], 4, 0, cache=cache)
    assert torch.equal(torch.cat([a, b], 1), want)
    cache = MixedKVCache()
    with torch.autocast("cpu", torch.bfloat16):
        generate(model.float(), ids(), 3, 0, cache=cache)
        generate(model, ids()[:, :0], 3, 0, cache=cache)
    with pytest.raises(ValueError, match="cache has dtype torch.bfloat16"): generate(model, ids()[:, :0], 3, 0, cache=cache)

def test_a_pending_id_of_another_vocabulary_is_refused(model):
    cache = MixedKVCache()
    generate(model, ids(), 3, 0, cache=cache)
    cache.pending[:] = model.cfg.vocab_size
    with pytest.raises(ValueError, match="ids from.*vocab_size"): generate(model, ids(), 3, 0, cache=cache)
