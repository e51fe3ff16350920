"""Ring, growing buffer and mixed cache: what they hold, what they weigh, what they refuse, and that refusing changes nothing."""
import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, strategies as st

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.generation import generate, prefill
from gptoss_lite.growth import GrowingBuffer
from gptoss_lite.ring import RingBuffer
from oracle import cached_logits, config, examples, random_ids, random_model, raw, same, snapshot, worst

B, HKV, D = 2, 3, 4

def kv(start, n, B=B, dtype=torch.float64, device="cpu"):
    "Token t carries t + 1 plus a fraction that tells rows, heads and dimensions apart; values are the negatives"
    t = torch.arange(start + 1, start + n + 1, dtype=torch.float64)[None, None, :, None]
    mark = torch.arange(B*HKV*D, dtype=torch.float64).view(B, HKV, 1, D) / 1000
    return (t + mark).to(dtype).to(device), -(t + mark).to(dtype).to(device)

def tokens(x): return [int(t) for t in x[0, 0, :, 0].tolist()]

def expect(got, numbers, dtype=torch.float64):
    "Keys and values of exactly these tokens, in this order"
    k = torch.cat([kv(t - 1, 1, got[0].shape[0], dtype)[0] for t in numbers], 2)
    assert torch.equal(got[0], k) and torch.equal(got[1], -k) and got[0].dtype == got[1].dtype == dtype

def storage(*xs): return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in xs}.values())

TOKEN = 2*B*HKV*D*8 # bytes of one token in float64, key and value

# ---- the ring --------------------------------------------------------------------------------------------------

def test_ring_of_three_after_seven():
    for split in ([7], [1]*7, [2, 5], [3, 4], [4, 3], [6, 1], [1, 2, 1, 3]):
        ring, t = RingBuffer(3), 0
        for n in split: ring.append(*kv(t, n)); t += n
        expect(ring.get(), [5, 6, 7])
        assert (ring.count, ring.n_tokens) == (3, 7)

def test_ring_of_one():
    ring = RingBuffer(1)
    for t in range(3):
        expect(ring.update(*kv(t, 1)), [t+1])
        expect(ring.get(), [t+1])
    expect(ring.update(*kv(3, 4)), [4, 5, 6, 7])
    expect(ring.get(), [7])
    assert (ring.head, ring.count, ring.n_tokens) == (0, 1, 7)

@pytest.mark.parametrize("W,T", [(W, T) for W in (1, 2, 3, 5) for T in sorted({W-1, W, W+1, 2*W, 2*W+1}) if T])
def test_ring_after_a_prompt(W, T):
    "Of W - 1, W, W + 1, 2 W and 2 W + 1 tokens"
    ring = RingBuffer(W)
    expect(ring.update(*kv(0, T)), range(1, T+1))  # a chunk's queries see all of it
    held = list(range(max(1, T-W+1), T+1))
    expect(ring.get(), held)
    assert (ring.head, ring.count, ring.n_tokens) == (T % W if T < W else 0, min(T, W), T)
    assert ring.nbytes == W*TOKEN == storage(ring.k, ring.v) and ring.used_nbytes == min(T, W)*TOKEN
    for t in range(T, T + 2*W):  # and then one by one
        seen = ring.update(*kv(t, 1))
        assert sorted(tokens(seen[0])) == list(range(max(1, t+2-W), t+2)) == sorted(tokens(-seen[1]))
        assert seen[0].untyped_storage().data_ptr() == ring.k.untyped_storage().data_ptr()  # no copy
        expect(ring.get(), range(max(1, t+2-W), t+2))
    assert storage(ring.k, ring.v) == W*TOKEN

@pytest.mark.parametrize("n", [3, 4, 7])
def test_a_chunk_as_long_as_the_ring_begins_it_anew(n):
    "From slot 0, so that what is held lies in order and `get` need not copy"
    ring = RingBuffer(3)
    ring.append(*kv(0, 2))
    ring.append(*kv(2, n))
    assert (ring.head, ring.count) == (0, 3) and ring.get()[0].data_ptr() == ring.k.data_ptr()
    expect((ring.k, ring.v), range(n, n+3))

