"""Inside transformers: the mixed cache and the attention function, held to the models without any cache.

Models are tiny, random and made from configurations; nothing is downloaded. Runs on every supported version of
transformers: `make test-hf` takes the installed one and the oldest.
"""
import copy, importlib, inspect, json, os, subprocess, sys, warnings
from pathlib import Path

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import (DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig, GptOssForCausalLM, LlamaConfig,
                          Llama4ForCausalLM, Llama4TextConfig, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
                          StaticCache,
                          PhimoeConfig, PhimoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM)
from transformers.cache_utils import DynamicSlidingWindowLayer

import gptoss_lite.hf as hf
from gptoss_lite.attention import manual_causal_attention
from gptoss_lite.hf import CACHE_KEYWORD, attention_forward, explain, mixed_cache
from gptoss_lite.ring import RingBuffer

ROOT = Path(__file__).resolve().parent.parent
ANNOUNCES = hasattr(transformers.Cache, "activate_past_recording")  # before it takes tokens back
KW = dict(vocab_size=50, hidden_size=32, pad_token_id=0, eos_token_id=None, bos_token_id=None, initializer_range=0.2,
          max_position_embeddings=2048, rope_parameters=dict(rope_type="default", rope_theta=1e4), attn_implementation="eager")
MIXED = ["sliding_attention", "full_attention"]

def make(cls, config, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config).to(dtype).eval().requires_grad_(False)

def gpt_oss(window=8, heads=6, kv_heads=2, head_dim=16, layers=2, **kw):
    return make(GptOssForCausalLM, GptOssConfig(
        **KW | dict(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
                    sliding_window=window, num_local_experts=3, num_experts_per_tok=2, intermediate_size=24) | kw))

def other(cls, config, layers=2, **kw):
    return make(cls, config(**KW | dict(num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                        intermediate_size=24) | kw))

MODELS = {
    "gpt-oss, window 1, 8/4 heads of 64": lambda: gpt_oss(1, 8, 4, 64),
    "gpt-oss, window 4, 6/2 heads of 96": lambda: gpt_oss(4, 6, 2, 96),
    "gpt-oss, window 8, 16/2 heads of 64": lambda: gpt_oss(8, 16, 2, 64),  # 64/8, scaled down
    "gpt-oss, window 128, 8/4 heads of 96": lambda: gpt_oss(128, 8, 4, 96),
    "gemma 3 text": lambda: other(Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=8, layer_types=MIXED, query_pre_attn_scalar=50,
                                  rope_parameters={k: KW["rope_parameters"] for k in MIXED}),
    "mistral": lambda: other(MistralForCausalLM, MistralConfig, sliding_window=4),
    "qwen 2 with windows": lambda: other(Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen 2 without": lambda: other(Qwen2ForCausalLM, Qwen2Config, use_sliding_window=False, sliding_window=5),
    "qwen 3 with windows": lambda: other(Qwen3ForCausalLM, Qwen3Config, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen 2 moe, which names its window to the mask alone": lambda: other(
        Qwen2MoeForCausalLM, Qwen2MoeConfig, use_sliding_window=True, sliding_window=5, max_window_layers=1, num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8),
    "phi moe, which has no layer_types": lambda: other(PhimoeForCausalLM, PhimoeConfig, sliding_window=5, num_local_experts=3,
                                                          router_jitter_noise=0., input_jitter_noise=0.),
    "llama 4, in chunks": lambda: other(Llama4ForCausalLM, Llama4TextConfig, attention_chunk_size=6, layer_types=["chunked_attention", "full_attention"],
                                        no_rope_layers=[1, 0], moe_layers=[], num_local_experts=2, intermediate_size_mlp=24),
    "qwen 3 without": lambda: other(Qwen3ForCausalLM, Qwen3Config, use_sliding_window=False, sliding_window=5),
}
WINDOW = {"gpt-oss, window 128, 8/4 heads of 96": 128, "gpt-oss, window 1, 8/4 heads of 64": 1}  # the others at most 8

def use(model, name):
    model.set_attn_implementation(name)
    return model

def ids(T, B=1, seed=0): return torch.randint(1, 50, (B, T), generator=torch.Generator().manual_seed(seed))

def feed(model, x, cache, **kw): return model(x, **{CACHE_KEYWORD: cache}, **kw).logits

def stepwise(model, x, cache, n):
    "Logits of a text, the first `n` tokens at once, the others one by one"
    return torch.cat([feed(model, x[:, :n], cache), *(feed(model, x[:, t:t+1], cache) for t in range(n, x.shape[1]))], 1)

@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)  # the old name of the keyword
        yield


