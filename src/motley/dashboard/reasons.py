"""What each fate of a rollout means, and what to do about it, in a line. docs/metrics.md#reasons
has more.
"""

from __future__ import annotations

from motley.archive.rollouts import NO_ADVANTAGE, NOT_READ, NOT_RECORDED, WAITING, WORDS
from motley.learning.fates import (
    BLAMED,
    FILTERED,
    LEARNED,
    NOT_CUT,
    RESCUED,
    SILENT,
    TEXT_ONLY,
    UNHEARD,
    UNREAD,
    WITHHELD,
)

REFUSED = "refused: "

FATES = {
    WORDS[LEARNED]: "A step was taken along it.",
    WORDS[SILENT]: "All of its group have the same reward, so there is nothing to tell apart. "
    "Many: the problems are too easy or too hard.",
    NO_ADVANTAGE: "It is exactly as good as its group is on average.",
    WORDS[FILTERED]: "The objective's filter left it out: it failed, and the learner finds it so "
    "unlikely that unlearning it would do harm. Many: the sender is far from the learner; raise g "
    "to keep more.",
    WORDS[WITHHELD]: "Some of its tokens were not pushed up: they are in a phrase, or beyond a "
    "length, that only its sender keeps to (habits of [trust]).",
    WORDS[BLAMED]: "Its sender's sequences gave a loss that is no number, and were left out.",
    WORDS[RESCUED]: "Its success was learned where the learner had failed.",
    WORDS[TEXT_ONLY]: "Its sender has another vocabulary and did not use its tokenizer's own cut, "
    "so that no ratio of it is honest. It counts in its group's baseline only.",
    WORDS[NOT_CUT]: "Its sender has another vocabulary, and the learner has no tokens for the "
    "text, or too many.",
    WORDS[
        UNREAD
    ]: "Its sender has another vocabulary, and one of its tokens stands for no text, or "
    "its text is longer than an answer can be.",
    "stale": "It was too old when a step was chosen. Many: the crew samples faster than this "
    "learner learns; raise max_age, or sample less.",
    "not selected": "It did not fit quota, own_share or sender_share in its round. Raise them to "
    "take more of others.",
    "late": "It came after its round was closed without it. Many: raise deadline_s.",
    "muted": "Its sender is muted for what it sent before; motley pardon if it is honest.",
    "revoked": "The hub shut its sender out while it waited.",
    "incomplete": "Parts of its group by other peers did not come in time.",
    "unread": "Its sender has another vocabulary, and too few of the group's completions are text.",
    "another's branch": "It continues a prefix that only its author learns from.",
    UNHEARD: "The learner did not hear its sender in that round: `hear` of [crew] draws some "
    "senders for every round.",
    WAITING: "The learner has it, and no step has taken it so far.",
    NOT_READ: "The learner has not come to it in the log yet.",
    NOT_RECORDED: "Nobody wrote it down: the run is older, or its folder is not this one.",
}

FAULTS = {
    "size": "is too large",
    "inflated": "declares more than it may hold",
    "undeclared": "does not say how much it decompresses to",
    "schema": "is of a format that this version does not know, or empty",
    "truncated": "ends too early",
    "corrupt": "does not decompress",
    "malformed": "does not decode",
    "range": "has a number that no round or version has",
    "crew": "is of another crew",
    "subject": "stands under another id than its own",
    "sender": "is of nobody on the roster",
    "revoked": "is of a peer that was shut out",
    "key": "is not signed by the key that the roster has for its sender",
    "signature": "has a signature that does not fit its bytes: it was changed, or forged",
    "fork": "contradicts what its sender sent before",
    "replay": "was there before",
    "gap": "leaves out too much of what its sender says it sent",
    "vocabulary": "was made with a vocabulary whose bytes its sender has not published",
    "table": "is a table of a vocabulary that cannot be used",
    "sampling": "was sampled with other settings than the crew's",
    "model": "names its model by a text that is too long or not printable",
    "time": "was made on no day that can be",
    "group_size": "has another number of rollouts than the crew's groups",
    "assignment": "answers a problem that its sender was not given",
    "prefix": "continues a beginning that no answer of the crew can have",
    "length": "has a rollout with no token, or with too many",
    "token": "has a token outside the vocabulary",
    "ending": "has an end that does not match its tokens",
    "logprob": "has log-probs that tokens drawn from them do not have",
    "copied": "repeats rollouts of an earlier group",
    "flood": "follows many refused records of its sender",
    "reward": "claims a reward that is not what the reader computes",
    "unscorable": "makes the reward function fail",
    "undecided": "takes longer to score than an answer may",
    "role": "is of a kind that its sender's role does not publish",
    "version": "names a version that cannot be",
    "duplicate": "has the round and slot of a group that was admitted before",
}


def fate_words(fate: str) -> str:
    """What a fate means; nothing of one that is not known here."""
    if fate.startswith(REFUSED):
        return f"Admission refused the group: {fault_words(fate.removeprefix(REFUSED))}"
    return FATES.get(fate, "")


def fault_words(fault: str) -> str:
    """What a fault of a record means; nothing of none."""
    if not fault:
        return ""
    said = FAULTS.get(fault)
    return f"the record {said}." if said else f"the record has the fault {fault!r}."