@examples(100)
@given(W=st.integers(1, 7), calls=st.lists(st.integers(1, 16), min_size=1, max_size=8), data=st.data())
def test_ring_is_the_end_of_a_list(W, calls, data):
    "Against a plain list: what is held, and what each call may see"
    ring, model, t = RingBuffer(W), [], 0
    for n in calls:
        new = list(range(t+1, t+n+1))
        if data.draw(st.booleans()):
            seen = ring.update(*kv(t, n))
            right = model[-(W-1):]*(W > 1) + new  # the newest W - 1 before, and the new ones
            if n == 1: assert sorted(tokens(seen[0])) == right and sorted(tokens(-seen[1])) == right
            else: expect(seen, right)
        else: ring.append(*kv(t, n))
        model, t = (model + new)[-W:], t + n
        expect(ring.get(), model)
        assert (ring.count, ring.n_tokens) == (len(model), t) and 0 <= ring.head < W
        assert storage(ring.k, ring.v) == ring.nbytes == W*TOKEN and ring.used_nbytes == len(model)*TOKEN

def test_get_is_not_overwritten_where_it_is_a_copy():
    "After the ring has turned, what `get` gave stays as it was"
    ring = RingBuffer(3)
    ring.append(*kv(0, 3))
    ring.append(*kv(3, 1))
    held = ring.get()
    ring.append(*kv(4, 2))
    expect(held, [2, 3, 4])

def test_a_long_prompt_leaves_only_the_window():
    "Right after the prompt, not a step later, and no view keeps the prompt's storage alive"
    ring = RingBuffer(3)
    k, v = kv(0, 1000)
    gone = [weakref.ref(k.untyped_storage()), weakref.ref(v.untyped_storage())]
    ring.update(k, v)
    assert storage(ring.k, ring.v) == 3*TOKEN
    del k, v
    gc.collect()
    assert [g() for g in gone] == [None, None]

# ---- the growing buffer ----------------------------------------------------------------------------------------

@examples(100)
@given(calls=st.lists(st.integers(1, 40), min_size=1, max_size=30), cap=st.integers(1, 300), data=st.data())
def test_growth_follows_the_rule(calls, cap, data):
    "The specification's rule, and its cap"
    buf, t, capacity = GrowingBuffer(cap), 0, 0
    for n in calls:
        if t + n > cap:
            before = [raw(x) for x in (buf.k, buf.v)] if t else None
            with pytest.raises(ValueError, match=f"{t+n} tokens.*max_tokens={cap}"): buf.append(*kv(t, n))
            assert (buf.length, buf.capacity) == (t, capacity)
            if t: assert all(torch.equal(raw(x), y) for x, y in zip((buf.k, buf.v), before))
            continue
        right = list(range(1, t+n+1))
        if data.draw(st.booleans()): expect(buf.update(*kv(t, n)), right)
        else: buf.append(*kv(t, n))
        if capacity == 0: capacity = min(max(n, 1), cap)
        elif t + n > capacity: capacity = min(max(t + n, int(capacity*1.5) + 1), cap)
        t += n
        expect(buf.get(), right)
        assert (buf.length, buf.n_tokens, buf.capacity) == (t, t, capacity)
        assert buf.nbytes == capacity*TOKEN == storage(buf.k, buf.v) and buf.used_nbytes == t*TOKEN

def test_growth_by_hand():
    buf = GrowingBuffer()
    capacities = []
    for t in range(20):
        buf.append(*kv(t, 1))
        capacities.append(buf.capacity)
    assert capacities == [1, 2, 4, 4, 7, 7, 7, 11, 11, 11, 11] + [17]*6 + [26]*3
    assert buf.copied == 1 + 2 + 4 + 7 + 11 + 17  # the length at each growth

