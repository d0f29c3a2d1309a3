"""Language models as policies: a folder that `from_pretrained` reads, whether it holds 100 k
parameters or 32 G.

`create_tiny` makes such a folder from nothing but a vocabulary and a seed: a Llama with random
weights and a tokenizer of whole words. `LanguageModel` loads any folder (or Hub name) of a causal
language model and samples from it; `sample` makes it a `records.Policy`, `rollout` keeps the tokens
that reinforcement learning needs. It trains nothing and judges nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.extras import require_extra

__all__ = [
    "END",
    "PAD",
    "UNKNOWN",
    "LanguageModel",
    "Rollout",
    "TinySpec",
    "compute_token_logprobs",
    "create_tiny",
    "replace_folder",
]

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
# A chat template that says nothing of its own, so that TRL and servers, which want one, show the
# model the bare prompt.
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class TinySpec:
    """A Llama small enough to be made from nothing: the defaults have about 0.9 M parameters beside
    the vocabulary.

    `context`: tokens of prompt and completion together.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            self.hidden < 1
            or self.heads < 1
            or self.hidden % self.heads
            # Rotary embeddings rotate pairs of a head's elements.
            or (self.hidden // self.heads) % 2
        ):
            raise SettingError(
                "hidden", self.hidden, f"a multiple of twice the number of heads ({self.heads})"
            )
        if self.layers < 1 or self.context < 8:
            raise SettingError(
                "layers, context",
                (self.layers, self.context),
                "at least 1 layer and a context of 8",
            )


def create_tiny(folder: Path, words: Sequence[str], spec: TinySpec = TinySpec()) -> Path:
    """A folder with a random Llama (tied embeddings) and a tokenizer that knows exactly `words`;
    equal for equal arguments.
    """
    transformers = require_extra("transformers")
    tokenizer = _make_tokenizer(words, spec.context)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden,
        intermediate_size=4 * spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # The vocabulary has no such token; Llama's default id would be another word.
        bos_token_id=None,
    )
    # Initialising the weights draws from the global generator: forked, so that the caller's random
    # numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = transformers.LlamaForCausalLM(config)
    with replace_folder(folder) as fresh:
        model.save_pretrained(fresh, safe_serialization=True)
        tokenizer.save_pretrained(fresh)
    return folder


class replace_folder:
    """`with replace_folder(folder) as fresh:` fill `fresh`. If that succeeds, `fresh` takes the
    folder's place by a rename.

    A kill leaves the old folder, the new one, or for an instant neither beside `NAME.old`, which
    `recover_folder` puts back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._fresh, self._old = (
            folder,
            _name_sibling(folder, "new"),
            _name_sibling(folder, "old"),
        )

    def __enter__(self) -> Path:
        shutil.rmtree(self._fresh, ignore_errors=True)
        # Emptied before: what a killed process left there must not become a part of the model.
        self._fresh.mkdir(parents=True)
        return self._fresh

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._fresh, ignore_errors=True)
            return
        # A rename can not replace a directory that is not empty, so the old one is moved aside
        # first.
        if self._folder.exists():
            shutil.rmtree(self._old, ignore_errors=True)
            os.replace(self._folder, self._old)
        os.replace(self._fresh, self._folder)
        shutil.rmtree(self._old, ignore_errors=True)


def recover_folder(folder: Path) -> bool:
    """Whether there is a whole folder, after putting back what a kill in the middle of
    `replace_folder` left aside.
    """
    # A kill between the two renames of `replace_folder` leaves the old folder under this name only.
    if not folder.exists() and _name_sibling(folder, "old").exists():
        os.replace(_name_sibling(folder, "old"), folder)
    return folder.exists()


@dataclass(frozen=True)
class Rollout:
    """Sampled completions as tensors: prompts padded on the left, completions on the right.

    prompt_ids, prompt_mask: (N, P) int64. ids, mask: (N, T) int64; the mask covers the end token
    and nothing after it.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    ids: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]


