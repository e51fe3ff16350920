"""Caches on disk: what a file holds, that it continues exactly, and that a damaged, mislabelled or foreign one is refused."""
import json
import random
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.files import fingerprint, load_cache, save_cache
from gptoss_lite.generation import forward_step, generate
from gptoss_lite.memory import kv_cache_bytes
from gptoss_lite.model import _text_digest, load_checkpoint, save_checkpoint, tensor_digest
from oracle import config, random_ids, random_model, same, snapshot, worst

CFG = config(n_layers=4, window_size=4)

def filled(T=9, rewind=2, model=None, B=2):
    model = random_model(CFG) if model is None else model
    ids, cache = random_ids(CFG, B, T), MixedKVCache(rewind=rewind)
    with torch.no_grad(): forward_step(model, ids, 0, cache, {})
    return model, ids, cache

def meta_of(path):
    with safe_open(path, framework="pt") as f: return dict(f.metadata())

# ---- there and back --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, None)], ids=str)
@pytest.mark.parametrize("T", [1, 3, 4, 6, 7, 25])
def test_a_loaded_cache_goes_on_as_if_nothing_had_been(tmp_path, T, dtype, atol):
    model = random_model(CFG, dtype=dtype)
    _, ids, cache = filled(T, model=model)
    save_cache(cache, tmp_path/"c.safetensors", model, ids)
    other, back = load_cache(tmp_path/"c.safetensors", model)
    assert torch.equal(back, ids) and other.n_tokens == T and other.rewindable == cache.rewindable and other.max_rewind == 2
    more = random_ids(CFG, 2, 9, 5)
    with torch.no_grad():
        for c in (cache, other): forward_step(model, random_ids(CFG, 2, 3, 6), T, c, {}), c.rewind(2), c.rewind(0)
        n = T + 1
        ids = torch.cat([ids, random_ids(CFG, 2, 3, 6)[:, :1], more], 1)
        for s in range(0, 9, 3):
            a, b = (model.logits(forward_step(model, more[:, s:s+3], n+s, c, {})) for c in (cache, other))
            assert torch.equal(a, b)
            if atol: assert worst(a, model(ids[:, :n+s+3])[0][:, n+s:]) < atol

def test_a_generation_goes_on_across_a_file(tmp_path):
    "What is pending is kept, and the result is that of one call"
    model, ids = random_model(CFG), random_ids(CFG, 2, 9)
    whole, cache = generate(model, ids, 12, 0), MixedKVCache()
    first = generate(model, ids, 5, 0, cache=cache)
    save_cache(cache, tmp_path/"c.safetensors", model, first)  # the last column is pending
    other, back = load_cache(tmp_path/"c.safetensors", model)
    assert torch.equal(back, first[:, :-1]) and torch.equal(other.pending, first[:, -1:])
    rest = generate(model, ids[:, :0], 7, 0, cache=other)
    assert torch.equal(torch.cat([first, rest], 1), whole)

def test_only_the_tokens_held_are_written(tmp_path):
    "Neither slack nor empty slots, and of a ring no more than the window where nothing can be taken back"
    for T, rewind in ((25, 0), (2, 0)):
        model, ids, cache = filled(T, rewind)
        cache.reserve(5000)
        save_cache(cache, tmp_path/"c.safetensors", model, ids)
        tensors = load_file(tmp_path/"c.safetensors")
        assert sum(x.nbytes for x in tensors.values()) == cache.used_nbytes == kv_cache_bytes(CFG, T, 2, torch.float64) < cache.nbytes
        assert (tmp_path/"c.safetensors").stat().st_size < cache.used_nbytes + 8000

def test_what_is_in_the_metadata(tmp_path):
    model, ids, cache = filled()
    save_cache(cache, tmp_path/"c.safetensors", model, ids)
    meta = meta_of(tmp_path/"c.safetensors")
    assert json.loads(meta["config"]) == json.loads(json.dumps(CFG.to_dict())) and json.loads(meta["token_ids"]) == ids.tolist()
    assert meta["n_tokens"] == "9" and meta["weights"] == fingerprint(model) and meta["digest"] == tensor_digest(load_file(tmp_path/"c.safetensors"))
    assert "cache 1" in meta["format"]

def test_without_ids_and_without_tokens(tmp_path):
    model, ids, cache = filled()
    save_cache(cache, tmp_path/"c.safetensors", model)
    assert load_cache(tmp_path/"c.safetensors", model)[1] is None
    save_cache(MixedKVCache(), tmp_path/"e.safetensors", model)
    empty, back = load_cache(tmp_path/"e.safetensors", model, cache)
    assert empty is cache and back is None and (cache.n_tokens, len(cache), cache.nbytes) == (0, 0, 0)

