"The control arms: what each changes, the specification's prefill, and the run."
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gptoss_lite.arms as A
from gptoss_lite import attention
from gptoss_lite.arms import ARMS, FIVE, AppendThenGet, arm_evaluator, arm_recipes, loss_curve, run_arm, too_late, train_arm
from gptoss_lite.attention import manual_causal_attention
from gptoss_lite.model import GPTOSS, read_checkpoint, save_checkpoint
from gptoss_lite.passkey import load_pretrained, read_log
from gptoss_lite.training import Recipe, Stage, eval_config, passkey_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Untrained stand-ins for the checkpoints of the arms"
    path = tmp_path_factory.mktemp("arms")
    for name, r in arm_recipes().items(): save_checkpoint(GPTOSS(r.cfg), path/f"{name}.safetensors")
    return path


def test_each_arm_changes_one_thing(folder):
    ours, keys = arm_evaluator("ours", folder).model.cfg, {}
    assert ours == load_pretrained()[0].cfg == eval_config(passkey_config())
    for name in ARMS:
        ev = arm_evaluator(name, folder)
        keys[name] = {k for k, v in ev.model.cfg.to_dict().items() if v != ours.to_dict()[k]}
        assert ev.wording == ("leaky" if "leaky" in name else "passkey") and ev.haystack == "words"
    assert {n: k for n, k in keys.items() if k} == dict(
        plain={"yarn_scale_factor"}, factor={"yarn_mscale"}, tunedfactor={"yarn_mscale"}, yarnfactor={"yarn_mscale"}, full={"rope_global"},
        nope={"rope_global"}, nosink={"sink_bias"}, window32={"window_size"}, noglobal={"layer_types"}, nogloballeaky={"layer_types"})


def test_recipes_differ_in_one_thing_too():
    base = Recipe()
    for name, r in arm_recipes().items():
        assert len([k for k, v in r.cfg.to_dict().items() if v != base.cfg.to_dict()[k]]) == (0 if name == "base1" else 2 if name == "yarnfactor" else
                                                                                           1 if name != "tunedfactor" else 2), name
        assert (r.seed, bool(r.start)) == ((1, False) if name == "base1" else (0, name.startswith("tuned")))
        assert r.stages == (A.TUNING if r.start else base.stages)


# ---- append, then get ----

def test_late_queries_give_nothing_and_the_others_see_what_is_held():
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, 4, 11, 8, generator=g), torch.randn(2, 2, 11, 8, generator=g), torch.randn(2, 2, 11, 8, generator=g)
    sink, W = torch.randn(4, generator=g), 5
    before = attention.causal_attention
    with too_late(): got = attention.causal_attention(q, k[:, :, -W:], v[:, :, -W:], sink, W)
    assert attention.causal_attention is before
    assert not got[:, :, :-W].any()
    want = manual_causal_attention(q[:, :, -W:], k[:, :, -W:].repeat_interleave(2, 1), v[:, :, -W:].repeat_interleave(2, 1), sink)
    torch.testing.assert_close(got[:, :, -W:], want)
    with pytest.raises(ZeroDivisionError), too_late(): 1/0
    assert attention.causal_attention is before


@pytest.mark.parametrize("length, equal", [(100, True), (128, True), (129, False), (400, False)])
def test_it_is_ours_up_to_the_window_and_not_beyond(folder, length, equal):
    ours, theirs = arm_evaluator("ours", folder), arm_evaluator("append", folder)
    plan = ours.plan([length], 2, [0, 1], 3)
    a, b = ([t.output for t in sorted(ev.run_trials(plan), key=lambda t: t.trial)] for ev in (ours, theirs))
    if equal: assert a == b
    else: # the logits differ; at 129 the answer need not
        ids = torch.tensor([ours.build_prompt_ids("12345", length, 0.5, 0)])
        logits = []
        for cache in (A.MixedKVCache(), AppendThenGet()):
            with too_late(), torch.no_grad(): logits.append(A.prefill(ours.model, ids, cache, chunk=length))
        assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert theirs.header("middle", 1, 16)["prefill"] == "append, then get" and "prefill" not in ours.header("middle", 1, 16)


# ---- the run ----

def test_an_arm_is_run_and_goes_on(folder, monkeypatch):
    trials = run_arm("ours", folder, (128, 300), 10, (500,), 5, seed=9)
    assert [t.length for t in trials] == [128]*10 + [300]*10 + [500]*5 and all(t.correct for t in trials)
    assert {(t.length, t.depth) for t in trials} == {(n, d) for n in (128, 300, 500) for d in FIVE}
    assert len({t.seed for t in trials if t.length == 128}) == 2
    text = (folder/"ours.jsonl").read_text()
    monkeypatch.setattr(A.PasskeyEvaluator, "run_trials", None)
    assert run_arm("ours", folder, (128, 300), 10, (500,), 5, seed=9) == trials and (folder/"ours.jsonl").read_text() == text
    assert len(read_log(folder/"ours.jsonl")[2]) == 25


