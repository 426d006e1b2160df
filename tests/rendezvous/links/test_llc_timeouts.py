"""RFC 7609, C.7.1, first list: missing LLC replies.

Most rows have two cases: the message is lost although its send completes ("lose"), or its send
fails, which counts as a time-out ("fail").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rendezvous.links.llc_wire import Stage
from tests.rendezvous.rendezvous_pair import SIZE, World
from trio_smc.config.config import Config
from trio_smc.wire import llc

BIG = 4 * SIZE
WAYS = pytest.mark.parametrize("way", ["lose", "fail"])


@pytest.fixture
def world() -> Iterator[World]:
    with World(announces_end=False) as world:
        yield world


def provoke(stage: Stage, way: str, name: str, count: int = 1) -> None:
    getattr(stage.wire, way)(name, count)


# --- first contact, the second link ---------------------------------------------------------------


@pytest.mark.rfc("C.7.1/time-outs/2", "3.5.1.6.2/4", "3.5.1.6.2/5", "C.8/1", "C.8/2", "3.5.1.6/1")
@WAYS
def test_confirm_link_of_the_second_link_at_first_contact(world: World, way: str) -> None:
    stage = Stage(world, (2, 2), connect=False)
    provoke(stage, way, "C2 CONFIRM_LINK reply")
    seen: list[str] = []
    stage.wire.watch("C1 DELETE_LINK 2 reply", lambda: seen.append(stage.call.states[1]))
    assert world.finish() <= 5.0
    assert "S1 DELETE_LINK 2" in stage.log
    assert seen == ["CONFIRMING_LINK"]
    assert stage.call.states == ("ESTABLISHED", "ESTABLISHED")
    assert stage.links() == [1]
    assert stage.works()
    world.pass_time(400.0)
    assert stage.server.group.links.kind == "symmetric"
    assert stage.works()


@pytest.mark.rfc("C.7.1/time-outs/8")
def test_a_client_that_gets_no_confirm_link_on_the_second_link(world: World) -> None:
    stage = Stage(
        world, (2, 2), connect=False,
        configs=(Config(handshake_timeout=20), Config(first_contact_timeout=10)),
    )  # fmt: skip
    stage.wire.lose("S2 CONFIRM_LINK")
    seen: list[str] = []
    stage.wire.watch("S1 DELETE_LINK 2", lambda: seen.append(stage.call.states[0]))
    assert world.finish() == pytest.approx(5.0)
    place = stage.log.index("C1 DELETE_LINK 2")
    assert stage.log[place : place + 3] == [
        "C1 DELETE_LINK 2",
        "S1 DELETE_LINK 2",
        "C1 DELETE_LINK 2 reply",
    ]
    assert seen == ["CONFIRMING_LINK"]
    assert stage.links() == [1]
    assert stage.works()
    stage.log.clear()
    world.pass_time(400.0)
    assert any(name.startswith("C1 ADD_LINK 0") for name in stage.log) or "S1 ADD_LINK" in str(
        stage.log
    )
    assert stage.server.group.links.kind == "symmetric"


@pytest.mark.rfc("C.7.1/time-outs/11")
def test_a_client_that_waits_for_more_rtokens_at_first_contact(world: World) -> None:
    stage = Stage(world, (2, 2), connect=False)
    spare = llc.RTokenPair(reference_rkey=1, new_rkey=2, new_address=3)

    def promise(message: Any) -> llc.Message:
        return llc.AddLinkContinuation(
            link_number=message.link_number, tokens_left=3, pairs=(*message.pairs, spare)
        )

    stage.wire.change("S1 ADD_LINK_CONTINUATION", promise)
    stage.wire.lose("S2 CONFIRM_LINK")
    stage.wire.lose("S1 DELETE_LINK 2")
    world.finish()
    assert stage.call.client.tcp.cut == "rst"
    assert not stage.client.groups
    world.pass_time(70.0)
    assert not stage.server.groups
    assert not any(world.fabric.held.values())


@pytest.mark.parametrize("name", ["S1 ADD_LINK_CONTINUATION", "C1 ADD_LINK_CONTINUATION reply"])
def test_a_first_contact_without_the_rtoken_of_its_rmb(world: World, name: str) -> None:
    """3.5.1.6.3: without the RToken, the connection could not move to the new link."""
    stage = Stage(world, (2, 2), connect=False)

    def without(message: Any) -> llc.Message:
        return llc.AddLinkContinuation(
            reply=message.reply, link_number=message.link_number, tokens_left=0
        )

    stage.wire.change(name, without)
    world.finish()
    assert name in stage.log
    assert "S2 CONFIRM_LINK" not in stage.log


# --- later links ----------------------------------------------------------------------------------


def later(world: World) -> Stage:
    """Make a group with one link.  The server's second RNIC is down until the test changes that."""
    stage = Stage(world, (1, 2), down=1)
    assert stage.links() == [1]
    return stage


