"""Check `triage`: what the text of a source makes worth a closer look. It reads the syntax tree
and runs nothing.

It never refuses and never accepts: of the published kernels that a static checker refused, most
were refused for words in comments, and every rule here has an honest use or an evasion (names in
strings, aliases, tables of modules). Each finding is recorded, with the profile that the findings
call for; a caller that asked for a profile still gets that one. Docstrings and comments are not
looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.spec import CheckName
from torch_cudal1.judge.checks.static.source_syntax import parse_source
from torch_cudal1.judge.profiles import ProfileName
from torch_cudal1.judge.reference.source_reference import SourceCandidate

__all__ = ["TRIAGE", "Finding", "find_suspicious_text", "raise_profile", "triage"]

_SHOWN = 8
_WEIGHTY = frozenset(  # rules whose cheats the fast profile may not meet
    (
        "streams",
        "patched",
        "subclass",
        "modules",
        "frames",
        "collector",
        "obfuscated",
        "raw memory",
        "compiler flags",
        "spec literals",
    )
)
_CALLS: Mapping[str, str] = {  # last names of called functions -> rule
    **dict.fromkeys(
        ("Stream", "ExternalStream", "set_stream", "cudaStreamCreate", "cudaStreamCreateWithFlags"),
        "streams",
    ),
    **dict.fromkeys(
        (
            "Thread",
            "ThreadPoolExecutor",
            "ProcessPoolExecutor",
            "Process",
            "fork",
            "start_new_thread",
        ),
        "threads",
    ),
    **dict.fromkeys(("_getframe", "currentframe", "stack", "_current_frames"), "frames"),
    **dict.fromkeys(("get_objects", "get_referrers", "get_referents"), "collector"),
    **dict.fromkeys(
        ("exec", "eval", "compile", "__import__", "import_module", "loads", "b64decode", "fromhex"),
        "obfuscated",
    ),
    **dict.fromkeys(
        ("memset", "memmove", "from_address", "CDLL", "PyDLL", "dlopen", "string_at"), "raw memory"
    ),
    **dict.fromkeys(
        (
            "system",
            "popen",
            "run",
            "Popen",
            "check_output",
            "urlopen",
            "urlretrieve",
            "create_connection",
        ),
        "host",
    ),
    **dict.fromkeys(("CUDAGraph", "graph", "make_graphed_callables"), "graphs"),
    **dict.fromkeys(("manual_seed", "seed", "set_rng_state"), "random state"),
    **dict.fromkeys(("data_ptr", "_version"), "addresses"),
    **dict.fromkeys(
        (
            "set_float32_matmul_precision",
            "set_default_dtype",
            "set_num_threads",
            "set_grad_enabled",
        ),
        "flags",
    ),
    **dict.fromkeys(("load_inline", "load", "CUDAExtension"), "extension"),
    **dict.fromkeys(("half", "bfloat16", "autocast"), "half precision"),
}
_MODULES = frozenset(
    (
        "os",
        "subprocess",
        "socket",
        "ctypes",
        "threading",
        "multiprocessing",
        "gc",
        "inspect",
        "shutil",
        "urllib",
        "requests",
    )
)
_HOOKS = frozenset(
    (
        "__torch_function__",
        "__torch_dispatch__",
        "_make_wrapper_subclass",
        "__getattribute__",
        "__class__",
    )
)
_CUDA_WORDS: Mapping[str, str] = {  # in strings that hold device or host code
    "##": "obfuscated",
    "cudaStreamCreate": "streams",
    "cudaLaunchHostFunc": "threads",
    "pthread": "threads",
    "std::thread": "threads",
    "static ": "static variables",
    "use_fast_math": "compiler flags",
    "clock64": "clocks",
    "globaltimer": "clocks",
    "__constructor__": "host",
    "dlsym": "raw memory",
}
_CODE_WORDS = ("__global__", "#include", "__device__")
_SMALL = 64  # sizes below that are no sign of anything


@dataclass(frozen=True)
class Finding:
    """One rule that a source meets, where (line, 1 and up), and what was found."""

    rule: str
    line: int
    text: str


def triage(candidate: SourceCandidate, sizes: Collection[int] = ()) -> list[CheckResult]:
    """The findings as one check, which always passes. `sizes`: dimensions of the example inputs,
    which are no secret.
    """
    # Recorded only: of published kernels that a static checker refused most were refused for words
    # in comments, and names can be hidden in strings and aliases.
    matches = find_suspicious_text(candidate.text, sizes)
    rules = list(dict.fromkeys(each.rule for each in matches))
    shown = "; ".join(f"{each.rule} in line {each.line}: {each.text}" for each in matches[:_SHOWN])
    more = f"; and {len(matches) - _SHOWN} more" if len(matches) > _SHOWN else ""
    called = (
        "calls for the standard profile: " if raise_profile("fast", matches) == "standard" else ""
    )
    detail = f"{called}{shown}{more}" if matches else "nothing that asks for a closer look"
    return [CheckResult("triage", True, float(len(rules)), detail=detail)]


def raise_profile(profile: ProfileName, matches: Collection[Finding]) -> ProfileName:
    """The profile that the findings call for: at least standard where a rule's cheats may pass the
    fast one.
    """
    return (
        "standard"
        if profile == "fast" and any(each.rule in _WEIGHTY for each in matches)
        else profile
    )


def find_suspicious_text(text: str, sizes: Collection[int] = ()) -> list[Finding]:
    """Every rule that the text meets, each rule at most once a line, in order of lines."""
    # `contract` refuses it with the reason.
    tree = parse_source(text)
    if isinstance(tree, str):
        return []
    # Words in prose mean nothing: static checkers were misled by "forward pass".
    documented = {id(node) for node in _iter_docstrings(tree)}
    matches = {
        (line, rule, text_found)
        for node in ast.walk(tree)
        if id(node) not in documented
        # Small numbers occur everywhere.
        for rule, text_found in _match_rules(
            node, frozenset(size for size in sizes if size >= _SMALL)
        )
        for line in (getattr(node, "lineno", 0),)
    }
    return [Finding(rule, line, text_found) for line, rule, text_found in sorted(matches)]


def _iter_docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            yield body[0].value


def _match_rules(node: ast.AST, sizes: frozenset[int]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call):
        yield from _match_call(node)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
        yield from (("host modules", name) for name in names if name.partition(".")[0] in _MODULES)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        yield from (pair for target in targets for pair in _list_written(target))
    # A subclass of Tensor can put off its work until the result is compared.
    elif isinstance(node, ast.ClassDef):
        yield from (
            ("subclass", node.name)
            for base in node.bases
            if _join_names(base).rpartition(".")[2] in ("Tensor", "Parameter")
        )
    elif isinstance(node, ast.FunctionDef) and node.name in _HOOKS:
        yield "subclass", node.name
    elif isinstance(node, ast.Attribute) and _join_names(node) == "sys.modules":
        yield "modules", "sys.modules"
    # Most published kernels have a `try`: recorded, because a failing kernel may fall back
    # silently.
    elif isinstance(node, (ast.Try, ast.Global)):
        yield ("fallback", "try") if isinstance(node, ast.Try) else ("state", "global")
    elif isinstance(node, ast.Constant):
        yield from _match_constant(node.value, sizes)


def _match_call(node: ast.Call) -> Iterator[tuple[str, str]]:
    path = _join_names(node.func)
    name = path.rpartition(".")[2]
    rule = _CALLS.get(name)
    if (
        rule
        # `torch.compile` and `torch.load` are ordinary; the builtin and the extension loader are
        # meant.
        and not (name == "compile" and path.startswith("torch"))
        and not (name == "load" and "cpp_extension" not in path)
    ):
        yield rule, path
    # Assigning under a computed name patches a module as an attribute does.
    if name in ("setattr", "delattr") and node.args and _is_outside(_join_names(node.args[0])):
        yield "patched", f"{name}({_join_names(node.args[0])}, ...)"
    for keyword in node.keywords:
        if keyword.arg in (
            "extra_cuda_cflags",
            "extra_cflags",
            "extra_ldflags",
            "extra_include_paths",
        ):
            yield "compiler flags", keyword.arg


def _list_written(target: ast.expr) -> Iterator[tuple[str, str]]:
    """Attributes and items of something that is not the source's own."""
    if isinstance(target, (ast.Tuple, ast.List)):
        yield from (pair for item in target.elts for pair in _list_written(item))
    elif isinstance(target, ast.Attribute):
        path = _join_names(target)
        if _is_outside(path):
            yield ("flags" if ".backends." in path or path.endswith(".config") else "patched"), path
    elif isinstance(target, ast.Subscript) and _join_names(target.value) in (
        "os.environ",
        "sys.modules",
        "builtins.__dict__",
    ):
        yield (
            ("environment" if "environ" in _join_names(target.value) else "patched"),
            _join_names(target.value),
        )


def _is_outside(path: str) -> bool:
    # Names of modules that sources import by custom: assigning to their attributes patches them.
    return path.partition(".")[0] in (
        "torch",
        "time",
        "sys",
        "os",
        "builtins",
        "nn",
        "F",
        "triton",
        "tl",
        "np",
        "numpy",
        "random",
        "json",
    )


def _match_constant(value: object, sizes: frozenset[int]) -> Iterator[tuple[str, str]]:
    # Only strings that hold device code: the words occur in messages too.
    if isinstance(value, str) and any(word in value for word in _CODE_WORDS):
        yield from ((rule, word.strip()) for word, rule in _CUDA_WORDS.items() if word in value)
    # `type` and not `isinstance`: True is an int that equals 1.
    elif type(value) is int and value in sizes:
        yield "spec literals", str(value)


def _join_names(node: ast.AST) -> str:
    """`a.b.c` as text, "" for an expression that is no chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(parts)])
    return ".".join(["", *reversed(parts)]) if parts else ""


TRIAGE = CheckName(
    name="triage",
    module=__name__,
    asks="what in the source deserves a closer look; it refuses nothing",
)
