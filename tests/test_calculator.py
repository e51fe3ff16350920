"""The calculator page: its formulas are those of `memory` and `roofline`, its address brings a result back."""
import json, shutil, subprocess
from pathlib import Path

import pytest
import torch

from gptoss_lite.config import ModelConfig, count_parameters, gptoss_502m, gptoss_tiny
from gptoss_lite.memory import kv_bytes_per_token, kv_cache_bytes, kv_reduction
from gptoss_lite.roofline import A100, H100, H200, decode_cost, tokens_per_second

ROOT = Path(__file__).resolve().parent.parent
JS = ROOT/"nbs/calculator.js"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(not NODE, reason="node is not installed: the page's script is not run")

def node(code, data=None):
    "Run `code` with the calculator as `c` and `data` as `d`; what it returns, by way of JSON"
    script = (f"const c = require({json.dumps(str(JS))}), d = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
              f"console.log(JSON.stringify((() => {{ {code} }})()))")
    r = subprocess.run([NODE, "-e", script], input=json.dumps(data), capture_output=True, text=True, timeout=60)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)

CONFIGS = [gptoss_502m(), gptoss_tiny(), gptoss_tiny().replace(layer_types=["global"]*4),
           gptoss_tiny().replace(layer_types=["windowed"]*4, sink_bias=False, weight_tying=False),
           ModelConfig(vocab_size=1000, d_model=64, n_layers=7, n_heads=10, n_kv_heads=2, head_dim=6, ffn_dim=50,
                       n_routed_experts=3, n_activated_experts=1, n_shared_experts=0, window_size=33,
                       layer_types=["global"] + ["windowed"]*5 + ["global"])]
LENGTHS = [1, 6, 7, 8, 32, 33, 34, 127, 128, 129, 4096, 131_072, 1_000_003]
CARDS = {"a100": A100, "h100": H100, "h200": H200}

def model(cfg):
    "A configuration in the page's words"
    return dict(vocab=cfg.vocab_size, width=cfg.d_model, layers=cfg.n_layers, windowed=cfg.n_windowed,
                window=cfg.window_size, heads=cfg.n_heads, kvHeads=cfg.n_kv_heads, headDim=cfg.head_dim, ffn=cfg.ffn_dim,
                experts=cfg.n_routed_experts, taken=cfg.n_activated_experts, shared=cfg.n_shared_experts,
                sinks=cfg.sink_bias, tied=cfg.weight_tying)

GRID = [(cfg, T, batch, dtype) for cfg in CONFIGS for T in LENGTHS for batch in (1, 3)
        for dtype in (torch.bfloat16, torch.float32)]

@pytest.fixture(scope="module")
def reports():
    "What the page says for each point of the grid, on each card, with weights of the cache's number type"
    if not NODE: pytest.skip("node is not installed: the page's script is not run")
    return node("""return d.map(([m, T, batch, kvBytes]) => { const p = c.parameters(m); return Object.fromEntries(
        Object.keys(c.CARDS).map(k => [k, c.report({...m, ...c.preset("card", k), T, batch, kvBytes, reserve: 0.5,
          weights: kvBytes*p.total/1e9, read: kvBytes*p.read/1e9, active: p.read/1e9})])); })""",
        [(model(cfg), T, batch, dtype.itemsize) for cfg, T, batch, dtype in GRID])

def test_bytes_and_reduction(reports):
    for (cfg, T, batch, dtype), r in zip(GRID, reports, strict=True):
        r = r["a100"]
        assert r["perToken"] == kv_bytes_per_token(cfg, dtype)
        assert r["total"] == r["windowed"] + r["global"] == kv_cache_bytes(cfg, T, batch, dtype)
        assert r["full"] == kv_cache_bytes(cfg, T, batch, dtype, full=True)
        assert r["reduction"] == pytest.approx(kv_reduction(cfg, T), rel=1e-12)
        for kind, n in (("windowed", cfg.n_windowed), ("global", cfg.n_global)):
            one = kv_cache_bytes(cfg.replace(n_layers=1, layer_types=[kind]), T, batch, dtype)
            assert r[kind] == n*one

