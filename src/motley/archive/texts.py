"""Tokens of a log as text and as bytes, where their vocabulary can be had: by the table that their
sender published, or on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from motley.archive.examine import Seen
from motley.archive.vocabularies import ToldVocabulary, vocabulary_of
from motley.config import CrewConfig
from motley.records import Rollout
from motley.spelling import Spelling, UnspelledError

if TYPE_CHECKING:
    from motley.models.vocabulary import Vocabulary

    Known = Vocabulary | ToldVocabulary

TokenBytes = tuple[str | None, ...]  # hexadecimal; None: the token stands for no text, or ended it


class LogTexts:
    """What rollouts say; None where their vocabulary is not known here.

    `config`: the crew whose models may have it; the tiny models' are always known.
    """

    def __init__(self, config: CrewConfig | None = None) -> None:
        models = [peer.model for peer in config.students] if config else []
        # a stranger may name any number of vocabularies; a model's is read once
        read = cache(vocabulary_of)
        self._vocabulary = lru_cache(256)(lambda fingerprint: _find(fingerprint, models, read))

    def text(self, seen: Seen, rollout: Rollout) -> str | None:
        """What was scored: of a prefix and what follows it."""
        assert seen.group
        prefix = seen.group.prefix
        tokens = prefix + _without_end(rollout)
        if seen.spelling:
            with suppress(UnspelledError):
                return seen.spelling.text_of(tokens)
        known = self._vocabulary(seen.group.origin.vocabulary)
        if known is None or not all(0 <= t < known.size for t in prefix + rollout.tokens):
            return None
        return known.decode(tokens)

    def token_bytes(self, seen: Seen, rollout: Rollout) -> TokenBytes | None:
        """Of each token; one behind the other they are the text."""
        spelling = seen.spelling or self._spelling(seen)
        if spelling is None:
            return None
        table, spelled = spelling.token_bytes, _without_end(rollout)
        found = [table[token] if 0 <= token < len(table) else None for token in spelled]
        of_end = (None,) * (len(rollout.tokens) - len(spelled))
        return (*(None if one is None else one.hex() for one in found), *of_end)

    def token_texts(self, seen: Seen, rollout: Rollout) -> list[str]:
        """Of each token, for people: see `pieces`."""
        assert seen.group
        return self.pieces(seen.group.origin.vocabulary, rollout.tokens, seen.spelling)

    def pieces(
        self, vocabulary: str, tokens: Sequence[int], spelling: Spelling | None = None
    ) -> list[str]:
        """The text of each token by its sender's table, or by the vocabulary as it is known here.
        A byte that is no whole character is "\\xe2"; a token without text is its name, or "<7>".
        """
        known = self._vocabulary(vocabulary) if spelling is None else None
        spelling = spelling or _spelling_of(known)
        return [_piece(token, spelling, known) for token in tokens]

    def _spelling(self, seen: Seen) -> Spelling | None:
        assert seen.group
        return _spelling_of(self._vocabulary(seen.group.origin.vocabulary))


def _spelling_of(known: Known | None) -> Spelling | None:
    if known is None:
        return None
    from motley.models.spelled import NoSpellingError

    with suppress(NoSpellingError):
        return known.spelling
    return None


def _piece(token: int, spelling: Spelling | None, known: Known | None) -> str:
    table = spelling.token_bytes if spelling else ()
    spelled = table[token] if 0 <= token < len(table) else None
    if spelled is not None:
        return spelled.decode(errors="backslashreplace")
    name = known.name_of(token) if known else None
    return f"<{token}>" if name is None else name


def _without_end(rollout: Rollout) -> tuple[int, ...]:
    """A crew may have other end tokens than the tokenizer's own, so the ending tells."""
    return rollout.tokens[:-1] if rollout.ending == "stop" else rollout.tokens


def _find(
    fingerprint: str, models: Sequence[str], read: Callable[[str], Known | None]
) -> Known | None:
    from motley.models.named import is_tiny
    from motley.models.tiny_vocabularies import tiny_vocabularies

    for tiny in tiny_vocabularies():
        if tiny.fingerprint == fingerprint:
            return tiny
    for model in dict.fromkeys(models):
        if not is_tiny(model) and (own := read(model)) and own.fingerprint == fingerprint:
            return own
    return None
