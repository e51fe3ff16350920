"The side-by-side benchmark: the competitors compute the same, the counts are right. No time is asserted."
import subprocess
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

import gptoss_lite.bench as B
from gptoss_lite.cli import app
from gptoss_lite.config import gptoss_502m, gptoss_tiny
from gptoss_lite.memory import kv_cache_bytes
from gptoss_lite.model import GPTOSS
from gptoss_lite.roofline import decode_cost

OTHERS = [n for n in B.RIVALS if n != "ours"]


@pytest.fixture(scope="module")
def model():
    with torch.no_grad(): yield B.random_model(gptoss_tiny(), torch.float64)


def far(model, name, T, steps=1):
    "How far the logits of a competitor lie from ours, step by step on a filled cache"
    rivals = [B.RIVALS[n](model, T + steps) for n in ("ours", name)]
    B.fill_alike(rivals, T)
    for ids in B.random_ids(model, steps)[0].view(steps, 1, 1):
        out = []
        for r in rivals:
            with r.comparable(): out.append(r.feed(ids))
        yield B.disagreement(out[1], out[0])


# ---- every competitor computes the same function ----

@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("T", [1, 6, 7, 8, 50])  # around the window of 7
@torch.no_grad()
def test_decode_after_a_filled_cache(model, name, T):
    limit = 1e-5 if "transformers" in name else 1e-12  # its norms are computed in float32
    assert max(far(model, name, T, steps=9)) < limit


@pytest.mark.parametrize("name, T", [*((n, t) for n in OTHERS if n != "specification" for t in (7, 50)), ("specification", 7)])
@torch.no_grad()
def test_prefill(model, name, T):
    ids, r = B.random_ids(model, T), B.RIVALS[name](model, T)
    with r.comparable(): got = r.feed(ids)
    assert B.disagreement(got, B.Ours(model, T).feed(ids)) < 1e-6
    assert B.disagreement(got, model(ids)[0][:, -1]) < 1e-6


@torch.no_grad()
def test_the_specification_loses_keys_beyond_the_window(model):
    ids = B.random_ids(model, 8)
    assert B.disagreement(B.Specification(model, 8).feed(ids), B.Ours(model, 8).feed(ids)) > 1e-3


@torch.no_grad()
def test_transformers_differs_where_it_is_left_as_it_is(model):
    "The hooks are needed, and they are gone afterwards"
    r, ours, ids = B.Transformers(model, 20), B.Ours(model, 20), B.random_ids(model, 20)
    with r.comparable(): pass
    assert B.disagreement(r.feed(ids), ours.feed(ids)) > 1e-3


@pytest.mark.parametrize("change", [dict(n_shared_experts=0), dict(sink_bias=False), dict(weight_tying=False), dict(yarn_truncate=False),
                                    dict(layer_types=["global"]*4), dict(rope_global="none"), dict(yarn_mscale=False)], ids=str)
@torch.no_grad()
def test_transformers_twin_of_other_configurations(change):
    assert max(far(B.random_model(gptoss_tiny().replace(**change)), "transformers", 30, steps=2)) < 1e-5


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_sixteen_bits(name):
    cfg = gptoss_tiny().replace(n_activated_experts=5)  # all of them: rounding cannot choose another
    assert max(far(B.random_model(cfg, torch.bfloat16), name, 30, steps=2)) < B.AGREE[torch.bfloat16]


@torch.no_grad()
def test_a_wrong_weight_is_noticed(model):
    hf = B.Transformers(model, 1).hf
    sinks = hf.model.layers[2].self_attn.sinks
    old = sinks.clone()
    try:
        sinks += 1
        assert max(far(model, "transformers", 30)) > 1e-4
    finally: sinks.copy_(old)
    assert max(far(model, "transformers", 30)) < 1e-6


def test_the_global_random_state_stays():
    before = torch.get_rng_state()
    B.random_ids(B.random_model(gptoss_tiny()), 5)
    assert torch.equal(before, torch.get_rng_state())


# ---- counts ----

def test_bytes_are_those_of_the_roofline_chapter(model):
    rows = list(B.decode_rows(model, [5, 40], ["ours", "transformers"], repeats=2))
    cfg = model.cfg
    for r in rows:
        c = cfg if r["competitor"] == "ours" else cfg.replace(n_shared_experts=0)
        assert (r["flops"], r["nbytes"]) == tuple(decode_cost(c, r["tokens"], torch.float64))