def test_into_a_cache_that_is_there(tmp_path):
    "It becomes what the file says, keeps its own limits, and its marks are void"
    model, ids, cache = filled(25, rewind=3)
    save_cache(cache, tmp_path/"c.safetensors", model, ids)
    for rewind in (0, 1, 3, 9):
        _, _, other = filled(4, rewind, model, B=3)
        mark, fork, before = other.snapshot(), other.fork(), other.n_tokens
        got, _ = load_cache(tmp_path/"c.safetensors", model, other)
        assert got is other and (other.n_tokens, other.max_rewind, other.rewindable) == (25, rewind, min(rewind, 3))
        for i, kind in enumerate(CFG.kinds):
            for x, y in zip(other.get(i, kind == "windowed"), cache.get(i, kind == "windowed")): assert torch.equal(x, y)
        with pytest.raises(ValueError, match="mark"): other.restore(mark)
        assert fork.n_tokens == before

def test_a_file_of_a_fork(tmp_path):
    model, ids, cache = filled(20)
    fork = cache.fork()
    with torch.no_grad(): forward_step(model, ids[:, :3], 20, fork, {})
    save_cache(cache, tmp_path/"c.safetensors", model, ids)
    assert torch.equal(load_cache(tmp_path/"c.safetensors", model)[0].get(1, False)[0], cache.get(1, False)[0])

# ---- what is refused -------------------------------------------------------------------------------------------

def test_a_killed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model, ids, cache = filled()
    path = tmp_path/"c.safetensors"
    save_cache(cache, path, model, ids)
    old = path.read_bytes()
    with torch.no_grad(): forward_step(model, ids[:, :3], 9, cache, {})
    def dies(*args, **kwargs):
        save_file(*args, **kwargs)
        raise KeyboardInterrupt
    monkeypatch.setattr("gptoss_lite.model.save_file", dies)
    with pytest.raises(KeyboardInterrupt): save_cache(cache, path, model)
    assert path.read_bytes() == old and [f.name for f in tmp_path.iterdir()] == [path.name]

def test_a_save_that_is_killed_for_good(tmp_path):
    "No clean-up runs: the old file is whole, and the next save writes over the remains"
    code = ("import os, sys; sys.path.insert(0, 'tests'); import test_files as t, gptoss_lite.files as f; model, ids, cache = t.filled()\n"
            "f.save_cache(cache, sys.argv[1], model, ids); print(flush=True)\n"
            "os.replace = lambda *a: os._exit(9)\nf.save_cache(cache, sys.argv[1], model)")
    path = tmp_path/"c.safetensors"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 9
    model, ids, cache = filled()
    assert torch.equal(load_cache(path, model)[1], ids) and len(list(tmp_path.iterdir())) == 2
    save_cache(cache, path, model)
    assert load_cache(path, model)[1] is None and len(list(tmp_path.iterdir())) == 1

@pytest.mark.parametrize("what", ["weights", "config", "window", "checkpoint", "short cache", "no file", "a folder"])
def test_a_file_that_does_not_belong(tmp_path, what):
    "One error that says why, and the cache that was to be filled is as it was"
    model, ids, cache = filled()
    path, exc, words, target = tmp_path/"c.safetensors", ValueError, [], filled(5, model=model)[2]
    save_cache(cache, path, model, ids)
    match what:
        case "weights":
            with torch.no_grad(): model.norm.weight[0] += 1
            words = ["other weights"]
        case "config": model, words = random_model(CFG.replace(rope_theta=51)), ["rope_theta", "50", "51"]
        case "window": model, words = random_model(CFG.replace(window_size=5)), ["window_size", "4", "5"]
        case "checkpoint": save_checkpoint(model, path); words = ["format", "gptoss_lite"]
        case "short cache": target, words = MixedKVCache(max_tokens=8), ["9 tokens", "max_tokens=8"]
        case "no file": path, exc, words = tmp_path/"d.safetensors", FileNotFoundError, ["no such file"]
        case "a folder": path, exc, words = tmp_path, FileNotFoundError, []
    before = snapshot(target)
    with pytest.raises(exc) as e: load_cache(path, model, target)
    for word in [*words, ";", str(path)]: assert word in str(e.value), (word, str(e.value))
    same(snapshot(target), before)

