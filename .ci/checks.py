"""Everything that `make test` checks, in this order; the last lines are counts.

    checks.py           the whole of it
    checks.py --slow    only the cells and tests that are marked slow

A step that fails does not stop the ones after it, so that one run shows all there is to mend. The exit status is 0
only if every step passed; the last line sums the notebooks, the tests and the other steps that failed.
"""
import argparse, hashlib, os, re, shutil, subprocess, sys, tempfile, time, zipfile
import xml.etree.ElementTree as ET
from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BIN = Path(sys.executable).parent

def run(*cmd):
    "Run `cmd`, show what it says as it comes, and return its exit status and its text"
    env = dict(os.environ, HF_HUB_OFFLINE="1", PATH=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    p = subprocess.Popen([str(c) for c in cmd], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, encoding="utf-8", errors="replace")
    said = []
    for line in p.stdout:
        print(line, end="", flush=True)
        said.append(line)
    return p.wait(), "".join(said)

def state(*patterns):
    "A digest of each file that the patterns find"
    files = sorted({f for p in patterns for f in ROOT.glob(p) if f.is_file()})
    return {str(f.relative_to(ROOT)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}

def changes_nothing(tool, what, *patterns):
    "Run an nbdev command; it fails if a file is another one afterwards"
    before = state(*patterns)
    code, _ = run(BIN/tool)
    after = state(*patterns)
    changed = sorted(f for f in before.keys() | after.keys() if before.get(f) != after.get(f))
    if not before: print(f"{tool}: there are no files to check"); return False
    if code: print(f"{tool} ended with {code}"); return False
    if changed:
        print(f"{tool} changed {', '.join(changed)}: {what} They are in order now: look at `git diff` and commit them.")
        return False
    print(f"{tool} changed nothing in {len(after)} files")
    return True

def clean(): return changes_nothing("nbdev_clean", "run it before a commit.", "nbs/**/*.ipynb")

def export():
    return changes_nothing("nbdev_export", "the modules were not what the notebooks say.", "gptoss_lite/**/*.py")

def notebooks(*args):
    code, said = run(sys.executable, HERE/"notebooks.py", "test", *args)
    found = re.findall(r"^notebooks: (\d+) passed, (\d+) failed, (\d+) skipped", said, re.M)
    counts = [int(n) for n in found[-1]] if found else [0, 1, 0]
    if code and not counts[1]: counts[1] = 1
    return counts

def pytest(*args):
    with tempfile.TemporaryDirectory() as tmp:
        xml = Path(tmp)/"junit.xml"
        code, _ = run(sys.executable, "-m", "pytest", "-q", "tests", f"--junitxml={xml}", *args)
        suites = list(ET.parse(xml).getroot().iter("testsuite")) if xml.exists() else []
    n = {k: sum(int(s.get(k, 0)) for s in suites) for k in ("tests", "failures", "errors", "skipped")}
    failed = n["failures"] + n["errors"]
    if code and not failed: failed = 1
    return [max(n["tests"] - n["failures"] - n["errors"] - n["skipped"], 0), failed, n["skipped"]]

def site(): return run(sys.executable, HERE/"site.py")[0] == 0

def passkey():
    "The shipped model finds every key in texts of up to 16,384 tokens"
    return run(BIN/"gptoss-lite", "passkey", "--context-lengths", "4096", "8192", "16384", "--n-trials", "5", "--position", "0,0.25,0.5,0.75,1",
               "--fillers", "1", "--seed", "161803", "--fail-below", "1")[0] == 0

def sources(to):
    "Copy what git holds or would hold to the folder `to`, so that a stale build folder cannot help the wheel"
    git = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:  # no repository: an unpacked archive
        skip = shutil.ignore_patterns(".venv", ".git", "build", "dist", "*.egg-info", "_docs", "_proc", "__pycache__")
        shutil.copytree(ROOT, to, ignore=skip)
        return
    for f in filter(None, git.stdout.split("\0")):
        if not (ROOT/f).is_file(): continue
        (to/f).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT/f, to/f)

def wheel():
    "Build the wheel; it must hold every module, the checkpoint and the command"
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT/"settings.ini", encoding="utf-8")
    lib, version = ini["DEFAULT"]["lib_path"], ini["DEFAULT"]["version"]
    with tempfile.TemporaryDirectory() as tmp:
        src, dist = Path(tmp)/"src", Path(tmp)/"dist"
        sources(src)
        if run(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "-w", dist, src)[0]:
            print("wheel: pip could not build it"); return False
        built = list(dist.glob("*.whl"))
        if len(built) != 1: print(f"wheel: expected one, found {built}"); return False
        with zipfile.ZipFile(built[0]) as z:
            names = z.namelist()
            info = next(n for n in names if n.endswith(".dist-info/entry_points.txt"))
            points = z.read(info).decode()
        wrong = []
        missing = [f"{lib}/{f.name}" for f in (src/lib).glob("*.py") if f"{lib}/{f.name}" not in names]
        if missing: wrong.append(f"it lacks {missing}")
        held = [n for n in names if n.startswith(f"{lib}/checkpoints/")]
        if not any(n.endswith(".safetensors") for n in held): wrong.append(f"it holds no {lib}/checkpoints/*.safetensors")
        absent = [f.name for f in (src/lib/"checkpoints").glob("*") if f"{lib}/checkpoints/{f.name}" not in names]
        if absent: wrong.append(f"it lacks the checkpoint files {absent}")
        if f"{lib}/cli.py" not in names: wrong.append(f"it lacks {lib}/cli.py, which the command needs")
        if not re.search(rf"^gptoss-lite\s*=\s*{lib}\.cli:main$", points, re.M): wrong.append("it has no command gptoss-lite")
        if f"-{version}-" not in built[0].name: wrong.append(f"its version is not {version}")
        foreign = sorted({n.split("/")[0] for n in names if not n.startswith((f"{lib}/", f"{lib}-"))})
        if foreign: wrong.append(f"it also holds {foreign}")
        for w in wrong: print(f"wheel {built[0].name}: {w}")
        if not wrong:
            print(f"wheel {built[0].name}: {built[0].stat().st_size/2**20:.1f} MiB, {len(names)} files, {', '.join(held)}")
    return not wrong

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--slow", action="store_true", help="only what is marked slow")
    slow = ap.parse_args().slow
    counted = dict(notebooks=lambda: notebooks(*(("--flags", "slow", "--only-flagged") if slow else ())),
                   pytest=lambda: pytest(*(("--slow", "-m", "slow") if slow else ())))
    plain = dict(clean=clean, export=export, passkey=passkey, site=site, wheel=wheel)
    order = ("notebooks", "pytest") if slow else ("clean", "export", "notebooks", "pytest", "passkey", "site", "wheel")
    lines, total = [], [0, 0, 0]
    for name in order:
        print(f"\n--- {name}", flush=True)
        start = time.time()
        try:
            if name in counted:
                n = counted[name]()
                text = "{} passed, {} failed, {} skipped".format(*n)
            else:
                ok = plain[name]()
                n, text = [0, 0 if ok else 1, 0], "ok" if ok else "FAILED"
        except Exception as e:
            n, text = [0, 1, 0], f"FAILED with {type(e).__name__}: {e}"
        total = [a+b for a, b in zip(total, n)]
        lines.append(f"{name + ':':<11}{text} ({time.time()-start:.0f} s)")
    print("\n---")
    for l in lines: print(l)
    print("{} passed, {} failed, {} skipped".format(*total), flush=True)
    return 1 if total[1] or not total[0] else 0

if __name__ == "__main__": sys.exit(main())