def test_default_cap():
    assert GrowingBuffer().max_tokens == MixedKVCache().max_tokens == 4_000_000
    with pytest.raises(ValueError, match="4000001.*4000000"): GrowingBuffer().reserve(4_000_001)

def test_get_is_a_view():
    buf = GrowingBuffer()
    buf.append(*kv(0, 5))
    assert buf.get()[0].data_ptr() == buf.k.data_ptr() and buf.update(*kv(5, 1))[0].data_ptr() == buf.k.data_ptr()

def test_reserve_of_a_buffer():
    buf = GrowingBuffer(50)
    buf.append(*kv(0, 4))
    buf.reserve(3)  # less than there is: nothing
    assert buf.capacity == 4
    buf.reserve(20)
    assert (buf.capacity, buf.length) == (20, 4) and buf.copied == 4
    at = buf.k.data_ptr()
    for t in range(4, 20): buf.append(*kv(t, 1))
    assert buf.k.data_ptr() == at and buf.copied == 4
    expect(buf.get(), range(1, 21))
    buf.append(*kv(20, 1))
    assert buf.capacity == 31
    with pytest.raises(ValueError, match="51.*50"): buf.reserve(51)
    assert buf.capacity == 31

# ---- the mixed cache -------------------------------------------------------------------------------------------

def filled(n=5, W=3, split=None, layers=2, **kwargs):
    "`n` tokens in `layers` layers, windowed ones at even places"
    cache = MixedKVCache(**kwargs)
    t = 0
    for m in split or [n]:
        for i in range(layers): cache.append(i, *kv(t, m), i % 2 == 0, W)
        t += m
    return cache

def test_an_empty_cache():
    cache = MixedKVCache()
    assert cache and len(cache) == 0 and cache.n_tokens == cache.nbytes == cache.used_nbytes == 0 and cache.pending is None
    for i in (0, 7):
        for windowed in (True, False): assert cache.get(i, windowed) == (None, None) and cache.seq_len(i, windowed) == 0
    assert cache.windowed_kv == cache.global_kv == cache.global_lengths == cache.global_caps == []

def test_reading_in_the_specification_s_terms():
    cache = filled(7, split=[2, 1, 4])
    assert len(cache) == 2 and cache.n_tokens == 7
    assert (cache.seq_len(0, True), cache.seq_len(1, False)) == (3, 7)
    k, v, head, count = cache.windowed_kv[0]
    assert k.shape == v.shape == (B, HKV, 3, D) and count == 3 and 0 <= head < 3
    expect((torch.cat([k[:, :, head:], k[:, :, :head]], 2), torch.cat([v[:, :, head:], v[:, :, :head]], 2)), [5, 6, 7])
    k, v = cache.global_kv[1]
    expect((k[:, :, :7], v[:, :, :7]), range(1, 8))
    assert (cache.global_lengths[1], cache.global_caps[1]) == (7, 7) and k.shape == (B, HKV, 7, D)
    expect(cache.get(0, True), [5, 6, 7])
    expect(cache.get(1, False), range(1, 8))

def test_views_name_a_layer_of_the_other_kind_nothing():
    cache = filled(5)
    assert cache.windowed_kv[1] is None and cache.global_kv[0] is None
    assert cache.global_lengths[0] == cache.global_caps[0] == 0

def test_len_is_the_highest_layer():
    cache = MixedKVCache()
    cache.append(4, *kv(0, 2), False)
    assert len(cache) == 5 and cache.windowed_kv == [None]*5 and cache.global_lengths == [0, 0, 0, 0, 2]
    cache.append(1, *kv(0, 2), True, 3)
    assert len(cache) == 5 and cache.windowed_kv[1][3] == 2

