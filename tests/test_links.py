from __future__ import annotations

import math
from collections import Counter
from statistics import fmean
from typing import Any

import pytest

from motley.config import ConfigError, CrewConfig, config_text, parse_config
from motley.links import BETWEEN, Delay, Link, Network, Weather

LOW, MIDDLE, HIGH = (1 - BETWEEN) / 2, 0.5, (1 + BETWEEN) / 2
LOGNORMAL = Delay(shape="lognormal", low_s=60, high_s=1920)
WEIBULL = Delay(shape="weibull", low_s=60, high_s=1920)
EXPONENTIAL = Delay(shape="exponential", mean_s=300)


def arrivals(link: Link, count: int, start_s: float = 0.0, seed: str = "0/a") -> list[float]:
    return [link.arrival(f"{seed}/{number}", "up", start_s) for number in range(count)]


# Distributions


@pytest.mark.parametrize("shape", ["lognormal", "weibull"])
@pytest.mark.parametrize(("low_s", "high_s"), [(60, 1920), (0.01, 0.02), (1, 1e6)])
def test_so_many_delays_are_between_the_two_quantiles(
    shape: Any, low_s: float, high_s: float
) -> None:
    delay = Delay(shape=shape, low_s=low_s, high_s=high_s)
    assert delay.quantile(LOW) == pytest.approx(low_s)
    assert delay.quantile(HIGH) == pytest.approx(high_s)
    assert low_s < delay.quantile(0.1) < delay.quantile(0.9) < high_s


def test_a_log_normal_of_60_to_1920_seconds_is_the_one_of_the_paper() -> None:
    assert math.log(LOGNORMAL.quantile(0.5)) == pytest.approx(5.827, abs=5e-4)
    one_sigma = 0.8413447460685429
    assert math.log(LOGNORMAL.quantile(one_sigma) / LOGNORMAL.quantile(0.5)) == pytest.approx(
        0.617, abs=5e-4
    )


def test_a_weibull_of_60_to_1920_seconds_is_the_one_of_the_paper() -> None:
    at_scale = 1 - math.exp(-1)  # where every Weibull has its scale
    assert WEIBULL.quantile(at_scale) == pytest.approx(865, abs=0.5)
    # ln(-ln(1 - F)) is a line of slope k over ln t
    slope = math.log(math.log(1 - 0.9) / math.log(1 - 0.1)) / math.log(
        WEIBULL.quantile(0.9) / WEIBULL.quantile(0.1)
    )
    assert slope == pytest.approx(2.245, abs=5e-4)


@pytest.mark.parametrize("share", [0.0, 1e-9, LOW, 0.3, MIDDLE, HIGH, 1 - 1e-9])
@pytest.mark.parametrize(
    ("by_quantiles", "by_parameters"),
    [
        (LOGNORMAL, Delay(shape="lognormal", mu=5.827212513621964, sigma=0.617330639532092)),
        (WEIBULL, Delay(shape="weibull", k=2.2449919273155365, scale_s=864.8884943096049)),
        (
            Delay(shape="exponential", high_s=1800),
            Delay(shape="exponential", mean_s=1800 / -math.log(LOW)),
        ),
    ],
)
def test_parameters_say_the_same_as_the_quantiles_they_were_fitted_to(
    by_quantiles: Delay, by_parameters: Delay, share: float
) -> None:
    assert by_quantiles.quantile(share) == pytest.approx(by_parameters.quantile(share), rel=1e-9)


def test_an_exponential_delay_has_its_mean() -> None:
    assert EXPONENTIAL.quantile(1 - math.exp(-1)) == pytest.approx(300)
    assert EXPONENTIAL.quantile(0.0) == 0.0


@pytest.mark.parametrize(
    ("delay", "mean_s", "deviation_s"),
    [
        (LOGNORMAL, math.exp(5.82721 + 0.61733**2 / 2), 280.0),
        (WEIBULL, 864.89 * math.gamma(1 + 1 / 2.24499), 362.0),
        (EXPONENTIAL, 300.0, 300.0),
        (250.0, 250.0, 0.01),
    ],
)
def test_many_deliveries_take_the_mean_of_their_distribution(
    delay: float | Delay, mean_s: float, deviation_s: float
) -> None:
    count = 4000
    found = arrivals(Link(delay=delay), count)
    assert fmean(found) == pytest.approx(mean_s, abs=4 * deviation_s / math.sqrt(count))
    if isinstance(delay, Delay) and delay.low_s:
        assert fmean(60 <= found_s <= 1920 for found_s in found) == pytest.approx(
            BETWEEN, abs=4 * math.sqrt(0.005 / count)
        )


