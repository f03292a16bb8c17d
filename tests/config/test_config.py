from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import msgspec
import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from architectures import TURN_END, text_tokenizer, write_model
from fakes import spread_crew
from motley.config import (
    ConfigError,
    CrewConfig,
    Teach,
    config_text,
    parse_config,
    read_config,
    write_config,
)
from motley.models import opening
from motley.models.named import may_be_mixed
from motley.runs import checking
from motley.runs.checking import check_config, is_mixed
from motley.tasks import own_task

CREW = """
[crew]
name = "sums"
task = "digits"
rounds = 3
group_size = 6
problems_per_round = 6
objective = "ftis"
"""
PEERS = """
[[peer]]
name = "a"
model = "tiny:0.3m"
[[peer]]
name = "b"
model = "tiny:1m"
[[peer]]
name = "c"
model = "tiny:deep"
"""


def refusal(text: str) -> str:
    """The one line a bad crew file is refused with."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="bad.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("bad.toml: ")
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            CREW.replace("group_size", "group_sise") + PEERS,
            ["unknown field `group_sise`", "crew", "did you mean group_size?"],
        ),
        (CREW + "zzz = 1" + PEERS, ["unknown field `zzz`", "remove it"]),
        (
            CREW + "[learning]\nlearning_rate = 1e-3" + PEERS,
            ["unknown field `learning_rate`", "learning"],
        ),
        (CREW + PEERS + "trian = 1", ["unknown field `trian`", "did you mean train?"]),
        (CREW + PEERS + "[sampling]\ntemprature = 1.0", ["did you mean temperature?"]),
        (
            CREW.replace("rounds = 3", 'rounds = "three"') + PEERS,
            ["Expected `int`, got `str`", "crew.rounds"],
        ),
        (CREW.replace("rounds = 3\n", "") + PEERS, ["missing required field `rounds`"]),
        (
            CREW.replace("rounds = 3", "rounds = 0") + PEERS,
            ["rounds=0 trains nothing; use at least 1"],
        ),
        (
            CREW.replace("group_size = 6", "group_size = 1") + PEERS,
            ["group_size=1 has no spread", "use at least 2"],
        ),
        (
            CREW.replace("problems_per_round = 6", "problems_per_round = 0") + PEERS,
            ["problems_per_round=0 trains nothing"],
        ),
        (
            CREW.replace('"sums"', '"su ms"') + PEERS,
            ["crew name 'su ms' must be letters, digits, - and _"],
        ),
        (
            CREW + PEERS.replace('"a"', '"a/b"'),
            ["peer name 'a/b' must be letters, digits, - and _"],
        ),
        (
            CREW.replace("group_size = 6", "group_size = 20") + 'layout = "horizontal"' + PEERS,
            ["group_size=20 is not divisible by the 3 peers of a horizontal crew; use 18 or 21"],
        ),
        (
            CREW.replace("group_size = 6", "group_size = 2") + 'layout = "horizontal"' + PEERS,
            ["group_size=2 is not divisible by the 3 peers of a horizontal crew; use 3"],
        ),
        (
            CREW.replace("problems_per_round = 6", "problems_per_round = 7") + PEERS,
            ["problems_per_round=7 is not divisible by the 3 peers of a vertical crew; use 6 or 9"],
        ),
        (
            CREW + 'layout = "horizontal"\n[learning]\nown_share = 0.5' + PEERS,
            ["own_share and quota", "remove them or use vertical"],
        ),
        (
            CREW + 'layout = "horizontal"\n[learning]\nquota = 2' + PEERS,
            ["own_share and quota", "remove them or use vertical"],
        ),
        (
            CREW + 'layout = "diagonal"' + PEERS,
            ["Invalid enum value 'diagonal'", "(in crew.layout)", 'use "horizontal" or "vertical"'],
        ),
        (CREW + PEERS.replace('"c"', '"a"'), ["peer names must differ; got a, b, a"]),
        (CREW, ["missing required field `peer`"]),
        ("peer = []\n" + CREW, ["a crew needs at least one [[peer]]"]),
        (
            CREW + PEERS + 'train = { lora = { rank = 8 }, layers = "last:1" }',
            ["exactly one of lora and layers", 'train = "full"'],
        ),
        (CREW + PEERS + "train = {}", ["exactly one of lora and layers"]),
        (CREW + PEERS + "train = { lora = { rank = 0 } }", ["lora needs rank >= 1", "got rank=0"]),
        (
            CREW + PEERS + "train = { lora = { bits = 8 } }",
            ["lora bits=8 is not known; use 4, or leave it out"],
        ),
        (CREW + PEERS + "bits = 4", ["unknown field `bits`", "it belongs under lora"]),
        (
            CREW + PEERS + 'train = { layers = "last:1", bits = 4 }',
            ["unknown field `bits`", "it belongs under lora"],
        ),
        (
            CREW + PEERS + "warm = { accuracy = { sort = 1.5 } }",
            ["warm accuracy of sort is 1.5", "between 0 and 1"],
        ),
        (CREW.replace('"ftis"', '"alone"') + PEERS, ["'alone' means one peer", "--alone"]),
        (CREW + "meet = 1.5" + PEERS, ["meet=1.5", "such as 0.25"]),
        (CREW + "[teach]\nrescue = 1.0" + PEERS, ["meet = 0.25 under [crew]", "horizontal"]),
        (CREW + "[teach]\nrescue = -1" + PEERS, ["rescue=-1", "0 is off"]),
        (CREW + "[teach]\ngamma = -1" + PEERS, ["gamma=-1", "0 is off"]),
        (CREW + "[teach]\nmost_branches = -1" + PEERS, ["most_branches=-1", "0 is one for each"]),
        (CREW + '[teach]\nbranch = "long"' + PEERS, ["'long'", "teach.branch"]),
        (
            CREW + 'pace = "async"\nmeet = 1.0\n[teach]\nbranch = "drawn"\n[[peer]]\nname = "a"\n'
            'model = "tiny:1m"\nrole = "learner"\n[[peer]]\nname = "b"\nrole = "sampler"\n'
            'follows = "a"',
            ["branch = 'drawn' is for peers that sample and learn", "remove branch"],
        ),
        (
            CREW.replace("size = 6", 'size = 3\nlayout = "horizontal"')
            + '[teach]\nbranch = "drawn"'
            + PEERS,
            ["branch = 'drawn' makes groups of 1", "group_size=3", "at least 6", "remove branch"],
        ),
        (CREW + "[teach]\nsuccess = inf" + PEERS, ["success=inf is no reward"]),
        (
            CREW + 'meet = 0.5\n[teach]\nrescue = 1.0\n[[peer]]\nname = "a"\nmodel = "tiny:1m"',
            ["somebody to learn from", "add a [[peer]]"],
        ),
        (CREW + "[learning]\nlr = 0" + PEERS, ["lr=0", "must be above 0 and at most 1"]),
        (CREW + "[learning]\nlr = 1e10" + PEERS, ["lr=10000000000.0", "at most 1", "5e-4"]),
        (CREW + "[learning]\nlr = nan" + PEERS, ["lr=nan", "at most 1"]),
        (CREW + "[learning]\ngrad_clip = 0" + PEERS, ["grad_clip=0", "1.0 is usual"]),
        (CREW + "[trust]\nsender_share = 0" + PEERS, ["sender_share=0", "0.5 is usual"]),
        (CREW + "[trust]\nsender_share = 1.5" + PEERS, ["sender_share=1.5 is outside 0..1"]),
        (CREW + "[trust]\ngrad_share = 0.5" + PEERS, ["grad_share=0.5", "0 sets no limit"]),
        (CREW + "[trust]\ngrad_share = nan" + PEERS, ["grad_share=nan", "4.0 is usual"]),
        (CREW + "[learning]\ngrad_share = 4.0" + PEERS, ["it belongs under [trust]"]),
        (CREW + "[learning]\nschedule = 'step'" + PEERS, ["'step'"]),
        (CREW + "[learning]\nfinal_lr = 1e-5\nwarmup_rounds = -1" + PEERS, ["warmup_rounds=-1"]),
        (CREW + "[learning]\nwarmup_rounds = 3" + PEERS, ["warmup_rounds=3 is not below rounds=3"]),
        (CREW + "[learning]\nfinal_lr = 2.0" + PEERS, ["final_lr=2.0 is outside 0..1", "share"]),
        (
            CREW + "[learning]\nweight_decay = nan" + PEERS,
            ["weight_decay=nan must not be"],
        ),
        (CREW + "[learning]\nepochs = 0" + PEERS, ["epochs=0 learns nothing", "at least 1"]),
        (CREW + "[learning]\ninner_kl = -0.1" + PEERS, ["inner_kl=-0.1 must not be negative"]),
        (CREW + "[evaluate]\nstop_after = -1" + PEERS, ["stop_after=-1", "to the last round"]),
        (CREW + "[evaluate]\nstop_at = nan" + PEERS, ["stop_at=nan is no reward", "leave it out"]),
        (CREW + "[learning]\nown_share = 1.5" + PEERS, ["own_share=1.5 is outside 0..1"]),
        (CREW + "[learning]\nsuccess_memory = 1.0" + PEERS, ["success_memory=1.0 is outside"]),
        (
            CREW + "[prompt]\ntemplate = 'A: {answer} Q: {prompt}'" + PEERS,
            ["must have {prompt} before {answer}", "writes only what comes last"],
        ),
        (CREW + "[learning]\ntoken_budget = -1" + PEERS, ["token_budget=-1 must not be negative"]),
        (
            CREW + "[learning]\ncheckpoint_every = 0" + PEERS,
            ["checkpoint_every=0 must be at least 1"],
        ),
        (CREW + "[learning]\nmax_age = -1" + PEERS, ["max_age=-1 must not be negative"]),
        (CREW + "[learning]\nquota = -1" + PEERS, ["quota=-1 must not be negative"]),
        (CREW + "[evaluate]\nevery = 0" + PEERS, ["every >= 1", "got every=0"]),
        (
            CREW + "deadline_s = -1.0" + PEERS,
            ["deadline_s=-1.0", "must not be negative", "leave them out to wait for everyone"],
        ),
        (CREW + "deadline_s = nan" + PEERS, ["deadline_s=nan"]),
        (CREW + "quorum = -1" + PEERS, ["quorum=-1", "must not be negative"]),
        (
            CREW + "quorum = 4" + PEERS,
            ["quorum=4 is more than the 3 peers who sample; use at most 3"],
        ),
        (CREW + 'processes = "yes"' + PEERS, ["Expected `bool`, got `str`", "crew.processes"]),
        (CREW + "check_reward = false" + PEERS, ["did you mean check_rewards?"]),
        (CREW + "learning_rate = 1e-4" + PEERS, ["here it is called lr, of [learning]"]),
        (CREW + "lr = 1e-4" + PEERS, ["it belongs under [learning] or [[peer]]"]),
        (CREW + "[learning]\ntop_kk = 1" + PEERS, ["did you mean top_k of [sampling]?"]),
        (CREW + "[sampling]\ntemp = 1.0" + PEERS, ["did you mean temperature?"]),
        (CREW + "[learning]\nlearning = 1" + PEERS, ["remove it, or see docs/crew_file.md"]),
        (CREW + "[learning]\nlevels = 1" + PEERS, ["remove it, or see docs/crew_file.md"]),
        (CREW + "[sampling]\nmax_toks = 1" + PEERS, ["did you mean max_tokens?"]),
        (CREW + "rate = 1" + PEERS, ["remove it, or see docs/crew_file.md"]),
        (
            CREW + "[learning]\nquorum = 2" + PEERS,
            ["unknown field `quorum`", "it belongs under [crew]"],
        ),
        (
            CREW + "[sampling]\nlossless = true" + PEERS,
            ["unknown field `lossless`", "it belongs under [crew]"],
        ),
        (CREW + PEERS.replace('"a"', '"hub"'), ["peer name 'hub' is taken", "choose another"]),
        (CREW + "[sampling]\ntemperature = 0.0" + PEERS, ["temperature=0 ", "at least 0.01"]),
        (CREW + "[sampling]\ntemperature = 1e-9" + PEERS, ["temperature=1e-09", "at least 0.01"]),
        (
            CREW + "[sampling]\ntop_k = 1" + PEERS,
            ["top_k=1 gives every rollout of a group the same tokens", "at least 2"],
        ),
        (CREW + "[sampling]\ntop_p = 2.0" + PEERS, ["top_p=2.0 is outside", "sampling"]),
        (CREW + "rounds = ", ["Invalid value", "expected a crew file in TOML"]),
        ("[crew", ["Expected ']'"]),
    ],
)
def test_a_bad_crew_file_is_refused_in_one_line_with_the_remedy(
    text: str, words: list[str]
) -> None:
    message = refusal(text)
    for word in words:
        assert word in message


def test_a_missing_crew_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot read crew file .*none\.toml: No such file or directory; give the path",
    ):
        read_config(tmp_path / "none.toml")


def test_a_crew_file_that_is_not_text_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "crew.toml").write_bytes(b"\xff\xfe[crew]")
    with pytest.raises(ConfigError, match=r"crew\.toml .*; expected a crew file in TOML$"):
        read_config(tmp_path / "crew.toml")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b'{"prompt": "1+1=", "answer": "2"}\n'),
        ("rows.json", b'[{"prompt": "1+1=", "answer": "2"}]\n'),
        ("rows.csv", b"prompt,answer\n1+1=,2\n"),
        ("rows.parquet", b"PAR1\xff"),
    ],
)
def test_data_in_place_of_a_crew_file_is_answered_with_how_to_make_one(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"expected a crew file in TOML; .* run: motley new --data .*{name}$"
    ):
        read_config(tmp_path / name)


FULL = (
    CREW
    + """