def test_update_gives_what_may_be_seen():
    cache = MixedKVCache()
    expect(cache.update(0, *kv(0, 5), True, 3), range(1, 6))
    expect(cache.update(1, *kv(0, 5), False), range(1, 6))
    expect(cache.update(0, *kv(5, 2), True, 3), [4, 5, 6, 7])  # W - 1 before, and the two
    expect(cache.update(1, *kv(5, 2), False), range(1, 8))
    assert sorted(tokens(cache.update(0, *kv(7, 1), True, 3)[0])) == [6, 7, 8]
    expect(cache.update(1, *kv(7, 1), False), range(1, 9))

@pytest.mark.parametrize("windowed", [True, False])
def test_one_token_is_not_copied(windowed):
    cache = filled(9, split=[4, 5])
    cache.reserve(20)
    i = 0 if windowed else 1
    seen = cache.update(i, *kv(9, 1), windowed, 3)
    held = (cache.windowed_kv if windowed else cache.global_kv)[i]
    assert [x.untyped_storage().data_ptr() for x in seen] == [x.untyped_storage().data_ptr() for x in held[:2]]

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_is_kept(dtype):
    cache = MixedKVCache()
    for t, n in ((0, 4), (4, 1), (5, 2)):
        for i in (0, 1):
            for x in cache.update(i, *kv(t, n, dtype=dtype), i == 0, 3): assert x.dtype == dtype
    for x in (*cache.windowed_kv[0][:2], *cache.global_kv[1], *cache.get(0, True), *cache.get(1, False)): assert x.dtype == dtype
    assert cache.used_nbytes == (3 + 7)*TOKEN//8*dtype.itemsize

@pytest.mark.parametrize("T", [1, 2, 3, 4, 6, 1000])
def test_storage_right_after_a_prompt(T):
    cache = filled(T)
    assert storage(*cache.windowed_kv[0][:2]) == 3*TOKEN and storage(*cache.global_kv[1]) == T*TOKEN
    assert cache.nbytes == (3 + T)*TOKEN and cache.used_nbytes == (min(3, T) + T)*TOKEN

def test_reset_is_a_new_cache():
    cfg = config()
    model = random_model(cfg)
    cache = MixedKVCache()
    cache.reserve(500)
    first = generate(model, random_ids(cfg, 2, 9, 1), 5, 0, cache=cache)
    cache.reset()
    same(snapshot(cache), snapshot(MixedKVCache()))
    ids = random_ids(cfg, 3, 11, 2)  # another batch size, too
    again, fresh = MixedKVCache(), cache
    assert torch.equal(generate(model, ids, 6, 0, cache=fresh), generate(model, ids, 6, 0, cache=again))
    a, b = snapshot(fresh), snapshot(again)
    for x in (a, b): x["places"], x["tensors"] = [], []  # slots not written yet hold anything
    same(a, b)  # the capacities, too: the reservation is forgotten
    for i, kind in enumerate(cfg.kinds):
        for x, y in zip(fresh.get(i, kind == "windowed"), again.get(i, kind == "windowed")): assert torch.equal(x, y)
    assert first.shape == (2, 14)

def test_a_deep_copy_goes_its_own_way():
    "It holds what the cache holds and no more, and neither disturbs the other"
    cfg = config()
    model, cache = random_model(cfg), MixedKVCache()
    generate(model, random_ids(cfg, 2, 40), 2, 0, cache=cache)
    before, other = snapshot(cache), copy.deepcopy(cache)
    a = generate(model, random_ids(cfg, 2, 3), 9, 0, cache=other)
    same(snapshot(cache), before)
    assert torch.equal(a, generate(model, random_ids(cfg, 2, 3), 9, 0, cache=cache))
    assert storage(*other.windowed_kv[0][:2]) == storage(*cache.windowed_kv[0][:2]) == cache.windowed_kv[0][0].nbytes*2

# ---- reserve ---------------------------------------------------------------------------------------------------

