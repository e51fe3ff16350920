"The training loop: batches, resuming, and the shipped checkpoint's papers."
import json
from pathlib import Path

import pytest
import torch

import gptoss_lite
from gptoss_lite.model import load_checkpoint, read_checkpoint
from gptoss_lite.passkey import CharTokenizer, PromptBuilder, load_pretrained
from gptoss_lite.training import Recipe, Stage, eval_config, export_checkpoint, losses, make_batch, passkey_config, train

SMALL = passkey_config(d_model=12, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=10, n_routed_experts=3, window_size=16)


def recipe(**kw): return Recipe(**{**dict(cfg=SMALL, stages=(Stage(4, 3, 130, 1e-2), Stage(3, 2, 170, 5e-3)), warmup=2), **kw})


def test_batches_end_with_the_answer_and_mark_what_can_be_known():
    tok, stage = CharTokenizer(), Stage(1, 5, 300, 0.)
    ids, known = make_batch(PromptBuilder(tok), stage, 7, 3)
    assert ids.shape == known.shape == (5, 300) and known.dtype == torch.bool
    for row, mask in zip(ids, known):
        text = tok.decode(row.tolist())
        key = text[-6:-1]
        assert text.endswith(f" What is the passkey? The passkey is {key}.")
        n = text.count(f" The passkey is {key}.")  # needles and answer
        assert tok.decode(row[mask].tolist()) == (key + ".")*(n - 1), "every mention but the first, with its full stop"
        assert not mask[:text.index(key) + 5].any()


def test_batches_are_a_function_of_seed_and_step():
    b = PromptBuilder(CharTokenizer())
    get = lambda seed, step: make_batch(b, Stage(1, 2, 200, 0.), seed, step)[0]
    assert torch.equal(get(1, 2), get(1, 2))
    assert not torch.equal(get(1, 2), get(1, 3)) and not torch.equal(get(1, 2), get(2, 2))


def test_learning_rate_warms_up_and_anneals():
    r = recipe()
    lrs = [r.stage_at(s)[1] for s in range(r.steps)]
    assert lrs[:3] == pytest.approx([5e-3, 1e-2, 1e-2]) and lrs[4:] == pytest.approx([5e-3, 5e-3*0.7, 5e-3*0.4])


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path):
    r = recipe()
    whole, log = train(r, tmp_path/"a", progress=False)
    class Stop(Exception): pass
    def stop_at(n):
        calls = []
        def f(*a):
            calls.append(1)
            if len(calls) > n: raise Stop
            return make_batch(*a)
        return f
    import gptoss_lite.training as T
    with pytest.MonkeyPatch.context() as mp, pytest.raises(Stop):
        mp.setattr(T, "make_batch", stop_at(5))
        train(r, tmp_path/"b", save_every=2, progress=False)
    again, log2 = train(r, tmp_path/"b", progress=False)
    assert log == log2 and len(log) == r.steps
    for (n, p), q in zip(whole.named_parameters(), again.parameters()): assert torch.equal(p, q), n
    with pytest.raises(ValueError, match="another recipe"): train(recipe(seed=1), tmp_path/"b", progress=False)


def test_a_recipe_that_begins_from_a_checkpoint(tmp_path):
    from dataclasses import replace
    base = recipe(stages=(Stage(2, 2, 130, 1e-2),))
    model, _ = train(base, tmp_path/"base", progress=False)
    export_checkpoint(model, base, file := tmp_path/"m.safetensors")
    digest = read_checkpoint(file)[1]["digest"]
    tune = recipe(cfg=eval_config(SMALL), stages=(Stage(2, 2, 130, 1e-3),), start=digest, seed=5)
    tuned, log = train(tune, tmp_path/"tuned", start=file, save_every=1, progress=False)
    assert tuned.cfg.yarn_scale_factor == 32 and len(log) == 2
    moved = [(p - q).abs().max().item() for p, q in zip(model.parameters(), tuned.parameters())]
    assert 0 < max(moved) < 3e-3, "two small steps away from the checkpoint, not from fresh weights"
    again, _ = train(tune, tmp_path/"tuned", start=file, progress=False)
    for p, q in zip(tuned.parameters(), again.parameters()): assert torch.equal(p, q)
    for r, start, match in ((tune, None, "start=None.*begins from"), (replace(tune, start="0"*64), file, "recipe begins from 00000000"),
                            (base, file, "from fresh weights")):
        with pytest.raises(ValueError, match=match): train(r, tmp_path/"c", start=start, progress=False)
    with pytest.raises(ValueError, match="another recipe"): train(replace(tune, start=""), tmp_path/"tuned", progress=False)
    assert tune.to_dict()["start"] == digest and "start" not in base.to_dict()
    export_checkpoint(tuned, tune, file)
    assert json.loads(read_checkpoint(file)[1]["recipe"])["start"] == digest


def test_training_leaves_the_random_state_alone(tmp_path):
    before = torch.get_rng_state()
    train(recipe(stages=(Stage(1, 2, 130, 1e-2),)), tmp_path, progress=False)
    assert torch.equal(before, torch.get_rng_state())


def test_losses_fall(tmp_path):
    _, log = train(recipe(stages=(Stage(30, 4, 130, 1e-2),)), tmp_path, progress=False)
    assert log[-1]["lm"] < log[0]["lm"] - 0.5


def test_the_exported_file_carries_both_configurations(tmp_path):
    r = recipe(stages=(Stage(1, 2, 130, 1e-2),))
    model, _ = train(r, tmp_path, progress=False)
    export_checkpoint(model, r, tmp_path/"m.safetensors", commit="abc")
    _, meta = read_checkpoint(tmp_path/"m.safetensors")
    assert json.loads(meta["config"])["yarn_scale_factor"] == 1 and json.loads(meta["eval_config"])["yarn_scale_factor"] == 32
    assert meta["commit"] == "abc" and json.loads(meta["train_lengths"]) == [130] and meta["seed"] == "0"
    assert load_checkpoint(tmp_path/"m.safetensors").cfg == r.cfg


def test_the_shipped_checkpoint():
    path = Path(gptoss_lite.__file__).parent/"checkpoints"/"passkey.safetensors"
    assert path.stat().st_size < 4e6
    state, meta = read_checkpoint(path)  # checks the digest
    model, tok = load_pretrained("passkey")
    assert model.cfg == eval_config(load_checkpoint(path).cfg) and not model.cfg.yarn_mscale and model.cfg.yarn_scale_factor == 32
    assert {"seed", "commit", "train_lengths", "digest", "recipe"} <= meta.keys() and meta["commit"]
    assert max(json.loads(meta["train_lengths"])) == 4096 and tok.vocab_size == model.cfg.vocab_size


def test_a_state_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file
    save_file({"x": torch.zeros(3)}, tmp_path/"state.safetensors")
    with pytest.raises(ValueError, match="another recipe"): train(recipe(), tmp_path, progress=False)