@pytest.mark.rfc("C.7.1/time-outs/3", "3.5.5.1.1/1", "3.5.5.1.1/3")
@WAYS
def test_confirm_link_of_a_later_link(world: World, way: str) -> None:
    stage = later(world)
    provoke(stage, way, "C3 CONFIRM_LINK reply")
    stage.server.rnics[1].port_up()
    world.until(lambda: any("CONFIRM_LINK" in name for name in stage.log))
    assert stage.works()  # while the link is being added
    world.pass_time(3.0)
    assert "S1 DELETE_LINK 3" in stage.log
    assert stage.links() == [1]
    assert stage.works()
    world.pass_time(400.0)
    assert stage.server.group.links.kind == "asymmetric"
    assert stage.works()


@pytest.mark.rfc("C.7.1/time-outs/9")
def test_a_client_that_gets_no_confirm_link_on_a_later_link(world: World) -> None:
    stage = Stage(world, (1, 2), down=1, configs=(None, Config(llc_timeout=4)))
    stage.wire.lose("S3 CONFIRM_LINK")
    stage.server.rnics[1].port_up()
    world.pass_time(3.0)
    place = stage.log.index("C1 DELETE_LINK 3")
    assert "S1 DELETE_LINK 3" in stage.log[place:] or "S1 DELETE_LINK 3 reply" in stage.log[place:]
    assert stage.links() == [1]
    assert stage.works()
    world.pass_time(400.0)
    assert stage.server.group.links.kind == "asymmetric"


ADDING = pytest.mark.parametrize(
    "name",
    [
        pytest.param("S{} ADD_LINK {}", marks=pytest.mark.rfc("C.7.1/time-outs/6")),
        pytest.param("C{} ADD_LINK {} reply", marks=pytest.mark.rfc("C.7.1/time-outs/6")),
        pytest.param("S{} ADD_LINK_CONTINUATION", marks=pytest.mark.rfc("C.7.1/time-outs/7")),
        pytest.param(
            "C{} ADD_LINK_CONTINUATION reply", marks=pytest.mark.rfc("C.7.1/time-outs/10")
        ),
    ],
)


@ADDING
@WAYS
def test_an_addition_that_stops_ends_a_group_with_one_link(
    world: World, way: str, name: str
) -> None:
    stage = later(world)
    provoke(stage, way, name.format(1, 3))
    stage.server.rnics[1].port_up()
    world.pass_time(70.0)
    assert stage.is_over()


@ADDING
@WAYS
def test_an_interrupted_addition_begins_again_over_another_link(
    world: World, way: str, name: str
) -> None:
    stage = Stage(world, (3, 3), down=1)
    assert len(stage.links()) == 2
    number = max(stage.links()) + 2  # the client has rejected one number
    provoke(stage, way, name.format(1, r"\d"))
    stage.log.clear()
    stage.server.rnics[2].port_up()
    world.pass_time(4.0)
    assert any(each.startswith("S2 DELETE_LINK 1") for each in stage.log), (number, stage.log)
    assert any(each.startswith("S2 ADD_LINK") for each in stage.log)
    world.pass_time(70.0)
    assert 1 not in stage.links()
    assert stage.server.group.links.kind == "symmetric"
    assert stage.works()


@pytest.mark.rfc("C.7.1/time-outs/12")
@pytest.mark.parametrize("rnics", [(1, 2), (3, 3)])
def test_a_client_that_waits_for_more_rtokens_later(world: World, rnics: tuple[int, int]) -> None:
    stage = Stage(world, rnics, down=1)
    for _ in range(3):
        world.connect(stage.client, stage.server, size=BIG)
    seen: list[str] = []

    def lose_the_second() -> None:
        seen.append("first")
        stage.wire.lose("S1 ADD_LINK_CONTINUATION")

    stage.wire.watch("S1 ADD_LINK_CONTINUATION", lose_the_second)
    stage.log.clear()
    stage.server.rnics[-1].port_up()
    world.pass_time(70.0)
    assert seen
    if rnics == (1, 2):
        assert stage.is_over()
    else:
        assert "C2 DELETE_LINK 1" in stage.log
        assert 1 not in stage.links()
        assert stage.works()


