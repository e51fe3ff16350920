"""What is broken off, at every layer, every operation and every line, leaves the text so far in the cache and pending.

The rule, after any fault in any call: all layers have the same length, the cache holds whole passes, cache and pending are
together a beginning of the text that the call would have written, and going on without new ids writes the rest."""
import sys
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.generation import generate, prefill, stream
from gptoss_lite.lookup import stream_with_lookup
from gptoss_lite.ragged import RaggedKVCache
from oracle import config, random_ids, random_model

CFG = config()
MODEL = random_model(CFG)
A, B = random_ids(CFG, 1, 5)[0], random_ids(CFG, 1, 13, 1)[0]
TEXT = {True: generate(MODEL, A[None], 40, 0)[0], False: generate(MODEL, B[None], 40, 0)[0]} # of a row that begins like A, like B

class Situation:
    "Something under way: a cache, and a function whose call is to be broken off"
    def __init__(self, cache, run, texts): self.cache, self.run, self.texts = cache, run, texts

    @property
    def caches(self): return self.cache.rows if isinstance(self.cache, RaggedKVCache) else [self.cache]

def decode(): # one token, the rings have turned; the global layers are full, so that they grow
    cache = MixedKVCache()
    with torch.no_grad(): prefill(MODEL, TEXT[True][None, :9], cache)
    cache.pending = TEXT[True][None, 9:10].clone()
    s = stream(MODEL, A[None, :0], 9, 0, cache=cache)
    return Situation(cache, lambda: next(s), [TEXT[True]])

def batch(): # two rows that stay together
    cache, text = MixedKVCache(), torch.stack([TEXT[True], TEXT[True]])
    generate(MODEL, text[:, :5], 3, 0, cache=cache)
    s = stream(MODEL, text[:, :0], 9, 0, cache=cache)
    return Situation(cache, lambda: next(s), [TEXT[True]])

def chunks(): # a prompt in chunks longer than the window, into an empty cache
    cache = MixedKVCache()
    return Situation(cache, lambda: generate(MODEL, B[None], 1, 0, cache=cache, prefill_chunk=5), [TEXT[False]])

def turn(): # new ids behind what is pending
    cache = MixedKVCache()
    generate(MODEL, TEXT[False][None, :20], 1, 0, cache=cache)
    new = TEXT[False][None, 21:30]
    return Situation(cache, lambda: generate(MODEL, new, 1, 0, cache=cache, prefill_chunk=4), [TEXT[False]])

def texts(): # two texts of different lengths, packed, in a step
    cache = RaggedKVCache()
    generate(MODEL, [A, B], 4, 0, cache=cache)
    s = stream(MODEL, [A[:0], B[:0]], 9, 0, cache=cache)
    return Situation(cache, lambda: next(s), [TEXT[True], TEXT[False]])

def text_chunks(): # and in a prompt that takes several passes
    cache = RaggedKVCache()
    return Situation(cache, lambda: generate(MODEL, [A, B], 1, 0, cache=cache, prefill_chunk=6), [TEXT[True], TEXT[False]])

def lookup(): # a draft of which two are right and two must be taken back
    cache = MixedKVCache(rewind=5)
    def proposer(text, n):
        draft = TEXT[True][len(text):len(text)+n].clone()
        draft[2:] = (draft[2:] + 1) % CFG.vocab_size
        return draft
    s = stream_with_lookup(MODEL, A[None], 30, n_draft=4, cache=cache, proposer=proposer)
    next(s); next(s)
    return Situation(cache, lambda: next(s), [TEXT[True]])

SITUATIONS = [decode, batch, chunks, turn, texts, text_chunks, lookup]
here = pytest.mark.parametrize("make", SITUATIONS, ids=lambda f: f.__name__)

def state(s): return [(c.n_tokens, None if c.pending is None else c.pending.tolist()) for c in s.caches]

