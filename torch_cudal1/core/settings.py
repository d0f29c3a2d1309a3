"""Every option of the package and its `TORCH_CUDAL1_*` variable, read here and nowhere else.

A `Settings` is a frozen value: functions take it as an argument, nothing is global. A variable or
option that is misspelt or out of range is refused by name.

The environment is written in four places: `replace_environment` in a process made for a candidate,
`set_environment` in a process made for measuring, `append_to_path` for the time of a block, and
`set_triton_folder` where the user named no folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from torch_cudal1.core.errors import SettingError

__all__ = [
    "FAMILIES",
    "HUB_REPOSITORY",
    "INDUCTOR_PREFIX",
    "PREFIX",
    "Settings",
    "append_to_path",
    "default_key_folder",
    "environment_table",
    "export_settings",
    "process_environment",
    "replace_environment",
    "select_environment",
    "set_environment",
]

PREFIX = "TORCH_CUDAL1_"
# Variables that Inductor sets for itself while it compiles.
INDUCTOR_PREFIX = b"_TORCHINDUCTOR_"
# Families of techniques, see `Settings.without`.
FAMILIES = ("rewrites", "kernels", "compile", "graphs")
# A Hub repository with an owner, perhaps @revision (branch, tag or commit). The text becomes part
# of a path: ".." could lead out of the cache, and "--" stands for "/" in the Hub's folder names.
HUB_REPOSITORY = re.compile(
    r"(?![^@]*--)(?!.*\.\.)[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[A-Za-z0-9][\w./-]{0,199})?",
    re.ASCII,
)
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NUMBER_RANGES = {
    "budget_s": (0.0, 1e6),
    "margin": (1.0, 10.0),
    "min_saving_us": (0.0, 1e6),
    "candidate_timeout_s": (1.0, 1e5),
    "hub_timeout_s": (0.1, 1e4),
    "memory_limit_gib": (0.0, 1e5),
    "shadow_rate": (0.0, 1.0),
    "ranks_timeout_s": (0.0, 1e5),
    "ranks_heartbeat_s": (0.1, 1e5),
    "ranks_deciding_s": (0.1, 1e5),
}
_CHOICES = ("on_miss", "strictness", "precision", "trust")
_SWITCHES = (
    "enabled",
    "assume_finite",
    "autotune",
    "offline",
    "unsafe_sandbox",
    "ranks_agree",
    "shipped",
    "recall",
    "remeasure",
    "inductor_files",
)
_WORDS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch_cudal1"


def default_key_folder() -> Path:
    """Where `cudal1 keys new` puts private keys: beside the user's other configuration, never in a
    cache.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "torch_cudal1" / "keys"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All options. `Settings()` holds the defaults; `Settings.from_env(**given)` lets the
    environment fill what was not given.

    - enabled: False means every call runs the user's own baseline (the kill switch).
    - on_miss: what a region without a cached decision gets: "quick" (PyTorch's own ways of running
      it are benchmarked now, which takes seconds beyond torch.compile's first call), "baseline"
      (it runs as it is), "tune" (search now, within budget_s), "error".
    - strictness: what a failure of this package does besides falling back: "silent" (counted), "warn"
      (logged once), "error" (raised).
    - precision, assume_finite: the precision contract.
    - cache_dir: the one writable cache. read_only_caches: further folders that are only read, in
      order.
    - budget_s: seconds of search per region, of which 30 begin in any case when its baselines have
      been timed; waiting for another process to release the GPU does not count.
    - margin, min_saving_us: a swap needs this lower bound of the speed-up and this saving per call.
    - autotune: let Inductor's max-autotune join the baselines (slow to compile). It joins by itself
      from budget_s = 600 on.
    - without: families of techniques that a search leaves out, to measure what each contributes:
      "rewrites" (of the graph), "kernels", "compile" (Inductor), "graphs" (CUDA graphs). Baselines
      of these are not timed either; use a separate cache.
    - candidate_timeout_s, memory_limit_gib: limits of one judge process (the memory limit is for
      its host memory).
    - offline: this package opens no connection; what is not on this machine is a miss.
    - record: the file to which every process appends the signatures of the calls that it serves (no
      data), for a later warm-up.
    - shadow_rate: the share of calls of a swapped region that also run the baseline and are
      compared with it; 0: none.
    - on_mismatch: called with the event when such a comparison fails: a function, or
      "package.module:name".
    - ranks_agree: under torch.distributed all ranks that run a graph run the same choice.
      ranks_timeout_s: the longest that ranks wait for each other before all take the baseline.
      ranks_heartbeat_s: the longest wait for a deciding rank without a sign of life.
      ranks_deciding_s: the longest wait for a deciding rank that lives, plus twice the budget of a
      search that it may make.
    - unsafe_sandbox: evaluate foreign sources even where their process cannot be kept from files
      and the network.
    - trust: the treatment of an entry from outside `cache_dir` without a signature of an allowed
      publisher: "judge" (evaluated here first where on_miss is "tune", refused elsewhere) or
      "signed" (always refused).
    - publishers: the list of publishers whose signature is accepted. revoked: the list of entries,
      programs and keys that must not be used any more.
    - hub: a Hub repository, owner/name or owner/name@revision, in which entries are looked up that
      this machine lacks; "": none. hub_timeout_s: the longest wait for one answer; after a Hub did
      not answer, this process does not ask it for a minute.
    - shipped: look up the entries that came with the package, after all other folders.
    - recall: bind a call of an accelerated module without Dynamo where an earlier start of the same
      program did; see docs/limits.md for what a start like that cannot see.
    - remeasure: where a busy machine leaves open which way of running is the fastest, the next starts
      measure again, up to three times; False: what the first one decides stays.
    - inductor_files: use what Inductor compiled elsewhere (`warmup --with-inductor`), from the own
      cache or signed by an allowed publisher. These files are code that runs in this process.
    - llm_key: the key of a language model's server, sent to that server only; from the environment,
      never shown.
    """

    enabled: bool = True
    on_miss: Literal["quick", "baseline", "tune", "error"] = "quick"
    strictness: Literal["silent", "warn", "error"] = "warn"
    precision: Literal["match", "strict", "kernelbench"] = "match"
    assume_finite: bool = False
    cache_dir: Path = field(default_factory=_default_cache)
    read_only_caches: tuple[Path, ...] = ()
    budget_s: float = 60.0
    margin: float = 1.05
    min_saving_us: float = 2.0
    autotune: bool = False
    without: tuple[str, ...] = ()
    candidate_timeout_s: float = 120.0
    # 0: no limit beyond the machine's.
    memory_limit_gib: float = 0.0
    offline: bool = False
    unsafe_sandbox: bool = False
    record: Path | None = None
    shadow_rate: float = 0.0
    on_mismatch: Callable[[Any], object] | str | None = None
    ranks_agree: bool = True
    ranks_timeout_s: float = 60.0
    ranks_heartbeat_s: float = 60.0
    ranks_deciding_s: float = 600.0
    trust: Literal["judge", "signed"] = "judge"
    publishers: Path | None = None
    revoked: Path | None = None
    hub: str = ""
    hub_timeout_s: float = 10.0
    shipped: bool = True
    recall: bool = False
    remeasure: bool = True
    inductor_files: bool = False
    # repr=False: a repr may end in a log or an error message, and the key must not.
    llm_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_names()
        self._expand_paths()

    def _check_numbers(self) -> None:
        for name, (low, high) in _NUMBER_RANGES.items():
            value = getattr(self, name)
            if (
                not isinstance(value, (int, float))
                # True is an int in Python, but `budget_s=True` is a mistake and no second.
                or isinstance(value, bool)
                or not low <= value <= high
            ):
                raise SettingError(name, value, f"a number from {low:g} to {high:g}")

    def _check_choices(self) -> None:
        for name in _CHOICES:
            allowed = get_args(_find_annotation(name))
            if getattr(self, name) not in allowed:
                raise SettingError(
                    name, getattr(self, name), "one of " + ", ".join(map(repr, allowed))
                )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise SettingError(name, getattr(self, name), "True or False")

    def _check_names(self) -> None:
        """Technique families, the callback, and the Hub's repository."""
        if unknown := [name for name in self.without if name not in FAMILIES]:
            raise SettingError("without", unknown[0], "some of " + ", ".join(FAMILIES))
        callback = self.on_mismatch
        if not (
            callback is None
            or callable(callback)
            or (isinstance(callback, str) and _FUNCTION.fullmatch(callback))
        ):
            raise SettingError(
                "on_mismatch", callback, "a function, or the name of one as 'package.module:name'"
            )
        if not isinstance(self.hub, str) or (self.hub and not HUB_REPOSITORY.fullmatch(self.hub)):
            raise SettingError("hub", self.hub, "owner/name or owner/name@revision")

    def _expand_paths(self) -> None:
        """Make every path a Path without "~"."""
        changes: dict[str, object] = {
            "cache_dir": Path(self.cache_dir).expanduser(),
            "read_only_caches": tuple(Path(path).expanduser() for path in self.read_only_caches),
        }
        if self.record is not None:
            changes["record"] = Path(self.record).expanduser()
        for name in ("publishers", "revoked"):
            if (path := getattr(self, name)) is not None:
                # Path("") is the current folder, which the user did not name.
                if not str(path):
                    raise SettingError(name, path, "the path of a TOML file, or None")
                changes[name] = Path(path).expanduser()
        for name, value in changes.items():
            # A frozen field is set by object.__setattr__ only.
            object.__setattr__(self, name, value)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Defaults, then `TORCH_CUDAL1_NAME` variables, then `overrides`. Raises SettingError for an
        unknown name or a bad value.
        """
        option_names = {f.name for f in fields(cls)}
        for name in overrides:
            if name not in option_names:
                raise SettingError(
                    name, overrides[name], "one of the settings " + ", ".join(sorted(option_names))
                )
        values: dict[str, Any] = {}
        for variable, text in (os.environ if environ is None else environ).items():
            name = variable.removeprefix(PREFIX).lower()
            if not variable.startswith(PREFIX):
                continue
            # A misspelt variable would otherwise be ignored, and the user would believe that it
            # holds.
            if name not in option_names:
                raise SettingError(
                    variable,
                    text,
                    "one of " + ", ".join(sorted(PREFIX + k.upper() for k in option_names)),
                )
            values[name] = _parse(name, text)
        # Arguments of the call outweigh the environment.
        return cls(**{**values, **overrides})

    def but(self, **changes: Any) -> Settings:
        """A copy with `changes`. Raises SettingError like `from_env`."""
        option_names = {f.name for f in fields(self)}
        for name in changes:
            if name not in option_names:
                raise SettingError(
                    name, changes[name], "one of the settings " + ", ".join(sorted(option_names))
                )
        return replace(self, **changes)


def select_environment(names: Collection[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables that a child process gets: the names in `names`, and every name that starts
    with one of `prefixes`.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(prefixes)
    }


@contextlib.contextmanager
def append_to_path(folder: str) -> Iterator[None]:
    """PATH with `folder` at its end, for programs that this process starts meanwhile."""
    before = os.environ.get("PATH")
    # At the end: a program of the machine itself is found first.
    os.environ["PATH"] = os.pathsep.join(filter(None, [before, folder]))
    try:
        yield
    # The user's own later processes get PATH as it was, or none.
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def set_triton_folder(otherwise: str) -> Path:
    """The folder in which Triton keeps what it builds from now on: the user's TRITON_CACHE_DIR, else
    `otherwise`, which becomes TRITON_CACHE_DIR.
    """
    # Inductor sets the variable too, but only after Triton has started. Triton looks there for its
    # driver library when it starts, and calls a C compiler if the library is missing.
    return Path(os.environ.setdefault("TRITON_CACHE_DIR", otherwise))


def environment_table() -> dict[bytes, bytes]:
    """The dictionary behind `os.environ`, with keys and values in bytes. Only to be compared."""
    # The dictionary itself, because a guard looks at it again at every call; Dynamo reads it too.
    table: dict[bytes, bytes] = vars(os.environ)["_data"]
    return table


def process_environment() -> dict[str, str]:
    """Every variable as the C library has it now."""
    # os.environ is Python's copy of the start: `os.putenv` and native code change only the block of
    # the C library, which a child process inherits.
    try:
        block = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    except (OSError, ValueError):
        # No such library or symbol outside POSIX.
        return dict(os.environ)
    texts: list[str] = []
    # The block ends with a null pointer, and is null itself after clearenv().
    while block and (text := block[len(texts)]) is not None:
        texts.append(text.decode(errors="replace"))
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def replace_environment(variables: Mapping[str, str]) -> None:
    """Make `variables` the only ones of this process, which was forked for a candidate."""
    # A fork inherits every variable of the fork server.
    os.environ.clear()
    os.environ.update(variables)


def set_environment(variables: Mapping[str, str]) -> None:
    """Add `variables` to those of this process, which was made for measuring."""
    # Before the first CUDA call: CUDA reads variables such as CUDA_VISIBLE_DEVICES once.
    os.environ.update(variables)


def export_settings(options: Mapping[str, object]) -> None:
    """Set the variables of those settings that have a value, for `Settings.from_env` in this process
    and in those that it starts.
    """
    for name, value in options.items():
        if value is not None:
            written = str(value).lower() if isinstance(value, bool) else str(value)
            os.environ[PREFIX + name.upper()] = written


def _find_annotation(name: str) -> Any:
    # Annotations are texts here (from __future__ import annotations).
    return get_type_hints(Settings)[name]


def _parse(name: str, text: str) -> Any:
    # The type of the default says how to read the text.
    default = getattr(Settings, name, None)
    if name in ("cache_dir", "record"):
        return Path(text)
    if name in ("publishers", "revoked"):
        return Path(text) if text else None
    if name == "without":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "read_only_caches":
        return tuple(Path(part) for part in text.split(os.pathsep) if part)
    if isinstance(default, bool):
        if text.lower() not in _WORDS:
            raise SettingError(PREFIX + name.upper(), text, "true or false")
        return _WORDS[text.lower()]
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise SettingError(PREFIX + name.upper(), text, "a number") from None
    return text
