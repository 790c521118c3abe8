"""Which replica a request belongs to."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from typing import Any

import pytest

from kvcore.server.affinity import HEAD_CHARACTERS, Affinity, affinity_key

CHAT = "/v1/chat/completions"


def key(**body: Any) -> str:
    return affinity_key(CHAT, json.dumps(body).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_all_turns_of_a_conversation_have_one_key() -> None:
    first = [{"role": "system", "content": "Be brief."}, user("Name a river.")]
    later = [*first, {"role": "assistant", "content": "The Elbe."}, user("Another?")]
    assert key(messages=first) == key(messages=later, temperature=1, model="x")
    assert key(messages=first) != key(messages=[first[0], user("Name a lake.")])
    assert key(messages=first) != key(messages=first[1:])


def test_prompts_that_begin_alike_have_one_key() -> None:
    text = "x" * HEAD_CHARACTERS
    assert key(prompt=text + "a") == key(prompt=text + "b") == key(prompt=[text + "c", "another"])
    assert key(prompt="a" + text) != key(prompt="b" + text)
    assert key(prompt=list(range(300))) == key(prompt=list(range(400))) != key(prompt=list(range(1, 300)))


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"messages": 5}', b'{"messages": []}'])
def test_a_body_of_another_kind_has_a_key_too(body: bytes) -> None:
    assert len(affinity_key("/v1/models", body)) == 32


def test_a_conversation_stays_where_it_went() -> None:
    affinity = Affinity()
    for number in range(50):
        affinity.went(str(number), "b")
    assert affinity.order("7", ["a", "b", "c"])[0] == "b"
    assert set(affinity.order("7", ["a", "b", "c"])) == {"a", "b", "c"}


@pytest.mark.parametrize("replicas", [2, 3, 7])
def test_conversations_are_spread_evenly(replicas: int) -> None:
    affinity, names = Affinity(), [f"r{i}" for i in range(replicas)]
    for number in range(30 * replicas):
        affinity.went(str(number), affinity.order(str(number), names)[0])
    counts = Counter(affinity.order(str(number), names)[0] for number in range(30 * replicas))
    assert max(counts.values()) <= 1.1 * 30 + 1
    assert min(counts.values()) >= 20


def test_a_replica_that_goes_moves_only_its_own_conversations() -> None:
    affinity, names = Affinity(), ["a", "b", "c"]
    homes = {}
    for number in map(str, range(90)):
        homes[number] = affinity.order(number, names)[0]
        affinity.went(number, homes[number])
    for number, home in homes.items():
        now = affinity.order(number, ["a", "c"])[0]
        assert now == home or home == "b"
        affinity.went(number, now)
    assert "b" not in {affinity.order(number, names)[0] for number in homes}  # it comes back empty


def test_two_routers_that_have_seen_nothing_agree() -> None:
    names = ["a", "b", "c"]
    assert [Affinity().order(str(n), names) for n in range(20)] == [Affinity().order(str(n), names) for n in range(20)]


def test_old_conversations_are_forgotten() -> None:
    affinity = Affinity(remembered=10)
    for number in range(1000):
        affinity.went(str(number), "a")
    assert affinity._counts == {"a": 10}
    assert len(affinity._homes) == 10


def test_replicas_that_hold_half_of_the_conversations_reuse_twice_as_much_as_at_random() -> None:
    """Replicas as stores that hold the 18 latest of 30 conversations: 300 turns in a random order."""

    def reused(affinity: Affinity | None) -> int:
        draw, stores = random.Random(0), {name: OrderedDict[str, int]() for name in ("a", "b")}
        rows = 0
        for turn in range(10):
            for conversation in draw.sample(range(30), 30):
                name = str(conversation)
                home = draw.choice("ab") if affinity is None else affinity.order(name, ["a", "b"])[0]
                if affinity is not None:
                    affinity.went(name, home)
                rows += stores[home].pop(name, 0)
                stores[home][name] = 100 * (turn + 1)
                while len(stores[home]) > 18:
                    stores[home].popitem(last=False)
        return rows

    assert reused(Affinity()) >= 1.5 * reused(None)
