"""Going back, sharing, selecting rows, steps that fail: against a plain list of tokens, whatever the order of the calls."""
import copy
import gc
import importlib
import json
import subprocess
import sys
import tempfile
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from torch.utils._python_dispatch import TorchDispatchMode

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.config import ModelConfig
from gptoss_lite.files import load_cache, save_cache
from gptoss_lite.generation import forward_step
from gptoss_lite.growth import GrowingBuffer
from gptoss_lite.operate import mark_nbytes
from gptoss_lite.ring import RingBuffer
from oracle import config, random_ids, random_model, worst

B, HKV, D = 2, 3, 4
TOKEN = 2*HKV*D*8 # bytes of one token of one row in float64, key and value
LAYERS = {0: 4, 1: None, 2: 1, 3: None} # the window, or None for a global layer

def kv(tokens, rows, dtype=torch.float64):
    "Token t of row r: t, and a fraction that tells rows, heads and dimensions apart; values are the negatives"
    t = torch.tensor(tokens, dtype=torch.float64)[None, None, :, None]
    r = torch.tensor(rows, dtype=torch.float64)[:, None, None, None] / 10
    k = t + r + torch.arange(HKV*D, dtype=torch.float64).view(1, HKV, 1, D) / 1000
    return k.to(dtype), -k.to(dtype)

def storage(x): return x.untyped_storage()

attn = lambda W: SimpleNamespace(is_windowed=W is not None, window_size=W or 9, n_kv_heads=HKV, head_dim=D)
MODEL = SimpleNamespace(cfg=SimpleNamespace(to_dict=lambda: dict(layers=4)), parameters=lambda: iter([torch.zeros(1)]),
                        blocks=[SimpleNamespace(attn=attn(W)) for W in LAYERS.values()]) # what a file asks of a model

# ---- the state machine -----------------------------------------------------------------------------------------

class Holder:
    "A cache, and what it should be: a list of tokens, the same for all rows"
    def __init__(self, cache, tokens=(), rows=range(B), lost=None):
        self.cache, self.tokens = cache, list(tokens)
        self.rows = list(rows) # which row of the first cache each row was
        self.lost = dict(lost or {W: 0 for W in LAYERS.values() if W}) # for each window, how many of the oldest tokens have left the slots
        self.marks, self.dead = [], [] # (mark, tokens, lost); those that must be refused

