"""Each rule finds its cheat in the syntax tree and not in words of comments; triage itself never
refuses.
"""

from __future__ import annotations

import pytest

from tests.judge.sources import source
from torch_cudal1.judge.checks.static.triage import find_suspicious_text, raise_profile, triage
from torch_cudal1.judge.reference.source_reference import SourceCandidate

FOUND: dict[
    str, tuple[dict[str, str], str]
] = {  # what the source does -> the rule that must see it
    "a stream": ({"before": "s = torch.cuda.Stream()"}, "streams"),
    "a thread": (
        {"top": "import threading\n", "before": "threading.Thread(target=print).start()"},
        "threads",
    ),
    "a patched function": ({"top": "torch.allclose = lambda *a: True\n"}, "patched"),
    "a patched method": ({"top": "torch.cuda.Event.record = None\n"}, "patched"),
    "setattr": ({"top": "setattr(torch, 'equal', None)\n"}, "patched"),
    "a deleted attribute": ({"top": "del torch.equal\n"}, "patched"),
    "several at once": ({"top": "import time\nx, time.time = 1, None\n"}, "patched"),
    "a flag": ({"top": "torch.backends.cudnn.benchmark = True\n"}, "flags"),
    "a switch": ({"top": "torch.set_float32_matmul_precision('high')\n"}, "flags"),
    "a variable": ({"top": "import os\nos.environ['X'] = '1'\n"}, "environment"),
    "a subclass": ({"top": "class Later(torch.Tensor):\n    pass\n"}, "subclass"),
    "a hook": (
        {"top": "class L:\n    def __torch_function__(self, *a):\n        pass\n"},
        "subclass",
    ),
    "the table of modules": ({"top": "import sys\nm = sys.modules\n"}, "modules"),
    "frames": ({"top": "import sys\nsys._getframe(1)\n"}, "frames"),
    "the collector": ({"top": "import gc\ngc.get_objects()\n"}, "collector"),
    "text that is run": ({"top": "exec('a = 1')\n"}, "obfuscated"),
    "raw memory": (
        {"top": "import ctypes\n", "before": "ctypes.memset(x.data_ptr(), 0, 4)"},
        "raw memory",
    ),
    "a program": ({"top": "import subprocess\nsubprocess.run(['ls'])\n"}, "host"),
    "a socket": ({"top": "import socket\n"}, "host modules"),
    "flags of a compiler": (
        {
            "top": "from torch.utils.cpp_extension import load_inline\nload_inline('a', '', extra_cuda_cflags=['-O3'])\n"
        },
        "compiler flags",
    ),
    "pasted tokens": (
        {"top": "code = '#define S(a) cuda ## a\\n__global__ void k() {}'\n"},
        "obfuscated",
    ),
    "a static in C++": ({"top": "code = '#include <x>\\nstatic int n = 0;'\n"}, "static variables"),
    "the spec's sizes": ({"before": "if x.shape[1] == 4096:\n    pass"}, "spec literals"),
    "a fallback": ({"before": "try:\n    pass\nexcept Exception:\n    pass"}, "fallback"),
    "a seed": ({"before": "torch.manual_seed(0)"}, "random state"),
    "a cache by address": ({"before": "key = x.data_ptr()"}, "addresses"),
    "a graph": ({"before": "g = torch.cuda.CUDAGraph()"}, "graphs"),
    "half precision": ({"result": "torch.relu(self.linear(x).half().float())"}, "half precision"),
}
SIZES = (16, 4096)


@pytest.mark.parametrize("name", FOUND)
def test_a_rule_finds_its_cheat(name: str) -> None:
    parts, rule = FOUND[name]
    findings_of_rule = find_suspicious_text(source(**parts), SIZES)
    assert rule in {finding.rule for finding in findings_of_rule}, findings_of_rule
    assert all(finding.line > 0 for finding in findings_of_rule)
    (check,) = triage(SourceCandidate(source(**parts)), SIZES)
    assert check.passed
    assert check.name == "triage"
    assert rule in check.detail


WORDS = '''
"""A forward pass on a stream, with a cache; no sleep, no thread, no torch.cuda.Stream(), exec or sys.modules."""
# torch.allclose = None; os.environ["X"] = "1"
note = "this passes the stream to eval and caches 4096 items"
'''
HONEST: dict[str, dict[str, str]] = {
    "the reference": {},
    "words in comments and strings": {"top": WORDS},
    "its own attributes": {"init": "self.cache = None\nself.streams = []"},
    "small sizes": {"before": "if x.shape[0] == 16:\n    pass"},
    "torch.compile": {"init": "self.__dict__['f'] = torch.compile(self.linear)"},
    "a loaded state": {"before": "self.load_state_dict(self.state_dict())"},
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_text_has_no_findings(name: str) -> None:
    assert find_suspicious_text(source(**HONEST[name]), SIZES) == []


def test_findings_raise_the_profile_and_never_lower_it() -> None:
    weighty = find_suspicious_text(source(before="s = torch.cuda.Stream()"))
    light = find_suspicious_text(source(before="try:\n    pass\nfinally:\n    pass"))
    assert raise_profile("fast", weighty) == "standard"
    assert raise_profile("fast", light) == "fast"
    assert raise_profile("strict", weighty) == "strict"
    assert raise_profile("fast", []) == "fast"


def test_what_does_not_parse_is_not_its_business() -> None:
    assert find_suspicious_text("class (") == []
    (check,) = triage(SourceCandidate("class ("))
    assert check.passed
