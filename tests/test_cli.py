"The command as a person types it."
import json
import re

import pytest
from typer.testing import CliRunner

from gptoss_lite.cli import app, main

run = lambda *a: CliRunner().invoke(app, [str(x) for x in a])


def test_help_on_each():
    top = run("--help")
    assert top.exit_code == 0
    for cmd in "smoke kv passkey generate train".split():
        assert cmd in top.output
        assert run(cmd, "--help").exit_code == 0


def test_kv_prints_the_table_and_judges(tmp_path):
    r = run("kv", "--json", tmp_path/"kv.json")
    assert r.exit_code == 0 and "PASSED" in r.output
    assert re.findall(r"\d\.\d\dx", r.output)[:6] == ["1.94x", "1.97x", "1.98x", "1.99x", "2.00x", "2.00x"]
    assert [x["full"] for x in json.loads((tmp_path/"kv.json").read_text())["rows"]][-1] == 2_415_919_104
    assert run("kv", 128).exit_code == 1, "no reduction up to the window"
    assert run("kv", "--threshold", 2.1).exit_code == 1


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_smoke(dtype, tmp_path):
    r = run("smoke", "--dtype", dtype, "--json", tmp_path/"s.json")
    assert r.exit_code == 0 and "PASSED" in r.output
    assert json.loads((tmp_path/"s.json").read_text())["passed"] is True


def test_smoke_can_fail(monkeypatch):
    import gptoss_lite.attention as A
    true = A.causal_attention
    monkeypatch.setattr(A, "causal_attention", lambda q, k, v, sink, window: true(q, k, v, None if q.shape[2] == 1 else sink, window))
    r = run("smoke")
    assert r.exit_code == 1 and "FAILED" in r.output


def test_passkey_of_an_untrained_model_exits_0_below_target(tmp_path):
    r = run("passkey", "--context-lengths", 100, 200, "--n-trials", 3, "--position", "spread", "--checkpoint", "random",
            "--json", tmp_path/"p.json", "--plot", tmp_path/"p.png")
    assert r.exit_code == 0 and "BELOW TARGET" in r.output
    res = json.loads((tmp_path/"p.json").read_text())
    assert [s["length"] for s in res["summary"]] == [100, 200] and len(res["trials"]) == 6 and res["seed"] == 42
    assert (tmp_path/"p.png").read_bytes()[:4] == b"\x89PNG"
    assert run("passkey", "--context-lengths", 100, "--n-trials", 1, "--checkpoint", "random", "--fail-below", 0.85).exit_code == 1


def test_generate_is_reproducible():
    a, b, c = (run("generate", "river stone", "--max-new-tokens", 8, "--seed", s).output for s in (1, 1, 2))
    assert a == b != c and a.startswith("river stone")


def test_train_writes_a_checkpoint_that_evaluates(tmp_path):
    assert run("train", tmp_path/"run", "--steps", "1,1,1").exit_code == 0
    assert {"state.safetensors", "passkey.safetensors", "log.json"} <= {f.name for f in (tmp_path/"run").iterdir()}
    r = run("passkey", "--context-lengths", 100, "--n-trials", 1, "--checkpoint", tmp_path/"run"/"passkey.safetensors")
    assert r.exit_code == 0


@pytest.mark.parametrize("argv, words", [
    (["passkey", "--context-lengths", "10"], "context_length=10"),
    (["passkey", "--position", "top", "--context-lengths", "100", "--n-trials", "1"], "passkey_position='top'"),
    (["generate", "x", "--top-p", "1.5"], "top_p=1.5"),
    (["generate", "x", "--checkpoint", "missing.safetensors"], "missing.safetensors"),
    (["generate", "x", "--checkpoint", "nope"], "name='nope'"),
    (["generate", ""], "input_ids")])
def test_bad_input_ends_with_one_line(argv, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gptoss-lite", *argv])
    with pytest.raises(SystemExit) as e: main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and words in err and "Traceback" not in err