def test_a_delay_begins_where_its_delivery_does() -> None:
    link = Link(delay=LOGNORMAL)
    assert [at_s - 5000 for at_s in arrivals(link, 20, 5000.0)] == pytest.approx(arrivals(link, 20))


# Which delay a delivery gets


def weather(peer: str = "a", seed: int = 0, **link: Any) -> Weather:
    return Weather(Link(**{"delay": LOGNORMAL} | link), f"{seed}/{peer}")


def test_a_delivery_has_the_same_delay_whenever_it_is_asked_for() -> None:
    first = [weather().sent(str(number), 3.0) for number in range(50)]
    assert first == [weather().sent(str(number), 3.0) for number in range(50)]
    assert len(set(first)) == 50


def test_delays_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert weather().sent("0", 0.0) == pytest.approx(PINNED_UP_S)
    assert weather().fetched("0", 0.0) == pytest.approx(PINNED_DOWN_S)


PINNED_UP_S, PINNED_DOWN_S = 618.925994, 230.684404  # of crew seed 0, peer a, delivery 0


def test_peers_seeds_directions_and_deliveries_have_delays_of_their_own() -> None:
    ways = [
        [weather().sent(str(n), 0.0) for n in range(200)],
        [weather().fetched(str(n), 0.0) for n in range(200)],
        [weather("b").sent(str(n), 0.0) for n in range(200)],
        [weather(seed=1).sent(str(n), 0.0) for n in range(200)],
        [weather().sent(f"weights.{n}", 0.0) for n in range(200)],
    ]
    assert len({at_s for way in ways for at_s in way}) == 1000
    for one in range(len(ways)):  # and what one is says nothing about the other
        for other in range(one):
            assert abs(correlation(ways[one], ways[other])) < 0.3


def correlation(first: list[float], second: list[float]) -> float:
    a, b = ([math.log(x) - fmean(map(math.log, xs)) for x in xs] for xs in (first, second))
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(
        sum(x * x for x in a) * sum(y * y for y in b)
    )


def test_up_and_down_may_differ() -> None:
    link = weather(delay=5.0, up=1.0, down=0.0)
    assert (link.sent("x", 10.0), link.fetched("x", 10.0)) == (11.0, 10.0)
    both = weather(delay=5.0, down=2.0)
    assert (both.sent("x", 10.0), both.fetched("x", 10.0)) == (15.0, 12.0)


def test_a_peers_seconds_count_from_its_own_start() -> None:
    late = Weather(Link(delay=3.0, outages=((10.0, 20.0),)), "0/a", started_s=1000.0)
    assert [late.sent("x", at_s) for at_s in (1000.0, 1008.0, 1015.0, 1030.0)] == [
        1003.0,
        1020.0,
        1023.0,
        1033.0,
    ]


def test_a_link_of_its_own_is_instead_of_everyones_and_not_on_top_of_it() -> None:
    network = Network(delay=9.0, loss=0.5, link={"far": Link(delay=60.0)})
    assert (network.of("near").delay, network.of("near").loss) == (9.0, 0.5)
    assert (network.of("far").delay, network.of("far").loss) == (60.0, 0.0)


@pytest.mark.parametrize(
    ("link", "instant"),
    [
        (Link(), True),
        (Link(loss=0.5), True),  # trying again takes no time
        (Link(delay=1.0), False),
        (Link(up=1.0), False),
        (Link(down=LOGNORMAL), False),
        (Link(outages=((0.0, 1.0),)), False),
    ],
)
def test_a_link_without_delay_and_outage_is_instant(link: Link, instant: bool) -> None:
    assert link.instant == instant
    if instant:
        assert set(arrivals(link, 50, 7.0)) == {7.0}


# Loss


def test_a_lost_delivery_is_sent_again_until_it_arrives() -> None:
    count, loss = 4000, 0.25
    tries = Counter(at_s / 10 for at_s in arrivals(Link(delay=10.0, loss=loss), count))
    assert all(number == int(number) >= 1 for number in tries)  # whole delays, nothing between
    assert sum(number * times for number, times in tries.items()) / count == pytest.approx(
        1 / (1 - loss), abs=0.05
    )
    for number in (1, 2, 3):
        assert tries[number] / count == pytest.approx((1 - loss) * loss ** (number - 1), abs=0.03)


