"The command as a person types it."
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import gptoss_lite
import gptoss_lite.bench as B
import gptoss_lite.cli as C
from gptoss_lite.cli import app, cpu_name, main, printable, run_info
from gptoss_lite.config import gptoss_tiny

run = lambda *a: CliRunner().invoke(app, [str(x) for x in a])


def test_help_on_each():
    top = run("--help")
    assert top.exit_code == 0 and run().output == top.output
    for cmd in "smoke kv passkey generate train bench".split():
        assert cmd in top.output
        assert run(cmd, "--help").exit_code == 0
    for cmd in "decode prefill cache".split():
        assert cmd in run("bench", "--help").output and run("bench", cmd, "--help").exit_code == 0


# ---- what the pages tell to type ----

ROOT = Path(__file__).resolve().parent.parent

def commands(text):
    "The lines of a text that begin with our command; one may go on after a backslash"
    return [l for l in text.replace("\\\n", " ").splitlines() if l.startswith("gptoss-lite ")]

def on_pages():
    "Every command that a page or the README shows by itself on a line"
    yield from (("README.md", line) for line in commands((ROOT/"README.md").read_text(encoding="utf-8")))
    for fn in sorted((ROOT/"nbs").glob("*.ipynb")):
        for cell in json.loads(fn.read_text(encoding="utf-8"))["cells"]:
            outs = ["".join(o.get("text", [])) + "".join(o.get("data", {}).get("text/markdown", [])) for o in cell.get("outputs", [])]
            for text in ["".join(cell["source"])]*(cell["cell_type"] == "markdown") + outs:
                yield from ((fn.name, line) for line in commands(text))

def parses(line):
    "Read a line as the program would, and run nothing"
    command, (name, *args) = get_command(app), shlex.split(line, comments=True)
    while hasattr(command, "commands") and args and args[0] in command.commands:
        name, *args = args
        command = command.commands[name]
    if "--help" in args or hasattr(command, "commands") and args in ([], ["--version"]): return
    command.make_context(name, args)

def test_what_the_pages_tell_to_type_can_be_typed():
    lines = list(on_pages())
    assert len(lines) > 20
    wrong = []
    for page, line in lines:
        try: parses(line)
        except C.ClickException as e: wrong.append(f"{page}: {line}: {e.format_message()}")
    assert not wrong, "\n".join(wrong)

@pytest.mark.parametrize("line", ["gptoss-lite bench cache --device cuda", "gptoss-lite kv --fast", "gptoss-lite passkey --target 85"])
def test_what_cannot_be_typed_is_seen(line):
    with pytest.raises(C.ClickException): parses(line)


def test_the_console_script_is_this():
    [script] = {e.value for e in entry_points(group="console_scripts") if e.name == "gptoss-lite"}
    assert script == "gptoss_lite.cli:main"
    assert run("--version").output.strip() == gptoss_lite.__version__