# --- DELETE LINK ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, marks=pytest.mark.rfc("C.7.1/time-outs/13")),
        pytest.param(1, marks=pytest.mark.rfc("C.7.1/time-outs/15")),
    ],
)
@WAYS
def test_delete_link_is_sent_again_over_a_surviving_link(
    world: World, way: str, place: int
) -> None:
    """The side also deletes the link that carried the request without an answer."""
    stage = Stage(world, (3, 3))
    assert stage.links() == [1, 2, 3]
    letter = "CS"[place]
    provoke(stage, way, f"{letter}1 DELETE_LINK 3")
    stage.end(place).group.delete_link(3, orderly=True, reason=llc.DeleteLinkReason.OPERATOR)
    world.pass_time(7.0)
    assert f"{letter}2 DELETE_LINK 3" in stage.log
    assert f"{letter}2 DELETE_LINK 1" in stage.log
    assert not {1, 3} & set(stage.links())
    assert stage.works()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, marks=pytest.mark.rfc("C.7.1/time-outs/13")),
        pytest.param(1, marks=pytest.mark.rfc("C.7.1/time-outs/15")),
    ],
)
@WAYS
def test_delete_link_without_an_answer_on_the_last_link(world: World, way: str, place: int) -> None:
    stage = Stage(world, (1, 1))
    provoke(stage, way, r"[CS]1 DELETE_LINK 1.*", 3)
    stage.end(place).group.delete_link(1, orderly=False, reason=llc.DeleteLinkReason.OPERATOR)
    world.pass_time(70.0)
    assert stage.is_over()


def test_a_server_that_never_deletes_a_lost_link_costs_no_connection(world: World) -> None:
    """Linux over soft-RoCE deletes no link while it waits for its own sends on that link."""
    stage = Stage(world, (2, 2))
    stage.wire.lose("C2 DELETE_LINK 1", 99)
    stage.client.group.links[1].machine.send("failed")
    world.pass_time(70.0)
    assert "C2 DELETE_LINK 1" in stage.log
    assert stage.client.group.links[2].state == "ACTIVE"
    assert stage.works()


def test_a_client_that_never_answers_for_a_lost_link_ends_no_connection(world: World) -> None:
    """The server keeps waiting for the answer, and the connection continues."""
    stage = Stage(world, (2, 2))
    stage.wire.lose("C2 DELETE_LINK 1 reply", 99)
    stage.server.group.links[1].machine.send("failed")
    world.pass_time(70.0)
    assert "S2 DELETE_LINK 1" in stage.log
    assert stage.server.group.links[2].state == "ACTIVE"
    assert stage.server.group.exchanges.state == "DELETE_LINK"
    assert stage.works()


@pytest.mark.parametrize("place", [0, 1])
def test_delete_link_of_a_lost_link_is_sent_again_over_the_last_one(
    world: World, place: int
) -> None:
    """Linux drops requests that arrive during another exchange of its own."""
    stage = Stage(world, (2, 2))
    letter = "CS"[place]
    stage.wire.lose(f"{letter}2 DELETE_LINK 1")
    rnic = stage.end(place).rnics[0]
    rnic.port_down()
    world.pass_time(9.0)
    assert stage.log.count(f"{letter}2 DELETE_LINK 1") >= 2
    assert 1 not in stage.links()
    rnic.port_up()
    world.pass_time(1.0)
    assert stage.server.group.links.kind == "symmetric"
    assert stage.works()


# --- a client that rejects a link after it has accepted it, like Linux ----------------------------


def reject_after_agreement(stage: Stage, lost: str) -> None:
    """Let the client, like Linux, reject a link after it has accepted it, because it cannot use it.

    lost: the message that the client ignores; at this moment it removes and rejects the link.
    """

    def reject() -> None:
        group = stage.client.group
        number = group.adding.number
        group.exchanges.stop_reply_timer()
        group.exchanges.machine.send("superseded")
        group.links[1].send_llc(
            llc.AddLink(
                reply=True, rejected=True, reason=llc.AddLinkReason.NO_ALTERNATE_PATH,
                mac=bytes(6), gid=bytes(16), link_number=number,
            )
        )  # fmt: skip

    stage.wire.watch_and_lose(lost, reject)