# ---- logits -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", MODELS)
def test_every_step_equals_the_model_without_a_cache(name):
    model, W = MODELS[name](), WINDOW.get(name, 8)
    lengths = sorted({1, max(W - 1, 1), W, W + 1, 3*W + 2})
    text = ids(max(lengths) + 2*W)
    want = use(model, "eager")(text).logits
    assert_close(use(model, "gptoss_lite")(text).logits, want, atol=1e-4, rtol=0)
    for n in lengths:
        x = text[:, :n + 2*W]
        ways = [("gptoss_lite", mixed_cache), ("eager", mixed_cache), ("gptoss_lite", lambda c: DynamicCache(config=c))]
        if W == 128: ways = ways[:1 if n not in (1, 3*W + 2) else 2]  # each is some hundred steps
        for attention, cache in ways:
            got = stepwise(use(model, attention), x, cache(model.config), n)
            assert_close(got, want[:, :n + 2*W], atol=1e-4, rtol=0, msg=lambda m: f"{attention}, {n} at once: {m}")

@pytest.mark.parametrize("attention", ["eager", "gptoss_lite"])
def test_chunks_of_any_size(attention):
    model, text = use(gpt_oss(4), attention), ids(40)
    want = model(text).logits
    for sizes in ([3, 1, 4, 1, 5, 9, 2, 6, 9], [5]*8, [39, 1], [1, 39], [20, 20]):
        cache = mixed_cache(model.config)
        got = torch.cat([feed(model, x, cache) for x in text.split(sizes, 1)], 1)
        assert_close(got, want, atol=1e-4, rtol=0)

def test_a_window_of_one_is_right_here_and_not_there():
    model, text = gpt_oss(1), ids(6)
    want = model(text).logits
    assert_close(stepwise(model, text, mixed_cache(model.config), 1), want, atol=1e-4, rtol=0)
    theirs = (stepwise(model, text, DynamicCache(config=model.config), 1) - want).abs().max()
    assert theirs > 0.1, "transformers has mended its window of 1: say so in the chapter"
    assert_close(stepwise(use(model, "gptoss_lite"), text, DynamicCache(config=model.config), 1), want, atol=1e-4, rtol=0)

@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_number_types(dtype):
    model, text = gpt_oss(4), ids(20)
    model.set_experts_implementation("eager") if hasattr(model, "set_experts_implementation") else None
    model = model.to(dtype)
    want = model(text).logits
    cache = mixed_cache(model.config)
    got = stepwise(use(model, "gptoss_lite"), text, cache, 7)
    assert got.dtype == want.dtype and cache.layers[0].keys.dtype == dtype
    far = (got - want).float().square().mean().sqrt()/want.float().square().mean().sqrt()
    assert far < (1e-9 if dtype == torch.float64 else 0.1)


# ---- generate ---------------------------------------------------------------------------------------------------

PADS = torch.tensor([0, 5, 11])[:, None]
MODES = {
    "greedy": dict(),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20),
    "beams": dict(num_beams=3),
    "beams, several returned": dict(num_beams=4, num_return_sequences=2),
    "padded": dict(attention_mask=True),
    "padded beams": dict(attention_mask=True, num_beams=2),
    "chunks": dict(prefill_chunk_size=7),
    "padded chunks": dict(attention_mask=True, prefill_chunk_size=7),
}

def generate(model, cache, x, **kw):
    if kw.get("attention_mask") is True: kw["attention_mask"] = (torch.arange(x.shape[1]) >= PADS[:len(x)]).long()
    else: kw["attention_mask"] = torch.ones_like(x)  # or it takes a token 0 for padding
    torch.manual_seed(1)
    return model.generate(x, **{CACHE_KEYWORD: cache}, **dict(max_new_tokens=20, do_sample=False) | kw)

@pytest.mark.parametrize("attention", ["eager", "gptoss_lite"])
@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_same_tokens_as_with_their_cache(mode, attention):
    kw = MODES[mode]
    x = ids(26, B=3 if "attention_mask" in kw else 1)
    for model in (gpt_oss(8), gpt_oss(4, 8, 4)):
        want = generate(use(model, "eager"), DynamicCache(config=model.config), x, **kw)
        got = generate(use(model, attention), mixed_cache(model.config, max_length=46), x, **kw)
        assert got.tolist() == want.tolist()