@dataclass
class LanguageModel:
    """A causal language model and its tokenizer; see `load`. Fills the protocol `records.Policy`."""

    name: str
    model: Any
    tokenizer: Any
    max_new_tokens: int = 64
    batch: int = 256
    end_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ends = self.model.generation_config.eos_token_id
        # Models with several end tokens (such as end of turn and end of text) have a list.
        end_ids = ends if isinstance(ends, list) else [ends]
        self.end_ids = tuple(i for i in {*end_ids, self.tokenizer.eos_token_id} if i is not None)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        max_new_tokens: int = 64,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> LanguageModel:
        """From a folder, or a Hub name that this machine has or may download."""
        transformers = require_extra("transformers")
        if isinstance(folder, Path) and not (folder / "config.json").is_file():
            raise SettingError(
                "model", str(folder), "a folder written by save_pretrained (it has no config.json)"
            )
        # Left, because `generate` continues at the end of each row: padding there would stand
        # between a prompt and its completion.
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        # Many models have no padding token. Any will do, since the mask hides it.
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            .to(device)
            .eval()
        )
        return cls(str(folder), model, tokenizer, max_new_tokens)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def save(self, folder: Path) -> None:
        """The model in safetensors, and the tokenizer, in the folder's place."""
        with replace_folder(folder) as fresh:
            self.model.save_pretrained(fresh, safe_serialization=True)
            self.tokenizer.save_pretrained(fresh)

    def sample(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> list[list[str]]:
        """`count` completions for each prompt, in the order of the prompts."""
        texts = self.texts(self.rollout(prompts, count=count, temperature=temperature, seed=seed))
        return [texts[i : i + count] for i in range(0, len(texts), count)]

    def rollout(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> Rollout:
        """`count` completions for each prompt as tensors, members of a prompt next to each other.

        The same arguments give the same completions on one machine; the caller's random numbers
        stay as they were.
        """
        if not prompts or count < 1 or temperature <= 0:
            raise ValueError(
                f"expected prompts, a count and a temperature above 0; got {len(prompts)}, "
                f"{count}, {temperature}"
            )
        shown = [prompt for prompt in prompts for _ in range(count)]
        # The caller's random numbers stay as they were.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            parts = [
                self._generate(chunk, temperature) for chunk in _split_chunks(shown, self.batch)
            ]
        return self._join_rollouts(parts)

    def texts(self, rollout: Rollout) -> list[str]:
        """The completions as text, without the end token."""
        rows = [ids[: int(mask.sum())] for ids, mask in zip(rollout.ids, rollout.mask, strict=True)]
        return [
            str(text).strip()
            for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        ]

    def after(self, rollout: Rollout, marker: str) -> Tensor:
        """(N, T): 1 for tokens behind the last of `marker`, all of them where a completion has no
        such text.
        """
        finished = rollout.mask.clone()
        for row, ids, mask in zip(finished, rollout.ids, rollout.mask, strict=True):
            low, high = 0, int(mask.sum())
            # Without the marker the whole completion counts as the program.
            if marker not in self.tokenizer.decode(ids[:high]):
                continue
            # Binary search for the fewest tokens that hold the marker: each probe decodes a prefix,
            # and a longer prefix holds whatever a shorter one does.
            while low < high:
                middle = (low + high) // 2
                low, high = (
                    (low, middle)
                    if marker in self.tokenizer.decode(ids[:middle])
                    else (middle + 1, high)
                )
            row[:low] = 0
        return finished

    def rebuilt(self, prompts: Sequence[str], ids: Sequence[Sequence[int]]) -> Rollout:
        """The rollout whose completions had these tokens, end token included; as many for each
        prompt.
        """
        count = len(ids) // len(prompts)
        pad, width = self.tokenizer.pad_token_id, max(1, *map(len, ids))
        prompt_ids, prompt_mask = _pad_left(
            [row for p in prompts for row in [self.encoded(p)] * count], pad
        )
        text = torch.tensor([[*row, *[pad] * (width - len(row))] for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
        return Rollout(*(each.to(self.device) for each in (prompt_ids, prompt_mask, text, mask)))

    def encoded(self, prompt: str) -> list[int]:
        """A prompt's tokens: in the model's chat template if it has one. Raises SettingError if no
        room is left for an answer.
        """
        if self.tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        # `generate` would run past the last position that the model was trained for.
        room = (
            int(getattr(self.model.config, "max_position_embeddings", 1 << 30))
            - self.max_new_tokens
        )
        if not 0 < len(ids) <= room:
            raise SettingError(
                "context",
                f"a prompt of {len(ids)} tokens",
                f"1 to {room}, so that {self.max_new_tokens} remain",
            )
        return list(ids)

    def _generate(self, prompts: Sequence[str], temperature: float) -> Rollout:
        # A group repeats its prompt, which is encoded once.
        cache = {prompt: self.encoded(prompt) for prompt in dict.fromkeys(prompts)}
        prompt_ids, prompt_mask = _pad_left(
            [cache[prompt] for prompt in prompts], self.tokenizer.pad_token_id
        )
        prompt_ids, prompt_mask = prompt_ids.to(self.device), prompt_mask.to(self.device)
        with torch.inference_mode():
            sequence = self.model.generate(
                input_ids=prompt_ids,
                attention_mask=prompt_mask,
                do_sample=True,
                temperature=temperature,
                # Neither top-k nor top-p: completions must be drawn from the very distribution
                # whose log-probabilities `compute_token_logprobs` gives.
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=list(self.end_ids),
            )
        # Cloned outside `inference_mode`: autograd refuses to save an inference tensor for the
        # backward pass, and training gathers by these ids.
        ids = sequence[:, prompt_ids.shape[1] :].clone()
        return Rollout(prompt_ids, prompt_mask, ids, self.answered(ids))

    def answered(self, ids: Tensor) -> Tensor:
        """(N, T) mask of a completion: everything up to its first end token, that one included."""
        ends = torch.isin(ids, torch.tensor(self.end_ids, device=ids.device))
        # Minus the token itself, so that the first end token is part of the completion: a policy
        # must learn to end.
        return (ends.cumsum(1) - ends.int() == 0).long()

    def _join_rollouts(self, parts: Sequence[Rollout]) -> Rollout:
        pad = self.tokenizer.pad_token_id
        prompts, answers = (
            max(p.prompt_ids.shape[1] for p in parts),
            max(p.ids.shape[1] for p in parts),
        )
        return Rollout(
            torch.cat([_pad_to(p.prompt_ids, prompts, pad, pad_left=True) for p in parts]),
            torch.cat([_pad_to(p.prompt_mask, prompts, 0, pad_left=True) for p in parts]),
            torch.cat([_pad_to(p.ids, answers, pad, pad_left=False) for p in parts]),
            torch.cat([_pad_to(p.mask, answers, 0, pad_left=False) for p in parts]),
        )


def compute_token_logprobs(
    model: Any, rollout: Rollout, temperature: float
) -> tuple[Tensor, Tensor]:
    """(N, T) log-probabilities of the completions' tokens under the model at that temperature, and
    (N, T) entropies in nats.
    """
    ids, mask = (
        torch.cat([rollout.prompt_ids, rollout.ids], 1),
        torch.cat([rollout.prompt_mask, rollout.mask], 1),
    )
    # Counted from the first real token: padding must not move a model with absolute positions.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logprobs = rollout.ids.shape[1]
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        # Logits of the prompt are not needed, and each has the size of the vocabulary.
        logits_to_keep=logprobs + 1,
        use_cache=False,
    ).logits
    # In float32, because bfloat16 keeps under three decimal digits, too few for the differences of
    # log-probabilities that training takes. The logits at a position belong to the next token, so
    # the last are dropped.
    logs = torch.log_softmax(logits[:, :-1].float() / temperature, -1)
    entropy = -(logs.exp() * logs).sum(-1)
    return logs.gather(-1, rollout.ids.unsqueeze(-1)).squeeze(-1), entropy


def _make_tokenizer(words: Sequence[str], context: int) -> Any:
    tokenizers, transformers = require_extra("tokenizers"), require_extra("transformers")
    # The tokenizer splits at white space, so a word that holds some could never be one token.
    bad = [word for word in words if not word or word != "".join(word.split())]
    if bad:
        raise SettingError("words", bad[:3], "a vocabulary of words without white space")
    # `dict.fromkeys` keeps the order: equal words give equal ids, and with the seed the same model.
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys((PAD, UNKNOWN, END, *words)))}
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    word_level.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_level,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        padding_side="left",
        model_max_length=context,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _pad_to(values: Tensor, width: int, fill: int, *, pad_left: bool) -> Tensor:
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values, (missing, 0) if pad_left else (0, missing), value=fill)


def _split_chunks(values: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (values[i : i + size] for i in range(0, len(values), size))


def _name_sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")
