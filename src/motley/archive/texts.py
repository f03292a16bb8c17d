"""Tokens of a log as text, where their vocabulary can be had on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from motley.config import CrewConfig
from motley.records import Group, Rollout

if TYPE_CHECKING:
    from motley.models.vocabulary import Vocabulary

TextOf = Callable[[Group, Rollout], str | None]


def texts_of(config: CrewConfig | None = None) -> TextOf:
    """The text of a rollout; None where its vocabulary is not known here.

    `config`: the crew whose models may have it; the tiny models' are always known.
    """
    models = [peer.model for peer in config.students] if config else []

    @cache
    def vocabulary(fingerprint: str) -> Vocabulary | None:
        return _find(fingerprint, models)

    def text_of(group: Group, rollout: Rollout) -> str | None:
        known, tokens = vocabulary(group.origin.vocabulary), group.prefix + rollout.tokens
        if known is None or not all(0 <= token < known.size for token in tokens):
            return None
        # a crew may have other end tokens than the tokenizer's own
        ended = rollout.ending == "stop" and len(rollout.tokens) > 0
        return known.decode(tokens[:-1] if ended else tokens)

    return text_of


def _find(fingerprint: str, models: Sequence[str]) -> Vocabulary | None:
    from motley.models.opening import is_tiny
    from motley.models.sources import find, read_shape, read_tokenizer
    from motley.models.tiny import tiny_vocabularies
    from motley.models.vocabulary import Vocabulary

    for tiny in tiny_vocabularies():
        if tiny.fingerprint == fingerprint:
            return tiny
    for model in dict.fromkeys(models):
        if is_tiny(model):
            continue
        try:
            source = find(model)
            size = read_shape(source).get_text_config().vocab_size
            own = Vocabulary(read_tokenizer(source), size=size)
        except (ValueError, OSError):  # the model is another machine's
            continue
        if own.fingerprint == fingerprint:
            return own
    return None