def test_reserve_before_the_first_token():
    "It is the total, it is remembered until the layers are written, and nothing moves until it is passed"
    cache = MixedKVCache()
    cache.reserve(9)
    assert cache.nbytes == 0
    for i in (0, 1, 3): cache.append(i, *kv(0, 4), i == 0, 3)
    assert cache.global_caps == [0, 9, 0, 9] and cache.nbytes == (3 + 9 + 9)*TOKEN and cache.used_nbytes == (3 + 4 + 4)*TOKEN
    at = cache.global_kv[1][0].data_ptr()
    for t in range(4, 9):
        for i in (0, 1, 3): cache.append(i, *kv(t, 1), i == 0, 3)
    assert cache.global_kv[1][0].data_ptr() == at and cache.global_caps[1] == 9
    cache.append(1, *kv(9, 1), False)
    assert cache.global_caps[1] == 14 and cache.global_lengths[1] == 10

def test_reserve_less_than_the_first_chunk():
    cache = MixedKVCache()
    cache.reserve(2)
    cache.append(0, *kv(0, 5), False)
    assert cache.global_caps == [5]

def test_reserve_later():
    cache = filled(4)
    cache.reserve(3)
    assert cache.global_caps[1] == 4
    cache.reserve(30)
    assert cache.global_caps[1] == 30 and cache.global_lengths[1] == 4
    expect(cache.get(1, False), range(1, 5))

@pytest.mark.parametrize("n,exc", [(-1, ValueError), (11, ValueError), (2.5, TypeError), (True, TypeError), ("9", TypeError)])
def test_reserve_refuses(n, exc):
    cache = filled(4, max_tokens=10)
    before = snapshot(cache)
    with pytest.raises(exc, match="n_tokens"): cache.reserve(n)
    same(snapshot(cache), before)

# ---- bytes -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T,new", [(1, 1), (2, 1), (3, 1), (4, 4), (20, 9)])
def test_bytes_of_a_generation(T, new, dtype):
    "What `generate` filled weighs what the formula says; what it can reach, no more than the growth rule allows"
    memory = pytest.importorskip("gptoss_lite.memory")
    cfg = config(n_layers=4)
    model, cache = random_model(cfg, dtype=dtype), MixedKVCache()
    generate(model, random_ids(cfg, 3, T), new, 0, cache=cache)
    held = T + new - 1
    assert cache.n_tokens == held
    assert cache.used_nbytes == memory.kv_cache_bytes(cfg, held, 3, dtype)
    token = memory.kv_bytes_per_token(cfg, dtype)*3
    assert cache.nbytes <= token*(cfg.n_windowed*cfg.window_size + cfg.n_global*(int(held*1.5) + 1))
    assert cache.nbytes == storage(*(x for kv in cache.windowed_kv + cache.global_kv if kv for x in kv[:2]))

@pytest.mark.parametrize("layer_types", [None, ["windowed"]*4, ["global"]*4, ["windowed", "windowed", "windowed", "global"]], ids=str)
def test_bytes_of_a_prompt(layer_types):
    "The mixed cache against one that keeps all: the formula's reduction is what the storage shows"
    memory = pytest.importorskip("gptoss_lite.memory")
    cfg = config(n_layers=4, layer_types=layer_types)
    cache = MixedKVCache()
    with torch.no_grad(): prefill(random_model(cfg, dtype=torch.float32), random_ids(cfg, 2, 50), cache, chunk=20)
    assert cache.used_nbytes == memory.kv_cache_bytes(cfg, 50, 2, torch.float32)
    full = memory.kv_cache_bytes(cfg, 50, 2, torch.float32, full=True)
    assert full / cache.used_nbytes == pytest.approx(memory.kv_reduction(cfg, 50))
    assert full == 4*50*2*2*cfg.n_kv_heads*cfg.head_dim*4  # key heads, not query heads

# ---- the cap ---------------------------------------------------------------------------------------------------

def test_the_cap_is_reached_but_not_passed():
    cache = filled(9, max_tokens=10)
    for i in (0, 1): cache.append(i, *kv(9, 1), i == 0, 3)
    assert cache.n_tokens == 10
    before = snapshot(cache)
    for call in (cache.append, cache.update):
        for i in (0, 1):
            for n in (1, 4):
                with pytest.raises(ValueError, match=f"{10+n} tokens.*max_tokens=10.*larger max_tokens"): call(i, *kv(10, n), i == 0, 3)
    same(snapshot(cache), before)
    assert cache.global_caps[1] <= 10