class Operating(RuleBasedStateMachine):
    MOST = 4 # caches at a time

    def __init__(self):
        super().__init__()
        self.n = 0 # tokens are numbered throughout, so that another cache's token is seen
        self.holders, self.saved, self.folder = [], [], tempfile.TemporaryDirectory()

    def teardown(self): self.folder.cleanup()

    # -- the model --

    def add(self, *args):
        if len(self.holders) < self.MOST: self.holders.append(Holder(*args))

    def new(self, n):
        self.n += n
        return list(range(self.n - n + 1, self.n + 1))

    def budget(self, h):
        "What can be taken back"
        T, n = len(h.tokens), h.cache.max_rewind
        return min([n, T, *(T - lost - W if lost else T for W, lost in h.lost.items())])

    def grown(self, h, new):
        below = len(h.tokens)
        h.dead += [m for m in h.marks if len(m[1]) > below]
        h.marks = [m for m in h.marks if len(m[1]) <= below]
        h.tokens = h.tokens + new
        for W in h.lost: h.lost[W] = max(h.lost[W], len(h.tokens) - W - h.cache.max_rewind)

    # -- the rules --

    @initialize(rewind=st.integers(0, 5))
    def build(self, rewind): self.add(MixedKVCache(rewind=rewind))

    def pick(self, data, of=None):
        "By its place: what is drawn lives on in hypothesis, and a cache that is dropped must go"
        of = self.holders if of is None else of
        return of[data.draw(st.integers(0, len(of) - 1), label="cache")]

    @rule(data=st.data(), calls=st.lists(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9, 13]), min_size=1, max_size=6),
          how=st.sampled_from(["update", "append", "update in steps", "append in a step"]))
    def feed(self, data, calls, how):
        h = self.pick(data)
        with h.cache.step() if how == "append in a step" else nullcontext():
            for n in calls:
                new = self.new(n)
                with h.cache.step() if how == "update in steps" else nullcontext():
                    for i, W in LAYERS.items():
                        args = i, *kv(new, h.rows), W is not None, W
                        if "append" in how: h.cache.append(*args)
                        else: self.see(h, h.cache.update(*args), ([] if W == 1 else h.tokens if W is None else h.tokens[1-W:]) + new, n > 1)
                self.grown(h, new)

    def see(self, h, got, right, ordered):
        "`got` is what `right` says, in this order or, for one token, in any"
        k, v = kv(right, h.rows)
        if not ordered:
            k, v = (x.sort(2).values for x in (k, v))
            got = tuple(x.sort(2).values for x in got)
        assert torch.equal(got[0], k) and torch.equal(got[1], v), right

    @rule(data=st.data(), n=st.sampled_from([1, 2, 3, 5, 13]), at=st.integers(0, 2*len(LAYERS)))
    def fail(self, data, n, at):
        "A step of two calls that raises before, between and after the layers"
        h = self.pick(data)
        new, wrote = self.new(2*n), False
        with pytest.raises(KeyboardInterrupt), h.cache.step():
            for half in (new[:n], new[n:]):
                for i, W in LAYERS.items():
                    if at == 0: raise KeyboardInterrupt
                    at, wrote = at - 1, wrote or W is None
                    h.cache.append(i, *kv(half, h.rows), W is not None, W)
            raise KeyboardInterrupt
        if wrote and h.tokens: # what a mark further on relied on has been overwritten
            h.dead += [m for m in h.marks if len(m[1]) > len(h.tokens)]
            h.marks = [m for m in h.marks if len(m[1]) <= len(h.tokens)]

    @rule(data=st.data(), how=st.sampled_from(["snapshot", "rewind", "restore", "rewind", "restore", "refused"]))
    def go_back(self, data, how):
        if how == "refused": return self.restore_refused(data)
        h = self.pick(data)
        if how == "snapshot" or how == "restore" and not h.marks:
            m = h.cache.snapshot()
            rings = [b for b in h.cache.buffers.values() if isinstance(b, RingBuffer)]
            assert m.n_tokens == len(h.tokens)
            assert m.nbytes == sum(b.nbytes for b in rings if h.tokens) <= len(h.rows)*TOKEN*(4 + 1 + 2*h.cache.max_rewind)
            h.marks.append((m, list(h.tokens), dict(h.lost)))
        elif how == "restore":
            m, tokens, lost = self.pick(data, h.marks)
            h.cache.restore(m)
            h.tokens, h.lost = list(tokens), dict(lost)
        else:
            most = self.budget(h)
            assert h.cache.rewindable == most
            k = data.draw(st.integers(0, most + 1), label="k")
            if k > most:
                with pytest.raises(ValueError, match=f"n={k}.*at most {most}"): h.cache.rewind(k)
            else:
                h.cache.rewind(k)
                h.tokens = h.tokens[:len(h.tokens) - k]

    def restore_refused(self, data):
        "A mark that was written below, of before a reset, or of another cache"
        bad = [(h.cache, m) for h in self.holders for o in self.holders for m, *_ in o.dead + (o.marks if o is not h else [])]
        if not bad: return
        cache, m = self.pick(data, bad)
        with pytest.raises(ValueError, match="mark"): cache.restore(m)

    @rule(data=st.data(), how=st.sampled_from(["fork", "fork", "fork", "deepcopy", "select", "repeat"]))
    def another(self, data, how):
        h = self.pick(data)
        if how == "fork": return self.add(h.cache.fork(), h.tokens, h.rows, h.lost)
        if how == "repeat":
            n = data.draw(st.integers(1, 2 if len(h.rows) < 4 else 1))
            new, rows = h.cache.repeat(n), [r for r in h.rows for _ in range(n)]
        elif how == "select":
            of = data.draw(st.lists(st.integers(0, len(h.rows) - 1), min_size=1, max_size=3), label="rows")
            new, rows = h.cache.select(of), [h.rows[r] for r in of]
        else: new, rows = copy.deepcopy(h.cache), h.rows
        right = sum(len(h.tokens) if W is None else W + h.cache.max_rewind for W in LAYERS.values()) if h.tokens else 0
        assert new.nbytes == len(rows)*TOKEN*right # what is visible and no more
        self.add(new, h.tokens, rows, h.lost)

    @rule(data=st.data(), how=st.sampled_from(["reserve", "reserve", "reset", "drop"]))
    def others(self, data, how):
        h = self.pick(data)
        if how == "drop" and len(self.holders) > 1: self.holders.remove(h)
        if how == "reserve":
            n = len(h.tokens) + data.draw(st.integers(0, 20), label="more")
            h.cache.reserve(n)
            if h.tokens: assert min(h.cache.global_caps[1], h.cache.global_caps[3]) >= n
        if how == "reset":
            h.cache.reset()
            h.dead, h.marks, h.tokens = h.dead + h.marks, [], []
            h.lost = {W: 0 for W in h.lost}

    @rule(data=st.data(), how=st.sampled_from(["save", "load", "load anew"]))
    def file(self, data, how):
        h, at = self.pick(data), lambda i: f"{self.folder.name}/{i}.safetensors"
        if how == "save" or not self.saved:
            save_cache(h.cache, at(len(self.saved)), MODEL, torch.tensor([h.tokens]*len(h.rows)), weights="w")
            self.saved.append((list(h.tokens), list(h.rows), dict(h.lost), h.cache.max_rewind))
            return
        i = data.draw(st.integers(0, len(self.saved) - 1), label="file")
        tokens, rows, lost, rewind = self.saved[i]
        cache, ids = load_cache(at(i), MODEL, h.cache if how == "load" else None, weights="w")
        if tokens: assert ids.tolist() == [tokens]*len(rows)
        if how == "load anew": return self.add(cache, tokens, rows, lost)
        assert cache is h.cache
        h.dead, h.marks = h.dead + h.marks, []
        h.tokens, h.rows = list(tokens), list(rows)
        h.lost = {W: max(n, len(tokens) - W - cache.max_rewind) for W, n in lost.items()}

    # -- what must hold after every step --

    @invariant()
    def all_hold_what_they_should(self):
        for h in self.holders:
            c, T = h.cache, len(h.tokens)
            assert c.n_tokens == T and len(c) == (4 if T else 0)
            for i, W in LAYERS.items():
                right = h.tokens if W is None else h.tokens[-W:]
                got = c.get(i, W is not None)
                assert c.seq_len(i, W is not None) == len(right)
                if not right: assert got == (None, None)
                else:
                    k, v = kv(right, h.rows)
                    assert torch.equal(got[0], k) and torch.equal(got[1], v), (i, right)
            assert c.used_nbytes == len(h.rows)*TOKEN*sum(T if W is None else min(T, W) for W in LAYERS.values())

    @invariant()
    def bytes_are_counted(self):
        places = [{storage(x).data_ptr(): storage(x).nbytes() for b in h.cache.buffers.values() for x in (b.k, b.v)} for h in self.holders]
        for i, (h, mine) in enumerate(zip(self.holders, places)):
            others = {p for j, o in enumerate(places) if j != i for p in o}
            assert h.cache.nbytes == sum(mine.values())
            assert h.cache.shared_nbytes == sum(n for p, n in mine.items() if p in others and n)
            for b in h.cache.buffers.values():
                if isinstance(b, RingBuffer): assert b.nbytes == len(h.rows)*TOKEN*(b.window + h.cache.max_rewind)