def test_in_a_process_of_its_own():
    bad = subprocess.run([sys.executable, "-c", "from gptoss_lite.cli import main; main()", "kv", "--", "-5"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "gptoss-lite: T=-5: must be at least 0; a cache cannot hold fewer than no tokens\n"


# ---- kv and smoke ----

def test_kv_of_a_model_of_transformers(tmp_path):
    (tmp_path/"config.json").write_text(json.dumps(dict(model_type="gpt_oss", num_hidden_layers=24)))
    for path in (tmp_path, tmp_path/"config.json"):
        r = run("kv", 1024, 131072, "--config", path, "--json", tmp_path/"kv.json")
        assert r.exit_code == 0 and "1.998 times less" in r.output
        assert [x["all_full"] for x in json.loads((tmp_path/"kv.json").read_text())["rows"]] == [24*2048*1024, 24*2048*131072]
    for path in ("missing", Path(__file__)): assert isinstance(run("kv", "--config", path).exception, OSError)

def test_kv_prints_the_table_and_judges(tmp_path):
    r = run("kv", "--json", tmp_path/"new"/"kv.json")
    assert r.exit_code == 0 and "PASSED" in r.output
    assert re.findall(r"\d\.\d\dx", r.output)[:6] == ["1.94x", "1.97x", "1.98x", "1.99x", "2.00x", "2.00x"]
    assert [x["full"] for x in json.loads((tmp_path/"new"/"kv.json").read_text())["rows"]][-1] == 2_415_919_104
    assert run("kv", 128).exit_code == 1, "no reduction up to the window"
    assert run("kv", "--threshold", 2.1).exit_code == 1
    assert run("kv", 131072, 128).exit_code == 0, "the longest length is judged, wherever it stands"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_smoke(dtype, tmp_path):
    before = torch.get_rng_state()
    r = run("smoke", "--dtype", dtype, "--json", tmp_path/"s.json")
    assert r.exit_code == 0 and "PASSED" in r.output
    assert json.loads((tmp_path/"s.json").read_text())["passed"] is True
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tokens", [28, 29, 100])
def test_smoke_feeds_every_token_once(tokens, monkeypatch):
    true, fed = C.forward_step, []
    monkeypatch.setattr(C, "forward_step", lambda model, ids, start, cache: fed.append((start, ids.shape[1])) or true(model, ids, start, cache))
    assert run("smoke", "--tokens", tokens).exit_code == 0
    assert [s for s, _ in fed] == [sum(n for _, n in fed[:i]) for i in range(len(fed))] and sum(n for _, n in fed) == tokens
    W = gptoss_tiny().window_size
    assert {1, W, 2*W + 1} == {n for _, n in fed}


def test_smoke_can_fail(monkeypatch):
    import gptoss_lite.attention as A
    true = A.causal_attention
    monkeypatch.setattr(A, "causal_attention", lambda q, k, v, sink=None, *a, **kw: true(q, k, v, None if q.shape[2] == 1 else sink, *a, **kw))
    r = run("smoke")
    assert r.exit_code == 1 and "FAILED" in r.output


def test_smoke_finds_a_window_that_lost_keys(monkeypatch):
    "Append, then get: what a chunk needs is overwritten before it is read"
    from gptoss_lite.ring import RingBuffer
    def append_then_get(self, k, v): self.append(k, v); return self.get()
    monkeypatch.setattr(RingBuffer, "update", append_then_get)
    r = run("smoke")
    assert r.exit_code == 1 or r.exception is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smoke_on_a_gpu(dtype): assert run("smoke", "--device", "cuda", "--dtype", dtype).exit_code == 0


# ---- passkey ----

def test_passkey_of_an_untrained_model_exits_0_below_target(tmp_path):
    r = run("passkey", "--context-lengths", 100, 200, "--n-trials", 3, "--position", "spread", "--checkpoint", "random",
            "--json", tmp_path/"p.json", "--plot", tmp_path/"p.picture")
    assert r.exit_code == 0 and "BELOW TARGET" in r.output
    res = json.loads((tmp_path/"p.json").read_text())
    assert [s["length"] for s in res["summary"]] == [100, 200] and len(res["trials"]) == 6 and res["seed"] == 42
    assert res["config"]["yarn_scale_factor"] == 32 and re.fullmatch("[0-9a-f]{64}", res["digest"])
    assert (tmp_path/"p.picture").read_bytes()[:4] == b"\x89PNG"
    assert run("passkey", "--context-lengths", 100, "--n-trials", 1, "--checkpoint", "random", "--fail-below", 0.85).exit_code == 1


def test_passkey_judges_the_longest_length(monkeypatch):
    from gptoss_lite.passkey import PasskeyEvaluator, Trial
    def run_trials(self, plans, *a): return [Trial(**p, output="", answer=p["key"], correct=p["length"] < 200, seconds=0.) for p in plans]
    monkeypatch.setattr(PasskeyEvaluator, "run_trials", run_trials)
    good, bad = ("passkey", "--n-trials", 2, "--context-lengths", 150, 100), ("passkey", "--n-trials", 2, "--context-lengths", 200, 100)
    assert "PASSED: 100.0% at 150 tokens, target 85%" in run(*good).output and run(*good, "--fail-below", 1).exit_code == 0
    assert "BELOW TARGET: 0.0% at 200 tokens" in run(*bad).output and run(*bad, "--fail-below", 0).exit_code == 0
    monkeypatch.setattr(PasskeyEvaluator, "run_trials", lambda self, plans, *a: [Trial(**p, output="", answer=None, correct=p["length"] > 100, seconds=0.) for p in plans])
    assert "PASSED: 100.0% at 150" in run(*good).output and run(*good, "--fail-below", 1).exit_code == 1, "any length may fail"


def test_passkey_writes_no_path_and_no_host(tmp_path):
    import platform
    (tmp_path/"secret").mkdir()
    assert run("train", tmp_path/"secret", "--steps", "1,1,1").exit_code == 0
    run("passkey", "--context-lengths", 100, "--n-trials", 1, "--checkpoint", tmp_path/"secret"/"passkey.safetensors", "--json", tmp_path/"p.json")
    text = (tmp_path/"p.json").read_text()
    assert json.loads(text)["checkpoint"] == "passkey.safetensors" and "secret" not in text and platform.node() not in text


def test_a_run_goes_on_and_other_haystacks_and_tokenizers_are_used(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}, merges=[]))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>").save_pretrained(tmp_path/"tok")
    line = ("passkey", "--context-lengths", 200, "--n-trials", 4, "--position", "0,0.5", "--fillers", 2, "--haystack", "prose", "--wording", "code",
            "--checkpoint", "random", "--tokenizer", tmp_path/"tok", "--commit", "abc", "--log", tmp_path/"t.jsonl", "--json", tmp_path/"p.json")
    assert run(*line).exit_code == 0
    res, text = json.loads((tmp_path/"p.json").read_text()), (tmp_path/"t.jsonl").read_text()
    head, start, *trials = map(json.loads, text.splitlines())
    assert (head["haystack"], head["wording"], head["config"]["vocab_size"], head["seed"], head["position"]) == ("prose", "code", 257, 42, ["0", "0.5"])
    assert head["digest"] == res["digest"] and start["run"]["commit"] == res["run"]["commit"] == "abc" and start["run"]["machine"]
    assert sorted(trials, key=lambda t: t["trial"]) == res["trials"] and str(tmp_path) not in text
    assert run(*line).exit_code == 0 and (tmp_path/"t.jsonl").read_text() == text