def test_the_ceiling(reports):
    for (cfg, T, batch, dtype), r in zip(GRID, reports, strict=True):
        cost, empty = decode_cost(cfg, T, dtype), decode_cost(cfg, 0, dtype)
        for card, hardware in CARDS.items():
            # each weight is read once for the whole batch, everything else is done for each sequence
            nbytes = empty.nbytes + batch*(cost.nbytes - empty.nbytes)
            seconds = hardware.seconds(batch*cost.flops, nbytes)
            assert r[card]["nbytes"] == pytest.approx(nbytes, rel=1e-12)
            assert r[card]["flops"] == pytest.approx(batch*cost.flops, rel=1e-12)
            assert r[card]["tokensPerSecond"] == pytest.approx(batch/seconds, rel=1e-12)
            if batch == 1: assert r[card]["perSequence"] == pytest.approx(tokens_per_second(cfg, T, hardware, dtype), rel=1e-12)

def test_the_largest_text_fits_and_one_token_more_does_not(reports):
    for (cfg, T, batch, dtype), r in zip(GRID, reports, strict=True):
        for card in CARDS:
            most, room = r[card]["largestT"], r[card]["room"]
            if most is None:  # JSON's word for Infinity: no layer grows for ever
                assert cfg.n_global == 0 and kv_cache_bytes(cfg, 10**9, batch, dtype) <= room
            else: assert kv_cache_bytes(cfg, most, batch, dtype) <= room < kv_cache_bytes(cfg, most + 1, batch, dtype)

@needs_node
def test_the_largest_text_near_the_window():
    cfg = gptoss_tiny()
    rooms = [kv_cache_bytes(cfg, T) + d for T in range(1, 20) for d in (-1, 0, 1)] + [0]
    got = node("return d[1].map(b => c.largestT({...c.START, ...d[0], batch: 1, kvBytes: 2, weights: 0, reserve: 0, memory: b/1e9}))",
               [model(cfg), rooms])
    want = [max(T for T in range(21) if kv_cache_bytes(cfg, T) <= room) for room in rooms]
    assert got == want

@needs_node
def test_parameters():
    for cfg in CONFIGS:
        p = node("return c.parameters(d)", model(cfg))
        assert p["total"] == count_parameters(cfg)
        assert p["read"]*2 == decode_cost(cfg, 0, torch.bfloat16).nbytes

@needs_node
def test_what_is_listed_is_what_the_library_says():
    models, cards, start = node("return [c.MODELS, c.CARDS, c.report(c.START)]")
    assert {k: models["ours"][k] for k in model(gptoss_502m())} == model(gptoss_502m())
    assert models["ours"]["context"] == gptoss_502m().eval_max_seq_len
    for k, hardware in CARDS.items():
        assert (cards[k]["name"], cards[k]["source"]) == (hardware.name, hardware.source)
        assert cards[k]["bandwidth"]*1e12 == pytest.approx(hardware.bandwidth) and cards[k]["tflops"]*1e12 == hardware.flops
    assert start["full"] == 2_415_919_104 and round(start["tokensPerSecond"]) == 1198

# Parameters as published, in billions, and the published checkpoint's size in GiB where there is one
# Source: gpt-oss model card, https://arxiv.org/abs/2508.10925 (table 1)
# Source: Gemma 3 report, https://arxiv.org/abs/2503.19786 (table 1, without the vision encoder)
# Source: https://huggingface.co/Qwen/Qwen3-8B, https://huggingface.co/Qwen/Qwen3-30B-A3B
# Source: https://arxiv.org/abs/2310.06825 (Mistral 7B), https://huggingface.co/mistralai/Mistral-Small-24B-Base-2501
# Source: Llama 3 report, https://arxiv.org/abs/2407.21783
PUBLISHED = {"gpt-oss-20b": (20.91, 12.8), "gpt-oss-120b": (116.83, 60.8), "gemma-3-4b": (3.884, None),
             "gemma-3-12b": (11.77, None), "gemma-3-27b": (27.02, None), "mistral-7b": (7.24, None), "mistral-small": (23.6, None),
             "qwen-3-8b": (8.2, None), "qwen-3-30b-a3b": (30.5, None), "llama-3.1-8b": (8.03, None), "llama-3.1-70b": (70.6, None)}

