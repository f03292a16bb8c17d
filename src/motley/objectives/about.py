"""A line and a source for every row of the table and its variants, for those who choose one.

Knows no tensor: whoever only lists the rows need not wait for torch.
"""

from __future__ import annotations

from typing import NamedTuple


class About(NamedTuple):
    line: str
    source: str


_HETERO = "arXiv 2508.17850"
_FTIS = "arXiv 2605.22537"
_OURS = "Motley"
_TRL = "TRL 1.16"

# "ROW" or "ROW/VARIANT". `published` is the same for every row: `about` says it.
ABOUT: dict[str, About] = {
    "alone": About("on-policy GRPO: a peer by itself, on its own groups", "arXiv 2402.03300"),
    "nois": About("no importance sampling: foreign groups as if they were own", _FTIS),
    "grpo": About("GRPO's clipped token ratio, taken to the sampler", "arXiv 2402.03300"),
    "grpo/batch_std": About("the spread is that of all rewards of the batch", _TRL),
    "tis": About("token weights truncated at C = 2", "Yao et al. 2025"),
    "tis/token_mask": About("tokens whose ratio is above C = 3 count nothing", _TRL),
    "tis/sequence": About("one weight a sequence, its product of ratios, at most C = 3", _TRL),
    "tis/sequence_mask": About("sequences whose product is above C = 3 count nothing", _TRL),
    "tis/trl": About("sequence_mask over tokens: TRL's default with its engine", _TRL),
    "ftis": About("tis, without failures that the learner would not make", _FTIS),
    "ftis/code": About("what the authors' code computes", _FTIS),
    "fnois": About("nois with the filter of ftis", _FTIS),
    "fvis": About("grpo with the filter of ftis", _FTIS),
    "dapo": About("grpo with a higher upper clip, over tokens", "arXiv 2503.14476"),
    "dr_grpo": About("grpo without std and without lengths in the scale", "arXiv 2503.20783"),
    "bnpo": About("rewards normalised by a Beta distribution over the batch", "arXiv 2506.02864"),
    "gspo": About("one clipped ratio a sequence, the geometric mean", "arXiv 2507.18071"),
    "gepo": About("one ratio a sequence, to what its group expects", _HETERO),
    "gepo/code": About("what the authors' code computes", _HETERO),
    "gepo_plus": About("gepo, but the own ratio where learner and sampler agree", _HETERO),
    "ds_gspo": About("gspo with a denominator that cannot vanish", _HETERO),
    "cispo": About("truncated weights on log p: no token loses its gradient", "arXiv 2506.13585"),
    "topr": About(
        "successes at full weight, failures tapered by their product", "arXiv 2503.14286"
    ),
    "topr/filtered": About("topr with the filter of ftis", "arXiv 2503.14286"),
    "gmpo": About("the geometric mean of clipped token ratios", "arXiv 2507.20673"),
    "sapo": About("a soft gate on the token ratio instead of a clip", "arXiv 2511.20347"),
    "rloo": About("each against the mean of the others, product of ratios", "arXiv 2402.14740"),
    "reinforce_pp": About("rewards whitened over all tokens of the batch", "arXiv 2501.03262"),
    "reinforce_pp/baseline": About("the group's mean first, then whitened", "arXiv 2501.03262"),
    "dppo": About("tokens masked by how far their probability moved", "arXiv 2602.04879"),
    "m2po": About("the batch's second moment of log-ratios is bounded", "arXiv 2510.01161"),
    "vcpo": About("the learning rate follows the effective sample size", "arXiv 2602.17616"),
    "uplift": About("learn what works from anyone; unlearn what you would do yourself", _OURS),
    "uplift/both": About("others' successes count by their group, or by what one lacks", _OURS),
    "uplift/kept": About("both, and own successes are held that become less likely", _OURS),
    "uplift/sure": About("kept, and others' tokens count as far as they were sure of them", _OURS),
    "uplift/gated": About("kept, and others' successes count in full only where one fails", _OURS),
    "uplift/relative": About("others' successes count by what the receiver lacks", _OURS),
    "uplift/rehearsed": About("own solved groups are rehearsed", _OURS),
    "uplift/relative_rehearsed": About("relative at half the scale, and rehearsed", _OURS),
    "uplift/floored": About("successes weigh their ratio, between 0.3 and 2", _OURS),
    "uplift/shaped": About(
        "others' successes weigh less where they are absurd", "arXiv 2504.14945"
    ),
    "uplift/relative_shaped": About("relative and shaped", _OURS),
    "uplift/relative_rehearsed_shaped": About("relative, rehearsed and shaped", _OURS),
    "uplift/capped": About("others have at most half of all advantage", _OURS),
    "uplift/relative_capped": About("relative, rehearsed and capped", _OURS),
    "hacpo": About("GSPO among peers of different skill", "arXiv 2603.02604"),
    "sapo_swarm": About("GRPO on swapped samples, silent groups left out", "arXiv 2509.08721"),
}


def about(name: str, variant: str = "") -> About:
    """A line on a row or a variant of it, and where it comes from.

    >>> about("grpo", "published").line
    "without a bound on strangers' ratios"
    """
    if variant == "published":
        return About("without a bound on strangers' ratios", ABOUT[name].source)
    return ABOUT[f"{name}/{variant}" if variant else name]