def operate(sequences, steps=40):
    run_state_machine_as_test(Operating, settings=settings(settings.get_profile("checks"), max_examples=sequences, stateful_step_count=steps,
                              suppress_health_check=list(HealthCheck)))

def test_any_order_of_calls(): operate(100)

@pytest.mark.slow
def test_any_order_of_calls_at_length(): operate(2000, 60)

# ---- a ring that can go back -----------------------------------------------------------------------------------

def ring_like(tokens, W, n):
    ring = RingBuffer(W, n)
    if tokens: ring.append(*kv(tokens, [0]))
    return ring

@pytest.mark.parametrize("W", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_ring_goes_back_exactly(W, n):
    "After any number of tokens, alone or in chunks: as if the newest had never come, and what comes then is right, too"
    for calls in ([1]*(2*(W+n)+1), [W+n], [W+n+1], [3*(W+n)], [W, 1], [1, W+n-1 or 1], [2, 3, 4, 5, 6]):
        ring, T = RingBuffer(W, n), 0
        for c in calls:
            ring.append(*kv(list(range(T+1, T+c+1)), [0]))
            T += c
            for k in range(min(n, T) + 1):
                back, left = copy.deepcopy(ring), list(range(1, T-k+1))
                back.rewind(k)
                assert (back.n_tokens, back.count) == (T-k, min(T-k, W)) and back.rewindable >= min(n, T) - k
                if left: assert torch.equal(back.get()[0], kv(left[-W:], [0])[0])
                else: assert back.get() == (None, None)
                for new in ([90], [90, 91], list(range(90, 90+W+n+1))):
                    other = copy.deepcopy(back)
                    seen = other.update(*kv(new, [0]))[0]
                    right = ([] if W == 1 else left[1-W:]) + new
                    assert sorted(seen[0, 0, :, 0].tolist()) == kv(right, [0])[0][0, 0, :, 0].tolist()
                    assert torch.equal(other.get()[0], kv((left + new)[-W:], [0])[0])

def test_further_slots_are_counted_and_not_seen():
    ring = ring_like(list(range(1, 21)), 3, 4)
    assert ring.nbytes == storage(ring.k).nbytes() + storage(ring.v).nbytes() == 7*TOKEN and ring.used_nbytes == 3*TOKEN
    assert ring.update(*kv([21], [0]))[0].shape[2] == 3 and ring.update(*kv([22, 23], [0]))[0].shape[2] == 4

def test_without_further_slots_one_token_is_not_copied():
    ring = ring_like(list(range(1, 21)), 3, 0)
    assert storage(ring.update(*kv([21], [0]))[0]).data_ptr() == storage(ring.k).data_ptr()

def test_a_ring_that_has_lost_a_token_says_so():
    ring = ring_like([1, 2, 3], 3, 0)
    assert ring.rewindable == 3
    ring.append(*kv([4], [0]))
    before = ring.snapshot()
    with pytest.raises(ValueError, match="n=1: must be at most 0.*nothing was changed"): ring.rewind(1)
    assert (ring.head, ring.kept, ring.n_tokens) == before[2:] and torch.equal(ring.k, before.k)

@pytest.mark.parametrize("bad,exc", [(-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)])
def test_impossible_numbers(bad, exc):
    for make in (lambda: RingBuffer(3, bad), lambda: MixedKVCache(rewind=bad)):
        with pytest.raises(exc, match="rewind"): make()
    for c in (RingBuffer(3, 2), GrowingBuffer(), MixedKVCache(rewind=2)):
        with pytest.raises(exc, match="n="): c.rewind(bad)
    with pytest.raises((exc, ValueError), match="n="): MixedKVCache().repeat(bad)

# ---- rewind, snapshot, restore of a cache ----------------------------------------------------------------------

def fill(cache, tokens, rows=range(B)):
    for i, W in LAYERS.items(): cache.append(i, *kv(list(tokens), list(rows)), W is not None, W)
    return cache

def holds(cache, tokens, rows=range(B)):
    tokens, rows = list(tokens), list(rows)
    for i, W in LAYERS.items():
        for x, y in zip(cache.get(i, W is not None), kv(tokens if W is None else tokens[-W:], rows)): assert torch.equal(x, y), i
    assert cache.n_tokens == len(tokens)

def test_more_than_the_cache_was_made_for_is_refused():
    "Also where the rings happen to hold it: whether it works must not depend on how long the text is"
    cache = fill(MixedKVCache(rewind=2), range(3))
    cache.pending = torch.tensor([[7], [8]])
    assert cache.rewindable == 2
    with pytest.raises(ValueError, match="n=3: must be at most 2.*rewind=2.*nothing was changed"): cache.rewind(3)
    holds(cache, range(3))
    cache.rewind(0)
    assert cache.pending is not None
    cache.rewind(2)
    holds(cache, range(1))
    assert cache.pending is None  # it was chosen behind tokens that are gone

def test_a_budget_that_is_spent():
    cache = fill(MixedKVCache(rewind=3), range(30))
    cache.rewind(2)
    assert cache.rewindable == 1
    with pytest.raises(ValueError, match="n=2: must be at most 1"): cache.rewind(2)
    fill(cache, [50])
    assert cache.rewindable == 2
    cache.rewind(2)
    holds(cache, range(27))

def test_a_mark_is_restored_any_number_of_times_and_across_growth():
    cache = fill(MixedKVCache(), range(9))
    cache.pending = torch.tensor([[5], [6]])
    mark = cache.snapshot()
    for n in (1, 40, 3, 500, 2):
        fill(cache, range(100, 100+n))
        cache.pending = None
        cache.restore(mark)
        holds(cache, range(9))
        assert cache.pending.tolist() == [[5], [6]]
        cache.pending += 1  # and what is done to it now does not reach the mark

def test_a_mark_of_nothing():
    cache = MixedKVCache()
    empty = cache.snapshot()
    assert (empty.nbytes, empty.n_tokens) == (0, 0)
    fill(cache, range(20))
    full = cache.snapshot()
    cache.restore(empty)
    assert len(cache) == cache.n_tokens == cache.used_nbytes == 0 and cache.get(1, False) == (None, None)
    cache.restore(full)  # nothing was written since
    holds(cache, range(20))
    cache.restore(empty)
    holds(fill(cache, [7]), [7])
    with pytest.raises(ValueError, match="mark of 20 tokens: layer 1.*nothing was changed"): cache.restore(full)
    holds(cache, [7])

def test_a_cache_that_was_emptied_is_as_free_as_a_new_one():
    "Another batch, another number type, and layers of other kinds; what was reserved is remembered"
    for rewind in (0, 30):
        cache = MixedKVCache(rewind=rewind)
        cache.reserve(40)
        empty = cache.snapshot()
        fill(cache, range(20))
        full = cache.snapshot()
        cache.rewind(20) if rewind else cache.restore(empty)
        assert cache.batch_size is None and cache.select([7]).nbytes == cache.fork().nbytes == copy.deepcopy(cache).nbytes == 0
        with pytest.raises(ValueError): cache.update(0, *kv([1], [0]), True, 0)  # refused: nothing has changed
        with pytest.raises(KeyboardInterrupt), cache.step():
            fill(cache, [5], [0])
            raise KeyboardInterrupt
        cache.restore(full)
        holds(cache, range(20))
        cache.rewind(20) if rewind else cache.restore(empty)
        for i in range(4): cache.append(i, *kv(list(range(9)), [0], torch.float32), i % 2 == 1, 5)
        assert cache.n_tokens == 9 and cache.batch_size == 1 and cache.global_caps == [40, 0, 40, 0]
        with pytest.raises(ValueError, match="mark"): cache.restore(full)

def test_a_mark_of_an_emptied_cache():
    cache = fill(MixedKVCache(rewind=9), range(5))
    cache.rewind(5)
    empty = cache.snapshot()
    assert empty.nbytes == 0
    for n in (3, 20):
        fill(cache, range(n))
        cache.restore(empty)
        assert cache.n_tokens == len(cache) == 0

def test_a_mark_is_lost_when_something_is_written_below_it():
    cache = fill(MixedKVCache(rewind=4), range(20))
    low, high = (cache.snapshot(), fill(cache, [20, 21]) and cache.snapshot())
    cache.rewind(3)
    cache.restore(high)  # nothing written yet
    cache.rewind(2)
    fill(cache, [30])  # at the low mark's length: only the high one is lost
    with pytest.raises(ValueError, match="mark of 22 tokens"): cache.restore(high)
    holds(cache, [*range(20), 30])
    cache.restore(low)
    holds(cache, range(20))

def test_reserving_after_going_back_keeps_the_mark():
    cache = fill(MixedKVCache(rewind=4), range(20))
    mark = cache.snapshot()
    cache.rewind(3)
    cache.reserve(100)
    cache.restore(mark)
    holds(cache, range(20))

@pytest.mark.parametrize("how", ["reset", "to", "another cache", "a fork", "deepcopy", "no mark"])
def test_marks_that_are_void(how):
    cache = fill(MixedKVCache(), range(9))
    mark, other = cache.snapshot(), cache
    match how:
        case "reset": fill(cache.reset() or cache, range(9))
        case "to": cache.to("meta")
        case "another cache": other = fill(MixedKVCache(), range(9))
        case "a fork": other = cache.fork()
        case "deepcopy": other = copy.deepcopy(cache)
        case "no mark": mark = None
    with pytest.raises(TypeError if how == "no mark" else ValueError, match="mark"): other.restore(mark)
    if how != "to": holds(other, range(9))

def test_a_mark_weighs_what_the_rings_weigh():
    "Whatever the length, and it copies nothing of the global layers"
    k = torch.zeros(1, 4, 2048, 96, dtype=torch.bfloat16, device="meta")
    cfg, sizes = ModelConfig(), []
    cache = MixedKVCache(rewind=16)
    for n in range(64):
        for i, kind in enumerate(cfg.kinds): cache.update(i, k, k, kind == "windowed", cfg.window_size)
        sizes.append(cache.snapshot().nbytes)
    assert set(sizes) == {mark_nbytes(cfg, rewind=16)} == {6*(128 + 16)*1536} and cache.n_tokens == 131_072

# ---- forks -----------------------------------------------------------------------------------------------------

def places(cache): return {i: b.k.data_ptr() for i, b in cache.buffers.items() if isinstance(b, GrowingBuffer)}

def test_one_writes_in_place_and_the_others_copy():
    for first in ("parent", "child"):
        parent = fill(MixedKVCache(), range(9))
        parent.reserve(50)
        child, at = parent.fork(), places(parent)
        assert places(child) == at and child.shared_nbytes == parent.shared_nbytes == 2*50*B*TOKEN
        assert child.nbytes == parent.nbytes == (2*50 + 4 + 1)*B*TOKEN
        one, two = (parent, child) if first == "parent" else (child, parent)
        for t in range(3):
            fill(one, [10+t]), fill(two, [20+t])
            holds(one, [*range(9), *range(10, 11+t)]), holds(two, [*range(9), *range(20, 21+t)])
        assert places(one) == at and places(two) != at and one.shared_nbytes == two.shared_nbytes == 0

def test_a_fork_that_is_gone_costs_no_copy():
    parent = fill(MixedKVCache(rewind=3), range(9))
    parent.reserve(50)
    at, child = places(parent), parent.fork()
    fill(child, [30, 31])
    del child
    fill(parent, [40])
    assert places(parent) == at
    holds(parent, [*range(9), 40])

def test_a_child_never_writes_where_a_mark_of_the_parent_points():
    parent = fill(MixedKVCache(rewind=4), range(12))
    parent.reserve(50)
    mark = parent.snapshot()
    parent.rewind(4)
    child = parent.fork()  # both hold 8, and the parent may go back to 12
    fill(child, [30])
    parent.restore(mark)
    holds(parent, range(12)), holds(child, [*range(8), 30])
    parent.rewind(3)
    fill(parent, [40, 41])
    with pytest.raises(ValueError, match="mark of 12"): parent.restore(mark)
    holds(parent, [*range(9), 40, 41]), holds(child, [*range(8), 30])

def test_who_goes_back_behind_another_copies():
    parent = fill(MixedKVCache(rewind=4), range(12))
    parent.reserve(50)
    child, at = parent.fork(), places(parent)
    parent.rewind(4)
    parent.reserve(40)  # its room has been taken by the child: it gets its own now, and nothing moves later
    moved = places(parent)
    assert moved != at
    fill(parent, [50])
    assert places(parent) == moved
    holds(child, range(12)), holds(parent, [*range(8), 50])
    fill(child, [60])
    assert places(child) == at
    holds(child, [*range(12), 60])

def test_one_token_behind_is_behind():
    a = fill(MixedKVCache(), range(9))
    a.reserve(50)
    b = a.fork()
    fill(b, [30])
    fill(a, [40])
    holds(b, [*range(9), 30]), holds(a, [*range(9), 40])

def test_forks_of_forks():
    caches = [fill(MixedKVCache(), range(5))]
    caches[0].reserve(30)
    for i in range(4): caches.append(fill(caches[-1].fork(), [100+i]))
    for i, c in enumerate(caches): holds(c, [*range(5), *range(100, 100+i)])
    assert len({tuple(places(c).items()) for c in caches}) == 1  # each wrote behind the one before: no copy yet
    for i, c in enumerate(caches): fill(c, [200+i])
    for i, c in enumerate(caches): holds(c, [*range(5), *range(100, 100+i), 200+i])

def test_an_empty_cache_forks():
    a = MixedKVCache(rewind=2, max_tokens=40)
    a.reserve(30)
    b = a.fork()
    fill(a, range(4)), fill(b, range(9, 15))
    holds(a, range(4)), holds(b, range(9, 15))
    assert b.global_caps[1] == 30 and b.max_tokens == 40 and b.max_rewind == 2 and b.shared_nbytes == 0

# ---- rows ------------------------------------------------------------------------------------------------------

def test_rows():
    cache = fill(MixedKVCache(rewind=2), range(9), [0, 1, 2])
    cache.pending = torch.tensor([[5], [6], [7]])
    one, two = cache.select([2, 0]), cache.repeat(2)
    holds(one, range(9), [2, 0]), holds(two, range(9), [0, 0, 1, 1, 2, 2])
    assert one.pending.tolist() == [[7], [5]] and two.pending.tolist() == [[5], [5], [6], [6], [7], [7]]
    holds(cache.select(torch.tensor([1])), range(9), [1])
    fill(one, [50], [2, 0]), fill(two, [60], [0, 0, 1, 1, 2, 2])
    holds(one, [*range(9), 50], [2, 0]), holds(two, [*range(9), 60], [0, 0, 1, 1, 2, 2]), holds(cache, range(9), [0, 1, 2])
    assert one.rewindable == 2 and one.max_rewind == 2
    assert MixedKVCache().select([0]).nbytes == 0

@pytest.mark.parametrize("rows,exc", [([3], ValueError), ([-1], ValueError), ([], TypeError), ([True, False, True], TypeError), ([0.], TypeError),
                                      (1, TypeError), ([[0]], TypeError), (torch.tensor([True, False, True]), TypeError), (None, TypeError)])
def test_impossible_rows(rows, exc):
    cache = fill(MixedKVCache(), range(9), [0, 1, 2])
    with pytest.raises(exc, match="rows"): cache.select(rows)
    holds(cache, range(9), [0, 1, 2])

# ---- an object -------------------------------------------------------------------------------------------------

def test_to():
    cache = fill(MixedKVCache(), range(9))
    cache.pending = torch.tensor([[5], [6]])
    mark = cache.snapshot()
    assert cache.to("cpu") is cache
    cache.restore(mark)  # it was there already: nothing has changed
    fork = cache.fork()
    assert cache.to(torch.device("meta")) is cache and cache.get(1, False)[0].device.type == cache.pending.device.type == "meta"
    assert cache.n_tokens == 9 and cache.shared_nbytes == fork.shared_nbytes == 0
    holds(fork, range(9))

def test_repr():
    cache = fill(MixedKVCache(rewind=2), range(9))
    for word in ("9 tokens", "batch 2", "2 windowed (W=1, 4)", "2 global", "torch.float64", "cpu", "held", "2 can be taken back"): assert word in repr(cache)
    assert "empty" in repr(MixedKVCache()) and "shared" not in repr(cache)
    fork = cache.fork()
    assert "shared" in repr(cache) and repr(fork) == repr(cache)

def test_a_deep_copy_holds_what_is_visible_and_no_more():
    cache = fill(MixedKVCache(), range(9))
    cache.reserve(1000)
    other = copy.deepcopy(cache)
    assert other.nbytes == sum(storage(x).nbytes() for b in other.buffers.values() for x in (b.k, b.v)) == (2*9 + 4 + 1)*B*TOKEN
    assert other.shared_nbytes == 0
    fill(other, [50])
    holds(cache, range(9)), holds(other, [*range(9), 50])
    for b in (cache.buffers[1], cache.buffers[0]): assert torch.equal(copy.deepcopy(b).get()[0], b.get()[0])

# ---- a step that fails -----------------------------------------------------------------------------------------

def state(cache):
    "All that can be seen and all that can be gone back to"
    held = [b.get() for b in cache.buffers.values()]
    return ([x.clone() for kv in held if kv[0] is not None for x in kv], len(cache), cache.n_tokens, cache.rewindable, list(cache.buffers),
            [(b.n_tokens, b.rewindable) for b in cache.buffers.values()], None if cache.pending is None else cache.pending.tolist())

def same_state(a, b):
    assert a[1:] == b[1:]
    assert len(a[0]) == len(b[0]) and all(torch.equal(x, y) for x, y in zip(a[0], b[0]))

class RaiseAt(TorchDispatchMode):
    "Raise before (or just after) the n-th operation, allocations and writes among them"
    def __init__(self, n, after): super().__init__(); self.left, self.after = n, after
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0 and not self.after: raise MemoryError(f"at {func}")
        out = func(*args, **(kwargs or {}))
        if self.left < 0: raise MemoryError(f"after {func}")
        return out

@pytest.mark.parametrize("rewind,back", [(0, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("n,T", [(0, 1), (0, 5), (2, 1), (3, 5), (9, 1), (9, 3), (9, 20)])
def test_a_step_raises_at_every_operation(n, T, rewind, back):
    "Before or after every operation of the cache, allocations and writes among them, in every layer: it is what it was"
    cache = MixedKVCache(rewind=rewind)
    if n: fill(cache, range(n)), cache.rewind(back)
    before = state(cache)
    for after in (False, True):
        for at in range(10_000):
            try:
                with cache.step(), RaiseAt(at, after): fill(cache, range(50, 50+T))
            except MemoryError: same_state(state(cache), before)
            else: break
        assert at >= 4*4  # and the last try went through
        holds(cache, [*range(n)][:n-back if n else 0] + [*range(50, 50+T)])
        cache = MixedKVCache(rewind=rewind)
        if n: fill(cache, range(n)), cache.rewind(back)

@pytest.mark.parametrize("n,T", [(0, 5), (7, 1), (7, 9)])
def test_a_model_raises_at_every_operation(n, T):
    "In a layer, between two, while growing: the next try gives the logits of one uncached run"
    cfg = config(n_layers=3, window_size=3, n_routed_experts=2, n_activated_experts=1)
    model, ids, cache, at = random_model(cfg), random_ids(cfg, 2, n + T + 4), MixedKVCache(), 0
    with torch.no_grad():
        if n: forward_step(model, ids[:, :n], 0, cache, {})
        before = state(cache)
        while True:
            try:
                with cache.step(), RaiseAt(at, False): x = forward_step(model, ids[:, n:n+T], n, cache, {})
            except MemoryError: same_state(state(cache), before)
            else: break
            at += 1
        assert at > 100
        logits = model.logits(torch.cat([x, forward_step(model, ids[:, n+T:], n+T, cache, {})], 1))
        assert worst(logits, model(ids)[0][:, n:]) < 1e-9

@pytest.mark.parametrize("T", [1, 2, 9])
def test_an_interrupt_at_every_line(T):
    "KeyboardInterrupt at each line of the cache that a step runs"
    files = {m.__file__ for m in map(importlib.import_module, ("gptoss_lite.ring", "gptoss_lite.growth", "gptoss_lite.cache"))}
    cache = fill(MixedKVCache(rewind=1), range(9))
    before, at = state(cache), 0
    def tracer(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "step": return
        if event == "line":
            left -= 1
            if left < 0: raise KeyboardInterrupt
        return tracer
    while True:
        left = at
        old = sys.gettrace()
        try:
            with cache.step():
                sys.settrace(tracer)
                try: fill(cache, range(50, 50+T))
                finally: sys.settrace(old)
        except KeyboardInterrupt: same_state(state(cache), before)
        else: break
        at += 1
    assert at > 100
    holds(cache, [*range(9), *range(50, 50+T)])

def test_what_a_step_logs():
    "At most min(T, slots) tokens of each ring, nothing of a global layer, and nothing where free slots are enough"
    for n, T, rewind, right in ((9, 1, 0, 1), (9, 3, 0, 3), (9, 20, 0, 4), (9, 20, 2, 6), (2, 1, 0, 0), (9, 2, 2, 2)):
        cache = fill(MixedKVCache(rewind=rewind), range(n))
        with cache.step():
            fill(cache, range(50, 50+T))
            logged = [sum(k.shape[2] for _, k, _ in log[0]) for buf, log in cache._step if isinstance(buf, RingBuffer)]
            assert logged[0] == right and len(cache._step) == 4
        assert cache._step is None

def test_a_step_in_a_step():
    cache = fill(MixedKVCache(), range(9))
    with cache.step():
        fill(cache, [10])
        with pytest.raises(ZeroDivisionError), cache.step():
            fill(cache, [11, 12])
            1/0
        holds(cache, [*range(9), 10])
        fill(cache, [13])
    holds(cache, [*range(9), 10, 13])
    with pytest.raises(ZeroDivisionError), cache.step():
        with cache.step(): fill(cache, [14]*5)
        1/0
    holds(cache, [*range(9), 10, 13])

def test_new_layers_of_a_step_that_fails_are_gone():
    cache = MixedKVCache()
    cache.reserve(30)
    with pytest.raises(ZeroDivisionError), cache.step(): fill(cache, range(9)), 1/0
    assert len(cache) == cache.nbytes == 0 and cache.buffers == {}
    assert fill(cache, range(3)).global_caps[1] == 30
    with pytest.raises(ZeroDivisionError), cache.step():
        cache.pending = torch.tensor([[1], [2]])
        cache.reset()
        fill(cache, range(5), [0])
        1/0
    holds(cache, range(3))
    assert cache.pending is None

@pytest.mark.parametrize("call", [lambda c, m: c.rewind(1), lambda c, m: c.restore(m), lambda c, m: c.to("meta")], ids=["rewind", "restore", "to"])
def test_what_a_step_could_not_undo_is_refused(call):
    cache = fill(MixedKVCache(rewind=2), range(9))
    mark = cache.snapshot()
    with pytest.raises(RuntimeError, match="step"), cache.step(): call(cache, mark)
    holds(cache, range(9))
    cache.rewind(1), cache.restore(mark)

# ---- with a model ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["float64", "float32"])
def test_logits_after_every_kind_of_way(dtype, atol):
    "Rewound, restored, forked, selected, repeated and copied: the logits are those of one uncached run"
    cfg = config(n_layers=4, window_size=4)
    model, ids, junk = random_model(cfg, dtype=dtype), random_ids(cfg, 3, 40), random_ids(cfg, 3, 40, 1)
    ref = model(ids)[0]
    sinks = {}
    run = lambda c, x, rows=slice(None): model.logits(forward_step(model, x[rows], c.n_tokens, c, sinks))
    with torch.no_grad():
        for T in (1, 3, 4, 5, 6, 8, 9, 21):
            cache = MixedKVCache(rewind=3)
            run(cache, ids[:, :T])
            mark = cache.snapshot()
            for n in (1, 2, 3): run(cache, junk[:, :n]), cache.rewind(n)
            run(cache, junk[:, :17]), cache.restore(mark)
            others = dict(fork=(cache.fork(), slice(None)), deep=(copy.deepcopy(cache), slice(None)),
                          select=(cache.select([2, 0]), [2, 0]), repeat=(cache.repeat(2), [0, 0, 1, 1, 2, 2]))
            for s in range(T, 38, 5):
                for name, (c, rows) in {"self": (cache, slice(None)), **others}.items():
                    assert worst(run(c, ids[:, s:s+1], rows), ref[rows][:, s:s+1]) < atol, (name, T, s)
                    assert worst(run(c, ids[:, s+1:s+5], rows), ref[rows][:, s+1:s+5]) < atol, (name, T, s)

# ---- lifetime --------------------------------------------------------------------------------------------------

def test_a_dropped_cache_is_freed():
    "At once, by its last reference; marks and forks hold on to nothing of it"
    gc.collect()
    gc.disable()
    try:
        cache = fill(MixedKVCache(rewind=2), range(9))
        with cache.step(): fill(cache, [9])
        mark, fork, other = cache.snapshot(), cache.fork(), copy.deepcopy(cache)
        with pytest.raises(ZeroDivisionError), cache.step(): fill(cache, [10]), 1/0
        cache.restore(mark), cache.rewind(1)
        refs = [weakref.ref(x) for x in (cache, *cache.buffers.values(), *(storage(b.k) for b in cache.buffers.values() if isinstance(b, RingBuffer)))]
        shared = [weakref.ref(storage(b.k)) for b in cache.buffers.values() if isinstance(b, GrowingBuffer)]
        del cache
        assert [r() for r in refs] == [None]*len(refs)
        assert None not in [r() for r in shared]
        holds(fork, range(10))
        del fork
        assert [r() for r in shared] == [None, None]  # the mark does not keep them
        with pytest.raises(ValueError, match="mark"): other.restore(mark)
    finally: gc.enable()

# ---- inference mode, and marks of what has become something else -----------------------------------------------

COPIES = {"fork": lambda c, *_: c.fork(), "select": lambda c, *_: c.select([0]), "repeat": lambda c, *_: c.repeat(1),
          "deepcopy": lambda c, *_: copy.deepcopy(c), "itself": lambda c, *_: c, "file": lambda c, model, path: load_cache(path, model)[0],
          "reserved": lambda c, *_: c.reserve(99) or c}

@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("inside", [True, False])
def test_what_inference_mode_has_made_can_be_written(tmp_path, how, inside):
    "`with torch.inference_mode()` around a part of the work, or around all of it"
    cfg = config()
    model, ids = random_model(cfg), random_ids(cfg, 1, 14)
    with torch.inference_mode():
        cache = MixedKVCache()
        forward_step(model, ids[:, :9], 0, cache, {})
        save_cache(cache, tmp_path/"c.safetensors", model)
        copied = COPIES[how](cache, model, tmp_path/"c.safetensors")
    with torch.inference_mode(inside), torch.no_grad(): got = model.logits(forward_step(model, ids[:, 9:], 9, copied, {}))
    with torch.no_grad(): assert (got - model(ids)[0][:, 9:]).abs().max() < 1e-9

def test_a_mark_of_a_layer_that_has_become_another_is_refused():
    for before, after, dtype in (((False,), (True, 4), torch.float64), ((True, 4), (False,), torch.float64), ((True, 4), (True, 4), torch.float32)):
        cache = MixedKVCache(rewind=30)
        cache.append(0, *kv([1, 2, 3], [0]), *before)
        mark = cache.snapshot()
        cache.rewind(3)
        cache.append(0, *kv([4, 5], [0], dtype), *after)
        held = cache.get(0, after[0])[0].clone()
        with pytest.raises(ValueError, match="mark of 3 tokens"): cache.restore(mark)
        assert torch.equal(cache.get(0, after[0])[0], held) and cache.n_tokens == 2

# ---- at length -------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    "20,000 steps with every way to go back among them, in a process of its own"
    out, script = tmp_path/"soak.json", Path(__file__).parent/"soak.py"
    subprocess.run([sys.executable, str(script), str(out)], check=True)
    soak = json.loads(out.read_text())
    rows = dict(soak["rows"])
    assert soak["steps"] == 20_000 and min(soak["counts"].values()) >= 20 and soak["worst"] < 1e-4
    assert rows[20_000] - rows[2_000] < 4*2**20, f"{(rows[20_000] - rows[2_000])/2**20:.1f} MiB more in the end"
