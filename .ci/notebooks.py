"""Run the notebooks: as tests, to refresh their saved outputs, or to see whether those are current.

    notebooks.py test    [--flags "slow gpu"] [NB ...]   run them, save nothing
    notebooks.py refresh [NB ...]                        run them and save the outputs in place
    notebooks.py current [NB ...]                        run them and compare with the saved outputs

NB is a notebook or a folder; without one it is every notebook of the package. The cells that run are those that
nbdev_test runs, each notebook in a process of its own. What makes this more than nbdev_test: it fails when there was
no notebook to run, it prints how many cells ran and which did not, it has a time limit, and `test` fails on a cell
that is skipped without being named in skipped-cells.txt, and on a line there that names no skipped cell.
"""
import argparse, base64, copy, io, json, os, signal, subprocess, sys, tempfile, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SKIPPED_LIST, MEASURED_LIST = HERE/"skipped-cells.txt", HERE/"measured-cells.txt"
LIMIT, SLOW_LIMIT = 300, 3600  # seconds a notebook may take; with --flags


# ---- what is in a notebook -------------------------------------------------------------------------------------

def first_line(source):
    "The first line of a cell that is neither empty nor a directive: how the lists name a cell"
    return next((s for s in (l.strip() for l in source.splitlines()) if s and not s.startswith("#|")), "")

def front_matter(nb):
    "A notebook's front matter as nbdev reads it"
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor
    p = NBProcessor(nb=copy.deepcopy(nb), procs=FrontmatterProc, process=True)
    return getattr(p.nb, "frontmatter_", {}) or {}

def reasons(nb, flags, forced=()):
    "Why each cell does not run: a list beside `nb.cells`, `None` where the cell runs or is no code"
    from fastcore.basics import str2bool
    from nbdev.process import extract_directives, nb_lang
    whole = "language" if nb_lang(nb) != "python" else None
    if str2bool(front_matter(nb).get("skip_exec", False)): whole = "skip_exec"
    def why(cell):
        src = "".join(cell.source)
        if not src.strip() or cell.cell_type not in ("raw", "code"): return None
        if cell.cell_type == "raw": return None if src.lstrip().startswith("---") else "raw"
        if "nbdev_export(" in src: return "nbdev_export"
        d = extract_directives(copy.deepcopy(cell), remove=False)
        if d.get("eval:", [""])[0].lower() == "false": return "eval:false"
        return whole or next((f for f in flags if f in d and f not in forced), None)
    return [why(c) for c in nb.cells]

def tst_flags():
    from nbdev.config import get_config
    return get_config().tst_flags.split()

def find(paths):
    "The notebooks under `paths`, those aside whose name or folder begins with `_` or `.`"
    res = []
    for p in map(Path, paths):
        if p.is_file(): res.append(p.resolve()); continue
        inside = [f for f in sorted(p.rglob("*.ipynb")) if not any(s[0] in "_." for s in f.relative_to(p).parts)]
        res += [f.resolve() for f in inside]
    return res

def read_list(path):
    "The lines of a committed list: `notebook | ... | first line of the cell`, `#` for remarks"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return Counter(key(l) for l in lines if l.strip() and l[0] != "#")

def key(*parts):
    "An entry of a list as `read_list` gives it"
    return tuple(s.strip() for s in " | ".join(parts).split("|"))


# ---- one notebook, in its own process --------------------------------------------------------------------------

def outputs(cell):
    "What of a cell's outputs is to stay the same: no execution counts, streams joined"
    res = []
    for o in cell.get("outputs", []):
        o = json.loads(json.dumps(o))
        o.pop("execution_count", None); o.pop("id", None)
        if "text" in o: o["text"] = "".join(o["text"])
        if "data" in o: o["data"] = {k: "".join(v) if isinstance(v, list) else v for k, v in o["data"].items()}
        if "metadata" in o: o["metadata"] = dict(o["metadata"])
        res.append(o)
    return res

def pixels(png):
    "A picture of an output, `(height, width, 3)`"
    import numpy as np
    from PIL import Image
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")).astype(int)

def same(now, saved):
    "Whether two lists of outputs show the same. A colour may be a little off: how it is rounded differs between processors"
    pngs = [[o["data"].pop("image/png") for o in outs if "image/png" in o.get("data", {})] for outs in (now, saved)]
    if now != saved or len(pngs[0]) != len(pngs[1]): return False
    for a, b in zip(*pngs):
        if a == b: continue
        a, b = pixels(a), pixels(b)
        if a.shape != b.shape or abs(a - b).max() > 8: return False
    return True

def one(mode, fn, forced, result):
    "Run the notebook `fn` and write what happened to the file `result`"
    os.environ["IN_TEST"] = "1"  # nbdev_export() in a notebook is then a no-op
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell
    from nbdev.clean import clean_nb
    nb, flags = read_nb(fn), tst_flags()
    why = reasons(nb, flags, forced)
    code = [c.cell_type == "code" and bool("".join(c.source).strip()) for c in nb.cells]
    runs = [i for i, c in enumerate(code) if c and why[i] is None]
    saved = [outputs(c) for c in nb.cells]
    sys.path.insert(0, str(ROOT))
    done = []
    shell = CaptureShell(fn, mpl_format="png")  # nbdev's default, retina, makes the files twice as large
    shell._cell_idx = None
    os.chdir(fn.parent)
    ok, error = True, ""
    for i in runs: nb.cells[i].outputs = []  # or a cell that has fallen silent would keep its old output
    todo = set(runs)
    try: shell.run_all(nb, exc_stop=True, preproc=lambda c: c.idx_ not in todo, postproc=done.append)
    except BaseException as e:
        ok, error = False, shell.prettytb(fn.name) if shell.exc else f"{type(e).__name__}: {e}"
    changed = []
    if ok and mode != "test":
        clean_nb(nb)
        changed = [(i, first_line("".join(nb.cells[i].source))) for i in runs if not same(outputs(nb.cells[i]), saved[i])]
        if mode == "refresh": write_nb(nb, fn)
    Path(result).write_text(json.dumps(dict(ok=ok, error=error, ran=len(done), changed=changed)))


