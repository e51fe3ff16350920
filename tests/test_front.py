"""The front page and the results: README.md is made from the one, both show what is in results/, and the code on them runs."""
import importlib.util, json, re, shutil, subprocess, sys
from pathlib import Path

import pytest

from gptoss_lite.bench import beside, inside

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT/"README.md").read_text(encoding="utf-8")
AGAIN = 'run make refresh NB="nbs/index.ipynb nbs/results.ipynb"'

def cells(name): return json.loads((ROOT/"nbs"/f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]

def said(cells, kind="text/markdown"):
    "What code cells show as Markdown, or print"
    res = []
    for o in (o for c in cells for o in c.get("outputs", [])):
        res.append("".join(o["data"].get(kind, "")) if "data" in o else "".join(o.get("text", "")))
    return res

def tool():
    "The script that makes README.md"
    spec = importlib.util.spec_from_file_location("readme", ROOT/".ci/readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- README.md is the front page -------------------------------------------------------------------------------

def test_the_readme_and_its_picture_are_made_from_the_front_page():
    text, picture = tool().made()
    assert README == text, AGAIN
    assert picture[:4] == b"\x89PNG" and (ROOT/tool().PICTURE).read_bytes() == picture, AGAIN

def test_a_page_becomes_markdown():
    md = lambda s: dict(cell_type="markdown", source=[s])
    code = lambda s, *outs: dict(cell_type="code", source=[s], outputs=list(outs))
    png = dict(output_type="display_data", data={"image/png": "AAAA", "text/plain": "<Figure>"})
    text, picture = tool().page(dict(cells=[
        md("# A\n\n> gist"), code("#| hide\nimport os"), code("print(7)", dict(output_type="stream", text=["7\n"])),
        code("#| echo: false\nMarkdown(x)", dict(output_type="execute_result", data={"text/markdown": ["| a |"]})),
        code('#| echo: false\n#| fig-cap: "Look here."\n#| fig-alt: "A line."\nplot()', png),
        md("[one](00_a.ipynb), [two](b.ipynb#c), [away](https://x.org/b.ipynb)")]))
    assert text.split("\n\n") == ["# A", "gist", "```python\nprint(7)\n```", "```\n7\n```", "| a |", "![A line.](nbs/images/front.png)",
                                  "*Look here.*", "[one](nbs/00_a.ipynb), [two](nbs/b.ipynb#c), [away](https://x.org/b.ipynb)\n"]
    assert picture == b"\0\0\0"

def test_the_pages_show_what_is_in_results():
    table = beside(ROOT/"results")
    assert table in said(cells("index")) and table in README and table in said(cells("results")), AGAIN
    assert not (t := inside(ROOT/"results")) or t in said(cells("results")), AGAIN

def test_code_on_the_front_page_fits_the_page():
    for block in re.findall(r"^```\w*\n(.*?)^```", README, re.M | re.S):
        for line in block.splitlines(): assert len(line) <= 76, line


# ---- its code runs ---------------------------------------------------------------------------------------------

def blocks(): return re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)

def test_the_ten_lines_run():
    ten = blocks()[0]
    assert len([l for l in ten.splitlines() if l.strip()]) == 10 and "assert" in ten
    r = subprocess.run([sys.executable, "-c", ten], cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert r.stdout and f"```\n{r.stdout}```" in README

def test_the_three_lines_for_transformers_run():
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM
    ten, three = blocks()
    assert len(three.splitlines()) == 3
    config = GptOssConfig(num_hidden_layers=4, hidden_size=32, num_attention_heads=6, num_key_value_heads=2, head_dim=16, sliding_window=8,
                          num_local_experts=3, num_experts_per_tok=2, intermediate_size=24, vocab_size=50, initializer_range=0.2,
                          pad_token_id=0, eos_token_id=None, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    inputs = dict(input_ids=torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(1)), max_new_tokens=12, do_sample=False)
    want, names = model.generate(**inputs), dict(model=model, inputs=inputs)
    exec(three, names)
    assert model.config._attn_implementation == "gptoss_lite"
    assert names["out"].tolist() == want.tolist()


# ---- the page of results ---------------------------------------------------------------------------------------

def test_no_number_is_typed_into_the_results():
    for c in cells("results"):
        if c["cell_type"] != "markdown": continue
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", "".join(c["source"]))
        assert not re.search(r"\d", prose), prose

def page_with(folder, **files):
    "The page of results as it comes out with these files, and no others"
    (folder/"nbs").mkdir(); (folder/"results"/"arms").mkdir(parents=True)
    shutil.copy(ROOT/"nbs/results.ipynb", folder/"nbs")
    for name, text in files.items(): (folder/"results"/name).write_text(text)
    r = subprocess.run([sys.executable, str(ROOT/".ci/notebooks.py"), "refresh", str(folder/"nbs/results.ipynb")], capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    made = json.loads((folder/"nbs/results.ipynb").read_text(encoding="utf-8"))["cells"]
    return "\n".join(said(made)), sum(map(bool, said(made, "image/png")))

def test_the_results_without_any_file(tmp_path):
    text, pictures = page_with(tmp_path)
    assert pictures == 0
    for command in ("passkey --position", "arms --train", "bench decode", "bench prefill", "bench cache", "bench hf", "train runs"):
        assert re.search(rf"Not yet measured.*\n\n```bash\n(gptoss-lite {command}|.*{command})", text), command

def test_the_results_with_files_that_come_later(tmp_path):
    files = {f.name: f.read_text() for f in (ROOT/"results").iterdir() if f.suffix in (".json", ".jsonl") and not f.name.startswith("passkey-")}
    head, *lines = files["passkey.jsonl"].splitlines(keepends=True)
    trials = [json.loads(l) for l in lines if '"trial"' in l][:20]
    as_log = lambda length: head + "".join(json.dumps(t | dict(trial=i, length=length)) + "\n" for i, t in enumerate(trials))
    decode, cache = (json.loads(files[f"bench-{n}.json"]) for n in ("decode", "cache"))
    ours = next(r for r in cache["rows"] if r["competitor"] == "ours" and r["phase"] == "prefill")
    timed = next(r for r in decode["rows"] if r["what"] == "decode")
    names = ("ours", "transformers", "transformers+cache", "transformers+attention", "transformers+both")
    hf = [timed | dict(competitor=n, tokens=4321, times_ours=1. + i) for i, n in enumerate(names)]
    hf += [ours | dict(competitor=n, tokens=8192) for n in names[1:]]
    files |= {"bench-hf.json": json.dumps(decode | dict(rows=hf)),
              "bench-128k.json": json.dumps(cache | dict(rows=[ours | dict(tokens=131072, prefill_seconds=1234.)])),
              "passkey-beyond.jsonl": as_log(262144), "passkey-prose.jsonl": as_log(32768),
              "arms/ours.jsonl": as_log(32768), "arms/noglobal.jsonl": as_log(4096)}
    text, pictures = page_with(tmp_path, **files)
    assert "| 131,072 | 1,234 |" in text and "| token after 4,321, ms |" in text and "| 262,144 | " in text
    assert "| prose | 20 of 20 |" in text and "| the model in the package | – | 20 of 20 |" in text
    assert not re.search(r"Not yet measured.\*\* This", text) and pictures == 4