variant = "code"
layout = "vertical"
pace = "async"
seed = 7
processes = true
deadline_s = 2.5
quorum = 6
check_rewards = false
lossless = true
[task]
kinds = ["sort"]
levels = [2, 3]
[objective]
C = 3
kl_over = "group"
[sampling]
temperature = 0.7
top_k = 5
logprobs = "full"
[learning]
quota = 2
stale = "pace"
[evaluate]
every = 2
"""
    + PEERS
    + """
lr = 2e-3
train = { lora = { rank = 4, targets = ["q_proj"] } }
warm = { accuracy = { sort = 0.5 }, max_steps = 10 }
[[peer]]
name = "d"
model = "tiny:4m"
train = { layers = "last:1" }
[[peer]]
name = "e"
model = "tiny:4m"
[[peer]]
name = "f"
model = "tiny:4m"
"""
)


@pytest.mark.parametrize("text", [CREW + PEERS, FULL], ids=["defaults", "everything"])
def test_a_written_crew_reads_back_the_same(text: str, tmp_path: Path) -> None:
    config = parse_config(text)
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config


def test_alone_is_a_crew_of_one_that_makes_all_the_sampling() -> None:
    config = parse_config(FULL)
    alone = config.alone("c")
    assert alone.peer == (config.peer[2],)
    assert (alone.crew.objective, alone.crew.variant, alone.objective) == ("alone", "", {})
    assert alone.crew.name == "sums-alone-c"
    assert (alone.crew.processes, alone.crew.deadline_s, alone.crew.quorum) == (False, 0.0, 0)
    assert (alone.crew.check_rewards, alone.crew.lossless) == (False, True)
    assert alone.problems_per_peer == config.crew.problems_per_round
    assert (alone.sampling, alone.task, alone.crew.seed) == (config.sampling, config.task, 7)


@pytest.mark.parametrize(
    ("layout", "problems", "rollouts"), [("vertical", 2, 6), ("horizontal", 6, 2)]
)
def test_the_work_of_a_round_is_divided_by_problems_or_by_rollouts(
    layout: str, problems: int, rollouts: int
) -> None:
    config = parse_config(CREW + f'layout = "{layout}"' + PEERS)
    assert (config.problems_per_peer, config.rollouts_per_group) == (problems, rollouts)
    alone = config.alone("a")
    assert alone.problems_per_peer * alone.rollouts_per_group == 36


@pytest.mark.parametrize(
    ("keys", "met"),
    [
        ("", 0),
        ("meet = 0.01", 1),
        ("meet = 0.5", 1),
        ("meet = 0.6", 2),
        ("meet = 1.0", 2),
        ('layout = "horizontal"', 6),
    ],
)
def test_peers_meet_on_a_share_of_their_problems_or_on_all(keys: str, met: int) -> None:
    assert parse_config(CREW + keys + PEERS).num_met == met


def test_a_crew_in_which_only_teaching_crosses_may_have_the_objective_alone() -> None:
    text = CREW.replace('"ftis"', '"alone"') + "meet = 0.5\n[teach]\nrescue = 1.0" + PEERS
    config = parse_config(text)
    assert not config.alone("a").teach.is_on
    assert config.alone("a").num_met == 0


def test_a_task_with_rewards_of_any_size_must_say_what_a_success_is(folder: Path) -> None:
    config = spread_crew(folder, layout="horizontal")
    asked = lambda **teach: msgspec.structs.replace(config, teach=Teach(rescue=1.0, **teach))
    with pytest.raises(ValueError, match=r"^\[teach\] must know a success, .* write success ="):
        check_config(asked())
    check_config(asked(success=0.5))


def test_nobody_needs_to_ask_for_processes_deadlines_or_trust() -> None:
    crew = parse_config(CREW + PEERS).crew
    assert (crew.processes, crew.deadline_s, crew.check_rewards, crew.lossless) == (
        False,
        0.0,
        True,
        False,
    )


@pytest.mark.parametrize(("quorum", "expected"), [(0, 2), (1, 1), (3, 3)])
def test_a_quorum_is_two_peers_unless_it_is_given(quorum: int, expected: int) -> None:
    config = parse_config(CREW + f"quorum = {quorum}" + PEERS)
    assert config.quorum == expected
    assert config.alone("a").quorum == 1


@pytest.mark.parametrize(
    ("num_peers", "share", "expected"),
    [(1, 0.5, 1.0), (2, 0.1, 1.0), (4, 0.5, 0.5), (4, 0.1, 0.5), (8, 0.1, 0.25), (8, 0.5, 0.5)],
)
def test_a_foreign_sender_may_have_twice_its_even_share_of_a_step_or_more(
    num_peers: int, share: float, expected: float
) -> None:
    peers = "".join(f'\n[[peer]]\nname = "p{i}"\nmodel = "tiny:0.3m"' for i in range(num_peers))
    crew = CREW.replace("problems_per_round = 6", "problems_per_round = 8")
    config = parse_config(f"{crew}\n[trust]\nsender_share = {share}{peers}")
    assert config.sender_share("p0") == expected


LOST = "clips may take tokens of failures out"
PUSHED = "what is kept of own successes is pushed on every token"


@pytest.mark.parametrize(
    ("row", "sampling", "words"),
    [
        ("grpo", "top_p = 0.7", [r"^with top_p = 0\.7 and logprobs = 'sampled'", LOST]),
        ("grpo", "top_k = 20\ntop_p = 0.9", [r"^with top_k = 20 and top_p = 0\.9 and logprobs"]),
        ("rloo", "top_k = 20", ["Under rloo ratios are below 1"]),
        ("tis", "top_k = 20", [LOST]),
        ("topr", "top_k = 20", [LOST]),
        ("uplift", "top_k = 20", [LOST, "Set logprobs = 'full' under"]),
        ("auto", "top_k = 20", ["Under uplift/sure ratios", LOST, PUSHED]),
        ('alone"\n[objective]\nkeep = 1.0 # "', "top_p = 0.9", [f"Under alone {PUSHED}"]),
    ],
)
def test_own_samples_that_look_unlikely_by_truncation_are_warned_of(
    row: str, sampling: str, words: list[str]
) -> None:
    peers = PEERS if "alone" not in row else PEERS[: PEERS.index("[[peer]]", 4)]
    text = CREW.replace('"ftis"', f'"{row}"') + f"[sampling]\n{sampling}\n" + peers
    with pytest.warns(UserWarning, match="than they were drawn") as warned:
        check_config(parse_config(text))
    (message,) = [str(one.message) for one in warned]
    for word in words:
        assert re.search(word, message)
    assert "leave out top_k and top_p" in message


@pytest.mark.parametrize(
    ("row", "sampling"),
    [
        ("uplift", ""),
        ("uplift", 'top_p = 0.9\nlogprobs = "full"'),
        ("nois", "top_p = 0.9"),
        ("fnois", "top_k = 20"),
    ],
)
def test_truncation_that_no_own_sample_is_weighed_by_is_not_warned_of(
    row: str, sampling: str
) -> None:
    text = CREW.replace('"ftis"', f'"{row}"') + f"[sampling]\n{sampling}\n" + PEERS
    check_config(parse_config(text))


def test_who_joins_is_not_warned_of_what_is_the_crews() -> None:
    config = parse_config(CREW + "[sampling]\ntop_p = 0.9\n" + PEERS)
    check_config(config, mine="a")
    with pytest.warns(UserWarning, match="Under ftis"):
        check_config(config, mine=checking.NOBODY)


@pytest.mark.parametrize(("size", "teach"), [(6, 'branch = "drawn"'), (3, "rescue = 1.0")])
def test_a_horizontal_crew_may_branch_from_two_rollouts_and_rescue_from_one(
    size: int, teach: str
) -> None:
    crew = CREW.replace("size = 6", f'size = {size}\nlayout = "horizontal"')
    config = parse_config(f"{crew}[teach]\n{teach}\n{PEERS}")
    assert config.rollouts_per_group == size // 3


def test_changing_a_crew_checks_it_again() -> None:
    config = parse_config(CREW + PEERS)
    with pytest.raises(ValueError, match="rounds=-1 trains nothing"):
        msgspec.structs.replace(config.crew, rounds=-1)
    with pytest.raises(ValueError, match="not divisible"):
        msgspec.structs.replace(
            config, crew=msgspec.structs.replace(config.crew, problems_per_round=7)
        )
    assert isinstance(config, CrewConfig)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param("warm = { accuracy = {} }", id="warm towards nothing"),
        pytest.param("warm = { accuracy = { sort = 0.5 }, batch = 0 }", id="empty warm batches"),
        pytest.param("warm = { accuracy = { sort = 0.5 }, lr = 0.0 }", id="warm lr 0"),
        pytest.param("warm = { accuracy = { sort = 0.5 }, lr = 2.0 }", id="warm lr above 1"),
        pytest.param("lr = -1.0", id="negative lr of a peer"),
        pytest.param("lr = inf", id="infinite lr of a peer"),
        pytest.param("lr = 1e10", id="lr of a peer above 1"),
        pytest.param('train = { layers = "last:0" }', id="no layer"),
    ],
)
def test_what_cannot_train_is_refused_at_load(extra: str) -> None:
    refusal(CREW + PEERS + extra)


# Roles

FAR = """
[crew]
name = "far"
task = "digits"
rounds = 3
group_size = 6
problems_per_round = 6
objective = "gepo"
variant = ""
pace = "async"
"""
LEARNER = """
[[peer]]
name = "l"
role = "learner"
model = "tiny:0.3m"
"""
SAMPLERS = """
[[peer]]
name = "s"
role = "sampler"
follows = "l"
[[peer]]
name = "t"
role = "sampler"
follows = "l"
"""
PLAIN = """
[[peer]]
name = "p"
model = "tiny:1m"
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            FAR + LEARNER + SAMPLERS.replace('follows = "l"\n', "", 1),
            ["sampler s must say whose weights it uses", 'follows = "LEARNER"'],
        ),
        (
            FAR + LEARNER + SAMPLERS + 'model = "tiny:1m"',
            ["sampler t has the model of l", "remove its model, train, warm and lr"],
        ),
        (FAR + LEARNER + SAMPLERS + "train = { lora = {} }", ["sampler t has the model of l"]),
        (
            FAR + LEARNER + SAMPLERS + "warm = { accuracy = { sort = 0.5 } }",
            ["sampler t has the model of l"],
        ),
        (FAR + LEARNER + SAMPLERS + "lr = 1e-3", ["sampler t has the model of l"]),
        (
            FAR + LEARNER + 'follows = "l"' + SAMPLERS,
            ["learner l needs a model, and only a sampler follows"],
        ),
        (
            FAR + LEARNER.replace('model = "tiny:0.3m"\n', "") + SAMPLERS,
            ["learner l needs a model"],
        ),
        (
            FAR + LEARNER + SAMPLERS + PLAIN + 'follows = "l"',
            ["peer p needs a model, and only a sampler follows"],
        ),
        (
            FAR + LEARNER + SAMPLERS.replace('"l"', '"x"', 1),
            ["sampler s follows 'x'; the learners are l"],
        ),
        (
            FAR + LEARNER + SAMPLERS.replace('"l"', '"t"', 1),
            ["sampler s follows 't'; the learners are l"],
        ),
        (
            FAR + LEARNER + SAMPLERS.replace('"l"', '"s"', 1),
            ["sampler s follows 's'; the learners are l"],
        ),
        (
            FAR + PLAIN + SAMPLERS.replace('"l"', '"p"'),
            ["sampler s follows 'p'; the learners are none"],
        ),
        (FAR + LEARNER, ["a crew needs someone who samples (a peer or a sampler)"]),
        (FAR + SAMPLERS, ["someone who learns (a peer or a learner)"]),
        (
            FAR.replace('pace = "async"', "") + LEARNER + SAMPLERS,
            ["do not wait for each other", 'set crew.pace = "async"'],
        ),
        (
            FAR + LEARNER.replace('"learner"', '"teacher"') + SAMPLERS,
            ["Invalid enum value 'teacher'", "role"],
        ),
        (FAR + LEARNER + SAMPLERS.replace('"s"', '"l"'), ["peer names must differ"]),
        (
            FAR.replace('"gepo"', '"alone"') + LEARNER + SAMPLERS,
            ["'alone' means one peer", "--alone"],
        ),
        (
            FAR.replace("problems_per_round = 6", "problems_per_round = 3") + LEARNER + SAMPLERS,
            ["problems_per_round=3 is not divisible by the 2 peers of a vertical crew; use 2 or 4"],
        ),
        (
            FAR.replace("group_size = 6", "group_size = 3")
            + 'layout = "horizontal"'
            + LEARNER
            + SAMPLERS,
            ["group_size=3 is not divisible by the 2 peers of a horizontal crew; use 2 or 4"],
        ),
        (
            FAR + "quorum = 3" + LEARNER + SAMPLERS,
            ["quorum=3 is more than the 2 peers who sample; use at most 2"],
        ),
        (
            FAR + "[weights]\nevery = 0" + LEARNER + SAMPLERS,
            ["every >= 1", "got every=0, anchor_every=16"],
        ),
        (
            FAR + "[weights]\nevery = 3" + LEARNER + SAMPLERS,
            ["an anchor_every that it divides; got every=3, anchor_every=16"],
        ),
        (FAR + "[weights]\nanchor_every = 0" + LEARNER + SAMPLERS, ["anchor_every=0"]),
        (
            FAR + '[weights]\nprecision = "float16"' + LEARNER + SAMPLERS,
            ["Invalid enum value 'float16'", "weights.precision"],
        ),
        (
            FAR + "[learning]\nmax_age_s = -1" + LEARNER + SAMPLERS,
            ["max_age_s=-1", "must not be negative"],
        ),
        (FAR + "[learning]\nmax_age_s = nan" + LEARNER + SAMPLERS, ["max_age_s=nan"]),
        (
            FAR + LEARNER + "speed = { learn = 0 }" + SAMPLERS,
            ["learn > 0", "got sample=1000.0, learn=0"],
        ),
        (FAR + LEARNER + "speed = { sample = nan }" + SAMPLERS, ["sample=nan"]),
        (
            FAR + LEARNER + SAMPLERS + "churn = { join_s = -1 }",
            ["churn must go join_s, crashes", "got [-1.0]"],
        ),
        (FAR + LEARNER + SAMPLERS + "churn = { join_s = 5, leave_s = 5 }", ["got [5.0, 5.0]"]),
        (FAR + LEARNER + SAMPLERS + "churn = { leave_s = -5 }", ["churn must go"]),
        (FAR + LEARNER + SAMPLERS + "churn = { crashes = [[5, 4]] }", ["churn must go"]),
        (
            FAR + LEARNER + SAMPLERS + "churn = { crashes = [[5, 8], [7, 9]] }",
            ["got [0.0, 5.0, 8.0, 7.0, 9.0]"],
        ),
        (
            FAR + LEARNER + SAMPLERS + "churn = { crashes = [[5, 8]], leave_s = 7 }",
            ["churn must go"],
        ),
        (
            FAR + LEARNER + SAMPLERS + "churn = { join_s = 6, crashes = [[5, 8]] }",
            ["churn must go"],
        ),
        (FAR + LEARNER + SAMPLERS + "churn = { crashes = [[5]] }", ["length 2"]),
        # Keys that are misspelt, or in the wrong place
        (
            FAR + LEARNER + SAMPLERS.replace("follows", "folows", 1),
            ["unknown field `folows`", "did you mean follows?"],
        ),
        (FAR + LEARNER.replace("role", "roll") + SAMPLERS, ["did you mean role?"]),
        (
            FAR + LEARNER + "speed = { lern = 5 }" + SAMPLERS,
            ["unknown field `lern`", "did you mean learn?"],
        ),
        (FAR + LEARNER + "churn = { crash = [] }" + SAMPLERS, ["did you mean crashes?"]),
        (
            FAR + LEARNER + "join_s = 5" + SAMPLERS,
            ["unknown field `join_s`", "it belongs under [peer.churn]"],
        ),
        (FAR + LEARNER + "learn = 5" + SAMPLERS, ["it belongs under [peer.speed]"]),
        (FAR + "[weights]\npresision = 1" + LEARNER + SAMPLERS, ["did you mean precision?"]),
        (FAR + "[weights]\nmax_age_s = 1" + LEARNER + SAMPLERS, ["it belongs under [learning]"]),
        (FAR + "[learning]\nmax_ages = 1" + LEARNER + SAMPLERS, ["did you mean max_age"]),
        (FAR + "loss = 0.5" + LEARNER + SAMPLERS, ["it belongs under [network]"]),
        (FAR + "[network]\nmean_s = 5" + LEARNER + SAMPLERS, ["it belongs under delay"]),
        (
            FAR + "[network.link.x]\ndelay = 1\n[network.link.y]\ndelay = 1" + LEARNER + SAMPLERS,
            ["names x, y; the peers are l, s, t"],
        ),
    ],
)
def test_impossible_roles_are_refused_in_one_line_with_the_remedy(
    text: str, words: list[str]
) -> None:
    message = refusal(text)
    for word in words:
        assert word in message