def test_a_cache_of_another_model_is_not_saved_under_this_one_s_name(tmp_path):
    _, ids, cache = filled()
    for other in (CFG.replace(n_layers=3), CFG.replace(window_size=3, n_heads=3, n_kv_heads=3), CFG.replace(layer_types=["global"]*4), CFG.replace(head_dim=10)):
        with pytest.raises(ValueError, match="not a cache of this model.*use the model"): save_cache(cache, tmp_path/"c.safetensors", random_model(other), ids)
    del cache.buffers[3]
    with pytest.raises(ValueError, match="missing 3.k, 3.v"): save_cache(cache, tmp_path/"c.safetensors", random_model(CFG))
    assert not list(tmp_path.iterdir())

def test_what_cannot_be_saved(tmp_path):
    model, ids, cache = filled()
    cache.pending = torch.tensor([[1], [2]])
    for bad in (ids[:, :8], ids[:1], torch.cat([ids, torch.tensor([[1], [3]])], 1), torch.cat([ids, cache.pending, cache.pending], 1)):
        with pytest.raises(ValueError, match="ids.*9 tokens held"): save_cache(cache, tmp_path/"c.safetensors", model, bad)
    for bad in (ids.tolist(), ids[0], "text"):
        with pytest.raises(TypeError, match="ids"): save_cache(cache, tmp_path/"c.safetensors", model, bad)
    with pytest.raises(FileNotFoundError, match="folder"): save_cache(cache, tmp_path/"no"/"c.safetensors", model)
    cache.pending = ids[:, :0]
    with pytest.raises(ValueError, match="part of a step"): save_cache(cache, tmp_path/"c.safetensors", model)
    cache.pending = None
    cache.buffers[0].rewind(1)
    with pytest.raises(ValueError, match="part of a step"): save_cache(cache, tmp_path/"c.safetensors", model)
    assert not list(tmp_path.iterdir())

# ---- fuzzed files ----------------------------------------------------------------------------------------------

def rewrite(path, change, digests=True):
    "The same file after `change(tensors, meta)`, with digests that fit again, as somebody would write who means it"
    tensors, meta = load_file(path), meta_of(path)
    change(tensors, meta)
    if digests:
        meta["digest"] = tensor_digest(tensors)
        meta["text_digest"] = _text_digest(meta)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata=meta)

def put(key, value): return lambda t, m: (t if key in t or "." in key else m).__setitem__(key, value)

CRAFTED = {
    "a layer is missing": lambda t, m: [t.pop(f"3.{x}") for x in "kv"],
    "a layer too many": lambda t, m: t.update({f"4.{x}": t[f"3.{x}"].clone() for x in "kv"}),
    "keys of the layers changed over": lambda t, m: t.update({"0.k": t["1.k"], "1.k": t["0.k"].clone()}),
    "more tokens than there are": put("n_tokens", "10"), "fewer tokens than there are": put("n_tokens", "8"),
    "no tokens": put("n_tokens", "0"), "less than none": put("n_tokens", "-9"), "half a token": put("n_tokens", "9.5"),
    "no number": put("n_tokens", "nine"), "no number of further slots": put("rewind", "x"), "fewer further slots": put("rewind", "0"),
    "a row less in one layer": lambda t, m: t.update({"2.k": t["2.k"][:1].clone(), "2.v": t["2.v"][:1].clone()}),
    "values shorter than keys": lambda t, m: t.update({"0.v": t["0.v"][:, :, 1:].clone()}),
    "another number of heads": lambda t, m: t.update({f"{i}.{x}": t[f"{i}.{x}"][:, :1].clone() for i in range(4) for x in "kv"}),
    "another head_dim": lambda t, m: t.update({f"{i}.{x}": t[f"{i}.{x}"][..., :2].clone() for i in range(4) for x in "kv"}),
    "three dimensions": lambda t, m: t.update({"1.k": t["1.k"][0].clone()}),
    "another number type in one layer": lambda t, m: t.update({"1.k": t["1.k"].float()}),
    "whole numbers": lambda t, m: t.update({n: x.long() for n, x in t.items()}),
    "ids of other length": put("token_ids", "[[1, 2], [3, 4]]"), "ids of other rows": put("token_ids", json.dumps([[1]*9])),
    "ragged ids": put("token_ids", json.dumps([[1]*9, [1]*8])), "ids that are words": put("token_ids", '[["a"]]'),
    "ids in no list": put("token_ids", "7"), "broken json": put("pending", "[[1], "), "pending of other rows": put("pending", "[[1], [2], [3]]"),
    "another version": put("format", "gptoss_lite cache 2"), "no format": lambda t, m: m.pop("format"),
    "no ids entry": lambda t, m: m.pop("token_ids"), "no configuration": lambda t, m: m.pop("config"), "no weights": lambda t, m: m.pop("weights"),
    "a list as configuration": put("config", "[1]"), "a word as configuration": put("config", '"x"'), "null as configuration": put("config", "null"),
    "two names changed over, digest left": lambda t, m: None,
}

