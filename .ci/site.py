"""Build the site where there is no Quarto: nbdev processes the notebooks, smalldocs reads the one _quarto.yml.

    site.py [KATEX]

KATEX is the npm package katex, unpacked: with it the site carries its own copy, and formulas need no network.
It ends with an error on a broken link, and on an option or Markdown that smalldocs does not read.
"""
import json, os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

def rename(proc):
    "Page names: nbdev writes an `output-file` (00_config.ipynb is config.html), smalldocs goes by the file's name"
    names = {}
    for f in sorted(proc.rglob("*.ipynb")):
        first = json.loads(f.read_text(encoding="utf-8"))["cells"][:1]
        m = re.search(r"^output-file: (\S+)\.html$", "".join(first[0]["source"]) if first else "", re.M)
        names[f.name] = (m[1] if m else f.stem) + ".ipynb"
    if len(set(names.values())) < len(names): sys.exit(f"two notebooks make the same page: {names}")
    return names

def own_copies(site, katex):
    "No page asks another host for a thing, as far as we can help it; and search forgives less, as Quarto's does"
    def edit(f, pattern, new):
        old = f.read_text(encoding="utf-8")
        f.write_text(re.sub(pattern, new, old), encoding="utf-8")
    for f in (site/"site_libs"/"themes").glob("*.css"): edit(f, r"@import url\(https:[^)]*\);?", "")  # fonts
    edit(site/"site_libs"/"smalldocs.js", r"threshold: 0\.3\b", "threshold: 0.1")  # "ring buffer" was a growing buffer, too
    for f in site.glob("**/*.llms.md"): edit(f, r"(?ms)^<script>\n.*?^</script>\n?", "")  # the Markdown copies are to be read
    if katex:
        for f in site.rglob("*.html"):
            edit(f, r"https://[\w.]+/npm/katex@[\d.]+/dist", "../"*(len(f.relative_to(site).parts) - 1) + "site_libs/katex")
        shutil.copytree(katex/"dist", site/"site_libs"/"katex")
        shutil.copy(katex/"LICENSE", site/"site_libs"/"katex")

def main(katex=None):
    katex = katex and Path(katex).resolve()  # before the working folder changes
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))  # the notebooks import the package, installed or not
    os.environ["IN_TEST"] = "1"
    from nbdev.config import get_config
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs
    cfg = get_config()
    shutil.rmtree(ROOT/"_proc", ignore_errors=True)  # a page whose notebook is gone would stay
    refresh_quarto_yml()                             # nbs/nbdev.yml from settings.ini
    proc = proc_nbs(n_workers=0, force=True)         # what nbdev_docs gives to Quarto
    names = rename(proc)
    if not names: sys.exit("there is no notebook to make a page of")
    pat = re.compile(r"(?<![\w/-])(" + "|".join(map(re.escape, names)) + r")\b")
    new = lambda s: pat.sub(lambda m: names[m[1]], s)
    own = f"{cfg.doc_host}{cfg.doc_baseurl}/"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        for f in proc.rglob("*"):                    # pictures and styles go along as they are
            to = tmp/f.relative_to(proc)
            if f.is_dir() or f.suffix == ".ipynb" or f.name == "_quarto.yml": continue
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(f, to)
        for f in proc.rglob("*.ipynb"):
            nb = json.loads(f.read_text(encoding="utf-8"))
            for c in nb["cells"]:
                src = "".join(c["source"])
                if c["cell_type"] == "raw": src = re.sub(r"^output-file:.*\n", "", src, flags=re.M)
                if c["cell_type"] == "markdown": src = new(src.replace(own, ""))  # links to this very site become local
                c["source"] = src
            to = tmp/f.relative_to(proc).with_name(names[f.name])
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(json.dumps(nb), encoding="utf-8")
        top = new((ROOT/"_quarto.yml").read_text(encoding="utf-8"))
        (tmp/"_quarto.yml").write_text(top + "\nmetadata-files: [nbdev.yml]\n", encoding="utf-8")
        for cmd in (["check"], ["render", "--strict"]):
            if subprocess.run([sys.executable, "-m", "smalldocs.cli", *cmd, str(tmp)]).returncode:
                sys.exit(f"the site: smalldocs {cmd[0]} failed, see above")
        site = tmp/cfg.doc_path.name
        own_copies(site, katex)
        shutil.rmtree(cfg.doc_path, ignore_errors=True)
        shutil.copytree(site, cfg.doc_path)
    shutil.rmtree(proc, ignore_errors=True)
    pages = len(list(cfg.doc_path.rglob("*.html")))
    print(f"site: {pages} pages in {cfg.doc_path.name}/")

if __name__ == "__main__": main(*sys.argv[1:])