@pytest.mark.parametrize("T", [1, 6, 7, 8, 100])
def test_prefill_flops_count_the_visible_pairs(T):
    cfg = gptoss_tiny()
    from gptoss_lite.attention import visible
    pairs = sum(int(visible(T, T, cfg.window_size if k == "windowed" else None).sum()) for k in cfg.kinds)
    rest = B.prefill_flops(cfg, T) - 4*cfg.n_heads*cfg.head_dim*pairs
    assert rest == T*cfg.n_layers*B.layer_matrix_flops(cfg) + 2*cfg.vocab_size*cfg.d_model


def test_held_bytes_are_what_the_caches_hold(model):
    T, cfg = 40, model.cfg
    for n in ("ours", "concat", "specification"):
        r = B.RIVALS[n](model, T)
        B.fill_alike([r], T)
        assert B.RIVALS[n].held(cfg, T, torch.float64) == r.cache.nbytes
    assert B.Concat.held(cfg, T, torch.float64) == kv_cache_bytes(cfg, T, dtype=torch.float64, full=True)


def test_rounds_fit_into_memory():
    model = GPTOSS.__new__(GPTOSS); torch.nn.Module.__init__(model)
    model.cfg, model.embed = gptoss_502m(), torch.nn.Embedding(1, 1)
    assert B.rounds(model, OTHERS, 8192, 14*2**30) == [OTHERS]
    groups = B.rounds(model, OTHERS, 131072, 14*2**30)
    assert [n for g in groups for n in g] == OTHERS and len(groups) == 3 and groups[0] == ["concat", "specification"]
    assert B.rounds(model, OTHERS, 131072, 1) == [[n] for n in OTHERS]


# ---- what is too slow or too large is passed over, with the reason ----

def test_a_slow_competitor_is_passed_over(model, monkeypatch):
    rows = list(B.decode_rows(model, [10], ["ours", "concat"], repeats=4, budget=0.))
    assert all("budget" in r["skipped"] and r["agrees"] for r in rows)
    clock = iter(range(10**6))
    monkeypatch.setattr(B, "perf_counter", lambda: float(next(clock)))  # every job takes a second
    rows = list(B.decode_rows(model, [10], ["ours", "concat"], repeats=9, budget=2.))
    assert [r["repeats"] for r in rows] == [3, 3]
    rows = list(B.prefill_rows(model, [10, 20, 40], ["ours", "concat"], repeats=2, budget=5., compare=10))
    assert [(r["tokens"], r["competitor"], "skipped" in r) for r in rows if r["tokens"] == 40] == [(40, "ours", False), (40, "concat", False)]
    rows = list(B.prefill_rows(model, [10, 40], ["ours", "concat"], repeats=2, budget=5., compare=10))
    assert "16 s" in rows[-1]["skipped"] and "skipped" not in rows[-2]


def test_what_does_not_run_here_is_passed_over(model, monkeypatch):
    def feed(self, ids): raise RuntimeError("no kernel\nand more")
    monkeypatch.setattr(B.Concat, "feed", feed)
    rows = list(B.decode_rows(model, [10], ["ours", "concat"], repeats=1))
    assert "seconds" in rows[0] and rows[1]["skipped"] == "does not run here: no kernel" and "agrees" not in rows[1]


def test_what_does_not_fit_is_passed_over(model):
    rows = list(B.prefill_rows(model, [3000], ["ours", "specification"], repeats=1, memory=500e6, compare=7))
    assert "skipped" not in rows[0] and "GiB" in rows[1]["skipped"]
    [row] = B.memory_rows(model.cfg, {"prefill": [10**6]}, ["transformers"])
    assert "GiB" in row["skipped"]


# ---- memory ----

@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process, from /proc")
def test_the_peak_is_reset_and_seen():
    "In a process of its own: here, freed memory of earlier tests may be used again and raise nothing"
    job = """
import torch
from gptoss_lite.bench import peak_memory
now = peak_memory(reset=True)["now"]
x = torch.ones(2**26)
del x
peak = peak_memory()["peak"]
print(peak - now, peak_memory(reset=True)["peak"] < peak)
"""
    rose, reset = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, check=True).stdout.split()
    assert int(rose) > 200e6 and reset == "True"