def check(s, before, passes):
    "The rule; `before` is the state before the call, `passes` the lengths at which a pass may have ended"
    assert len(s.caches) in (0, len(s.texts))
    for c, text, (n, pending) in zip(s.caches, s.texts, before):
        assert c._step is None and {b.n_tokens for b in c.buffers.values()} <= {c.n_tokens}, "layers out of step"
        assert c.n_tokens in passes, "part of a pass"
        rows = 1 if c.pending is None else len(c.pending)
        for row in range(rows):
            if c.pending is None: assert c.n_tokens == n == 0, "nothing is pending, but something was read"
            else: assert torch.equal(c.pending[row], text[c.n_tokens:c.n_tokens+c.pending.shape[1]]), "cache and pending are not the text"
        if c.n_tokens == n: assert (None if c.pending is None else c.pending.tolist()) == pending, "nothing was read, but something is pending"
        known = c.n_tokens + (0 if c.pending is None else c.pending.shape[1])
        ids = text[:5 if text is TEXT[True] else 13] if known == 0 else text[:0] # nothing was read: the call can be made again
        rest = generate(MODEL, ids.expand(rows, -1), 2, 0, cache=c)[:, len(ids):]
        at = known or len(ids)
        assert torch.equal(rest, text[at:at+2].expand(rows, -1)), "it goes on with another text"

def lengths(make):
    "Every length at which a cache may stand: empty, before the call, and after each of its passes"
    s, seen = make(), set()
    seen.update(c.n_tokens for c in s.caches)
    step = MixedKVCache.step
    @contextmanager
    def noted(self):
        with step(self): yield self
        seen.add(self.n_tokens)
    MixedKVCache.step = noted
    try: s.run()
    finally: MixedKVCache.step = step
    return seen | {c.n_tokens for c in s.caches} | {0}

# ---- every layer -----------------------------------------------------------------------------------------------

MODULES = [n for n, m in MODEL.named_modules() if n and not list(m.children())] + [f"blocks.{i}" for i in range(3)] + ["blocks.1.attn", "blocks.2.moe"]

@here
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_layer(make, when):
    ends, n = lengths(make), 0
    for name in MODULES:
        for call in (1, 2)[:1 if make in (decode, batch, texts, lookup) else 2]:
            s, calls = make(), []
            before = state(s)
            def fail(*_):
                calls.append(1)
                if len(calls) == call: raise RuntimeError("a layer failed")
            m = MODEL.get_submodule(name)
            hook = m.register_forward_pre_hook(fail) if when == "before" else m.register_forward_hook(fail)
            try: s.run()
            except RuntimeError: n += 1
            else: continue # not so many calls
            finally: hook.remove()
            check(s, before, ends)
    assert n >= 25

# ---- every operation, allocations among them -------------------------------------------------------------------

class RaiseAt(TorchDispatchMode):
    "Out of memory at the `at`-th operation: before it, or once what it returns has been made"
    def __init__(self, at, after): super().__init__(); self.at, self.after, self.n = at, after, 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        if self.n == self.at and not self.after: raise torch.OutOfMemoryError(f"operation {self.at}, {func}")
        out = func(*args, **(kwargs or {}))
        if self.n == self.at: raise torch.OutOfMemoryError(f"operation {self.at}, {func}")
        return out

def each_operation(make, every, after):
    ends, at, n = lengths(make), 1, 0
    while True:
        s = make()
        before = state(s)
        try:
            with RaiseAt(at, after): s.run()
        except torch.OutOfMemoryError: check(s, before, ends)
        else: return n
        at, n = at + every, n + 1

@here
def test_operations(make):
    assert each_operation(make, 29, False) > 8

@here
@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_every_operation(make, after):
    assert each_operation(make, 1, after) > 200

# ---- every line: a keyboard interrupt can come anywhere --------------------------------------------------------

def interrupted_at(run, at):
    "Run with a keyboard interrupt at the `at`-th line of the package; where it was, or None if there are not so many"
    n, where = 0, None
    def line(frame, event, arg):
        nonlocal n, where
        if event == "line":
            n += 1
            if n == at:
                where = frame.f_code.co_filename.rsplit("/", 1)[-1], frame.f_code.co_name
                raise KeyboardInterrupt
        return line
    old = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if "gptoss_lite" in frame.f_code.co_filename else None)
    try: run()
    except KeyboardInterrupt: pass
    finally: sys.settrace(old)
    return where

def each_line(make, every, start=1):
    ends, at, n = lengths(make), start, 0
    while True:
        s = make()
        before = state(s)
        where = interrupted_at(s.run, at)
        if where is None: return n
        at, n = at + every, n + 1
        for c in s.caches:
            if where == ("cache.py", "step"): c._step = None # the two lines that open and close a step are not covered by it
        check(s, before, ends)