def test_a_refusal_speaks_of_what_is_in_the_crew_file() -> None:
    assert "self." not in refusal(FAR + LEARNER + 'follows = "l"' + SAMPLERS)


def test_a_moment_that_is_none_is_refused() -> None:
    refusal(FAR + LEARNER + SAMPLERS + "churn = { join_s = nan }")


def test_who_samples_who_learns_and_whose_model_is_used() -> None:
    config = parse_config(FAR + LEARNER + SAMPLERS + PLAIN)
    assert config.authors == ["s", "t", "p"]
    assert [p.name for p in config.students] == ["l", "p"]
    assert [config.student_of(name) for name in ("l", "s", "t", "p")] == ["l", "l", "l", "p"]
    assert config.has_roles
    assert config.needs_processes
    plain = parse_config(CREW + PEERS)
    assert (plain.authors, plain.has_roles, plain.needs_processes) == (
        ["a", "b", "c"],
        False,
        False,
    )
    assert parse_config(CREW + "[network]\ndelay = 1" + PEERS).needs_processes
    assert parse_config(CREW + "processes = true" + PEERS).needs_processes


@pytest.mark.parametrize(
    ("layout", "problems", "rollouts", "authors"),
    [("vertical", 3, 6, 1), ("horizontal", 6, 3, 2)],
    ids=["vertical", "horizontal"],
)
def test_only_those_who_sample_share_the_work_of_a_round(
    layout: str, problems: int, rollouts: int, authors: int
) -> None:
    config = parse_config(FAR + f'layout = "{layout}"' + LEARNER + SAMPLERS)
    assert (config.problems_per_peer, config.rollouts_per_group, config.authors_per_group) == (
        problems,
        rollouts,
        authors,
    )
    assert config.quorum == 2
    assert parse_config(FAR + LEARNER + SAMPLERS.split('[[peer]]\nname = "t"')[0]).quorum == 1