def test_an_arm_that_finds_nothing_is_not_asked_further(folder):
    trials = run_arm("untrained", folder, (128, 200), 5, (500,), 5)
    assert [t.length for t in trials] == [128]*5 + [200]*5 and not any(t.correct for t in trials)


def test_all_arms_get_the_same_questions(folder):
    asked = [[(t.key, t.depth, t.seed) for t in run_arm(n, folder, (150,), 5, ())] for n in ("plain", "untrained", "leaky")]
    assert asked[0] == asked[1] == asked[2]


def test_unknown_and_missing_arms(tmp_path):
    with pytest.raises(ValueError, match="arm='wings': must be one of ours"): arm_evaluator("wings", tmp_path)
    with pytest.raises(ValueError, match="arm='nope': nope.safetensors must be in"): arm_evaluator("nope", tmp_path)
    with pytest.raises(ValueError, match="checkpoint='wings'"): train_arm("wings", tmp_path)


def test_a_checkpoint_is_trained_and_goes_on_from_the_shipped_one(tmp_path, monkeypatch):
    short = {n: replace(r, stages=(Stage(1, 2, 130, 1e-4),)) for n, r in arm_recipes().items()}
    monkeypatch.setattr(A, "arm_recipes", lambda: short)
    for name in ("tunedfactor", "noglobal"): train_arm(name, tmp_path, "abc", progress=False)
    near, far = arm_evaluator("tunedfactor", tmp_path).model, arm_evaluator("noglobal", tmp_path).model
    shipped = load_pretrained()[0]
    move = lambda m: max((p - q).abs().max().item() for p, q in zip(m.parameters(), shipped.parameters()))
    assert 0 < move(near) < 3e-4 < 0.1 < move(far)
    assert near.cfg.yarn_mscale and near.cfg.yarn_scale_factor == 32 and far.cfg.kinds == ("windowed",)*4
    assert {f.name for f in tmp_path.iterdir()} == {"training", *(f"{n}.{x}" for n in ("tunedfactor", "noglobal") for x in ("safetensors", "loss.json"))}


# ---- what is kept ----

KEPT = Path(__file__).parent.parent/"results"/"arms"

@pytest.mark.parametrize("name", arm_recipes())
def test_kept_checkpoints_are_those_of_the_recipes(name):
    if not (KEPT/f"{name}.safetensors").exists(): pytest.skip("not trained yet")
    _, meta = read_checkpoint(KEPT/f"{name}.safetensors")
    assert json.loads(meta["recipe"]) == json.loads(json.dumps(arm_recipes()[name].to_dict())) and meta["commit"]
    assert json.loads(meta["config"]) == json.loads(json.dumps(arm_recipes()[name].cfg.to_dict()))
    curve = json.loads((KEPT/f"{name}.loss.json").read_text())
    assert [s for s, _ in curve] == list(range(0, arm_recipes()[name].steps, 20))


@pytest.mark.parametrize("name", ARMS)
def test_kept_trials_are_those_of_the_arm_and_can_be_repeated(name):
    if not (KEPT/f"{name}.jsonl").exists(): pytest.skip("not run yet")
    head, runs, trials = read_log(KEPT/f"{name}.jsonl")
    ev = arm_evaluator(name, KEPT)
    assert head == {"log": head["log"], **json.loads(json.dumps(ev.header(FIVE, head["seed"], 16)))} and all(r["commit"] for r in runs)
    plan = {(p["length"], p["trial"]): p for n, lengths in ((20, (4096, 32768)), (10, (131072,)))
            for p in ev.plan(lengths, n, FIVE, head["seed"], n//5)}
    for t in trials: assert (t.key, t.depth, t.seed) == tuple(plan[t.length, t.trial][k] for k in ("key", "depth", "seed"))
    counts = {n: sum(t.length == n for t in trials) for n in (4096, 32768, 131072)}
    assert counts[4096] == counts[32768] == 20 and counts[131072] in (0, 10)
    assert (counts[131072] == 10) == any(t.correct for t in trials if t.length == 32768)


def test_loss_curves_are_means():
    assert loss_curve([dict(step=i, digits=float(i)) for i in range(7)], 3) == [[0, 1.0], [3, 4.0], [6, 6.0]]