def test_past_the_cap_every_layer_is_usable_at_the_old_length():
    cfg = config()
    model, ids, cache = random_model(cfg), random_ids(cfg, 2, 14), MixedKVCache(max_tokens=12)
    with torch.no_grad():
        head = cached_logits(model, ids[:, :10], [10], cache)
        before = snapshot(cache)
        with pytest.raises(ValueError, match="max_tokens=12"): prefill(model, ids[:, 10:], cache)
        same(snapshot(cache), before)
        tail = prefill(model, ids[:, 10:12], cache)
    assert worst(tail, model(ids[:, :12])[0][:, -1]) < 1e-9 and worst(head, model(ids[:, :10])[0]) < 1e-9

@pytest.mark.parametrize("cap,exc", [(0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)])
@pytest.mark.parametrize("kind", [MixedKVCache, GrowingBuffer])
def test_impossible_caps(kind, cap, exc):
    with pytest.raises(exc, match="max_tokens"): kind(max_tokens=cap)

# ---- refusing --------------------------------------------------------------------------------------------------

def bad(what):
    "Arguments that a cache of `filled()` must refuse: layer, keys, values, kind, window; the error; words of its message"
    (k, v), (i, w, W) = kv(5, 2), (0, True, 3)
    match what:
        case "device": return (i, k.to("meta"), v.to("meta"), w, W), ValueError, ["k_rot", "meta", "cpu", "reset"]
        case "v on another device": return (i, k, v.to("meta"), w, W), ValueError, ["v", "meta", "cpu"]
        case "dtype": return (i, k.float(), v.float(), w, W), ValueError, ["k_rot", "float32", "float64", "reset"]
        case "v of another dtype": return (i, k, v.float(), w, W), ValueError, ["v", "float32", "float64"]
        case "batch": return (i, *kv(5, 2, B=3), w, W), ValueError, ["k_rot", "batch", "3", "2", "reset"]
        case "heads": return (i, k[:, :2], v[:, :2], w, W), ValueError, ["k_rot", "heads", "2", "3"]
        case "head_dim": return (i, k[..., :3], v[..., :3], w, W), ValueError, ["k_rot", "head_dim", "3", "4"]
        case "shapes": return (i, k, v[:, :, :1], w, W), ValueError, ["v", "2, 3, 1, 4", "2, 3, 2, 4"]
        case "dimensions": return (i, k[0], v[0], w, W), ValueError, ["k_rot", "3, 2, 4"]
        case "no token": return (i, k[:, :, :0], v[:, :, :0], w, W), ValueError, ["k_rot", "2, 3, 0, 4", "at least 1"]
        case "no tensor": return (i, k.tolist(), v, w, W), TypeError, ["k_rot", "list"]
        case "v is no tensor": return (i, k, None, w, W), TypeError, ["v", "NoneType"]
        case "window": return (i, k, v, w, 4), ValueError, ["window=4", "3", "reset"]
        case "no window": return (i, k, v, w, None), (ValueError, TypeError), ["window=None", "3"]
        case "kind": return (i, k, v, False, W), ValueError, ["is_windowed=False", "True", "reset"]
        case "other kind": return (1, k, v, True, W), ValueError, ["is_windowed=True", "False", "reset"]
        case "layer": return (-1, k, v, w, W), ValueError, ["layer_idx=-1", "0"]
        case "layer is no int": return (0.5, k, v, w, W), TypeError, ["layer_idx=0.5", "int"]
        case "new layer, batch": return (2, *kv(5, 2, B=1), w, W), ValueError, ["k_rot", "batch", "1", "2"]
        case "new layer, dtype": return (2, k.half(), v.half(), w, W), ValueError, ["k_rot", "float16", "float64"]
        case "new layer, device": return (2, k.to("meta"), v.to("meta"), w, W), ValueError, ["k_rot", "meta", "cpu"]
        case "new layer, no window": return (2, k, v, True, None), TypeError, ["window=None", "int"]
        case "new layer, window 0": return (2, k, v, True, 0), ValueError, ["window=0", "1"]
        case "new layer, window is a bool": return (2, k, v, True, True), TypeError, ["window=True", "int"]