@pytest.mark.parametrize("name", ["gemma 3 text", "mistral", "qwen 2 with windows", "qwen 3 without"])
def test_generate_with_other_models(name):
    model, x = MODELS[name](), ids(26, B=3)
    for kw in (dict(), dict(num_beams=2), dict(attention_mask=True)):
        want = generate(use(model, "eager"), DynamicCache(config=model.config), x, **kw)
        assert generate(use(model, "gptoss_lite"), mixed_cache(model.config), x, **kw).tolist() == want.tolist()

def test_padded_rows_get_what_they_get_alone():
    model, x = use(gpt_oss(4), "gptoss_lite"), ids(12, B=3)
    got = generate(model, mixed_cache(model.config), x, attention_mask=True)
    for row, pads in enumerate(PADS[:, 0].tolist()):
        alone = generate(model, mixed_cache(model.config), x[row:row+1, pads:])
        assert got[row, pads:].tolist() == alone[0].tolist()

@pytest.mark.parametrize("attention", ["eager", "gptoss_lite"])
def test_a_conversation_goes_on_with_the_same_cache(attention):
    model, cache = use(gpt_oss(4), attention), mixed_cache(gpt_oss(4).config)
    first = generate(model, cache, ids(9))
    second = torch.cat([first, ids(6, seed=1)], 1)
    got = generate(model, cache, second)
    assert got.tolist() == generate(model, DynamicCache(config=model.config), second).tolist()
    assert cache.get_seq_length() == got.shape[1] - 1  # the last token is chosen and not yet read
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    assert generate(model, cache, second).tolist() == got.tolist()

def test_a_copy_goes_on_by_itself():
    model, x = gpt_oss(4), ids(12)
    cache = mixed_cache(model.config)
    feed(model, x, cache)
    copied = copy.deepcopy(cache)
    a, b = (feed(model, ids(3, seed=s), c) for s, c in ((1, cache), (2, copied)))
    for s, got in ((1, a), (2, b)): assert_close(got, model(torch.cat([x, ids(3, seed=s)], 1)).logits[:, 12:], atol=1e-4, rtol=0)

def test_a_copy_made_in_inference_mode_can_be_written_later():
    model, x, y = gpt_oss(4), ids(12), ids(3, seed=1)
    with torch.inference_mode():
        cache = mixed_cache(model.config)
        feed(model, x, cache)
        copied = copy.deepcopy(cache)
    assert_close(feed(model, y, copied), model(torch.cat([x, y], 1)).logits[:, 12:], atol=1e-4, rtol=0)

def text_with_repeats(): return ids(9).repeat(1, 3)

@pytest.mark.parametrize("attention", ["eager", "gptoss_lite"])
@pytest.mark.parametrize("window", [4, 8])
def test_drafts_leave_no_trace(window, attention):
    model, x = use(gpt_oss(window), attention), text_with_repeats()
    draft = other(Qwen2ForCausalLM, Qwen2Config, layers=1)
    end = dict(eos_token_id=49)  # older versions ask for one
    want = generate(model, mixed_cache(model.config), x, **end)
    room = {} if ANNOUNCES else dict(rewind=20)
    for kw in (dict(prompt_lookup_num_tokens=5), dict(assistant_model=draft)):
        cache = mixed_cache(model.config, **room)
        assert generate(model, cache, x, **kw, **end).tolist() == want.tolist()
        assert cache.get_seq_length() == want.shape[1] - 1

def test_without_room_a_draft_is_an_error_and_not_a_wrong_token():
    model, x = gpt_oss(4), text_with_repeats()
    cache = mixed_cache(model.config, rewind=1)
    with pytest.raises(ValueError, match="make the cache by mixed_cache"): generate(model, cache, x, prompt_lookup_num_tokens=9, eos_token_id=49)


# ---- what the cache holds ---------------------------------------------------------------------------------------

def slots(cache): return [l.buffer.k.shape[2] for l in cache.layers]

def test_storage_after_a_prompt():
    model, x = gpt_oss(8, layers=4), ids(1000)
    cache = mixed_cache(model.config, max_length=1010)
    feed(model, x, cache, logits_to_keep=1)
    assert slots(cache) == [8, 1010, 8, 1010]
    one = 2*2*16*4  # K and V, heads, numbers, bytes
    assert cache.used_nbytes == 2*(8 + 1000)*one and cache.nbytes == 2*(8 + 1010)*one
    for l in cache.layers: assert l.buffer.k.untyped_storage().nbytes() == l.buffer.k.nbytes, "a view of something larger"
    before = [l.buffer.k.data_ptr() for l in cache.layers]
    for t in range(10): feed(model, x[:, t:t+1], cache)
    assert [l.buffer.k.data_ptr() for l in cache.layers] == before, "something moved, though the length was known"