def test_config_is_used_for_every_kind_of_checkpoint(tmp_path):
    from gptoss_lite.passkey import load_pretrained
    plain = load_pretrained()[0].cfg.replace(yarn_scale_factor=1)
    (tmp_path/"plain.json").write_text(json.dumps(plain.to_dict()))
    for checkpoint in ("passkey", "random"):
        assert C._load(checkpoint, tmp_path/"plain.json")[0].cfg == plain != C._load(checkpoint)[0].cfg


def test_the_commands_of_the_makefile_parse():
    text = (Path(__file__).parent.parent/"Makefile").read_text().replace("\\\n", " ")
    [line] = re.findall(r"gptoss-lite (passkey .*)", text)
    lengths = re.findall(r"--context-lengths ([\d ]+)", line)[0].split()
    assert lengths == ["4096", "8192", "16384", "32768"] and "--n-trials 5 --position spread" in line


# ---- generate and train ----

def test_generate_is_reproducible():
    a, b, c = (run("generate", "river stone", "--max-new-tokens", 8, "--seed", s).output for s in (1, 1, 2))
    assert a == b != c and a.startswith("river stone")


def test_what_is_shown_cannot_control_the_terminal():
    assert printable("".join(map(chr, range(32)))) == "\ufffd"*9 + "\t\n" + "\ufffd"*21
    assert printable("\x7f\x9b\u202eé漢") == "\ufffd"*3 + "é漢"
    r = run("generate", "x", "--checkpoint", "random", "--max-new-tokens", 60, "--temperature", 5, "--top-p", 1, "--seed", 3)
    assert r.exit_code == 0 and all(c.isprintable() or c in "\n\t" for c in r.output)


def test_train_writes_a_checkpoint_that_evaluates(tmp_path):
    assert run("train", tmp_path/"run", "--steps", "1, 1,1").exit_code == 0
    assert {"state.safetensors", "passkey.safetensors", "log.json"} <= {f.name for f in (tmp_path/"run").iterdir()}
    assert len(json.loads((tmp_path/"run"/"log.json").read_text())["log"]) == 3
    r = run("passkey", "--context-lengths", 100, "--n-trials", 1, "--checkpoint", tmp_path/"run"/"passkey.safetensors")
    assert r.exit_code == 0


# ---- what a result carries ----

def test_run_info_names_the_processor(monkeypatch):
    info = run_info()
    assert info["machine"] == cpu_name() != "" and info["device"] == "cpu" and info["cores"] >= 1 and info["time"].endswith("+00:00")
    monkeypatch.setattr(B.Path, "exists", lambda self: False)
    monkeypatch.setattr(B.sys, "platform", "other")
    monkeypatch.setattr(B.platform, "processor", lambda: "")
    monkeypatch.setattr(B.platform, "machine", lambda: "riscv64")
    assert cpu_name() == "riscv64"


def test_the_processor_of_a_system_that_names_none(monkeypatch):
    monkeypatch.setattr(B.Path, "exists", lambda self: True)
    monkeypatch.setattr(B.Path, "read_text", lambda self, **kw: "processor\t: 0\nBogoMIPS\t: 50.00\n")
    monkeypatch.setattr(B.platform, "processor", lambda: "")
    monkeypatch.setattr(B.platform, "machine", lambda: "aarch64")
    assert cpu_name() == "aarch64"
    monkeypatch.setattr(B.Path, "read_text", lambda self, **kw: "model name\t: A Processor @ 2 GHz\nmodel name\t: Another\n")
    assert cpu_name() == "A Processor @ 2 GHz"


# ---- bad input ----