def test_every_try_takes_a_delay_of_its_own() -> None:
    sound, lossy = (
        arrivals(Link(delay=LOGNORMAL), 300),
        arrivals(Link(delay=LOGNORMAL, loss=0.5), 300),
    )
    further = [b - a for a, b in zip(sound, lossy, strict=True)]
    assert all(s >= 0 for s in further)
    assert 100 < sum(s > 0 for s in further) < 200
    assert all(
        abs(s / a - round(s / a)) > 1e-9 for s, a in zip(further, sound, strict=True) if s > 0
    )


def test_whether_a_delivery_is_lost_says_nothing_about_its_delay() -> None:
    delay = Delay(shape="exponential", mean_s=1.0)
    sound, lossy = arrivals(Link(delay=delay), 4000), arrivals(Link(delay=delay, loss=0.5), 4000)
    kept = [b for a, b in zip(sound, lossy, strict=True) if a == b]
    assert fmean(kept) == pytest.approx(1.0, abs=0.1)


# Outages


@pytest.mark.parametrize(
    ("outages", "start_s", "arrives_s"),
    [
        pytest.param([(10, 20)], 2.0, 5.0, id="over before it"),
        pytest.param([(10, 20)], 15.0, 23.0, id="ready in it"),
        pytest.param([(10, 20)], 10.0, 23.0, id="ready as it begins"),
        pytest.param([(10, 20)], 20.0, 23.0, id="ready as it ends"),
        pytest.param([(10, 20)], 8.0, 20.0, id="on its way in it"),
        pytest.param([(10, 20)], 7.0, 20.0, id="there as it begins"),
        pytest.param([(4, 5)], 3.0, 6.0, id="through it on the way"),
        pytest.param([(10, 20), (20, 30)], 15.0, 33.0, id="two back to back"),
        pytest.param([(20, 30), (10, 20)], 15.0, 33.0, id="two out of order"),
        pytest.param([(10, 20), (22, 30)], 15.0, 30.0, id="out of one into the next"),
        pytest.param([(10, 50), (20, 30)], 15.0, 53.0, id="one inside the other"),
        pytest.param([(10, 20), (15, 40)], 12.0, 43.0, id="overlapping"),
    ],
)
def test_nothing_leaves_and_nothing_arrives_in_an_outage(
    outages: Any, start_s: float, arrives_s: float
) -> None:
    assert Link(delay=3.0, outages=tuple(outages)).arrival("x", "down", start_s) == arrives_s


def test_a_try_that_is_lost_in_an_outage_is_made_again_after_it() -> None:
    link, seeds = Link(delay=3.0, loss=0.5, outages=((2.0, 20.0),)), map(str, range(200))
    tries = Counter(link.arrival(seed, "up", 0.0) for seed in seeds)
    assert set(tries) >= {20.0, 23.0, 26.0}
    assert all((at_s - 20) % 3 == 0 for at_s in tries)


# What is refused