def test_a_learner_alone_samples_for_itself_without_a_network() -> None:
    network = "quorum = 2\n[network]\ndelay = 60\n[network.link.s]\nloss = 0.5"
    config = parse_config(FAR + network + LEARNER + "lr = 3e-3" + SAMPLERS + PLAIN)
    alone = config.alone("l")
    assert [(p.name, p.role, p.model, p.lr) for p in alone.peer] == [
        ("l", "peer", "tiny:0.3m", 3e-3)
    ]
    assert (alone.crew.name, alone.crew.objective, alone.crew.pace, alone.crew.quorum) == (
        "far-alone-l",
        "alone",
        "lockstep",
        0,
    )
    assert (alone.has_roles, alone.needs_processes) == (False, False)
    assert alone.problems_per_peer * alone.rollouts_per_group == 36
    assert config.alone("p").crew.pace == "lockstep"
    with pytest.raises(ValueError, match="s needs a model"):
        config.alone("s")


def test_alone_keeps_the_pace_of_a_crew_without_roles() -> None:
    assert parse_config(CREW + 'pace = "async"' + PEERS).alone("a").crew.pace == "async"


def test_nobody_needs_to_ask_for_a_network_a_speed_or_a_channel() -> None:
    config = parse_config(FAR + LEARNER + SAMPLERS)
    assert config.network.of("s").instant
    assert (
        config.weights.every,
        config.weights.precision,
        config.weights.deltas,
        config.weights.anchor_every,
    ) == (1, "bfloat16", True, 16)
    assert (config.learning.max_age_s, config.learning.stale) == (0.0, "drop")
    assert (config.named("s").speed.sample, config.named("s").speed.learn) == (1000.0, 4000.0)
    assert (
        config.named("s").churn.join_s,
        config.named("s").churn.leave_s,
        config.named("s").churn.crashes,
    ) == (0.0, 0.0, ())


