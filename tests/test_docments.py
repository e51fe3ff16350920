"""Every public name explains itself: a docstring, and a word on each parameter whose meaning is not in its type."""
import importlib, inspect, re, typing
from pathlib import Path

import pytest
import torch
from fastcore.docments import docments

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(f.stem for f in (ROOT/"gptoss_lite").glob("*.py") if f.stem[0] != "_")
OWED = ROOT/".ci/undocumented.txt"  # names that still lack something; to be emptied

# Parameters that say what they are by their name, the same everywhere in the book (the glossary has them)
BY_NAME = """self cls args kwargs cfg model cache seed layer_idx path text ids T batch device dtype window is_windowed vocab_size
             max_new_tokens ax""".split()
# ... or by their type. Classes of this package explain themselves.
BY_TYPE = (torch.dtype, torch.device, torch.Generator)

def says_itself(annotation):
    "Whether a type leaves no question open"
    if typing.get_origin(annotation) is typing.Annotated: return True  # a command's option: its help says it
    parts = [a for a in typing.get_args(annotation) or (annotation,) if a is not type(None)]
    return all(a in BY_TYPE or inspect.isclass(a) and a.__module__.startswith("gptoss_lite") for a in parts)

def members(module):
    "The public functions of a module, its classes and their public methods, with their names"
    for name in module.__all__:
        obj = getattr(module, name)
        if getattr(obj, "__module__", None) != module.__name__: continue
        if inspect.isfunction(obj): yield name, obj
        if not inspect.isclass(obj): continue
        yield name, obj
        for k, v in vars(obj).items():
            v = getattr(v, "__func__", v.fget if isinstance(v, property) else v)
            if k[0] != "_" and inspect.isfunction(v) and v.__name__ != "<lambda>": yield f"{name}.{k}", v

def lacks(obj):
    "What `obj` leaves unsaid: its docstring, parameters, a tensor or number that it returns"
    if not inspect.getdoc(obj): yield "docstring"
    func = obj
    if inspect.isclass(obj):
        func = vars(obj).get("__init__")
        if not inspect.isfunction(func) or not func.__code__.co_filename.endswith(".py"): return
    said = docments(func, full=True)
    for p in inspect.signature(func).parameters.values():
        if p.name in BY_NAME or says_itself(p.annotation) or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD): continue
        if not getattr(said.get(p.name), "docment", None): yield p.name
    back = inspect.signature(func).return_annotation
    if re.search(r"Tensor|tuple|dict|list", str(back)) and not said["return"].docment: yield "return"

def found():
    for m in MODULES:
        module = importlib.import_module(f"gptoss_lite.{m}")
        for name, obj in members(module):
            for what in lacks(obj): yield f"{m}.{name}: {what}"

def test_every_public_name_is_documented():
    listed = {l.strip() for l in OWED.read_text(encoding="utf-8").splitlines() if l.strip() and l[0] != "#"} if OWED.exists() else set()
    now = set(found())
    assert not now - listed, "without a docment: " + ", ".join(sorted(now - listed))

@pytest.mark.parametrize("missing", ["docstring", "n", "return"])
def test_what_is_missing_is_seen(missing, tmp_path, monkeypatch):
    lines = dict(n="    n:int, # how many", return_=")->list[int]: # the numbers", docstring='    "Count"')
    if missing == "n": lines["n"] = "    n:int,"
    if missing == "return": lines["return_"] = ")->list[int]:"
    if missing == "docstring": lines["docstring"] = "    pass"
    (tmp_path/"a_module.py").write_text("def count(\n" + "\n".join(lines.values()) + "\n    return list(range(n))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(lacks(importlib.import_module("a_module").count)) == [missing]
    importlib.sys.modules.pop("a_module")