# ---- all of them -----------------------------------------------------------------------------------------------

def launch(mode, fn, forced, limit, threads):
    "Run `one` in a process of its own, and end it and its children at the limit"
    env = dict(os.environ, PYTHONPATH=str(ROOT), IN_TEST="1")
    if threads:
        for v in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"): env[f"{v}_NUM_THREADS"] = str(threads)
    start = time.time()
    with tempfile.TemporaryDirectory() as tmp:
        result = Path(tmp)/"result.json"
        cmd = [sys.executable, str(Path(__file__).resolve()), "one", mode, str(fn), str(result), *forced]
        p = subprocess.Popen(cmd, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, errors="replace", start_new_session=True)
        try: said = p.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            said = p.communicate()[0]
            res = dict(ok=False, error=f"{fn.name} took longer than {limit} s", ran=0, changed=[])
        else:
            res = json.loads(result.read_text()) if result.exists() else dict(
                ok=False, error=f"{fn.name}: the process ended with {p.returncode} before its last cell", ran=0, changed=[])
    return dict(res, said=said, seconds=time.time()-start)

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("mode", choices=("test", "refresh", "current"))
    ap.add_argument("notebooks", nargs="*")
    ap.add_argument("--flags", default="", help="run the cells with these flags too")
    ap.add_argument("--only-flagged", action="store_true", help="leave out notebooks without a cell of --flags")
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--limit", type=int, help=f"seconds a notebook may take ({LIMIT}, with --flags {SLOW_LIMIT})")
    ap.add_argument("--skipped-list", type=Path, default=SKIPPED_LIST)
    a = ap.parse_args()
    given = [Path(p).resolve() for p in a.notebooks]  # before the working folder changes
    os.chdir(ROOT)
    from execnb.nbio import read_nb
    from nbdev.config import get_config
    nbs = find(given or [get_config().nbs_path])
    forced, flags = a.flags.split(), tst_flags()
    limit = a.limit or (SLOW_LIMIT if forced else LIMIT)
    if not nbs:
        print("notebooks: 0 passed, 1 failed, 0 skipped (there was no notebook to run)")
        return 1

    # the gate: what is skipped, beside what may be
    listed, found, problems, skipped, flagged = read_list(a.skipped_list), Counter(), {}, {}, set()
    for f in nbs:
        nb = read_nb(f)
        for cell, r in zip(nb.cells, reasons(nb, flags)):
            if r in (None, "nbdev_export"): continue
            k = key(f.name, r, first_line("".join(cell.source)))
            found[k] += 1
            if r in forced: flagged.add(f)
            else: skipped.setdefault(f, []).append(k)
            if found[k] > listed[k]:
                problems.setdefault(f.name, []).append(f"skipped, and not in {a.skipped_list.name}: {' | '.join(k)}")
    here = {f.name for f in nbs}
    for k, n in (listed - found).items():
        if not given or a.skipped_list != SKIPPED_LIST or k[0] in here:
            problems.setdefault(k[0], []).append(f"in {a.skipped_list.name}, but no such cell is skipped: {' | '.join(k)}")
    if a.mode != "test": problems = {}
    if a.only_flagged: nbs = [f for f in nbs if f in flagged]

    # figures that show a measurement want the machine to themselves
    workers, threads = (a.workers, 1) if a.mode == "test" else (1, None)
    measured = read_list(MEASURED_LIST)
    passed = failed = cells = 0
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        jobs = [(f, pool.submit(launch, a.mode, f, forced, limit, threads)) for f in nbs]
        for f, job in jobs:
            r = job.result()
            notes = problems.pop(f.name, [])
            if a.mode == "current":
                notes += [f"cell {i} now gives another output: {s}" for i, s in r["changed"] if key(f.name, s) not in measured]
            ok = r["ok"] and not notes
            passed, failed, cells = passed+ok, failed+(not ok), cells+r["ran"]
            skips = skipped.get(f, [])
            more = f", {len(r['changed'])} outputs changed" if a.mode == "refresh" else ""
            print(f"{'ok  ' if ok else 'FAIL'} {f.name:<22} {r['ran']:>3} cells run, {len(skips)} skipped"
                  f"{more}, {r['seconds']:.1f} s", flush=True)
            for k in skips: print(f"       skipped: {' | '.join(k[1:])}")
            for n in notes: print(f"       {n}")
            if not r["ok"]: print(r["said"] + r["error"], flush=True)
    for name, notes in problems.items():  # lines of the list that name notebooks which are not there
        failed += 1
        for n in notes: print(f"FAIL {name}: {n}")
    print(f"cells: {cells} run, {sum(map(len, skipped.values()))} skipped")
    print(f"notebooks: {passed} passed, {failed} failed, 0 skipped")
    return 1 if failed or (not passed and not a.only_flagged) else 0

if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        os.chdir(ROOT)
        one(sys.argv[2], Path(sys.argv[3]), sys.argv[5:], sys.argv[4])
    else: sys.exit(main())
