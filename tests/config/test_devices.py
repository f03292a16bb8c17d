"""A peer on several devices, in a crew file."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.config import changes, check_changes, config_text, parse_config
from motley.runs.local import LocalCrew

CREW = """
[crew]
name = "one"
task = "digits"
rounds = 2
group_size = 4
problems_per_round = 4
"""


def crew(peer: str) -> str:
    return f'{CREW}\n[[peer]]\nname = "ada"\nmodel = "tiny:0.3m"\n{peer}\n'


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ("devices = 0", "devices=0 computes nothing; use at least 1"),
        ('devices = 2\ndevice = "mps"', "devices=2: Apple has one GPU"),
        (
            'devices = 2\nengine = { openai = { url = "http://127.0.0.1:8000/v1" } }',
            'devices=2: each device samples by itself; use engine = "torch"',
        ),
        ('devices = 2\noptimizer = "adamw8bit"', "devices=2: a part of the moments is on each"),
        ("devices = 2\noffload = true", "leave optimizer and offload out"),
        (
            'devices = 2\ndtype = "bfloat16"\nmasters = "bfloat16"',
            'devices=2: parts are kept in float32; leave masters = "bfloat16" out',
        ),
        (
            "devices = 2\ntrain = { lora = { bits = 4 } }",
            "devices=2: a model in 4 bits is on one device; leave devices or bits = 4 out",
        ),
    ],
)
def test_what_several_devices_cannot_do_is_refused(peer: str, words: str) -> None:
    with pytest.raises(ValueError, match="peer ada: ") as error:
        parse_config(crew(peer))
    assert words in str(error.value)


def test_a_sampler_has_one_device() -> None:
    roles = 'role = "learner"\n[[peer]]\nname = "s"\nrole = "sampler"\nfollows = "ada"\ndevices = 2'
    with pytest.raises(ValueError, match="peer s: devices=2: a sampler has no learner to share"):
        parse_config(crew(roles).replace("rounds = 2", 'rounds = 2\npace = "async"'))


def test_several_devices_need_a_process_of_their_own(tmp_path: Path) -> None:
    one, two = parse_config(crew("")), parse_config(crew("devices = 2"))
    assert two.needs_processes
    assert not one.needs_processes
    assert not two.alone("ada").needs_processes
    with pytest.raises(ValueError, match=r"ada: devices=2 needs a process .*processes = true"):
        LocalCrew.start(two, tmp_path / "run")


def test_a_run_goes_on_with_another_number_of_devices() -> None:
    one, two = parse_config(crew("")), parse_config(crew("devices = 2"))
    (change,) = changes(one, two)
    assert (change.key, change.before, change.after) == ("peer.ada.devices", 1, 2)
    check_changes([change], "run")


def test_a_crew_of_one_device_each_is_written_as_ever() -> None:
    assert "devices" not in config_text(parse_config(crew("")))
    two = parse_config(crew("devices = 2"))
    assert parse_config(config_text(two)) == two
