"""Whether what is saved of a policy comes back: tried before a run trusts in it, and not again.

transformers renames, splits and joins weights when it saves, and reads a model's shape from its
configuration. What either loses would be missed first when a run is resumed or exported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import __version__ as safetensors_version
from torch import Tensor
from torch.func import functional_call
from transformers import __version__ as transformers_version

from motley.files import cache_folder
from motley.models.policy import Policy
from motley.models.precision import apart, nearly, spread_ids
from motley.models.sources import quiet, read_folder

SOME_TOKENS = (5, 6, 7, 3, 4, 10, 11, 9)
# by what a model is saved and read; its number is that of our own part
TRIAL = f"returns/1/transformers-{transformers_version}/safetensors-{safetensors_version}"
NOT_SHAPE = frozenset(("_name_or_path", "name_or_path", "transformers_version"))
# where there is no cache, or nothing may be kept in it, a model is tried each time
NO_CACHE = (OSError, RuntimeError)


def returned_before(policy: Policy) -> bool:
    """Whether a model of this shape came back on this machine: large ones take minutes to try."""
    with suppress(*NO_CACHE):
        return _mark(policy).exists()
    return False


def note_returned(policy: Policy) -> None:
    with suppress(*NO_CACHE):
        mark = _mark(policy)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(policy: Policy) -> Path:
    configs = [policy.base.config, policy.base.generation_config]  # both are saved beside it
    shape = [
        {k: v for k, v in config.to_dict().items() if k not in NOT_SHAPE} if config else None
        for config in configs
    ]
    tried = [TRIAL, policy.fingerprint, json.dumps(shape, sort_keys=True, default=str)]
    return cache_folder() / "returned" / hashlib.sha256(repr(tried).encode()).hexdigest()[:24]


def check_returns(policy: Policy, folder: Path) -> None:
    """Save a policy as a whole into a new folder and read it again; refuse what comes back
    otherwise, by name.
    """
    try:
        with quiet():
            policy.base.save_pretrained(folder)
        read = read_folder(folder)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError) as error:
        said, *_ = str(error).splitlines() or [type(error).__name__]
        raise _refusal(policy, f"what transformers saves of it cannot be read ({said})") from error
    own, back = policy.base.state_dict(), read.state_dict()
    otherwise = sorted(
        {name for name in own.keys() & back.keys() if not _same(own[name], back[name])}
        | (own.keys() ^ back.keys())
    )
    check_numbers((name, own[name]) for name in otherwise if name in own)
    if otherwise:
        raise _refusal(
            policy, f"{len(otherwise)} tensors differ, such as {', '.join(otherwise[:3])}"
        )
    ids = spread_ids(SOME_TOKENS, policy.vocabulary.size)
    logits_TV = _some_logits(policy.base, own, ids)
    back_TV = _some_logits(_beside(read, policy.device), own, ids)
    fault = apart(logits_TV.log_softmax(-1), back_TV.log_softmax(-1), logits_TV)
    if not nearly(fault, torch.float32):
        raise _refusal(
            policy, f"its weights do, and its log-probs differ by {fault:.2g} all the same"
        )


def check_numbers(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse the first tensor of a model that holds what is no number, by its name."""
    for name, value in tensors:
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(
                f"{name} of the model holds numbers that are not finite; take an earlier "
                "checkpoint of it, or another model"
            )


def check_part_returns(policy: Policy, folder: Path) -> None:
    """The same for an adapter or for layers, which are saved alone: saved, wiped and loaded."""
    before = {name: p.detach().clone() for name, p in policy.trained()}
    policy.save(folder)
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.zero_()
    policy.load(folder)
    otherwise = [name for name, p in policy.trained() if not _same(p.detach(), before[name])]
    if otherwise:
        raise _refusal(
            policy, f"{len(otherwise)} tensors differ, such as {', '.join(otherwise[:3])}"
        )


def _same(own: Tensor, back: Tensor) -> bool:
    return own.shape == back.shape and torch.equal(own.to(back.device), back)


def _beside(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The model without its weights, on a device: what its configuration alone makes of it.

    Two processors round differently. So the same weights are computed twice on one, and need not
    be there twice.
    """
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return model


@torch.no_grad()
def _some_logits(
    model: torch.nn.Module, weights: dict[str, Tensor], ids: tuple[int, ...]
) -> Tensor:
    device = next(iter(weights.values())).device
    given = {"input_ids": torch.tensor([ids], device=device), "use_cache": False}
    # both names of what is tied are given
    output = functional_call(model.eval(), weights, (), given, tie_weights=False)
    logits_TV: Tensor = output.logits[0]
    return logits_TV.float()


def _refusal(policy: Policy, reason: str) -> ValueError:
    remedy = (
        "leave keep_layers out"
        if policy.made_of.keep_layers
        else "train = { lora = { rank = 8 } } writes adapters only"
    )
    return ValueError(
        f"architecture {policy.config.model_type!r} does not come back from disk: {reason}; use "
        f"another model, or {remedy}"
    )