def test_a_crew_with_roles_reads_back_the_same(tmp_path: Path) -> None:
    text = (
        FAR
        + '[weights]\nevery = 4\nprecision = "float32"\n'
        + LEARNER
        + "speed = { learn = 25 }"
        + SAMPLERS
    )
    config = parse_config(
        text + "churn = { join_s = 1, crashes = [[2, 3]], leave_s = 9.5 }" + PLAIN
    )
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config
    assert config.named("t").churn.crashes == ((2.0, 3.0),)
    assert config.named("l").speed.learn == 25.0


# Pretrained models


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            CREW + PEERS + 'device = "gpu"',
            ["device='gpu' is not known; use auto, cpu, cuda, cuda:N or mps"],
        ),
        (CREW + PEERS + 'device = "cuda:x"', ["device='cuda:x' is not known"]),
        (CREW + PEERS + 'dtype = "float8"', ["Invalid enum value 'float8'"]),
        (
            CREW + PEERS + "keep_layers = 1",
            ["keep_layers=1; use at least 2, the first and the last, or 0 for all"],
        ),
        (CREW + PEERS + "keep_layers = -3", ["keep_layers=-3"]),
        (CREW + PEERS + 'optimizer = "sgd"', ["Invalid enum value 'sgd'"]),
        (
            CREW + PEERS + 'gradient_checkpointing = "some"',
            ["'some' (in peer.c.gradient_checkpointing); use true, false or \"auto\""],
        ),
        (
            CREW + PEERS + 'train = "lorra"',
            ["'lorra' (in peer.c.train); use \"full\", { lora = … } or { layers = … }"],
        ),
        (
            CREW + PEERS + 'judge = { url = "http://x/v1", logprobs = "some" }',
            ['\'some\' (in peer.c.judge.logprobs); use "full" or "sampled"'],
        ),
        (
            CREW + 'report = ["trackio", "excel"]' + PEERS,
            ['\'excel\' (in crew.report[1]); use "tensorboard", "trackio" or "wandb"'],
        ),
        (
            CREW + PEERS + '[network.link.a.delay]\nshape = "gamma"',
            ['link[...].delay.shape); use "exponential", "lognormal" or "weibull"'],
        ),
        (CREW + PEERS + 'train = "lora"', ["write train = { lora = { rank = 8 } }"]),
        (CREW + PEERS + "lr = []", ["Expected `float`, got `array` (in peer.c.lr)"]),
        (
            CREW + '[[peer]]\nmodel = "tiny:1m"\nlr = []',
            ["Expected `float`, got `array` (in peer[0].lr)"],
        ),
        (
            CREW + PEERS + 'masters = "bfloat16"',
            ['is for train = "full" with dtype = "bfloat16"', 'dtype = "auto"; set them'],
        ),
        (
            CREW + PEERS + 'masters = "bfloat16"\ndtype = "bfloat16"\ntrain = { lora = {} }',
            ["got train = a part of it", "or leave masters out"],
        ),
        (
            CREW + PEERS + 'optimizer = "adafactor"\noffload = true',
            ["keeps next to nothing", 'or use "adamw8bit"'],
        ),
        (CREW + PEERS + "keep_layer = 3", ["did you mean keep_layers?"]),
        (
            CREW + PEERS + "engine = {}",
            ["engine takes exactly one of vllm and openai", 'write engine = "torch"'],
        ),
        (
            CREW + PEERS + 'engine = { vllm = {}, openai = { url = "http://x/v1" } }',
            ["exactly one of vllm and openai"],
        ),
        (
            CREW + PEERS + 'engine = { openai = { url = "localhost:8000" } }',
            ["openai url='localhost:8000' is no address; write such as http://"],
        ),
        (CREW + PEERS + "engine = { openai = {} }", ["missing required field `url`"]),
        (CREW + PEERS + 'engine = { vllm = { pyhton = "x" } }', ["did you mean python?"]),
        (CREW + PEERS + 'url = "http://x"', ["it belongs under openai"]),
        (CREW + PEERS + 'engine = "vllm"', ['use "torch", { vllm = … } or { openai = … }']),
        (
            CREW + PEERS + "warm = { steps = 5 }",
            ["warm takes either accuracy = { sort = 0.5 }, or kinds = ['sort'] with steps = 120"],
        ),
        (CREW + PEERS + 'warm = { kinds = ["sort"] }', ["warm takes either", "steps=0"]),
        (
            CREW + PEERS + 'warm = { accuracy = { sort = 0.5 }, kinds = ["sort"], steps = 5 }',
            ["warm takes either"],
        ),
        (CREW + PEERS + "warm = { accuracy = { sort = 0.5 }, steps = 5 }", ["warm takes either"]),
        (CREW + PEERS + 'warm = { kinds = ["sort"], steps = -5 }', ["steps >= 0", "steps=-5"]),
        (
            CREW + '[prompt]\ntemplate = "no holes"' + PEERS,
            ["must have {prompt} and {answer} once each"],
        ),
        (CREW + '[prompt]\ntemplate = "{prompt} {prompt} {answer}"' + PEERS, ["once each"]),
        (
            CREW + '[prompt]\nstyle = "chat"\ntemplate = "{prompt} {answer}"' + PEERS,
            ["the chat template comes with the model"],
        ),
        (CREW + "[prompt]\nshots = -1" + PEERS, ["shots=-1 must not be negative"]),
        (CREW + '[prompt]\nsystm = "x"' + PEERS, ["did you mean system?"]),
        (CREW + 'template = "{prompt}{answer}"' + PEERS, ["it belongs under [prompt]"]),
        (CREW + "[learning]\ntoken_budget = -1" + PEERS, ["token_budget=-1 must not be negative"]),
    ],
)
def test_bad_settings_of_models_are_refused_in_one_line_with_the_remedy(
    text: str, words: list[str]
) -> None:
    message = refusal(text)
    for word in words:
        assert word in message