@pytest.mark.parametrize("rewind", [0, 3])
def test_storage_while_past_is_recorded(rewind):
    model, x = gpt_oss(8), ids(1000)
    cache = mixed_cache(model.config, rewind=rewind)
    for l in cache.layers:
        if l.is_sliding: l.activate_past_recording()
    feed(model, x, cache, logits_to_keep=1)
    assert slots(cache)[0] == 8 + (rewind or hf.DRAFT)
    cache.layers[0].record_past = False  # as transformers does when it is done
    assert slots(cache)[0] == 8 + rewind
    assert_close(feed(model, x[:, :2], cache), model(torch.cat([x, x[:, :2]], 1)).logits[:, 1000:], atol=1e-4, rtol=0)

@pytest.mark.parametrize("seen", [2, 3, 4, 5, 9])
def test_the_contract_is_that_of_their_layer(seen):
    g = torch.Generator().manual_seed(seen)
    kv = lambda T: torch.randn(2, 1, 3, T, 5, generator=g)
    theirs, ours = DynamicSlidingWindowLayer(4), hf.WindowLayer(4)
    for T in (seen, 1, 2, 1, 7, 1):
        positions = "cache_position" in inspect.signature(theirs.get_mask_sizes).parameters
        want = theirs.get_mask_sizes(torch.arange(T) if positions else T)
        assert ours.get_mask_sizes(T) == ours.get_mask_sizes(torch.arange(T)) == want
        k, v = kv(T)
        for got, want in zip(ours.update(k, v), theirs.update(k, v)): assert got.equal(want)
        assert ours.get_seq_length() == theirs.get_seq_length()

@pytest.mark.parametrize("crop", [lambda c, n: c.crop(-n), lambda c, n: c.crop(c.get_seq_length() - n)], ids=["by count", "to a length"])
def test_crop(crop):
    model, x = gpt_oss(4), ids(30)
    want = model(x).logits
    cache = mixed_cache(model.config, rewind=5)
    feed(model, x[:, :20], cache)
    for n in (0, 5, 1, 3):
        at = cache.get_seq_length() - n
        crop(cache, n)
        assert cache.get_seq_length() == at
        assert_close(feed(model, x[:, at:at+9], cache), want[:, at:at+9], atol=1e-4, rtol=0)
    before = cache.get_seq_length()
    with pytest.raises(ValueError, match="at most 5"): crop(cache, 6)
    assert {l.get_seq_length() for l in cache.layers} == {before}
    cache.crop(1000)  # longer than it is: nothing to do
    assert cache.get_seq_length() == before

def test_rows_are_picked_and_repeated():
    model, x = gpt_oss(4), ids(10, B=3)
    want = model(x).logits
    cache = mixed_cache(model.config, max_length=64)
    cache.reorder_cache(torch.tensor([0]))  # nothing held yet
    feed(model, x[:, :7], cache)
    rows = torch.tensor([2, 0, 0])
    storage = cache.layers[1].buffer.k.data_ptr()
    cache.reorder_cache(rows)
    assert cache.layers[1].buffer.k.data_ptr() == storage
    assert_close(feed(model, x[rows, 7:], cache), want[rows, 7:], atol=1e-4, rtol=0)
    cache.crop(10) if ANNOUNCES else None
    cache = mixed_cache(model.config)
    feed(model, x[:, :7], cache)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert_close(feed(model, x[[1, 1], 7:], cache), want[[1, 1], 7:], atol=1e-4, rtol=0)

def test_gradients_end_at_the_history_and_say_so():
    model, x = gpt_oss(4).requires_grad_(True), ids(8)
    cache = mixed_cache(model.config)
    with torch.enable_grad():
        loss = feed(model, x, cache).sum()  # a whole text: nothing is lost
        grad = torch.autograd.grad(loss, model.model.layers[0].self_attn.k_proj.weight)[0]
        want = torch.autograd.grad(model(x).logits.sum(), model.model.layers[0].self_attn.k_proj.weight)[0]
        assert_close(grad, want)
        with pytest.warns(UserWarning, match="gradients end"): feed(model, x[:, :1], cache)
    assert not any(l.buffer.k.requires_grad for l in cache.layers)

