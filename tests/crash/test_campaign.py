"""Deaths at random moments and at random points, many of them, in scenes that go on all the while.

PENSTOCK_TIER=soak makes it 10,000 deaths.
"""

from __future__ import annotations

import random
import time

import pytest

from tests import tiers
from tests.crash import actors
from tests.crash.scenes import Cast, Scene
from tests.crash.test_points import ONCE, REACHED, REAPER
from tests.crash.zygote import Zygote

DEATHS_PER_SCENE = 40


def next_victim(scene: Scene, chance: random.Random) -> Cast:
    victim = chance.choice(scene.cast)
    if victim.armed and chance.random() < 0.6:
        deadline = time.monotonic() + 0.2  # it may not come to its point: then it is killed as the others are
        while victim.is_alive() and time.monotonic() < deadline:
            time.sleep(0.0005)
    else:
        time.sleep(chance.random() ** 2 * 0.03)
    if victim.is_alive():
        victim.kill()
    return victim


def replace(scene: Scene, victim: Cast, chance: random.Random) -> Cast:
    """With an actor that may have a point of its own to die at."""
    points = sorted(REACHED[scene.style, victim.role] - {"close.begun", "leave.begun", "pool.claiming"})
    is_armed = chance.random() < 0.5
    point = chance.choice(points) if is_armed else ""
    countdown = 1 if point in ONCE - REAPER else chance.randint(1, 20)
    options = {"point": point, "countdown": countdown} if is_armed else {}
    child = scene.add(victim.role, victim.index, **options)
    child.armed = point
    return child


def bury_all(scene: Scene, chance: random.Random, is_over: bool = False) -> int:
    """The actors that came to their points while the campaign looked elsewhere."""
    buried = 0
    for player in list(scene.cast):
        if not player.is_alive():
            assert player.armed, (
                f"{player.role} {player.index} (pid {player.pid}) ended unasked; it said {player.heard()}"
            )
            scene.bury(player)
            buried += 1
            if not is_over:
                replace(scene, player, chance)
    return buried


@pytest.mark.timeout(tiers.limit(240, soak=7200))
@pytest.mark.parametrize("style", ["ring", "broadcast", "inbox", "pool"])
def test_death_of_any_process_loses_nothing_of_the_others(zygote: Zygote, seed: int, style: str) -> None:
    chance = random.Random(f"{seed} {style}")
    deaths = records = 0
    while deaths < tiers.CAMPAIGN_DEATHS // 4:
        with Scene(zygote, style, pause=chance.choice((0.0, 0.0002, 0.001))) as scene:
            scene.fill()
            until = min(deaths + DEATHS_PER_SCENE, tiers.CAMPAIGN_DEATHS // 4)
            while deaths < until:
                victim = next_victim(scene, chance)
                scene.bury(victim)
                deaths += 1
                replace(scene, victim, chance)
                deaths += bury_all(scene, chance)
            # One more in each place with an armed actor, so that the actors that account for it all live to do so.
            while armed := [player for player in scene.cast if player.armed]:
                player = armed[0]
                if player.is_alive():
                    player.kill()
                scene.bury(player)
                deaths += 1
                scene.add(player.role, player.index).hear("ready", within=actors.WATCHDOG)
            scene.must_flow()
            scene.finish()
            records += sum(scene.board.sent(player.actor) for player in scene.dead + scene.cast)
    assert records > deaths, "hardly anything was sent"