@pytest.mark.parametrize("argv, words", [
    (["passkey", "--context-lengths", "10"], "context_length=10"),
    (["passkey", "--context-lengths", "4k"], "--context-lengths"),
    (["passkey", "--position", "top", "--context-lengths", "100", "--n-trials", "1"], "passkey_position='top'"),
    (["passkey", "--n-trials", "0"], "n_trials=0"),
    (["passkey", "--n-trials", "7", "--fillers", "2"], "n_trials=7"),
    (["passkey", "--n-trials", "7", "--position", "0,1"], "n_trials=7"),
    (["passkey", "--position", "0,2", "--n-trials", "2"], "passkey_position='2'"),
    (["passkey", "--haystack", "hay"], "haystack='hay'"),
    (["passkey", "--wording", "kind"], "wording='kind'"),
    (["passkey", "--tokenizer", "gpt2"], "tokenizer='gpt2'"),
    (["passkey", "--tokenizer", "."], "tokenizer"),
    (["passkey", "--batch", "0"], "batch=0"),
    (["passkey", "--log", "file2"], "file2"),
    (["passkey", "--target", "85"], "--target"),
    (["passkey", "--fail-below", "-1"], "--fail-below"),
    (["passkey", "--context-lengths", "100", "--device", "cuda:99"], "device='cuda:99'"),
    (["passkey", "--json", "."], "file that can be written"),
    (["passkey", "--json", "file/p.json"], "file"),
    (["passkey", "--plot", "."], "file that can be written"),
    (["passkey", "--config", "missing.json"], "missing.json"),
    (["passkey", "--config", "file"], "Expecting value"),
    (["passkey", "--config", "bad.json"], "no_such"),
    (["generate", "x", "--top-p", "1.5"], "top_p=1.5"),
    (["generate", "x", "--max-new-tokens", "-1"], "max_new_tokens=-1"),
    (["generate", "x", "--checkpoint", "missing.safetensors"], "missing.safetensors"),
    (["generate", "x", "--checkpoint", "broken.safetensors"], "broken.safetensors"),
    (["generate", "x", "--checkpoint", "nope"], "name='nope'"),
    (["generate", ""], "input_ids"),
    (["generate"], "prompt"),
    (["smoke", "--dtype", "int8"], "dtype='int8'"),
    (["smoke", "--dtype", "nn"], "dtype='nn'"),
    (["smoke", "--tokens", "5"], "tokens=5"),
    (["smoke", "--device", "toaster"], "device='toaster'"),
    (["smoke", "--device", "meta"], "device='meta'"),
    (["kv", "0"], "T=0"),
    (["train", "run", "--steps", "1,2"], "steps='1,2'"),
    (["train", "run", "--steps", "1,2,x"], "steps='1,2,x'"),
    (["train", "run", "--steps", "1,2,0"], "steps='1,2,0'"),
    (["train", "run", "--threads", "0"], "--threads"),
    (["train", "file"], "file"),
    (["bench", "decode", "--contexts", "1k"], "contexts='1k'"),
    (["bench", "decode", "--contexts", "0"], "contexts='0'"),
    (["bench", "prefill", "--competitors", "ours,llama"], "'llama'"),
    (["bench", "prefill", "--dtype", "int8"], "dtype='int8'"),
    (["bench", "decode", "--device", "mps"], "device='mps'"),
    (["bench", "decode", "--repeats", "0"], "--repeats"),
    (["bench", "cache", "--json", "."], "file that can be written"),
    (["bench", "cache", "--config", "bad.json"], "no_such"),
    (["fly"], "fly"),
    (["kv", "--fast"], "--fast")])
def test_bad_input_ends_with_one_line(argv, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"file").write_text("")
    (tmp_path/"file2").write_text("something\n")
    (tmp_path/"bad.json").write_text('{"no_such": 1}')
    (tmp_path/"broken.safetensors").write_bytes(b"12345678")
    monkeypatch.setattr("sys.argv", ["gptoss-lite", *argv])
    with pytest.raises(SystemExit) as e: main()
    out, err = capsys.readouterr()
    last = err.splitlines()[-1] # a progress bar may stand above
    assert e.value.code == 2 and last.startswith("gptoss-lite: ") and words.lower() in last.lower() and "Traceback" not in err and out == ""


def test_a_break_is_no_traceback(monkeypatch, capsys):
    def interrupted(*a, **kw): raise KeyboardInterrupt
    monkeypatch.setattr(C, "kv_cache_bytes", interrupted)
    monkeypatch.setattr("sys.argv", ["gptoss-lite", "kv"])
    with pytest.raises(SystemExit) as e: main()
    assert e.value.code == 130


def test_too_much_memory_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gptoss-lite", "smoke", "--tokens", "1000000000000"])
    with pytest.raises(SystemExit) as e: main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("gptoss-lite: ") and len(err.splitlines()) == 1
