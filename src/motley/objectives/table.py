"""The table of methods. A method is a row of parts; what differs from GRPO is what the row names.

Sources and the reasons behind each row: docs/methods.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

from motley.objectives.advantages import (
    BatchStandardised,
    BetaNormalised,
    BothBaselines,
    CapabilityAware,
    Centred,
    ForeignCap,
    LeaveOneOut,
    ReceiverRelative,
    Rehearsal,
    Whitened,
)
from motley.objectives.importance import (
    ClippedAbove,
    DropUnlikelyNegatives,
    SequenceMasked,
    SequenceTruncated,
    TaperedNegatives,
    TokenMasked,
    Truncated,
    Uplifting,
)
from motley.objectives.looks import EffectiveSamples, SecondMoment
from motley.objectives.objective import Keeping, Objective, Penalty, Setting
from motley.objectives.ratios import (
    GroupOrSequenceRatio,
    GroupRatio,
    ProductRatio,
    SequenceRatio,
    SmoothedSequenceRatio,
)
from motley.objectives.reductions import ConstantLength, PairSurvivors, SequenceSum, TokenMean
from motley.objectives.surrogates import (
    ClippedRatio,
    Collaborative,
    InnerClip,
    LogProb,
    MomentMasked,
    ProbabilityMasked,
    RatioTimesAdvantage,
    SoftGate,
)

_ftis_filter = DropUnlikelyNegatives()

OBJECTIVES: dict[str, Objective] = {
    # On-policy GRPO: own groups only, by selection. The row itself is that of nois.
    "alone": Objective(surrogate=InnerClip()),
    "nois": Objective(surrogate=InnerClip()),
    "grpo": Objective(surrogate=ClippedRatio()),
    "tis": Objective(weight=Truncated(), surrogate=InnerClip()),
    "ftis": Objective(weight=Truncated(), filter=_ftis_filter, surrogate=InnerClip()),
    "fnois": Objective(filter=_ftis_filter, surrogate=InnerClip()),
    "fvis": Objective(filter=_ftis_filter, surrogate=ClippedRatio()),
    "dapo": Objective(surrogate=ClippedRatio(clip_high=0.28), reduction=TokenMean()),
    "dr_grpo": Objective(advantage=Centred(), surrogate=ClippedRatio(), reduction=ConstantLength()),
    "bnpo": Objective(advantage=BetaNormalised(), surrogate=ClippedRatio(), reduction=TokenMean()),
    "gspo": Objective(surrogate=ClippedRatio(ratio=SequenceRatio())),
    "gepo": Objective(advantage=Centred(), surrogate=ClippedRatio(ratio=GroupRatio())),
    "gepo_plus": Objective(
        advantage=Centred(), surrogate=ClippedRatio(ratio=GroupOrSequenceRatio())
    ),
    "ds_gspo": Objective(
        advantage=Centred(), surrogate=ClippedRatio(ratio=SmoothedSequenceRatio())
    ),
    "cispo": Objective(weight=ClippedAbove(), surrogate=LogProb(), reduction=TokenMean()),
    "topr": Objective(
        advantage=Centred(), weight=TaperedNegatives(), surrogate=LogProb(), reduction=SequenceSum()
    ),
    "gmpo": Objective(surrogate=RatioTimesAdvantage()),
    "sapo": Objective(surrogate=SoftGate()),
    "rloo": Objective(advantage=LeaveOneOut(), surrogate=ClippedRatio(ratio=ProductRatio())),
    "reinforce_pp": Objective(
        advantage=Whitened(), surrogate=ClippedRatio(), reduction=TokenMean()
    ),
    "dppo": Objective(
        advantage=Centred(),
        surrogate=ProbabilityMasked(),
        reduction=TokenMean(),
        skip_silent=True,
    ),
    "m2po": Objective(surrogate=MomentMasked(), reduction=TokenMean(), look=SecondMoment()),
    "vcpo": Objective(weight=SequenceTruncated(C=8.0), look=EffectiveSamples()),
    "uplift": Objective(weight=Uplifting(), filter=_ftis_filter),
    "hacpo": Objective(advantage=CapabilityAware(), surrogate=Collaborative()),
    "sapo_swarm": Objective(surrogate=InnerClip(), reduction=TokenMean(), skip_silent=True),
}

_uplift = OBJECTIVES["uplift"]
_shaping = Uplifting(gamma=0.1)
_both = replace(_uplift, adjust=(BothBaselines(), Rehearsal()))


def _published(row: Objective, surrogate: ClippedRatio | RatioTimesAdvantage) -> Objective:
    """A row as its paper has it, strangers' ratios without a bound."""
    return replace(
        row,
        surrogate=replace(surrogate, dual_clip=math.inf),
        penalty=replace(row.penalty, dual_clip=math.inf),
    )