def test_memory_in_a_process_of_its_own():
    rows = list(B.memory_rows(gptoss_tiny(), {"decode": [60]}, ["concat", "transformers"], threads=1))
    for r in rows:
        assert "skipped" not in r, r
        assert r["peak"] >= r["imported"] + r["weights"] > r["weights"] and r["cache"] == kv_cache_bytes(gptoss_tiny(), 60, dtype=torch.float32)


def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(B.sys, "executable", "false")
    [row] = B.memory_rows(gptoss_tiny(), {"decode": [60]}, ["ours"])
    assert row["skipped"].startswith("failed")


# ---- the command and its file ----

def test_the_file_grows(tmp_path):
    path, seen = tmp_path/"x.json", []
    for row in B.collect(iter([dict(a=1), dict(a=2)]), path, head=3): seen.append(json.loads(path.read_text()))
    assert [len(s["rows"]) for s in seen] == [1, 2] and seen[0]["head"] == 3


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(B, "measure_machine", lambda device: B.Hardware("this machine", 1e11, 1e10, "not measured"))
    (tmp_path/"tiny.json").write_text(json.dumps(gptoss_tiny().to_dict()))
    def run(*argv):
        r = CliRunner().invoke(app, ["bench", *argv, "--config", "tiny.json"])
        name = f"results/bench-{argv[0]}.json"
        return r, json.loads((tmp_path/name).read_text()) if (tmp_path/name).exists() else None
    return run


HEAD = "bench run config dtype quick machine".split()

def test_decode_command(tiny):
    r, res = tiny("decode", "--contexts", "5,60", "--repeats", "2", "--commit", "abc")
    assert r.exit_code == 0, r.output
    assert set(HEAD) <= set(res) and res["run"]["commit"] == "abc" and res["run"]["threads"] and res["run"]["transformers"]
    rows = B.measured(res, "decode")
    assert [(x["tokens"], x["competitor"]) for x in rows] == [(T, n) for T in (5, 60) for n in B.COMPETITORS]
    for x in rows: assert x["agrees"] and x["fastest"] <= x["seconds"] <= x["slowest"] and x["repeats"] == 2 and x["times_ours"] > 0
    assert len(B.measured(res, "attention", tokens=60)) == 3 and all(x["agrees"] for x in res["rows"])
    assert len(r.output.splitlines()) == len(res["rows"]) + 2


def test_hf_command(tiny):
    r, res = tiny("hf", "--contexts", "60", "--prompts", "20", "--repeats", "1")
    assert r.exit_code == 0, r.output
    names = ["transformers", *B.INSIDE]
    assert [x["competitor"] for x in B.measured(res, "decode")] == [x["competitor"] for x in B.measured(res, "prefill")] == ["ours", *names]
    assert [x["competitor"] for x in B.measured(res, "memory")] == names
    assert all(x["agrees"] for x in res["rows"] if x["what"] != "memory")


def test_prefill_command(tiny):
    r, res = tiny("prefill", "--contexts", "20,30", "--repeats", "1", "--competitors", "ours,transformers")
    assert r.exit_code == 0, r.output
    assert [(x["tokens"], x["competitor"], x["compared"]) for x in B.measured(res, "prefill")] == \
        [(T, n, 20) for T in (20, 30) for n in ("ours", "transformers")]
    assert {(x["part"], x["tokens"]) for x in B.measured(res, "windowed")} == {(p, T) for p in ("layer", "attention") for T in (8192, 32768)}


def test_cache_command(tiny):
    r, res = tiny("cache", "--contexts", "20,30", "--decode-contexts", "none", "--competitors", "ours", "--threads", "1")
    assert r.exit_code == 0, r.output
    assert [(x["phase"], x["tokens"], x["competitor"]) for x in B.measured(res, "memory")] == [("prefill", 20, "ours"), ("prefill", 30, "ours")]
    assert all(x["prefill_seconds"] > 0 for x in res["rows"])


def test_quick_writes_no_file(tiny):
    r, res = tiny("decode", "--quick", "--competitors", "ours", "--contexts", "9")
    assert r.exit_code == 0 and res is None and "wrote" not in r.output


def test_a_competitor_that_computes_something_else_is_a_verdict(tiny, monkeypatch):
    true = B.Concat.feed
    monkeypatch.setattr(B.Concat, "feed", lambda self, ids: true(self, ids)*1.01)
    r, res = tiny("decode", "--contexts", "30", "--repeats", "1", "--competitors", "ours,concat")
    assert r.exit_code == 1 and "LOGITS DIFFER" in r.output and [x["agrees"] for x in B.measured(res, "decode")] == [True, False]