MODELS = """
[[peer]]
name = "a"
model = "./models/small"
device = "cuda:1"
dtype = "bfloat16"
gradient_checkpointing = true
keep_layers = 12
warm = { kinds = ["sort"], steps = 20, lr = 1e-5 }
[[peer]]
name = "b"
model = "small.gguf"
engine = { vllm = { python = "/opt/vllm/bin/python", args = ["--max-num-seqs", "64"] } }
[[peer]]
name = "c"
model = "Qwen/Qwen3-0.6B"
engine = { openai = { url = "http://127.0.0.1:8000/v1", key_env = "KEY", lora = true } }
"""
ASKING = (
    '[prompt]\nsystem = "Be brief."\nshots = 3\nstop = "\\n"\ntemplate = "Q: {prompt}\\nA: '
    '{answer}\\n\\n"\n'
)


def test_a_crew_of_pretrained_models_reads_back_the_same(tmp_path: Path) -> None:
    (tmp_path / "crew.toml").write_text(CREW + ASKING + MODELS)
    config = read_config(tmp_path / "crew.toml")
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config
    assert config.prompt.stop == "\n"
    assert config.prompt.template == "Q: {prompt}\nA: {answer}\n\n"
    assert config.named("a").warm.of_kinds == ("sort",)
    assert config.named("c").engine.openai.lora