@needs_node
def test_sizes_give_the_published_parameter_counts():
    got = node("return Object.fromEntries(Object.entries(c.MODELS).map(([k, m]) => [k, [c.parameters(m).total/1e9, c.weights(m).total/2**30]]))")
    assert set(got) == {"ours", *PUBLISHED}
    for k, (params, gib) in PUBLISHED.items():
        assert got[k][0] == pytest.approx(params, rel=3e-3), k
        if gib: assert got[k][1] == pytest.approx(gib, rel=3e-3), k

@needs_node
def test_the_address_brings_a_result_back():
    lost = node("""const states = [c.START];
        for (const model of [...Object.keys(c.MODELS), "own"]) for (const card of [...Object.keys(c.CARDS), "own"]) {
          const s = {...c.START, model, card, T: 5000, batch: 3, kvBytes: 0.5, reserve: 2.5};
          Object.assign(s, model === "own" ? {layers: 7, windowed: 5, window: 33, kvHeads: 3, headDim: 20, heads: 9, weights: 1.5, read: 0.25, active: 0.125} : c.preset("model", model));
          Object.assign(s, card === "own" ? {memory: 24, bandwidth: 1.008, tflops: 165.2} : c.preset("card", card));
          states.push(s); }
        const key = s => JSON.stringify(Object.entries(s).sort());
        return states.filter(s => key(c.decode(c.encode(s))) !== key(s)).length ? states.map(s => [s, c.decode(c.encode(s))]) : []""")
    assert lost == []

@needs_node
@pytest.mark.parametrize("query", ["", "model=nonsense&T=many&batch=0&card=constructor", "T=1e99&kvBytes=-1&layers=3&window=",
                                   "T=2.5&batch=&reserve=NaN"])
def test_an_address_of_nonsense_is_the_start(query):
    assert node(f"return c.decode({json.dumps(query)})") == node("return c.START")

@needs_node
def test_impossible_values_have_a_reason():
    why = lambda f, v: node(f"return c.wrong({json.dumps(f)}, {v}, c.START)")
    assert why("T", "1") == why("kvBytes", "0.5") == why("windowed", "12") == ""
    assert "whole" in why("T", "1.5") and "between" in why("batch", "0") and "number" in why("T", "NaN")
    assert "layers" in why("windowed", "13")

def test_the_notebook_holds_the_script_as_it_is():
    text = (ROOT/"nbs/calculator.ipynb").read_text(encoding="utf-8")
    outputs = [o for c in json.loads(text)["cells"] for o in c.get("outputs", []) if "text/html" in o.get("data", {})]
    assert JS.read_text(encoding="utf-8") in "".join(outputs[0]["data"]["text/html"]), "run nbs/calculator.ipynb and save it"

@needs_node
def test_windowed_layers_are_counted_as_transformers_counts_them():
    from transformers import Gemma3TextConfig, GptOssConfig
    models = node("return c.MODELS")
    for prefix, config in (("gpt-oss", GptOssConfig), ("gemma-3", Gemma3TextConfig)):
        for k in (k for k in models if k.startswith(prefix)):
            kinds = config(num_hidden_layers=models[k]["layers"]).layer_types
            assert models[k]["windowed"] == kinds.count("sliding_attention"), k
    for k, m in models.items(): assert m["windowed"] in (0, m["layers"]) or k == "ours" or k.startswith(("gpt-oss", "gemma-3")), k
