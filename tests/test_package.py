"""The package as a whole: names, imports, versions, the site's list of pages, and the gates of the checks."""
import ast, configparser, importlib, json, re, shutil, subprocess, sys
from importlib import metadata
from pathlib import Path

import pytest

import gptoss_lite

ROOT = Path(__file__).resolve().parent.parent
NBS = sorted(f for f in (ROOT/"nbs").glob("*.ipynb") if f.name[0] not in "_.")
CHAPTERS = [f for f in NBS if f.name[0].isdigit()]
PAGES = [f for f in NBS if f not in CHAPTERS]  # the front page, the calculator, how-tos: no number and no module

def code_cells(fn):
    "Index and source of the code cells of a notebook"
    cells = json.loads(fn.read_text(encoding="utf-8"))["cells"]
    return [(i, "".join(c["source"])) for i, c in enumerate(cells) if c["cell_type"] == "code"]

def settings():
    ini = configparser.ConfigParser(delimiters=["="])
    ini.read(ROOT/"settings.ini", encoding="utf-8")
    return ini["DEFAULT"]

def committed():
    "The text files that git holds or would hold"
    git = shutil.which("git") and subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT,
                                                 capture_output=True, text=True)
    if not git or git.returncode: pytest.skip("no git repository here")
    for name in filter(None, git.stdout.split("\0")):
        try: yield name, (ROOT/name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError): pass

def python(code, *args):
    "Run `code` in a fresh interpreter, in a folder without the sources' tests, and return what it prints"
    r = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()


# ---- names -----------------------------------------------------------------------------------------------------

EXPECTED = """ModelConfig GPTOSS MixedKVCache RingBuffer GrowingBuffer generate PasskeyEvaluator make_filler_text
load_pretrained kv_bytes_per_token kv_cache_bytes kv_reduction estimate_model_memory_gb causal_attention
manual_causal_attention repeat_kv save_checkpoint load_checkpoint""".split()

@pytest.mark.parametrize("name", sorted({*EXPECTED, *gptoss_lite.__all__} - {"__version__"}))
def test_name_is_handed_on(name):
    assert name in gptoss_lite.__all__ and name in dir(gptoss_lite)
    home = importlib.import_module(f"gptoss_lite.{gptoss_lite._HOME[name]}")
    assert getattr(gptoss_lite, name) is getattr(home, name)
    assert name in home.__all__, f"{home.__name__} does not export {name}"

def test_unknown_name():
    with pytest.raises(AttributeError, match="nonsense"): gptoss_lite.nonsense
    with pytest.raises(ImportError, match="nonsense"): from gptoss_lite import nonsense  # noqa: F401

def test_no_module_is_hidden_by_a_name():
    assert not set(gptoss_lite._HOMES) & set(gptoss_lite._HOME), "a module and a name that are the same"

HEAVY = ("transformers", "matplotlib", "nbdev", "typer")

def test_importing_the_package_imports_nothing_heavy():
    got = python("import sys, gptoss_lite; print([m for m in sys.argv[1:] if m in sys.modules])", *HEAVY, "torch")
    assert got == "[]"

def test_using_the_core_imports_neither_transformers_nor_matplotlib():
    got = python("import sys\nfrom gptoss_lite import GPTOSS, MixedKVCache, ModelConfig, generate\n"
                 "print([m for m in sys.argv[1:] if m in sys.modules])", *HEAVY)
    assert got == "[]"


# ---- versions and packaging ------------------------------------------------------------------------------------

def test_versions_agree():
    version = settings()["version"]
    assert gptoss_lite.__version__ == version
    assert metadata.version("gptoss_lite") == version
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT/"CHANGELOG.md").read_text(encoding="utf-8"), re.M)

def test_type_checkers_may_trust_the_hints():
    assert (ROOT/"gptoss_lite/py.typed").exists() and '"py.typed"' in (ROOT/"setup.py").read_text(encoding="utf-8")

def test_the_command_is_registered():
    found = [e for e in metadata.entry_points(group="console_scripts") if e.name == "gptoss-lite"]
    assert [e.value for e in found] == ["gptoss_lite.cli:main"]
    assert callable(found[0].load())