def test_models_beside_the_crew_file_are_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "crew.toml").write_text(CREW + MODELS)
    config = read_config(tmp_path / "crew.toml")
    assert [peer.model for peer in config.peer] == [
        str(tmp_path / "models" / "small"),
        str(tmp_path / "small.gguf"),
        "Qwen/Qwen3-0.6B",
    ]
    elsewhere = read_config(tmp_path / "crew.toml")
    assert elsewhere == config
    for model in ("tiny:0.3m", "smollm2-135m", "/models/x", "/models/x.gguf", "Qwen/Qwen3"):
        (tmp_path / "crew.toml").write_text(CREW + MODELS.replace("./models/small", model))
        assert read_config(tmp_path / "crew.toml").named("a").model == model
    (tmp_path / "crew.toml").write_text(CREW + MODELS.replace("./models/small", "../small"))
    assert (
        Path(read_config(tmp_path / "crew.toml").named("a").model).resolve()
        == tmp_path.parent / "small"
    )


# What can be known before any weights load

DIGITS = '[task]\nkinds = ["sort", "reverse"]\nlevels = [2]\n[sampling]\nmax_tokens = 12\n'


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a model's values are read."""
    monkeypatch.setattr(opening, "read_model", lambda source: pytest.fail("weights were read"))


def of_models(*models: Path | str, extra: str = "", prompt: str = "") -> CrewConfig:
    peers = "".join(
        f'[[peer]]\nname = "p{number}"\nmodel = "{model}"\n' for number, model in enumerate(models)
    )
    return parse_config(
        CREW.replace("problems_per_round = 6", f"problems_per_round = {6 * len(models)}")
        + DIGITS
        + prompt
        + peers
        + extra
    )