@here
def test_lines(make): assert each_line(make, 173) > 3

@here
@pytest.mark.slow
def test_every_line(make): assert each_line(make, 1) > 500

# ---- what is read stays read -----------------------------------------------------------------------------------

@pytest.mark.parametrize("chunk,at", [(2, 2), (2, 8), (5, 5), (5, 10), (5, 13)])
@pytest.mark.parametrize("exc", [KeyboardInterrupt, RuntimeError])
def test_a_prompt_that_is_broken_off_by_its_progress(chunk, at, exc):
    "Between two chunks; called with the last of all it belongs to the last chunk, which is then undone"
    def progress(done, total):
        assert total == 13
        if done == at: raise exc("enough")
    cache = MixedKVCache()
    with pytest.raises(exc): generate(MODEL, B[None], 9, 0, cache=cache, prefill_chunk=chunk, progress=progress)
    read = at if at < 13 else 10
    assert cache.n_tokens == read and torch.equal(cache.pending, B[None, read:])
    fed = []
    hook = MODEL.embed.register_forward_hook(lambda m, args, out: fed.append(args[0].numel()))
    rest = generate(MODEL, B[None, :0], 9, 0, cache=cache)
    hook.remove()
    assert fed == [13 - read] + [1]*8 and torch.equal(rest[0], TEXT[False][13:22]), "nothing is read twice"

def test_progress_of_texts():
    seen = []
    generate(MODEL, [A, B], 2, 0, prefill_chunk=6, progress=lambda *x: seen.append(x))
    assert seen == [(6, 18), (12, 18), (18, 18)]
    seen.clear()
    list(stream(MODEL, B[None], 3, 0, progress=lambda *x: seen.append(x)))
    assert seen == [(13, 13)], "the prompt's, not the tokens'"

def test_a_progress_bar(capsys):
    generate(MODEL, B[None], 2, 0, prefill_chunk=4, progress=True)
    assert "prompt" in capsys.readouterr().err
    generate(MODEL, B[None], 2, 0, progress=True) # one chunk
    generate(MODEL, B[None], 2, 0, prefill_chunk=4, progress=False)
    assert capsys.readouterr().err == ""

def test_what_a_stream_has_handed_out_is_there():
    "Interrupted in its fifth step: four tokens are the consumer's, and the cache goes on behind them"
    cache, got, calls = MixedKVCache(), [], []
    def fail(*_):
        calls.append(1)
        if len(calls) == 5: raise KeyboardInterrupt
    hook = MODEL.blocks[1].register_forward_pre_hook(fail)
    s = stream(MODEL, A[None], 20, 0, cache=cache)
    with pytest.raises(KeyboardInterrupt):
        for t in s: got.append(t)
    hook.remove()
    assert len(got) == 4 and list(s) == [], "the stream has ended"
    rest = generate(MODEL, A[None, :0], 16, 0, cache=cache)
    assert torch.equal(torch.cat([A, torch.cat(got), rest[0]]), TEXT[True][:25])

def test_streams_close(recwarn):
    "Closed, dropped, or thrown into: no warning, no state left behind, and the cache goes on"
    for leave in (lambda s: s.close(), lambda s: None, lambda s: pytest.raises(ZeroDivisionError, s.throw, ZeroDivisionError)):
        for prompt in (A[None], [A, B]):
            cache = MixedKVCache() if isinstance(prompt, torch.Tensor) else RaggedKVCache()
            s = stream(MODEL, prompt, 20, 0, cache=cache)
            next(s), next(s)
            leave(s)
            del s
            rows = [cache] if isinstance(cache, MixedKVCache) else cache.rows
            for c, text in zip(rows, (TEXT[True], TEXT[False])):
                assert c._step is None and torch.equal(generate(MODEL, A[None, :0], 5, 0, cache=c)[0], text[c.n_tokens-4:c.n_tokens+1])
    assert torch.is_grad_enabled() and not recwarn.list

def test_a_failed_refusal_reserves_nothing():
    "An empty cache whose first step failed makes no room for it the next time"
    cache, hook = MixedKVCache(), MODEL.blocks[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError): generate(MODEL, A[None], 500, 0, cache=cache)
    hook.remove()
    generate(MODEL, A[None], 3, 0, cache=cache)
    assert cache.global_caps[1] == 8
