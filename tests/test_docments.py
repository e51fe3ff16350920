"""Every public name explains itself: a docstring, and a word on each parameter whose meaning is not in its type."""
import importlib, inspect, re, typing
from pathlib import Path

import pytest
import torch
from fastcore.docments import docments

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(f.stem for f in (ROOT/"gptoss_lite").glob("*.py") if f.stem[0] != "_")

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

def found(modules):
    "What the public names of some modules leave unsaid"
    for module in modules:
        for name, obj in members(module):
            for what in lacks(obj): yield f"{module.__name__.split('.')[-1]}.{name}: {what}"

def test_every_public_name_is_documented():
    modules = [importlib.import_module(f"gptoss_lite.{m}") for m in MODULES]
    assert all(m.__all__ for m in modules) and sum(1 for m in modules for _ in members(m)) > 300  # all were looked at
    owed = sorted(found(modules))
    assert not owed, "without a docstring or a docment: " + ", ".join(owed)

WHOLE = '''
from fastcore.basics import patch
__all__ = ["count", "Counter"]

def count(
    n:int, # how many
)->list[int]: # the numbers
    "Count"

class Counter:
    "Counts on"
    def __init__(self,
        start:int, # the first number
    ): self.at = start

    def take(self,
        k:int, # how many further ones
    )->list[int]: # the next numbers
        "Count from where it stopped"

    @property
    def seen(self)->list[int]: # the numbers so far
        "What was counted"

@patch
def back(self:Counter,
    steps:int, # how far
)->tuple[int,int]: # the number before and after
    "Count again"
'''

# What is taken from it, and what is then found
MISSING = {
    "": [],
    '"Count"': ["count: docstring"],
    "# how many\n": ["count: n"],
    "# the numbers\n": ["count: return"],
    '"Counts on"': ["Counter: docstring"],
    "# the first number": ["Counter: start"],
    '"Count from where it stopped"': ["Counter.take: docstring"],
    "# how many further ones": ["Counter.take: k"],
    "# the next numbers": ["Counter.take: return"],
    '"What was counted"': ["Counter.seen: docstring"],
    "# the numbers so far": ["Counter.seen: return"],
    '"Count again"': ["Counter.back: docstring"],
    "# how far": ["Counter.back: steps"],
    "# the number before and after": ["Counter.back: return"],
}

@pytest.mark.parametrize("gone", MISSING)
def test_what_is_missing_is_seen(gone, tmp_path, monkeypatch):
    assert WHOLE.count(gone) == 1 or not gone
    text = WHOLE.replace(gone, "pass" if gone[0] == '"' else "\n") if gone else WHOLE
    (tmp_path/"a_module.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try: assert list(found([importlib.import_module("a_module")])) == [f"a_module.{x}" for x in MISSING[gone]]
    finally: importlib.sys.modules.pop("a_module", None)