def test_inference_mode_and_autocast():
    model, x = gpt_oss(4), ids(12)
    cache = mixed_cache(model.config)
    with torch.inference_mode(): feed(model, x[:, :5], cache)
    assert_close(feed(model, x[:, 5:], cache), model(x).logits[:, 5:], atol=1e-4, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        for attention in ("eager", "gptoss_lite"):
            cache = mixed_cache(model.config)
            got = stepwise(use(model, attention), x, cache, 5)
            assert cache.layers[0].keys.dtype == torch.bfloat16
            assert (got.float() - model(x).logits.float()).abs().mean() < 0.1


# ---- attention --------------------------------------------------------------------------------------------------

class Module:
    is_causal, num_key_value_groups, training = True, 2, False

def qkv(T, S, D=8, H=6, Hkv=3, B=2, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g, dtype=dtype)
    return r(B, H, T, D), r(B, Hkv, S, D), r(B, Hkv, S, D), r(H)

@pytest.mark.parametrize("T, S, window", [(1, 9, None), (1, 4, 4), (5, 5, None), (5, 5, 2), (5, 9, None), (5, 8, 4), (40, 40, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("sinks", [True, False])
def test_attention_equals_the_oracle(T, S, window, scale, sinks):
    q, k, v, s = qkv(T, S)
    s = s if sinks else None
    want = manual_causal_attention(q*((scale or 8**-0.5)*8**0.5), k, v, s, window).transpose(1, 2)
    got, weights = attention_forward(Module, q, k, v, None, scaling=scale, sliding_window=window, s_aux=s)
    assert weights is None and got.is_contiguous()
    assert_close(got, want, atol=1e-12, rtol=0)

def test_padding_at_either_end():
    model, x = gpt_oss(4), ids(12, B=4)
    at = torch.arange(12)
    for mask in (at >= torch.tensor([0, 3, 11, 7])[:, None], at < torch.tensor([12, 3, 1, 7])[:, None]):
        want = use(model, "eager")(x, attention_mask=mask.long()).logits
        got = use(model, "gptoss_lite")(x, attention_mask=mask.long()).logits
        assert got.isfinite().all()
        assert_close(got[mask], want[mask], atol=1e-4, rtol=0)

@pytest.mark.parametrize("cache", ["mixed", "static", "none"])
def test_holes_between_tokens(cache):
    model, x = gpt_oss(4), ids(14, B=2)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :3] = mask[0, 6:8] = mask[1, 5] = 0
    make_cache = {"mixed": lambda: mixed_cache(model.config), "static": lambda: StaticCache(config=model.config, max_cache_len=20),
                  "none": lambda: None}[cache]
    got = []
    for attention in ("eager", "gptoss_lite"):
        use(model, attention)
        c = make_cache()
        if c is None: got.append(model(x, attention_mask=mask).logits)
        else: got.append(torch.cat([feed(model, x[:, :10], c, attention_mask=mask[:, :10]),
                                    *(feed(model, x[:, t:t+1], c, attention_mask=mask[:, :t+1]) for t in range(10, 14))], 1))
    assert_close(got[1][mask == 1], got[0][mask == 1], atol=1e-4, rtol=0)

def test_padding_before_a_window_of_one_over_their_cache():
    "DynamicCache hands out more keys than it tells the mask"
    model, x = use(gpt_oss(1), "gptoss_lite"), ids(9, B=2)
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    cache = DynamicCache(config=model.config)
    got = torch.cat([feed(model, x[:, a:b], cache, attention_mask=mask[:, :b]) for a, b in ((0, 6), (6, 7), (7, 9))], 1)
    want = use(model, "eager")(x, attention_mask=mask).logits
    assert_close(got[mask == 1], want[mask == 1], atol=1e-4, rtol=0)

def test_other_caches_of_transformers():
    model, x = gpt_oss(4), ids(14)
    want = model(x).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
        assert_close(stepwise(use(model, "gptoss_lite"), x, cache, 6), want, atol=1e-4, rtol=0)

def test_texts_packed_into_one_row():
    model, x = other(MistralForCausalLM, MistralConfig, sliding_window=4), ids(12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    got = use(model, "gptoss_lite")(x, position_ids=positions, use_cache=False).logits
    want = torch.cat([model(x[:, :5]).logits, model(x[:, 5:]).logits], 1)
    assert_close(got, want, atol=1e-4, rtol=0)

def test_masks_of_the_caller():
    model, x = gpt_oss(4), ids(6)
    see = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.4
    see[..., 0] = True
    want = use(model, "eager")(x, attention_mask=torch.zeros(1, 1, 6, 6).masked_fill(~see, torch.finfo(torch.float32).min)).logits
    assert_close(use(model, "gptoss_lite")(x, attention_mask=see).logits, want, atol=1e-4, rtol=0)
    with pytest.raises(TypeError, match="must be bool"): model(x, attention_mask=torch.zeros(1, 1, 6, 6))

def test_attention_that_is_not_causal():
    class Both(Module): is_causal = False
    q, k, v, s = qkv(5, 5)
    scores = q @ k.repeat_interleave(2, 1).mT/8**0.5
    want = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    assert_close(attention_forward(Both, q, k, v, None)[0], want, atol=1e-12, rtol=0)
    with_sink = torch.cat([scores, s.view(1, 6, 1, 1).expand(2, 6, 5, 1)], -1).softmax(-1)[..., :5] @ v.repeat_interleave(2, 1)
    assert_close(attention_forward(Both, q, k, v, None, s_aux=s)[0], with_sink.transpose(1, 2), atol=1e-12, rtol=0)

def test_nothing_of_t_by_t_is_made_in_inference():
    "8,192 tokens in full and windowed layers, with and without padding, within some MiB: T by T would be 256 MiB a head"
    code = """if True:
        import torch
        from gptoss_lite.bench import peak_memory
        from gptoss_lite.hf import attention_forward, attention_mask
        from types import SimpleNamespace as N
        torch.set_num_threads(1)
        T = 8192
        q, k, v, s = torch.randn(1, 4, T, 16), torch.randn(1, 2, T, 16), torch.randn(1, 2, T, 16), torch.randn(4)
        run = lambda m, T, w: attention_forward(N(is_causal=True), q[:, :, :T], k[:, :, :T], v[:, :, :T], m, sliding_window=w, s_aux=s)
        pads = lambda T: attention_mask(attention_mask=torch.arange(T)[None] >= 5, kv_length=T, q_length=T, batch_size=1)
        assert pads(9).dim() == 2
        for n in (256, T):
            before = peak_memory(reset=True)["now"]
            for m in (None, pads(n)):
                for w in (None, 128): run(m, n, w)
        print((peak_memory()["peak"] - before)/2**20)"""
    assert 1 < float(python(code)) < 100

def python(code):
    r = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()


# ---- training ---------------------------------------------------------------------------------------------------

def gradients(model, attention, **kw):
    use(model, attention).train().requires_grad_(True)
    with torch.enable_grad(): model(**kw, use_cache=False).loss.backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return got

@pytest.mark.parametrize("name", [n for n in MODELS if "128" not in n and "without" not in n])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_equal_the_eager_ones(name, padded):
    model, x = MODELS[name](), ids(21, B=2)
    mask = torch.ones_like(x)
    if padded: mask[0, :6], mask[1, 15:] = 0, 0
    labels = x.clone()
    if padded: labels[0, :7], labels[1, 15:] = -100, -100  # what padding predicts is nobody's business
    kw = dict(input_ids=x, labels=labels, attention_mask=mask)
    want, got = (gradients(model, a, **kw) for a in ("eager", "gptoss_lite"))
    assert got.keys() == want.keys()
    for n in want: assert_close(got[n], want[n], atol=1e-4, rtol=0, msg=lambda m: f"{n}: {m}")
    for n in want:
        if n.endswith("sinks"): assert want[n].abs().max() > 1e-5, "a sink without gradient proves nothing"

def test_training_under_autocast():
    x = ids(21, B=2)
    want = gradients(gpt_oss(4), "eager", input_ids=x, labels=x)
    with torch.autocast("cpu", torch.bfloat16): got = gradients(gpt_oss(4), "gptoss_lite", input_ids=x, labels=x)
    for n in want: assert got[n].dtype == torch.float32 and (got[n] - want[n]).norm() < 0.1*want[n].norm() + 1e-3, n

@pytest.mark.parametrize("H, Hkv", [(2, 2), (4, 2)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck(window, H, Hkv, padded):
    q, k, v, s = (x.requires_grad_() for x in qkv(6, 6, 3, H, Hkv))
    mask = torch.arange(6) >= torch.tensor([[0], [2]]) if padded else None
    f = lambda q, k, v, s: attention_forward(Module, q, k, v, mask, sliding_window=window, s_aux=s)[0]
    with torch.enable_grad(): assert torch.autograd.gradcheck(f, (q, k, v, s))

def test_peak_memory_of_training_is_linear():
    "Forward and backward of a full and of a windowed layer: peaks above what was there before"
    code = """if True:
        import torch
        from gptoss_lite.bench import peak_memory
        from gptoss_lite.hf import attention_forward
        from types import SimpleNamespace as N
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
        torch.set_num_threads(1)
        def run(way, T, window):
            q, k, v, s = (torch.randn(*n).requires_grad_() for n in ((1, 2, T, 64), (1, 1, T, 64), (1, 1, T, 64), (2,)))
            layer = N(is_causal=True, num_key_value_groups=2, sinks=s, training=True)
            mask = torch.zeros(1, 1, T, T).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf) if way == "eager" else None
            f = eager_attention_forward if way == "eager" else attention_forward
            f(layer, q, k, v, mask, scaling=0.125, sliding_window=window, s_aux=s)[0].sum().backward()
        for way, lengths in (("ours", (4096, 8192)), ("eager", (2048, 4096))):
            run(way, 128, None)
            before = peak_memory(reset=True)["now"]
            for T in lengths:
                for w in (None, 128): run(way, T, w)
                print((peak_memory()["peak"] - before)/2**20, end=" ")
            print()"""
    (a, b), (c, d) = (map(float, line.split()) for line in python(code).splitlines())
    assert b < 2.5*a and b < 300, f"{a} MiB at 4,096 tokens, {b} at 8,192"
    assert d > 2.5*c, f"eager: {c} MiB at 2,048 tokens, {d} at 4,096"
    assert d > b  # eager needs more for 4,096 tokens than this for 8,192


# ---- files ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_and_runs(tmp_path, tied):
    model, x = gpt_oss(8, tie_word_embeddings=tied), ids(20)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = GptOssForCausalLM.from_pretrained(tmp_path, attn_implementation="gptoss_lite", local_files_only=True).eval()
    assert_close(stepwise(loaded, x, mixed_cache(loaded.config), 9), model(x).logits, atol=1e-4, rtol=0)
    assert explain(str(tmp_path), 100).groups == explain(model, 100).groups == explain(tmp_path/"config.json", 100).groups


# ---- explain ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", MODELS)
def test_explain_weighs_what_a_cache_weighs(name):
    model = MODELS[name]()
    cache = mixed_cache(model.config)
    feed(model, ids(30, B=2), cache)
    got = explain(model, 30, batch=2, dtype=torch.float32)
    assert got.mixed == cache.used_nbytes and got.reduction == got.all_full/got.mixed
    theirs = DynamicCache()  # without a configuration it keeps everything
    feed(model, ids(30, B=2), theirs)
    assert got.all_full == sum(l.keys.nbytes + l.values.nbytes for l in theirs.layers)
    assert json.loads(json.dumps(got.to_dict()))["mixed"] == got.mixed and str(got.T) in str(got)

def test_explain_known_models():
    b20, b120 = GptOssConfig(num_hidden_layers=24), GptOssConfig()
    assert explain(b20, 131072).all_full == 6*2**30 and explain(b20, 131072).mixed == 3*2**30 + 3*2**20
    assert explain(b120, 131072).all_full == 9*2**30
    assert explain(b20, 64).reduction == 1 and explain(b20, 0).mixed == 0
    llama = LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, num_attention_heads=32, hidden_size=4096)
    assert [g.kind for g in explain(llama, 8192).groups] == ["full"] and explain(llama, 8192).mixed == 2**30
    gemma = explain(Gemma3TextConfig(num_hidden_layers=12, sliding_window=512), 4096)
    assert [(g.kind, g.layers) for g in gemma.groups] == [("windowed", 10), ("full", 2)]

def test_explain_reads_the_text_part():
    whole = transformers.Gemma3Config(text_config=Gemma3TextConfig(num_hidden_layers=6, sliding_window=512).to_dict())
    assert explain(whole, 4096).groups == explain(whole.get_text_config(), 4096).groups
    assert [l.is_sliding for l in mixed_cache(whole).layers] == [True]*5 + [False]

@pytest.mark.parametrize("name, says", [("Gemma3nTextConfig", 20), ("Gemma4TextConfig", 30), ("Llama4TextConfig", 48)])
def test_layers_that_share_keys_and_heads_of_two_sizes(name, says):
    if not hasattr(transformers, name): pytest.skip(f"this version has no {name}")
    config = getattr(transformers, name)()
    if not DynamicCache(config=config).layers: pytest.skip("some versions make no layers for it")
    got = explain(config, 1000)
    assert sum(g.layers for g in got.groups) == says
    assert sum(not isinstance(w, str) for w in hf.cache_layers(config)) == says


# ---- errors -----------------------------------------------------------------------------------------------------

def held():
    model = gpt_oss(4)
    cache = mixed_cache(model.config)
    feed(model, ids(6), cache)
    return model, cache

@pytest.mark.parametrize("new, says", [
    (dict(B=2), "batch size 2.*another cache or reset"), (dict(Hkv=3), "number of key heads 3"), (dict(D=8), "head_dim 8"),
    (dict(dtype=torch.float64), "float64.*convert it"), (dict(device="meta"), "device meta")])
def test_keys_unlike_those_held(new, says):
    model, cache = held()
    new = dict(B=1, Hkv=2, D=16, dtype=torch.float32, device="cpu") | new
    k = torch.zeros(new["B"], new["Hkv"], 1, new["D"], dtype=new["dtype"], device=new["device"])
    for layer in (0, 1):
        cache = held()[1]
        with pytest.raises(ValueError, match=says): cache.layers[layer].update(k, k)
        assert cache.layers[layer].get_seq_length() == 6
    with pytest.raises(ValueError, match=says): held()[1].update(k, k, 0)

def test_a_cache_belongs_to_one_model():
    model, cache = held()
    with pytest.raises(ValueError, match="cache of 2 layers.*its own|mixed_cache"): feed(gpt_oss(4, layers=3), ids(6), cache)
    cache = mixed_cache(gpt_oss(4, layers=4).config)
    feed(model, ids(6), cache)
    with pytest.raises(ValueError, match="layer 0 has seen 6 tokens and layer 2 0: must be in step"): feed(gpt_oss(4, layers=4), ids(6), cache)
    cache.reset()
    feed(gpt_oss(4, layers=4), ids(6), cache)

def test_a_pass_that_broke_off():
    model, cache = held()
    hook = model.model.layers[1].register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): feed(model, ids(1), cache)
    hook.remove()
    with pytest.raises(ValueError, match="broke off.*reset"): feed(model, ids(1), cache)

def test_what_the_attention_does_not_have():
    q, k, v, s = qkv(3, 3)
    for name in ("softcap", "position_bias", "sinks", "indices"):
        with pytest.raises(ValueError, match=f"{name}.*eager"): attention_forward(Module, q, k, v, None, **{name: s})
    with pytest.raises(ValueError, match="dropout=0.1.*attention_dropout = 0"): attention_forward(Module, q, k, v, None, dropout=0.1)
    model = use(gpt_oss(4, attention_dropout=0.1), "gptoss_lite")
    model(ids(5))  # no dropout outside training
    with pytest.raises(ValueError, match="dropout"): model.train()(ids(5))

@pytest.mark.parametrize("kw, says", [
    (dict(max_length=0), "max_length=0"), (dict(max_length=2.5), "max_length=2.5"), (dict(rewind=-1), "rewind=-1")])
def test_arguments_of_the_cache(kw, says):
    with pytest.raises((ValueError, TypeError), match=says): mixed_cache(gpt_oss(4).config, **kw)

def test_configurations_that_it_does_not_know(tmp_path):
    model = gpt_oss(4)
    with pytest.raises(TypeError, match="pass model.config"): mixed_cache(model)
    with pytest.raises(ValueError, match="linear_attention"): mixed_cache(transformers.Qwen3NextConfig())
    with pytest.raises(ValueError, match="two sizes"): explain(transformers.DeepseekV3Config(), 10)
    with pytest.raises(ValueError, match="encoder"): mixed_cache(transformers.T5Config())
    with pytest.raises(FileNotFoundError, match="download it first"): explain(tmp_path/"nothing", 10)
    with pytest.raises((TypeError, ValueError), match="T="): explain(model, -1)

@pytest.mark.parametrize("version", ["4.57.1", "6.0.0", "6.1.0.dev0"])
def test_a_version_that_it_does_not_know(monkeypatch, version):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"transformers {version}.*5.0 to 5.x.*pip install"): hf.check_transformers()
    with pytest.raises(ImportError, match=version): importlib.reload(hf)
    monkeypatch.undo()

def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="not installed"): hf.check_transformers()


# ---- a GPU ------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    model, x = gpt_oss(8, 8, 4, 64).to("cuda", dtype), ids(40).cuda()
    want = use(model, "eager")(x).logits
    got = stepwise(use(model, "gptoss_lite"), x, mixed_cache(model.config), 17)
    far = (got - want).float().square().mean().sqrt()/want.float().square().mean().sqrt()
    assert far < (1e-4 if dtype == torch.float32 else 0.1)