@pytest.mark.parametrize("what", CRAFTED)
def test_a_file_whose_digests_fit_but_whose_content_does_not(tmp_path, what):
    model, ids, cache = filled()
    path, target = tmp_path/"c.safetensors", filled(5, model=model)[2]
    save_cache(cache, path, model, ids)
    if what.startswith("two names"): rewrite(path, lambda t, m: t.update({"0.k": t["2.k"], "2.k": t["0.k"].clone()}), digests=False)
    else: rewrite(path, CRAFTED[what])
    before = snapshot(target)
    with pytest.raises(ValueError) as e: load_cache(path, model, target)
    assert str(path) in str(e.value) and ";" in str(e.value), str(e.value)
    same(snapshot(target), before)

def damage(rng, data, other):
    "A way in which files break, and the bytes after it"
    how = rng.choice(["truncated", "bit flipped", "bit flipped", "bit flipped in the header", "mislabelled", "byte lost", "block zeroed", "grown", "length of the header"])
    n, out = len(data), bytearray(data)
    header = 8 + int.from_bytes(data[:8], "little")
    match how:
        case "truncated": out = out[:rng.choice([rng.randrange(n), rng.randrange(header), n-1])]
        case "bit flipped": out[rng.randrange(n)] ^= 1 << rng.randrange(8)
        case "bit flipped in the header": out[rng.randrange(header)] ^= 1 << rng.randrange(8)
        case "byte lost": del out[rng.randrange(n)]
        case "block zeroed":
            at = rng.randrange(n)
            while not any(out[at:at+64]): at = rng.randrange(n)
            out[at:at+64] = bytes(len(out[at:at+64]))
        case "grown": out += bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
        case "length of the header": out[:8] = rng.choice([rng.randrange(2**64), rng.randrange(2*n), header - 8 + rng.choice([-1, 1])]).to_bytes(8, "little")
        case "mislabelled": # one name, type or number of the header for another one, of the same length
            text, names = data[8:header], [b'"0.k"', b'"1.v"', b'"F64"', b'"I64"', b'"U64"', b'"embed.weight"', b'"norm.weight\x00"', b'"n_tokens"', b'"text_dig"']
            here = [x for x in names if x in text]
            old = rng.choice(here)
            new = rng.choice([x for x in names if len(x) == len(old) and x != old] or [old[:-2] + bytes([old[-2] ^ 1]) + old[-1:]])
            out[8:header] = text.replace(old, new, 1)
    return how, bytes(out)

def fuzz(tmp_path, times, seed=0):
    rng = random.Random(seed)
    model, ids, cache = filled()
    good, seen = {"cache": tmp_path/"cache.safetensors", "checkpoint": tmp_path/"checkpoint.safetensors"}, {}
    save_cache(cache, good["cache"], model, ids)
    save_checkpoint(model, good["checkpoint"])
    good = {kind: path.read_bytes() for kind, path in good.items()}
    path, target = tmp_path/"broken.safetensors", filled(5, model=model)[2]
    before, weights = snapshot(target), fingerprint(model)
    for i in range(times):
        kind = rng.choice(["cache", "checkpoint"])
        how, data = damage(rng, good[kind], good)
        if rng.random() < .05: how, data = "the other kind of file", good["checkpoint" if kind == "cache" else "cache"]
        assert data != good[kind], how
        path.write_bytes(data)
        with pytest.raises(ValueError) as e: # and nothing else: no crash, no other error, no tensor
            load_cache(path, model, target, weights=weights) if kind == "cache" else load_checkpoint(path)
        assert str(path) in str(e.value) and ";" in str(e.value) and len(str(e.value)) < 5000, (how, str(e.value))
        same(snapshot(target), before)
        seen[kind, how] = seen.get((kind, how), 0) + 1
    return seen

def test_each_kind_of_file_names_the_other(tmp_path):
    model, ids, cache = filled()
    path = tmp_path/"kind.safetensors"
    save_cache(cache, path, model, ids)
    with pytest.raises(ValueError, match="holds a cache, not weights; read it with load_cache"): load_checkpoint(path)
    save_checkpoint(model, path)
    with pytest.raises(ValueError, match="is no cache"): load_cache(path, model, cache)

def test_fuzzed_files(tmp_path):
    seen = fuzz(tmp_path, 500)
    assert sum(seen.values()) == 500 and len(seen) >= 16
