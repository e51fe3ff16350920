"""A small GPT-OSS style model and its mixed KV cache.

Names are handed on lazily (PEP 562): `from gptoss_lite import GPTOSS` imports the module that holds it,
and `import gptoss_lite` alone imports nothing else. This file is written by hand; `nbdev_export` sets
only its version line, from settings.ini.
"""
__version__ = "0.1.0"

from importlib import import_module as _import_module

_HOMES = {  # module -> the names that it hands on
    "config": ("ModelConfig", "count_parameters", "gptoss_502m", "gptoss_tiny"),
    "memory": ("kv_bytes_per_token", "kv_cache_bytes", "kv_reduction", "estimate_model_memory_gb"),
    "ring": ("RingBuffer",),
    "growth": ("GrowingBuffer",),
    "cache": ("MixedKVCache",),
    "ragged": ("RaggedKVCache",),
    "rope": ("YaRNRoPE",),
    "attention": ("causal_attention", "manual_causal_attention", "repeat_kv"),
    "model": ("GPTOSS", "save_checkpoint", "load_checkpoint"),
    "files": ("save_cache", "load_cache"),
    "reading": ("prefill", "score"),
    "generation": ("generate", "stream", "stream_text"),
    "lookup": ("generate_with_lookup",),
    "passkey": ("CharTokenizer", "PasskeyEvaluator", "make_filler_text", "load_pretrained"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name):
    "Import the module that holds `name`, and keep what was found for the next time"
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