BAD = [c.strip().split('"')[1] for c in open(__file__, encoding="utf-8") if c.strip().startswith("case ")]

@pytest.mark.parametrize("call", ["append", "update"])
@pytest.mark.parametrize("what", BAD)
def test_refused(what, call):
    "The message names the argument, its value, the limit and the way out, and nothing has changed"
    cache = filled(5)
    before = snapshot(cache)
    args, exc, words = bad(what)
    with pytest.raises(exc) as e: getattr(cache, call)(*args)
    for word in words: assert word in str(e.value), (word, str(e.value))
    assert ";" in str(e.value), f"no way out: {e.value}"
    same(snapshot(cache), before)
    for i in (0, 1): cache.append(i, *kv(5, 2), i == 0, 3)  # and it goes on as if nothing had been
    expect(cache.get(0, True), [5, 6, 7])
    expect(cache.get(1, False), range(1, 8))

def test_bad_first_call_leaves_it_empty():
    cache = MixedKVCache()
    for what in ("v of another dtype", "v on another device", "shapes", "dimensions", "no token", "no tensor", "layer", "new layer, no window"):
        args, exc, _ = bad(what)
        for call in (cache.append, cache.update):
            with pytest.raises(exc): call(*args)
    same(snapshot(cache), snapshot(MixedKVCache()))

@pytest.mark.parametrize("buffer", [lambda: RingBuffer(3), GrowingBuffer], ids=["ring", "growing"])
@pytest.mark.parametrize("what", ["device", "v on another device", "dtype", "v of another dtype", "batch", "heads", "head_dim", "shapes",
                                  "dimensions", "no token", "no tensor", "v is no tensor"])
def test_a_buffer_alone_refuses(what, buffer):
    buf = buffer()
    buf.append(*kv(0, 5))
    before = [raw(buf.k), raw(buf.v), buf.n_tokens]
    (_, k, v, *_), exc, _ = bad(what)
    for call in (buf.append, buf.update):
        with pytest.raises(exc): call(k, v)
    assert torch.equal(raw(buf.k), before[0]) and torch.equal(raw(buf.v), before[1]) and buf.n_tokens == before[2]

@pytest.mark.parametrize("window,exc", [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)])
def test_impossible_windows(window, exc):
    with pytest.raises(exc, match="window"): RingBuffer(window)

# ---- lifetime --------------------------------------------------------------------------------------------------

def test_nothing_outlives_its_owner():
    "Model and cache die when they are dropped: no memo, table or mask keeps them"
    cfg = config()
    model, cache = random_model(cfg), MixedKVCache()
    generate(model, random_ids(cfg, 2, 9), 4, 0.7, cache=cache)
    model(random_ids(cfg, 2, 9))
    refs = [weakref.ref(x) for x in (model, cache, model.blocks[0].attn, model.embed.weight, cache.global_kv[1][0], cache.windowed_kv[0][0])]
    del model, cache
    gc.collect()
    assert [r() for r in refs] == [None]*len(refs)

def test_steps_leave_nothing_behind():
    "After a hundred steps there are no more tensors than after ten"
    cfg = config()
    model, cache = random_model(cfg), MixedKVCache()
    cache.reserve(200)
    count = lambda: (gc.collect(), sum(type(x) is torch.Tensor for x in gc.get_objects()))[1]
    ids = random_ids(cfg, 2, 5)
    generate(model, ids, 10, 0, cache=cache)
    before = count()
    generate(model, ids[:, :0], 100, 0, cache=cache)
    assert count() <= before + 2