def test_the_constraints_allow_what_settings_ask_for():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name as canon
    lines = (ROOT/"constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canon(n): v for n, v in (l.split("==") for l in lines if l.strip() and l[0] != "#")}
    cfg = settings()
    for r in map(Requirement, (cfg["requirements"] + " " + cfg["dev_requirements"]).split()):
        assert canon(r.name) in pins, f"{r.name} is not in constraints.txt"
        assert pins[canon(r.name)] in r.specifier, f"{r} does not allow {pins[canon(r.name)]}"
    assert pins["torch"] == "2.13.0", "no local version such as +cpu: it is not to be had everywhere"

def test_the_runtime_does_not_import_what_only_development_installs():
    allowed = {*sys.stdlib_module_names, "gptoss_lite", "torch", "numpy", "safetensors", "transformers", "matplotlib", "PIL",
               "tqdm", "typer", "fastcore"}
    for f in (ROOT/"gptoss_lite").glob("*.py"):
        for node in ast.walk(ast.parse(f.read_text(encoding="utf-8"))):
            names = ([a.name for a in node.names] if isinstance(node, ast.Import) else
                     [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
            for n in names:
                if (f.name, n) == ("lessons.py", "IPython.display"): continue  # to show something in a notebook, within a function
                assert n.split(".")[0] in allowed, f"{f.name} imports {n}"

def test_the_makefile_and_the_scripts_name_existing_files():
    for text in ((ROOT/"Makefile").read_text(), (ROOT/".ci/run").read_text()):
        for f in re.findall(r"\.ci/[\w.-]+", text): assert (ROOT/f).exists(), f


# ---- what is committed -----------------------------------------------------------------------------------------

def test_no_registry_is_named():
    hosts = ["py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org", "npm" + "js.org", "registry." + "npm"]
    options = ["--" + o for o in ("index-" + "url", "extra-index-" + "url", "find-" + "links", "trusted-" + "host")]
    bad = [(n, w) for n, text in committed() for w in hosts + options if w in text]
    assert not bad, bad

def test_no_path_of_a_machine_is_committed():
    pat = re.compile(r"(?<![\w.:/])/(?:home|root|Users|tmp|work|opt)/[\w.-]+|site-packages/")
    bad = [(n, m[0]) for n, text in committed() if n.endswith((".ipynb", ".md", ".py", ".ini", ".txt", ".json"))
           and n != "tests/test_package.py" for m in pat.finditer(text)]
    assert not bad, bad

def test_links_in_the_markdown_files_lead_somewhere():
    for f in ROOT.glob("*.md"):
        for link in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", f.read_text(encoding="utf-8")):
            assert (ROOT/link).exists(), f"{f.name}: {link}"


# ---- notebooks -------------------------------------------------------------------------------------------------

def order(fn):
    "The rank of a notebook: its number, then its letter"
    n, letter = re.match(r"(\d+)([a-z]?)_", fn.name).groups()
    return int(n), letter

def module(fn): return re.sub(r"^\d+[a-z]?_", "", fn.stem)

RANK = {module(f): order(f) for f in CHAPTERS}

def ours(src):
    "The modules of this package that the code `src` imports"
    src = "\n".join("pass" if re.match(r"\s*[%!]", l) else l for l in src.splitlines())
    for node in ast.walk(ast.parse(src)):
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "gptoss_lite":
            names = ["gptoss_lite." + gptoss_lite._HOME.get(a.name, a.name) for a in node.names if a.name != "__version__"]
        elif isinstance(node, ast.ImportFrom) and node.module: names = [node.module]
        else: continue
        yield from (n.split(".")[1] for n in names if n.startswith("gptoss_lite."))

@pytest.mark.parametrize("fn", CHAPTERS, ids=lambda f: f.stem)
def test_a_chapter_imports_only_what_stands_before_it(fn):
    for i, src in code_cells(fn):
        if src.lstrip().startswith("%%"): continue
        exported = re.search(r"^#\|\s*export", src, re.M)
        for m in ours(src):
            assert m in RANK, f"{fn.name} cell {i}: there is no module {m}"
            if m == "lessons" and not exported: continue  # what all lesson cells share
            assert m != "lessons", f"{fn.name} cell {i}: the library does not use the lessons"
            assert RANK[m] < order(fn), f"{fn.name} cell {i} imports {m}, which comes later"

@pytest.mark.parametrize("fn", CHAPTERS, ids=lambda f: f.stem)
def test_a_chapter_makes_the_module_that_it_is_named_after(fn):
    cells = code_cells(fn)
    assert cells[0][1].startswith(f"#| default_exp {module(fn)}\n") or cells[0][1] == f"#| default_exp {module(fn)}"
    assert "nbdev_export()" in cells[-1][1] and cells[-1][1].startswith("#| hide")
    py = ROOT/"gptoss_lite"/f"{module(fn)}.py"
    assert f"File to edit: ../nbs/{fn.name}" in py.read_text(encoding="utf-8")

@pytest.mark.parametrize("fn", PAGES, ids=lambda f: f.stem)
def test_a_page_makes_no_module(fn):
    for i, src in code_cells(fn): assert not re.search(r"^#\|\s*(default_exp|export)", src, re.M), f"{fn.name} cell {i}"

@pytest.mark.parametrize("fn", NBS, ids=lambda f: f.stem)
def test_a_notebook_begins_with_title_and_description(fn):
    first = json.loads(fn.read_text(encoding="utf-8"))["cells"][0]
    assert first["cell_type"] == "markdown", f"{fn.name}: the site takes a page's title and description from its first cell"
    found = re.fullmatch(r"# (?P<title>\S[^\n]*)\n\n> (?P<description>\S[^\n]*)\n?", "".join(first["source"]))
    assert found, f"{fn.name}: one line `# title`, one line `> description`, and no more: nbdev leaves the rest of the cell out of the page"
    assert 40 <= len(found["description"]) <= 400, fn.name

def test_every_module_has_its_notebook():
    mods = {f.stem for f in (ROOT/"gptoss_lite").glob("*.py")} - {"__init__", "_modidx"}
    assert mods == set(RANK), "a module without a notebook, or a notebook without a module"

@pytest.mark.parametrize("fn", NBS, ids=lambda f: f.stem)
def test_directives_and_kernel(fn):
    nb = json.loads(fn.read_text(encoding="utf-8"))
    assert nb["metadata"]["kernelspec"]["name"] == "python3"
    for i, src in code_cells(fn):
        colon = re.search(r"^#\|\s*(default_exp|exports?|exporti|hide|slow|gpu|weights)\s*:", src, re.M)
        assert not colon, f"{fn.name} cell {i}: {colon[0]!r}: nbdev joins a directive with a colon to the next line"
        head = re.match(r"(?:#\|.*\n|\s*\n)*", src + "\n").end()
        late = re.search(r"^#\|", src[head:], re.M)
        assert not late, f"{fn.name} cell {i}: a directive below code does nothing"
    for i, c in enumerate(nb["cells"]):
        assert not any(o["output_type"] == "error" for o in c.get("outputs", [])), f"{fn.name} cell {i}: saved with an error"
        if c["cell_type"] == "markdown":
            label = re.search(r"\\eqref|\\label\{|\{#eq-", "".join(c["source"]))
            assert not label, f"{fn.name} cell {i}: number equations with \\tag{{n}}, not with {label[0]}"

def test_the_site_lists_every_notebook():
    import yaml
    site = yaml.safe_load((ROOT/"_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    listed = [n for e in site for n in (e["contents"] if isinstance(e, dict) else [e])]
    assert listed[0] == "index.ipynb" and len(set(listed)) == len(listed)
    chapters = [n for n in listed if n[0].isdigit()]
    assert chapters == [f.name for f in sorted(CHAPTERS, key=order)], "the sidebar is not the chapters in their order"
    assert set(listed) == {f.name for f in NBS}, "a page that the sidebar lacks, or a line without its page"

@pytest.mark.parametrize("fn, after", list(zip(sorted(CHAPTERS, key=order), sorted(CHAPTERS, key=order)[1:] + [None])),
                         ids=lambda f: f.stem if f else "end")
def test_a_chapter_leads_to_the_next_one(fn, after):
    text = fn.read_text(encoding="utf-8")
    found = re.findall(r"Next: \[[^\]]+\]\(([\w]+\.ipynb)\)", text)
    assert found == ([after.name] if after else []), f"{fn.name} leads to {found}"

def test_the_front_page_lists_every_chapter():
    text = (ROOT/"nbs/index.ipynb").read_text(encoding="utf-8")
    found = list(dict.fromkeys(re.findall(r"\]\(([\w]+\.ipynb)\)", text)))
    assert [n for n in found if n[0].isdigit()] == [f.name for f in sorted(CHAPTERS, key=order)]
    assert set(found) == {f.name for f in NBS} - {"index.ipynb"}


# ---- the gates of the checks -----------------------------------------------------------------------------------

def notebook(path, *cells, front=None):
    "Write a small notebook whose code cells are `cells`"
    raw = [dict(cell_type="raw", id="r", metadata={}, source=front)] if front else []
    code = [dict(cell_type="code", id=f"c{i}", metadata={}, execution_count=None, outputs=[], source=s)
            for i, s in enumerate(cells)]
    kernel = dict(display_name="python3", language="python", name="python3")
    path.write_text(json.dumps(dict(cells=raw + code, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)))

def gate(folder, listed="", *args, mode="test"):
    "What the notebook runner says of a folder, with `listed` as the list of cells that may be skipped"
    lst = folder/"list.txt"
    lst.write_text(listed)
    r = subprocess.run([sys.executable, str(ROOT/".ci/notebooks.py"), mode, str(folder), "--skipped-list", str(lst), *args],
                       capture_output=True, text=True)
    return r.returncode, r.stdout + r.stderr

def test_no_notebook_is_a_failure(tmp_path):
    code, said = gate(tmp_path)
    assert code == 1 and "no notebook" in said

def test_notebooks_pass_and_fail(tmp_path):
    notebook(tmp_path/"00_a.ipynb", "x = 1", "assert x == 1", "import nbdev; nbdev.nbdev_export()")
    code, said = gate(tmp_path)
    assert code == 0 and "2 cells run, 0 skipped" in said and "notebooks: 1 passed, 0 failed" in said
    notebook(tmp_path/"01_b.ipynb", "assert 1 == 2, 'wrong sum'")
    code, said = gate(tmp_path)
    assert code == 1 and "wrong sum" in said and "notebooks: 1 passed, 1 failed" in said

@pytest.mark.parametrize("cell, why, front", [
    ("#| slow\ny = 2", "slow", None), ("#| gpu\ny = 2", "gpu", None), ("#| eval: false\ny = 2", "eval:false", None),
    ("y = 2", "skip_exec", "---\nskip_exec: true\n---")])
def test_a_skipped_cell_must_be_listed(tmp_path, cell, why, front):
    notebook(tmp_path/"00_a.ipynb", *([] if front else ["x = 1"]), cell, front=front)
    code, said = gate(tmp_path)
    assert code == 1 and f"00_a.ipynb | {why} | y = 2" in said
    code, said = gate(tmp_path, f"00_a.ipynb | {why} | y = 2\n")
    assert code == 0 and "1 skipped" in said

def test_a_listed_cell_must_be_skipped(tmp_path):
    notebook(tmp_path/"00_a.ipynb", "x = 1")
    for stale in ("00_a.ipynb | slow | y = 2", "09_gone.ipynb | slow | y = 2"):
        code, said = gate(tmp_path, stale + "\n")
        assert code == 1 and stale in said and "no such cell is skipped" in said

def test_a_second_skipped_cell_needs_a_second_line(tmp_path):
    notebook(tmp_path/"00_a.ipynb", "x = 1", "#| slow\ny = 2", "#| slow\ny = 2")
    assert gate(tmp_path, "00_a.ipynb | slow | y = 2\n")[0] == 1
    assert gate(tmp_path, "00_a.ipynb | slow | y = 2\n" * 2)[0] == 0

def test_slow_cells_run_on_demand(tmp_path):
    notebook(tmp_path/"00_a.ipynb", "x = 1", "#| slow\nassert x == 2, 'the slow one'")
    listed = "00_a.ipynb | slow | assert x == 2, 'the slow one'\n"
    assert gate(tmp_path, listed)[0] == 0
    code, said = gate(tmp_path, listed, "--flags", "slow")
    assert code == 1 and "the slow one" in said

def test_a_notebook_past_its_limit_fails(tmp_path):
    notebook(tmp_path/"00_a.ipynb", "import time", "time.sleep(60)")
    code, said = gate(tmp_path, "", "--limit", "5")
    assert code == 1 and "longer than 5 s" in said

def test_saved_outputs_are_refreshed_and_compared(tmp_path):
    fn = tmp_path/"00_a.ipynb"
    notebook(fn, "print('seven')", "x = 1")
    code, said = gate(tmp_path, mode="current")
    assert code == 1 and "print('seven')" in said
    assert gate(tmp_path, mode="refresh")[0] == 0
    assert json.loads(fn.read_text())["cells"][0]["outputs"][0]["text"] == ["seven\n"]
    assert gate(tmp_path, mode="current")[0] == 0
    fn.write_text(fn.read_text().replace("print('seven')", "z = 3"))  # a cell that has fallen silent
    assert gate(tmp_path, mode="current")[0] == 1

def test_a_picture_may_differ_by_a_rounding(tmp_path):
    fn = tmp_path/"00_a.ipynb"
    draw = "from PIL import Image; im = Image.new('RGB', (7, 5)); im.putpixel((3, 2), ({}, 0, 0)); im"
    notebook(fn, draw.format(100))
    assert gate(tmp_path, mode="refresh")[0] == 0 and "image/png" in fn.read_text()
    for red, code in ((100, 0), (103, 0), (140, 1)):
        fn.write_text(re.sub(r"\(\d+, 0, 0\)", f"({red}, 0, 0)", fn.read_text()))
        assert gate(tmp_path, mode="current")[0] == code, red


# ---- the publisher's places ------------------------------------------------------------------------------------

def test_the_addresses_agree():
    import yaml
    cfg, site = settings(), yaml.safe_load((ROOT/"_quarto.yml").read_text(encoding="utf-8"))
    url = cfg["git_url"]
    assert [e["href"] for e in site["website"]["navbar"]["right"]] == [url], "set user in settings.ini, href in _quarto.yml"

def test_the_citation_agrees():
    import yaml
    cfg, cff = settings(), yaml.safe_load((ROOT/"CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cff), "what the format demands"
    assert str(cff["version"]) == cfg["version"] and cff["abstract"] == cfg["description"] and cff["license"] == "Apache-2.0"
    assert cff["repository-code"] == cfg["git_url"] and cff["url"] == cfg["doc_host"] + cfg["doc_baseurl"]
    assert [a.get("name") for a in cff["authors"]] == [cfg["author"]], "set author in settings.ini and in CITATION.cff"

def test_the_issue_forms_can_be_read():
    import yaml
    for f in (ROOT/".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(f.read_text(encoding="utf-8"))
        if f.name == "config.yml": continue
        assert {"name", "description", "body"} <= set(form), f.name
        for field in form["body"]:
            assert field["type"] in ("markdown", "input", "textarea", "dropdown", "checkboxes"), f.name
            assert field["type"] == "markdown" or {"id", "attributes"} <= set(field) and field["attributes"]["label"], f.name

def test_placeholders_stand_only_where_contributing_says():
    url = "github.com/" + "USER/"
    named = [n for n, text in committed() if url in text or re.search(r"^(user = USER|author = AUTHOR)$", text, re.M)]
    assert set(named) <= {"settings.ini", "_quarto.yml", "CITATION.cff", "gptoss_lite/_modidx.py"}, named