@pytest.mark.parametrize(
    "lost", ["S1 ADD_LINK_CONTINUATION", "S3 CONFIRM_LINK", "S1 DELETE_LINK 3"]
)
def test_a_link_that_the_client_agreed_to_and_then_rejects(world: World, lost: str) -> None:
    """The connection continues, the server does not wait for the client, and the sides add the link
    later."""
    stage = later(world)
    if "DELETE" in lost:
        stage.wire.fail("S3 CONFIRM_LINK")
    reject_after_agreement(stage, lost)
    stage.server.rnics[1].port_up()
    world.pass_time(1.5)  # less than the reply time-out
    assert any(each.startswith("C1 ADD_LINK 3 reply negative") for each in stage.log), stage.log
    assert stage.server.group.exchanges.state == "IDLE"
    assert stage.links() == [1]
    assert stage.works()
    world.pass_time(400.0)
    assert stage.server.group.links.kind == "asymmetric"
    assert stage.works()


def test_a_late_rejection_of_a_deleted_link_is_no_violation(world: World) -> None:
    """The rejection names a link that is already deleted, while the server offers the next one."""
    stage = later(world)
    stage.wire.lose("C3 CONFIRM_LINK reply")
    stage.server.rnics[1].port_up()
    world.pass_time(3.0)
    assert "C1 DELETE_LINK 3 reply" in stage.log
    rejection = llc.AddLink(
        reply=True, rejected=True, reason=llc.AddLinkReason.NO_ALTERNATE_PATH,
        mac=bytes(6), gid=bytes(16), link_number=3,
    )  # fmt: skip
    stage.wire.watch("C1 ADD_LINK 4 reply", lambda: stage.client.group.links[1].send_llc(rejection))
    world.pass_time(400.0)
    assert "C1 ADD_LINK 3 reply negative" in stage.log
    assert stage.links() == [1, 4]
    assert stage.works()


@pytest.mark.rfc("C.7.1/time-outs/14")
@pytest.mark.parametrize("place", [0, 1])
def test_delete_link_for_the_group_is_tried_on_other_links(world: World, place: int) -> None:
    stage = Stage(world, (2, 2))
    letter = "CS"[place]
    stage.wire.fail(f"{letter}1 DELETE_LINK all")
    stage.end(place).group.terminate()
    world.settle()
    assert stage.log[:2] == [f"{letter}1 DELETE_LINK all", f"{letter}2 DELETE_LINK all"]
    assert stage.is_over()


@pytest.mark.rfc("C.7.1/time-outs/14")
@WAYS
@pytest.mark.parametrize("place", [0, 1])
def test_a_group_ends_although_no_peer_receives_it(world: World, place: int, way: str) -> None:
    stage = Stage(world, (2, 2))
    provoke(stage, way, r"[CS][12] DELETE_LINK all", 10)
    stage.end(place).group.terminate()
    world.pass_time(5.0)
    assert not stage.end(place).groups
    world.pass_time(70.0)
    assert stage.is_over()


# --- CONFIRM RKEY and TEST LINK -------------------------------------------------------------------


def new_rmb(stage: Stage, place: int) -> None:
    """Request an element for which this side needs a new RMB."""
    stage.end(place).group.request_element(BIG, lambda _: None)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        pytest.param(0, 16, marks=pytest.mark.rfc("C.7.1/time-outs/16")),
        pytest.param(1, 17, marks=pytest.mark.rfc("C.7.1/time-outs/17")),
    ],
)
@pytest.mark.parametrize("message", ["{}1 CONFIRM_RKEY", "{}1 CONFIRM_RKEY reply"])
@WAYS
def test_confirm_rkey_without_reply_fails_its_link(
    world: World, way: str, message: str, place: int, number: int
) -> None:
    stage = Stage(world, (2, 2))
    provoke(
        stage,
        way,
        message.format("CS"["reply" in message] if place == 0 else "SC"["reply" in message]),
    )
    new_rmb(stage, place)
    world.pass_time(4.0)
    assert any(name.endswith("2 DELETE_LINK 1") for name in stage.log), stage.log
    assert 1 not in stage.links()
    world.pass_time(70.0)
    assert stage.works()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, marks=pytest.mark.rfc("C.7.1/time-outs/18")),
        pytest.param(1, marks=pytest.mark.rfc("C.7.1/time-outs/19")),
    ],
)
@WAYS
def test_test_link_without_reply_fails_its_link(world: World, way: str, place: int) -> None:
    configs: list[Config | None] = [Config(test_link_interval=10_000)] * 2
    configs[place] = None
    stage = Stage(world, (2, 2), configs=(configs[0], configs[1]))
    provoke(stage, way, f"{'CS'[place]}1 TEST_LINK")
    world.pass_time_until(lambda: 1 not in stage.end(place).group.links)
    world.settle()
    assert any(name.endswith("2 DELETE_LINK 1") for name in stage.log), stage.log
    assert 1 not in stage.links()
    assert stage.works()