CREW = """
[crew]
name = "far"
task = "digits"
rounds = 3
group_size = 4
problems_per_round = 4
objective = "gepo"
pace = "async"
[[peer]]
name = "learner"
role = "learner"
model = "tiny:0.3m"
speed = { learn = 25, sample = 2.5 }
churn = { join_s = 1.5, crashes = [[10, 20], [30.5, 40]], leave_s = 99 }
[[peer]]
name = "near"
role = "sampler"
follows = "learner"
[[peer]]
name = "far"
role = "sampler"
follows = "learner"
"""


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("delay = -1", ["delay=-1.0", "at least 0"]),
        ("up = -2", ["-2.0", "at least 0"]),
        ("delay = inf", ["delay=inf"]),
        ("delay = nan", ["delay=nan"]),
        ('delay = "5"', ["got `str`", "network.delay"]),
        ("loss = 1", ["loss=1.0 is outside [0, 1)", "0.05 loses one try in twenty"]),
        ("loss = -0.1", ["loss=-0.1 is outside"]),
        ("loss = nan", ["loss=nan is outside"]),
        ("outages = [[5, 5]]", ["[5.0, 5.0]", "from before to"]),
        ("outages = [[-1, 5]]", ["from before to"]),
        ("outages = [[1, inf]]", ["from before to"]),
        ("outages = [[1]]", ["length 2", "network.outages"]),
        ("outages = [1, 2]", ["network.outages"]),
        ('delay = { shape = "gamma" }', ["Invalid enum value 'gamma'", "network.delay.shape"]),
        ("delay = { low_s = 5 }", ["missing required field `shape`"]),
        (
            'delay = { shape = "lognormal" }',
            ["either low_s and high_s or mu and sigma; got nothing", "network.delay"],
        ),
        (
            'delay = { shape = "lognormal", low_s = 60 }',
            ["low_s=60.0 and high_s=0.0", "in this order, such as 60 and 1920"],
        ),
        ('delay = { shape = "lognormal", high_s = 60 }', ["low_s=0.0 and high_s=60.0"]),
        ('delay = { shape = "weibull", low_s = 60, high_s = 50 }', ["low_s=60.0 and high_s=50.0"]),
        ('delay = { shape = "weibull", low_s = -60, high_s = 50 }', ["low_s=-60.0"]),
        ('delay = { shape = "lognormal", low_s = 60, high_s = nan }', ["high_s=nan"]),
        ('delay = { shape = "lognormal", mu = 5 }', ["or mu and sigma; got mu"]),
        ('delay = { shape = "lognormal", mu = 5, sigma = 1, low_s = 5 }', ["got low_s, mu, sigma"]),
        (
            'delay = { shape = "lognormal", mu = 5, sigma = 0 }',
            ["mu and sigma of a lognormal delay must be above 0"],
        ),
        (
            'delay = { shape = "lognormal", mu = 300, sigma = 1 }',
            ["mu=300.0", "5.8 is about 6 minutes"],
        ),
        ('delay = { shape = "lognormal", mu = nan, sigma = 1 }', ["mu=nan"]),
        ('delay = { shape = "weibull", mu = 5, sigma = 1 }', ["or k and scale_s; got mu, sigma"]),
        ('delay = { shape = "weibull", k = -1, scale_s = 1 }', ["must be above 0"]),
        (
            'delay = { shape = "exponential", low_s = 5, high_s = 8 }',
            ["give high_s alone, or mean_s; got low_s=5.0"],
        ),
        ('delay = { shape = "exponential", mean_s = 0 }', ["must be above 0"]),
        ('delay = { shape = "exponential", mean_s = 5, high_s = 8 }', ["got high_s, mean_s"]),
        ("dealy = 5", ["unknown field `dealy`", "did you mean delay?"]),
        ("outage = []", ["did you mean outages?"]),
        (
            'delay = { shape = "exponential", mean = 5 }',
            ["unknown field `mean`", "did you mean mean_s?"],
        ),
        ("[network.link.far]\nloss = 2", ["loss=2.0 is outside"]),
        ("[network.link.far]\nlos = 0.5", ["did you mean loss?"]),
        (
            "[network.link.fra]\nloss = 0.5",
            ["network.link names fra; the peers are learner, near, far"],
        ),
    ],
)
def test_an_impossible_network_is_refused_in_one_line_with_the_remedy(
    network: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(CREW + "[network]\n" + network)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "delay",
    ["shape = 'lognormal', mu = 5, sigma = 500", "shape = 'weibull', k = 0.001, scale_s = 1"],
)
def test_a_delay_that_no_clock_can_count_is_refused_or_can_be_drawn(delay: str) -> None:
    try:
        config = parse_config(CREW + f"[network]\ndelay = {{ {delay} }}\n")
    except ConfigError:
        return
    for number in range(2000):
        config.weather("far").sent(str(number), 0.0)


# A crew file


NETWORK = """
[learning]
max_age_s = 1800
[weights]
every = 2
precision = "float32"
deltas = false
anchor_every = 8
[network]
delay = { shape = "weibull", low_s = 60, high_s = 1920 }
up = 3
loss = 0.05
outages = [[5, 6], [7.5, 9]]
[network.link.near]
delay = 0
down = { shape = "exponential", mean_s = 2 }
[network.link.far]
delay = { shape = "lognormal", mu = 0, sigma = 0.5 }
loss = 0.25
"""


def far() -> CrewConfig:
    return parse_config(CREW + NETWORK)


def test_a_crew_with_a_network_reads_back_the_same() -> None:
    assert parse_config(config_text(far())) == far()
    assert parse_config(config_text(parse_config(CREW))) == parse_config(CREW)


def test_a_crew_file_says_what_each_link_does() -> None:
    config = far()
    assert config.network.of("learner").delay == WEIBULL
    assert (config.network.of("learner").up, config.network.of("learner").outages) == (
        3.0,
        ((5.0, 6.0), (7.5, 9.0)),
    )
    assert config.network.of("near") == Link(down=Delay(shape="exponential", mean_s=2))
    assert config.network.of("far") == Link(
        delay=Delay(shape="lognormal", mu=0, sigma=0.5), loss=0.25
    )


def test_the_weather_of_a_peer_is_its_link_under_the_crews_seed() -> None:
    config = far()
    assert config.weather("far") == Weather(config.network.of("far"), "0/far", 0.0)
    assert config.weather("far", 7.0).started_s == 7.0
    assert config.weather("far").sent("0", 0.0) != config.weather("far").fetched("0", 0.0)