VARIANTS: dict[str, dict[str, Objective]] = {
    # The author's code where it differs from the paper: no std, filtered rows leave the mean over
    # micro-batches of 2, KL over the group's longest length, no end token.
    "ftis": {
        "code": Objective(
            advantage=Centred(),
            weight=Truncated(),
            filter=DropUnlikelyNegatives(kl_over="group"),
            surrogate=InnerClip(),
            reduction=PairSurvivors(),
            end_token=False,
        ),
    },
    # The released code: expectation over the micro-batch, KL in the direction that spikes.
    "gepo": {
        "code": replace(
            OBJECTIVES["gepo"],
            surrogate=ClippedRatio(ratio=GroupRatio(scope="microbatch")),
            penalty=Penalty(toward="code"),
        ),
    },
    # TRL's corrections for an engine whose log-probs are not the trainer's.
    "tis": {
        "token_mask": replace(OBJECTIVES["tis"], weight=TokenMasked()),
        "sequence": replace(OBJECTIVES["tis"], weight=SequenceTruncated()),
        "sequence_mask": replace(OBJECTIVES["tis"], weight=SequenceMasked()),
        "trl": replace(OBJECTIVES["tis"], weight=SequenceMasked(), reduction=TokenMean()),
    },
    "grpo": {"batch_std": replace(OBJECTIVES["grpo"], advantage=BatchStandardised())},
    "reinforce_pp": {
        "baseline": replace(OBJECTIVES["reinforce_pp"], advantage=Whitened(baseline="group")),
    },
    "topr": {"filtered": replace(OBJECTIVES["topr"], filter=_ftis_filter)},
    "uplift": {
        "both": _both,
        "kept": replace(_both, keeping=Keeping(keep=16.0)),
        "sure": replace(_both, weight=Uplifting(sure=1.0), keeping=Keeping(keep=16.0)),
        "gated": replace(_both, weight=Uplifting(gate=8.0), keeping=Keeping(keep=16.0)),
        "relative": replace(_uplift, adjust=(ReceiverRelative(),)),
        "rehearsed": replace(_uplift, adjust=(Rehearsal(),)),
        "relative_rehearsed": replace(_uplift, adjust=(ReceiverRelative(scale=1.0), Rehearsal())),
        "floored": replace(_uplift, weight=Uplifting(floor=0.3, C=2.0)),
        "shaped": replace(_uplift, weight=_shaping),
        "relative_shaped": replace(_uplift, weight=_shaping, adjust=(ReceiverRelative(),)),
        "relative_rehearsed_shaped": replace(
            _uplift, weight=_shaping, adjust=(ReceiverRelative(scale=1.0), Rehearsal())
        ),
        "capped": replace(_uplift, adjust=(ForeignCap(),)),
        "relative_capped": replace(_uplift, adjust=(ReceiverRelative(), Rehearsal(), ForeignCap())),
    },
}

# Rows in which a stranger's ratio would be without a bound where A < 0.
for _name, _row in OBJECTIVES.items():
    if isinstance(_row.surrogate, ClippedRatio | RatioTimesAdvantage):
        VARIANTS.setdefault(_name, {})["published"] = _published(_row, _row.surrogate)


def objective(
    name: str, variant: str = "", settings: dict[str, Setting] | None = None
) -> Objective:
    """Look a row up by name and variant and apply settings.

    >>> objective("ftis", settings={"g": 10.0}).filter.g
    10.0
    """
    if name not in OBJECTIVES:
        known, _, rest = name.partition("/")
        if rest and known in OBJECTIVES:
            raise ValueError(
                f"objective {name!r} is two words in one: write objective = {known!r} and "
                f"variant = {rest!r}"
            )
        raise ValueError(f"objective {name!r} is not known; choose one of {', '.join(OBJECTIVES)}")
    row = OBJECTIVES[name]
    if variant:
        variants = VARIANTS.get(name, {})
        if variant not in variants:
            raise ValueError(
                f"objective {name!r} has no variant {variant!r}; it has "
                f"{', '.join(variants) or 'none'}"
            )
        row = variants[variant]
    return row.with_settings(settings or {})
