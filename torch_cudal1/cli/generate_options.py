"""Options of `cudal1 generate`. It imports nothing heavy: every command line builds its parser from
here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the tasks, the model, the search and its limits, the evaluation, and the run's folder."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="+",
        help="KernelBench-style file or folder, or a CUDA-L1 release file",
    )
    _add_model(parser)
    _add_search(parser)
    _add_limits(parser)
    _add_evaluation(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("cudal1-generate"),
        metavar="DIR",
        help="the run; given again, it goes on",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--llm",
        # No default: the target's source is sent to this server.
        required=True,
        metavar="URL|MODEL",
        help="server such as http://localhost:8000/v1, or model folder",
    )
    parser.add_argument(
        "--llm-model",
        default="",
        metavar="NAME",
        help="which of the server's models; needless if it has one",
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=_above(int, 0), default=8, metavar="N", help="rounds of a task (8)"
    )
    parser.add_argument(
        "--samples",
        type=_above(int, 0),
        default=8,
        metavar="N",
        help="programs asked for in a round (8)",
    )
    parser.add_argument(
        "--temperature", type=_above(float, 0), default=0.8, metavar="T", help="of sampling (0.8)"
    )
    parser.add_argument(
        "--selector",
        choices=("none", "random", "bucket", "island", "top"),
        # The selector of the CUDA-L1 paper.
        default="bucket",
        help="which earlier programs are shown",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (0)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget-s",
        dest="total_s",
        type=_above(float, 0),
        metavar="S",
        help="seconds of a task, earlier runs included",
    )
    parser.add_argument(
        "--tokens", type=_above(int, 0), metavar="N", help="tokens of a task, prompts included"
    )
    parser.add_argument(
        "--money", type=_above(float, 0), metavar="M", help="money for a task; needs prices"
    )
    parser.add_argument(
        # Prices are given by the user: an OpenAI-compatible server counts tokens, not money.
        "--price-prompt",
        type=_from_zero,
        default=0.0,
        metavar="M",
        help="money for a million prompt tokens",
    )
    parser.add_argument(
        "--price-completion",
        type=_from_zero,
        default=0.0,
        metavar="M",
        help="for a million completion tokens",
    )
    parser.add_argument(
        "--max-tokens",
        type=_above(int, 0),
        default=8_192,
        metavar="N",
        help="of one completion (8192)",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=_above(int, 0), metavar="N", help="only the first N tasks")
    parser.add_argument(
        "--lanes", type=_above(int, 0), metavar="N", help="programs evaluated at the same time"
    )
    parser.add_argument(
        "--checker",
        choices=("rules", "model"),
        default="rules",
        help="what looks at sudden jumps of a score: rules, or the model too",
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=3,
        metavar="N",
        help="how many of the best are tried for the cache (3; 0: none)",
    )


def _above(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        # Also refuses NaN, which `float` accepts and no comparison holds for.
        if not least < value < 1e12:
            raise argparse.ArgumentTypeError(f"{text!r} is not above {least:g}")
        return value

    return read


def _from_zero(text: str) -> float:
    value = float(text)
    # Zero is allowed here: a price may be nothing.
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or above")
    return value
