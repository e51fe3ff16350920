"""What the tests share: `--slow`, the markers, two profiles of hypothesis, and one thread."""
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# A deadline would make a busy machine a failure; the same examples every time make a failure repeatable.
settings.register_profile("checks", deadline=None, derandomize=True, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow])
# HYPOTHESIS_PROFILE=thorough: other examples each time, and 30 times as many (`oracle.examples`).
settings.register_profile("thorough", settings.get_profile("checks"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "checks"))

collect_ignore = ["browser"]  # needs Chromium: `make browser-test` asks for that folder by name

torch.set_num_threads(1)  # the tensors here are tiny: more threads only wait for each other

def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes or gigabytes; runs with --slow (make test-slow)")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")

def pytest_collection_modifyitems(config, items):
    slow = pytest.mark.skip(reason="marked slow: make test-slow runs it")
    gpu = pytest.mark.skip(reason="marked gpu, and there is no CUDA device")
    cuda = None
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"): item.add_marker(slow)
        if "gpu" in item.keywords:
            if cuda is None: cuda = torch.cuda.is_available()
            if not cuda: item.add_marker(gpu)