def unfit(config: CrewConfig) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked by who asks
        check_config(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_models_that_share_a_vocabulary_make_a_crew(tmp_path: Path) -> None:
    folders = [
        write_model(tmp_path / kind, kind, layers=layers, **others)
        for kind, layers, others in MATES
    ]
    check_config(of_models(*folders))
    check_config(of_models(*folders, prompt='[prompt]\nstyle = "chat"\n'))
    check_config(of_models(*folders, prompt='[prompt]\nshots = 2\nstop = "\\n"\n'))
    check_config(of_models(*folders, extra='train = { layers = "last:1" }'))


MATES: list[tuple[str, int, dict[str, object]]] = [
    ("qwen2", 2, {}),
    ("qwen3", 4, {"vocab_size": 512}),  # rows that the tokenizer does not use
    ("gpt2", 2, {}),
]


@pytest.mark.usefixtures("no_weights")
def test_peers_of_different_vocabularies_make_a_mixed_crew(tmp_path: Path) -> None:
    first, second, same = (
        write_model(tmp_path / "a"),
        write_model(tmp_path / "b", tokenizer=text_tokenizer(size=280)),
        write_model(tmp_path / "c", layers=4),
    )
    for models in ((first, second), ("tiny:0.3m", first), (first, same, second)):
        check_config(of_models(*models))
        assert is_mixed(of_models(*models))
    assert not is_mixed(of_models(first, same))
    assert not is_mixed(of_models(first, first))
    assert not is_mixed(of_models("tiny:0.3m", "tiny:1m"))


@pytest.mark.usefixtures("no_weights")
def test_a_mixed_crew_refuses_a_model_whose_tokens_nobody_else_can_read(tmp_path: Path) -> None:
    whole, tokenizer = write_model(tmp_path / "a"), text_tokenizer(size=280)
    lowering = tokenizer.backend_tokenizer
    lowering.normalizer = normalizers.Lowercase()
    lowered = PreTrainedTokenizerFast(tokenizer_object=lowering, eos_token=tokenizer.eos_token)
    unspelled = write_model(tmp_path / "b", "gpt2", tokenizer=lowered)
    said = unfit(of_models(whole, unspelled))
    assert said.startswith(
        "peer p1 shares a crew with models of other vocabularies, and the tokens"
    )
    assert "let its model share a crew with models of the same vocabulary only" in said
    check_config(of_models(unspelled, unspelled))


def test_names_tell_whether_models_may_have_different_vocabularies() -> None:
    assert not may_be_mixed(["tiny:0.3m", "tiny:4m", "tiny:1m/words"])
    assert not may_be_mixed(["qwen", "qwen"])
    assert may_be_mixed(["qwen", "qwen-large"])
    assert may_be_mixed(["tiny:1m", "tiny:1m/bytes"])
    assert may_be_mixed(["tiny:1m", "qwen"])


@pytest.mark.usefixtures("no_weights")
def test_peers_that_end_their_answers_differently_are_refused(tmp_path: Path) -> None:
    tokenizer = text_tokenizer()
    end, turn_end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_END)
    base = write_model(tmp_path / "base")
    instruct = write_model(tmp_path / "instruct", ends=[turn_end, end])
    said = unfit(of_models(base, instruct))
    assert (
        f"peers p0 and p1 end their answers with different tokens, ({end},) and ({end}, {turn_end})"
        in said
    )
    check_config(of_models(instruct, write_model(tmp_path / "other", ends=[end, turn_end])))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("extra", "prompt", "words"),
    [
        (
            "",
            '[prompt]\nstyle = "chat"\n',
            'has no chat template; set prompt.style = "plain", or use an instruct model',
        ),
        ("keep_layers = 3", "", "keep_layers=3, and the model has 2; use fewer"),
        ('train = { lora = { targets = ["zz_proj"] } }', "", "zz_proj"),
        ("train = { lora = { bits = 4 } }", "", "in blocks of 64; leave bits out"),
        (
            'train = { layers = "model.nothing" }',
            "",
            "train layers='model.nothing' matches no parameter",
        ),
        (
            "",
            '[prompt]\nstop = "Question: 99"\n',
            "no token of the vocabulary begins with stop='Question: 99'",
        ),
        ("", "[prompt]\nshots = 20\n", "do not fit the 64 positions of"),
        ('device = "cuda"', "", "torch finds no CUDA GPU here"),
        (
            'warm = { kinds = ["spell"], steps = 3 }',
            "",
            "warm names kinds the task does not have: spell",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_its_weights_load(
    extra: str, prompt: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model = write_model(tmp_path / "m", tokenizer=text_tokenizer(None))
    assert words in unfit(of_models(model, extra=extra, prompt=prompt))


@pytest.mark.usefixtures("no_weights")
def test_four_bits_are_refused_for_a_model_that_runs_its_own_code(tmp_path: Path) -> None:
    other = write_model(tmp_path / "m", "gpt2", n_embd=64)
    said = unfit(of_models(other, extra="train = { lora = { bits = 4 } }"))
    assert "peer p0: bits=4 is for models that Motley has a forward pass of its own for" in said
    assert "'gpt2' runs its own code: GPT2LMHeadModel is none of LlamaForCausalLM" in said
    assert "leave bits out, or use a model like Llama" in said
    known = write_model(tmp_path / "k", hidden_size=64)
    check_config(of_models(known, extra="train = { lora = { bits = 4 } }"))


def test_bits_are_in_a_charter_only_where_a_peer_has_them() -> None:
    some = CREW + PEERS + "train = { lora = { rank = 2%s } }"
    texts = [config_text(parse_config(some % key)) for key in ("", ", bits = 4")]
    assert ["bits = 4" in text for text in texts] == [False, True]
    assert parse_config(texts[1]).peer[-1].bits == 4


@pytest.mark.usefixtures("no_weights")
def test_models_that_are_not_there_are_refused_before_any_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    here = write_model(tmp_path / "m")
    for name, words in (
        ("/none", "there is no model folder /none"),
        ("x.gguf", "there is no GGUF file"),
        ("some/id", "model 'some/id'"),
    ):
        assert words in unfit(of_models(here, name))


@pytest.mark.parametrize(
    ("extra", "words"),
    [("keep_layers = 9", "keep_layers=9, and the model has 3"), ("keep_layers = 2", "")],
)
def test_tiny_models_too_can_lose_layers(extra: str, words: str) -> None:
    config = of_models("tiny:0.3m", extra=extra)
    if words:
        assert words in unfit(config)
    else:
        check_config(config)
        assert opening.initial_policy(config.peer[0], seed=0).config.num_hidden_layers == 2


def test_tiny_models_have_no_chat_and_no_stop() -> None:
    assert "no chat template" in unfit(of_models("tiny:0.3m", prompt='[prompt]\nstyle = "chat"\n'))
    assert "tiny models end their answers themselves" in unfit(
        of_models("tiny:0.3m", prompt='[prompt]\nstop = "\\n"\n')
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "sort " + "9" * 300 + "=", "answer": "9"}, "such as 'sort 99999"),
        ({"prompt": "sort 4ü=", "answer": "4"}, "cannot spell"),
        ({"prompt": "sort 941=", "answer": "ü"}, "cannot spell"),
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_one_row_of_many_that_a_model_cannot_hold_is_found(
    row: dict[str, str], words: str, mixed: bool, tmp_path: Path
) -> None:
    good = [{"prompt": f"sort {n}=", "answer": str(n)} for n in range(300)]
    path = tmp_path / "rows.jsonl"
    task = f'task = "file:{path}"\n'
    own = f"[task.own]\n{task}" if mixed else ""
    asked = 'task = "mixture"\n' if mixed else task
    config = parse_config(CREW.replace('task = "digits"\n', asked) + own + PEERS)
    for rows in (good, [*good[:200], row, *good[200:]]):
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        if row in rows:
            assert words in unfit(config)
        else:
            check_config(config)


def test_a_token_without_a_row_is_found_in_one_row_of_many(tmp_path: Path) -> None:
    tokenizer = text_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["ab"])
    model = write_model(tmp_path / "model", tokenizer=tokenizer, vocab_size=rows)
    problems = [{"prompt": f"a b {n}", "answer": "1"} for n in range(300)]
    task = own_task([*problems, {"prompt": "ab", "answer": "2"}])
    config = parse_config(
        CREW.replace('task = "digits"', 'task = "file:rows.jsonl"')
        + f'[[peer]]\nname = "x"\nmodel = "{model}"\n'
    )
    with pytest.raises(ValueError, match=rf"peer x: the tokenizer makes token {rows} \('ab'\)"):
        check_config(config, task=task)


def test_of_many_peers_that_are_alike_one_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def check_peer(peer: Any, *rest: Any) -> Any:
        checked.append(peer.name)
        return opening.check_peer(peer, *rest)

    monkeypatch.setattr(checking, "check_peer", check_peer)
    others = "".join(f'[[peer]]\nname = "p{n}"\nmodel = "tiny:1m"\n' for n in range(3))
    check_config(parse_config(CREW + PEERS + others))
    assert checked == ["a", "b", "c"]
