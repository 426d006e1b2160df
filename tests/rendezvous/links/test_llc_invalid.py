"""RFC 7609, C.7.1, second list: invalid LLC messages in groups with several links.

Tests with one link are in `test_link_group_life`, `test_negotiation_first_contact`,
`test_negotiation_declines` and `test_rkeys`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rendezvous.links.llc_wire import Stage
from tests.rendezvous.rendezvous_pair import SIZE, World
from trio_smc.wire import llc


@pytest.fixture
def world() -> Iterator[World]:
    with World(announces_end=False) as world:
        yield world


@pytest.mark.rfc("C.7.1/messages/1")
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("field", ["qp_number", "gid", "mac"])
def test_confirm_link_names_another_queue_pair(world: World, field: str, later: bool) -> None:
    def corrupt(message: Any) -> llc.Message:
        value = getattr(message, field)
        wrong = value ^ 1 if isinstance(value, int) else bytes((value[0] ^ 1,)) + value[1:]
        changed: llc.Message = dataclasses.replace(message, **{field: wrong})
        return changed

    stage = Stage(world, (1, 2) if later else (2, 2), down=int(later), connect=False)
    stage.wire.change("S[23] CONFIRM_LINK", corrupt)
    world.finish()
    if later:
        stage.server.rnics[1].port_up()
        world.settle()
    world.pass_time(6.0)
    number = 3 if later else 2
    assert f"C1 DELETE_LINK {number}" in stage.log
    assert stage.links() == [1]
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/2", "A.3.2/3")
@pytest.mark.parametrize("mtu", [0, 6, 15])
def test_add_link_with_an_undefined_mtu(world: World, mtu: int) -> None:
    stage = Stage(world, (2, 2), connect=False)
    stage.wire.change("S1 ADD_LINK 2", lambda message: dataclasses.replace(message, qp_mtu=mtu))
    replies: list[Any] = []

    def record(message: Any) -> llc.Message:
        replies.append(message)
        reply: llc.Message = message
        return reply

    stage.wire.change("C1 ADD_LINK 2 reply negative", record)
    world.finish()
    (reply,) = replies
    assert (reply.rejected, reply.reason) == (True, llc.AddLinkReason.INVALID_MTU)
    assert stage.links() == [1]
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/3", "2.2.1/1")
def test_an_add_link_reply_that_makes_a_parallel_link(world: World) -> None:
    stage = Stage(world, (2, 1), connect=False)
    first = stage.client.rnics[0]
    stage.wire.change(
        "C1 ADD_LINK 2 reply",
        lambda message: dataclasses.replace(message, gid=first.gid, mac=first.mac),
    )
    world.finish()
    assert "S1 DELETE_LINK 2" in stage.log
    assert stage.links() == [1]
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/4")
def test_commands_on_a_link_whose_orderly_deletion_was_requested(world: World) -> None:
    """The client ignores CONFIRM RKEY on that link, and the server repeats it on another link."""
    stage = Stage(world, (2, 2))
    done: list[object] = []
    stage.server.group.request_element(4 * SIZE, done.append)
    stage.client.group.delete_link(1, orderly=True)
    world.settle()
    assert stage.log[:2] == ["S1 CONFIRM_RKEY", "C2 DELETE_LINK 1"]
    assert not any(name.startswith("C1") for name in stage.log)
    world.pass_time(3.0)
    assert not any(name.startswith("C1") for name in stage.log)
    assert "C2 CONFIRM_RKEY reply" in stage.log
    assert done[0] is not None
    assert 1 not in stage.links()
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/4")
def test_the_group_ends_by_a_message_on_a_link_that_is_to_be_deleted(world: World) -> None:
    stage = Stage(world, (2, 2))
    stage.server.group.request_element(4 * SIZE, lambda _: None)
    stage.client.group.delete_link(1, orderly=True)
    world.settle()
    stage.server.group.links[1].send_llc(
        llc.DeleteLink(all_links=True, link_number=0, reason=llc.DeleteLinkReason.PROGRAM)
    )
    world.settle()
    assert not stage.client.groups
    world.pass_time(70.0)
    assert stage.is_over()


@pytest.mark.rfc("2.3/7", "2.3/8")
def test_messages_on_a_link_that_has_failed_at_the_client(world: World) -> None:
    """The server's CONFIRM RKEY has arrived, but is not processed yet, when the client notices the
    failed link."""
    stage = Stage(world, (2, 2))
    done: list[object] = []
    stage.server.group.request_element(4 * SIZE, done.append)
    world.fabric.deliver(1)
    assert stage.log == ["S1 CONFIRM_RKEY"]
    record = stage.server.record()
    stage.client.group.links[1].machine.send("failed")
    world.pass_time(10.0)
    (again,) = [
        llc.decode_untrusted(data)
        for kind, way, data in record.messages()
        if (kind, way) == ("llc", "out") and data[0] == llc.MessageType.CONFIRM_RKEY
    ]
    assert isinstance(again, llc.ConfirmRkey)
    assert 1 not in {each.link_number for each in again.others}, "the server sent the old message"
    assert stage.log[1] == "C2 DELETE_LINK 1"
    assert "C1 CONFIRM_RKEY reply" not in stage.log
    assert stage.log.index("S2 DELETE_LINK 1") < stage.log.index(
        "S2 CONFIRM_RKEY"
    )  # 2.3: the server sends the message again
    assert done[0] is not None
    assert 1 not in stage.links()
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/5")
@pytest.mark.parametrize("rnics", [(1, 2), (3, 3)])
@pytest.mark.parametrize("name", ["S1 ADD_LINK_CONTINUATION", "C1 ADD_LINK_CONTINUATION reply"])
def test_rtokens_that_differ_from_the_announced_count(
    world: World, name: str, rnics: tuple[int, int]
) -> None:
    stage = Stage(world, rnics, down=1)
    for _ in range(3):
        world.connect(stage.client, stage.server, size=4 * SIZE)
    seen: list[int] = []

    def miscount(message: Any) -> llc.Message:
        seen.append(message.tokens_left)
        left = message.tokens_left + (len(seen) == 2)
        changed: llc.Message = dataclasses.replace(message, tokens_left=left)
        return changed

    stage.wire.change(name, miscount, count=2)
    stage.server.rnics[-1].port_up()
    world.pass_time(70.0)
    assert seen[0] - seen[1] == 2
    if rnics == (1, 2):
        assert stage.is_over()
    else:
        assert 1 not in stage.links()
        assert any(each.endswith("2 DELETE_LINK 1") for each in stage.log)
        assert stage.works()


@pytest.mark.rfc("C.7.1/messages/5")
@pytest.mark.parametrize("name", ["S1 ADD_LINK_CONTINUATION", "C1 ADD_LINK_CONTINUATION reply"])
def test_fewer_rtokens_than_there_are_rmbs_in_use(world: World, name: str) -> None:
    """All counts are consistent, but one RMB is missing."""
    stage = Stage(world, (3, 3), down=1)
    for _ in range(3):
        world.pass_time(2.0)  # slow, so no RMB is made in advance
        world.connect(stage.client, stage.server, size=4 * SIZE)
    announced: list[int] = []

    def leave_one_out(message: Any) -> llc.Message:
        left = message.tokens_left - 1
        announced.append(left)
        changed: llc.Message = dataclasses.replace(
            message, tokens_left=left, pairs=message.pairs[: min(left, 2)]
        )
        return changed

    stage.wire.change(name, leave_one_out, count=2)
    stage.server.rnics[-1].port_up()
    world.pass_time(70.0)
    assert announced == [3, 1]
    assert 1 not in stage.links()
    assert any(each.endswith("2 DELETE_LINK 1") for each in stage.log)
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/6")
def test_a_clients_delete_link_for_a_link_that_is_being_deleted(world: World) -> None:
    """The two sides begin to delete the link at the same time."""
    stage = Stage(world, (2, 2))
    stage.server.group.delete_link(2, orderly=False)
    stage.client.group.delete_link(2, orderly=False)
    world.settle()
    assert sorted(each for each in stage.log if each.endswith("DELETE_LINK 2")) == [
        "C1 DELETE_LINK 2",
        "S1 DELETE_LINK 2",
    ]
    assert not any(each.startswith("S") and each.endswith("reply") for each in stage.log)
    world.pass_time(10.0)
    assert 2 not in stage.links()
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/6", "C.7.1/messages/7", "A.3.4/6")
@pytest.mark.parametrize("place", [0, 1])
def test_delete_link_of_an_unknown_link(world: World, place: int) -> None:
    stage = Stage(world, (2, 2))
    link = stage.end(place).group.links[1]
    replies: list[Any] = []

    def record(message: Any) -> llc.Message:
        replies.append(message)
        reply: llc.Message = message
        return reply

    stage.wire.change(f"{'SC'[place]}1 DELETE_LINK 77 reply", record)
    link.send_llc(llc.DeleteLink(link_number=77, reason=llc.DeleteLinkReason.OPERATOR))
    world.settle()
    (reply,) = replies
    assert reply.reason == llc.DeleteLinkReason.UNKNOWN_LINK
    assert stage.links() == [1, 2]
    assert stage.works()


def test_a_late_rejection_causes_no_request(world: World) -> None:
    """Linux sends a rejection after an accepting reply if the link was not confirmed in time."""
    stage = Stage(world, (2, 2))
    assert stage.links() == [1, 2]

    def reject_late(message: Any) -> llc.Message:
        return llc.AddLink(
            reply=True, rejected=True, reason=1, mac=bytes(6), gid=bytes(16), link_number=2
        )

    stage.wire.change("C1 TEST_LINK.*", reject_late)
    stage.client.group.links[1].send_llc(llc.TestLink(user_data=bytes(16)))
    world.settle()
    assert stage.links() == [1, 2]
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/13", "A.3.4/5")
@pytest.mark.parametrize("number", [1, 2])
def test_add_link_with_the_number_of_a_link_of_the_group(world: World, number: int) -> None:
    """The two sides disagree on their links, so the client ends the link that carried the
    message."""
    stage = Stage(world, (3, 2))
    client = stage.client.record()
    stage.wire.change(
        "S[12] ADD_LINK 3", lambda message: dataclasses.replace(message, link_number=number)
    )
    carrier = stage.server.group.links.oldest()
    assert carrier is not None
    stage.server.add_rnic()
    world.settle()
    sent = [llc.decode_untrusted(data) for kind, way, data in client.messages()
            if (kind, way) == ("llc", "out")]  # fmt: skip
    deletions = [each for each in sent if isinstance(each, llc.DeleteLink) and not each.reply]
    assert [(each.link_number, each.reason) for each in deletions] == [
        (carrier.number, llc.DeleteLinkReason.PROTOCOL_VIOLATION)
    ]
    assert not any(isinstance(each, llc.AddLink) and each.rejected for each in sent)
    world.pass_time(20.0)
    assert carrier.number not in stage.links()
    assert stage.works()


@pytest.mark.rfc("C.7.1/messages/13")
def test_add_link_with_the_first_links_number_at_first_contact(world: World) -> None:
    """There is no other link, so the first contact fails."""
    stage = Stage(world, (2, 2), connect=False)
    stage.wire.change("S1 ADD_LINK 2", lambda message: dataclasses.replace(message, link_number=1))
    world.finish()
    assert stage.call.client.state == "FAILED"
    assert "number of link 1" in str(stage.call.client.error)
    assert not stage.client.groups


@pytest.mark.rfc("C.7.1/messages/13")
def test_add_link_with_the_number_of_a_link_that_the_server_has_just_freed(world: World) -> None:
    """The reply to DELETE LINK has arrived at the server, but the client has not seen its
    completion yet.  This is no disagreement."""
    stage = Stage(world, (2, 2))
    client = stage.client.record()
    offer = llc.AddLink(
        mac=bytes(6), gid=bytes(16), qp_number=9, link_number=2, qp_mtu=5, initial_psn=0
    ).encode()
    stage.wire.watch(
        "C1 DELETE_LINK 2 reply", lambda: stage.client.group.links[1].receive_untrusted(offer)
    )
    stage.server.group.delete_link(2)
    world.settle()
    sent = [llc.decode_untrusted(data) for kind, way, data in client.messages()
            if (kind, way) == ("llc", "out")]  # fmt: skip
    assert any(isinstance(each, llc.AddLink) and each.rejected for each in sent)
    assert stage.links() == [1]
    assert stage.works()


def test_add_link_without_a_queue_pair_is_rejected(world: World) -> None:
    """Such a message offers no link, so its link number has no meaning."""
    stage = Stage(world, (2, 2), connect=False)
    stage.wire.change(
        "S1 ADD_LINK 2",
        lambda message: dataclasses.replace(message, link_number=1, qp_number=0, qp_mtu=0),
    )
    world.finish()
    assert stage.call.client.state == "ESTABLISHED"
