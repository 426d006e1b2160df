"""SMC-R version 2 between two whole stacks: contacts, second links, RKeys, and a dishonest peer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import Call, Side, World, exchange, proposal_of
from tests.rendezvous.transcripts import line, messages
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc._base.reasons import FallbackReason, Origin
from trio_smc.config.config import Config
from trio_smc.rendezvous.client import ClientNegotiation
from trio_smc.rendezvous.links.link import Link
from trio_smc.rendezvous.links.link_set import LinkGroupKind
from trio_smc.rendezvous.terms import Offer
from trio_smc.wire import clc, llc
from trio_smc.wire.fields import encode_ueid

V2 = Config(ueids=("TRIO-SMC.TEST", "OTHER"))
HELLO = (b"ping", b"pong")


def pair(world: World, config: Config = V2, **options: Any) -> tuple[Side, Side]:
    """Two stacks that speak version 2."""
    options = {"routable": True, **options}
    return world.side(config, **options), world.side(config, **options)


def change_offer(side: Side, **changes: Any) -> None:
    """Change the offer of a side."""
    assert side.stack.groups.offer is not None
    side.stack.groups.offer = replace(side.stack.groups.offer, **changes)


def sent_messages(side: Side, kind: type[Any]) -> list[Any]:
    """The CLC messages of one kind."""
    found = [
        clc.decode_untrusted(data) for codec, _, data in side.recorder.messages() if codec == "clc"
    ]
    return [each for each in found if isinstance(each, kind)]


# --- contacts -------------------------------------------------------------------------------------


@pytest.mark.v2("v2.2/1", "v2.5/1", "v2.9/5")
def test_first_contact() -> None:
    with World() as world:
        client, server = pair(world)
        at_client, at_server = client.record(), server.record()
        call = world.connect(client, server)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert [line(each) for each in at_client.messages()] == [
            "out PROPOSAL",
            "in ACCEPT",
            "out CONFIRM",
            "in CONFIRM_LINK",
            "out CONFIRM_LINK reply",
            "in ADD_LINK",
            "out ADD_LINK reply",
        ]
        assert len(at_client.messages()) == len(at_server.messages())
        # Proposal with two EIDs and both versions, first-contact Accept, Confirm with one GID.
        sizes = [len(data) for codec, _, data in at_client.messages() if codec == "clc"]
        assert sizes == [132 + 64, 160, 180]
        assert client.group.terms == server.group.terms
        assert client.group.terms.version == 2
        assert client.group.terms.release == 1
        assert client.group.terms.eid == encode_ueid("TRIO-SMC.TEST")
        [confirm_link, _] = messages(client, llc.ConfirmLink, llc.V2)
        assert (confirm_link.max_links, confirm_link.max_connections) == (2, 255)
        assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.4/1", "v2.12/5")
def test_subsequent_contact_and_rkeys() -> None:
    """Further connections use the group, and the sides announce new RMBs."""
    with World() as world:
        client, server = pair(world, replace(V2, link_group_idle=1000))
        first = world.connect(client, server)
        client.record()
        calls = [first, *(world.connect(client, server) for _ in range(5))]
        assert len(client.groups) == len(server.groups) == 1
        assert {len(each.encode()) for each in sent_messages(client, clc.Accept)} == {108}
        assert {len(each.encode()) for each in sent_messages(client, clc.Confirm)} == {108}
        assert messages(client, llc.ConfirmRkey, llc.V2)
        for call in calls:
            assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.12/2")
def test_delete_rkey_of_unknown_rkeys_gets_a_negative_reply() -> None:
    with World() as world:
        client, server = pair(world)
        world.connect(client, server)
        client.record()
        [link] = server.group.links.values()
        known = len(client.group.peer_rmbs)
        request = llc.DeleteRkey(rkeys=tuple(range(1, 13)))
        client.group.on_llc_untrusted(client.group.links[link.number], llc.V2.encode(request))
        [reply] = messages(client, llc.DeleteRkey, llc.V2)
        assert (reply.reply, reply.negative, reply.unknown) == (True, True, 12)
        assert len(client.group.peer_rmbs) == known


@pytest.mark.v2("v2.3/1")
@pytest.mark.parametrize(("client_has", "server_has"), [(True, False), (False, True)])
def test_version_1_where_only_that_fits(client_has: bool, server_has: bool) -> None:
    with World() as world:
        config = (Config(), V2)
        client = world.side(config[client_has], routable=True)
        server = world.side(config[server_has], routable=True)
        call = world.connect(client, server)
        assert client.group.terms.version == server.group.terms.version == 1
        assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.1/6")
def test_without_ueids_nothing_changes_on_the_wire() -> None:
    with World() as world:
        client, server = world.side(routable=True), world.side(routable=True)
        client.record()
        world.connect(client, server)
        sizes = [len(data) for codec, _, data in client.recorder.messages() if codec == "clc"]
        assert sizes == [52, 68, 68]


@pytest.mark.v2("v2.7/1")
def test_groups_of_both_versions_beside_each_other() -> None:
    """A Proposal of version 1 does not find the group of version 2."""
    with World() as world:
        client, server = pair(world)
        world.connect(client, server)
        plain = proposal_of(client)
        client_offer, client.stack.groups.offer = client.stack.groups.offer, None
        call = world.connect(client, server, proposal=replace(plain, version=1, flags=0, v2=None))
        assert sorted(group.terms.version for group in server.groups) == [1, 2]
        assert exchange(world, call, HELLO) == HELLO[::-1]
        client.stack.groups.offer = client_offer
        world.connect(client, server)
        assert len(server.groups) == 2


# --- Linux as client ------------------------------------------------------------------------------


def without_peer_id(client: Side) -> clc.Proposal:
    """The Proposal of Linux over soft-RoCE: version 2 alone, without peer ID, GID and MAC."""
    return replace(
        proposal_of(client), peer_id=bytes(8), gid=bytes(16), mac=bytes(6), ipv4_subnet=bytes(4),
        ipv4_mask_length=0, flags=clc.proposal_flags(v1=False, v2=True),
    )  # fmt: skip


@pytest.mark.v2("v2.2/3", "v2.5/5", "v2.7/2")
def test_clients_without_peer_ids_differ_by_their_gids() -> None:
    with World() as world:
        one, server = pair(world)
        other = world.side(V2, routable=True)
        calls = [
            world.connect(client, server, proposal=without_peer_id(client))
            for client in (one, other, one, other)
        ]
        assert len(server.groups) == 2
        ids = {group.peer_id for group in server.groups}
        assert ids == {one.stack.groups.peer_id, other.stack.groups.peer_id}
        for call in calls:
            assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.7/2")
def test_two_clients_without_peer_ids_make_first_contact_at_once() -> None:
    with World() as world:
        one, server = pair(world)
        other = world.side(V2, routable=True)
        calls = [
            world.call(client, server, proposal=without_peer_id(client))
            for client in (one, other, one, other)
        ]
        world.settle()
        assert {call.states for call in calls} == {("ESTABLISHED", "ESTABLISHED")}
        assert len(server.groups) == 2


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.v2("v2.7/3")
def test_the_seventeenth_connection_opens_a_second_group() -> None:
    """The seventeenth connection makes a second group."""
    with World() as world:
        client, server = pair(world)
        change_offer(client, max_connections=16)
        calls = [world.call(client, server, size=16384) for _ in range(17)]
        world.settle()
        assert sorted(len(group.connections) for group in server.groups) == [1, 16]
        assert {call.states for call in calls} == {("ESTABLISHED", "ESTABLISHED")}


@pytest.mark.v2("v2.7/5")
@pytest.mark.parametrize("limited", [0, 1])
def test_a_limit_of_one_link_prevents_a_second_link(limited: int) -> None:
    """With max_links of 1 there is no ADD LINK, even if further RNICs appear."""
    with World() as world:
        sides = pair(world, rnics=2)
        client, server = sides
        change_offer(sides[limited], max_links=1)
        client.record()
        call = world.connect(client, server)
        for side in sides:
            side.add_rnic()
        world.pass_time(400)
        assert not messages(client, llc.AddLink, llc.V2)
        assert len(client.group.links) == len(server.group.links) == 1
        assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.4/7", "v2.9/5")
def test_both_sides_may_agree_on_release_0() -> None:
    with World() as world:
        client, server = pair(world)
        change_offer(client, release=0)
        client.record()
        call = world.connect(client, server)
        assert client.group.terms.release == server.group.terms.release == 0
        [accept] = sent_messages(client, clc.Accept)
        first = accept.v2.first
        assert (first.release, first.max_connections, first.max_links) == (0, 0, 0)
        [message, _] = messages(client, llc.ConfirmLink, llc.V2)
        assert message.max_connections == 0
        assert exchange(world, call, HELLO) == HELLO[::-1]


# --- further links --------------------------------------------------------------------------------


@pytest.mark.v2("v2.5/1", "v2.10/1")
def test_a_symmetric_group() -> None:
    with World() as world:
        client, server = pair(world, rnics=2)
        client.record()
        call = world.connect(client, server)
        assert client.group.kind is server.group.kind is LinkGroupKind.SYMMETRIC
        offer, reply = messages(client, llc.AddLink, llc.V2)
        for each in (offer, reply):
            assert each.extension is not None
            assert len(each.extension.pairs) == 1
        assert not messages(client, llc.AddLinkContinuation, llc.V2)
        [confirm] = sent_messages(client, clc.Confirm)
        assert confirm.v2.gids == (client.rnics[0].gid, client.rnics[1].gid)
        # The second link carries data after the end of the first.
        client.rnics[0].port_down()
        world.settle()
        assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.10/1")
def test_many_rmbs_are_announced_at_once() -> None:
    with World() as world:
        client, server = pair(world)
        calls = [world.connect(client, server) for _ in range(9)]
        for side in (client, server):
            side.record()
            side.add_rnic()
        world.settle()
        assert client.group.kind is LinkGroupKind.SYMMETRIC
        extensions = [
            each.extension for each in messages(client, llc.AddLink, llc.V2) if each.extension
        ]
        assert max(len(each.pairs) for each in extensions) >= 3
        client.rnics[0].port_down()
        world.settle()
        for call in calls:
            assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.11/1", "v2.11/2")
def test_a_client_requests_a_link() -> None:
    """When its second RNIC appears, the client sends REQUEST ADD LINK, and the server ADD LINK."""
    with World() as world:
        client, server = world.side(V2, routable=True), world.side(V2, routable=True, rnics=2)
        world.connect(client, server)
        assert len(client.group.links.asymmetric()) == 1
        client.record()
        rnic = client.add_rnic()
        world.settle()
        assert client.group.kind is server.group.kind is LinkGroupKind.SYMMETRIC
        request = messages(client, llc.RequestAddLink, llc.V2)[0]
        assert request.gids == (client.rnic.gid, rnic.gid)
        assert not request.reply


@pytest.mark.v2("v2.11/2")
def test_a_server_that_adds_no_link_replies_so() -> None:
    with World() as world:
        client, server = pair(world)
        world.connect(client, server)
        server.record()
        server.rnic.most_qps = len(server.rnic.qps)
        client.add_rnic()
        world.settle()
        [request, reply] = messages(server, llc.RequestAddLink, llc.V2)
        assert reply.reply
        assert not reply.gids
        assert len(llc.V2.encode(reply)) == 44
        assert not request.reply


@pytest.mark.v2("v2.7/6")
def test_a_group_of_version_2_uses_only_routable_rnics() -> None:
    with World() as world:
        client, server = pair(world)
        for side in (client, server):
            side.open_rnic(routable=False)
        world.connect(client, server)
        assert client.group.kind is LinkGroupKind.SINGLE


# --- refusals -------------------------------------------------------------------------------------


def refusal(world: World, call: Call) -> FallbackReason:
    """Check that both sides use TCP for the same reason, and return the reason."""
    world.settle()
    ends = call.ends
    assert {end.state for end in ends} == {"FALLEN_BACK"}, call.states
    [ours] = [end.fallback for end in ends if end.fallback.origin is Origin.LOCAL]
    [theirs] = [end.fallback for end in ends if end.fallback.origin is Origin.PEER]
    assert theirs.peer_code == ours.code
    assert theirs.reason is ours.reason
    return ours.reason


def only_v2(client: Side, **changes: Any) -> clc.Proposal:
    proposal = without_peer_id(client)
    assert proposal.v2 is not None
    return replace(proposal, v2=replace(proposal.v2, **changes))


@pytest.mark.v2("v2.3/4", "v2.3/6", "v2.3/7", "v2.6/1", "v2.6/5")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eids": ()}, FallbackReason.NO_COMMON_UEID),
        ({"eids": (encode_ueid("ELSE"),) * 8}, FallbackReason.NO_COMMON_UEID),
        ({"max_connections": 15}, FallbackReason.CONNECTION_LIMIT),
        ({"max_links": 0}, FallbackReason.LINK_LIMIT),
        ({"gid": bytes(16)}, FallbackReason.NO_ROUTE),
        ({"gid": b"\xfe\x80" + bytes(14)}, FallbackReason.NO_ROUTE),
    ],
)
def test_a_proposal_that_does_not_fit(changes: dict[str, Any], reason: FallbackReason) -> None:
    with World() as world:
        client, server = pair(world)
        client.record()
        healthy = world.connect(client, server)
        call = world.call(client, server, proposal=only_v2(client, **changes))
        assert refusal(world, call) is reason
        [decline] = sent_messages(client, clc.Decline)
        assert len(decline.encode()) == 44
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.3/7")
def test_a_client_beyond_all_routes() -> None:
    with World() as world:
        client, server = pair(world)
        world.fabric.direct[client.rnic.gid] = None
        assert refusal(world, world.call(client, server, proposal=without_peer_id(client))) is (
            FallbackReason.NO_ROUTE
        )


@pytest.mark.v2("v2.8/2")
def test_both_reach_each_other_through_a_gateway() -> None:
    with World() as world:
        client, server = pair(world)
        for side in (client, server):
            world.fabric.direct[side.rnic.gid] = False
        call = world.connect(client, server)
        assert not client.group.terms.direct
        assert not server.group.terms.direct
        assert exchange(world, call, HELLO) == HELLO[::-1]


def first_accept(**changes: Any) -> Callable[[clc.Message], clc.Message]:
    """Return a function that changes fields that version 2 adds to Accept."""

    def change(message: clc.Message) -> clc.Message:
        if not isinstance(message, clc.Accept) or message.v2 is None or message.v2.first is None:
            return message
        return replace(message, v2=replace(message.v2, first=replace(message.v2.first, **changes)))

    return change


def tamper_with(call: Call, end: int, change: Callable[[clc.Message], clc.Message]) -> None:
    """Change the messages of one end."""

    def tamper(piece: bytes) -> bytes:
        return change(clc.decode_untrusted(piece)).encode()

    call.tcp[end].tamper = tamper


def other_eid(message: clc.Message) -> clc.Message:
    if isinstance(message, (clc.Accept, clc.Confirm)) and message.v2 is not None:
        return replace(message, v2=replace(message.v2, eid=encode_ueid("ELSE")))
    return message


def version_1(message: clc.Message) -> clc.Message:
    if isinstance(message, clc.Accept):
        return replace(message, version=1, v2=None)
    return message


def unmapped(message: clc.Message) -> clc.Message:
    if isinstance(message, (clc.Accept, clc.Confirm)):
        return replace(message, gid=b"\xfe\x80" + bytes(14))
    return message


@pytest.mark.v2("v2.4/2", "v2.4/3", "v2.4/4", "v2.4/5", "v2.4/6")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (first_accept(release=2), FallbackReason.RELEASE_MISMATCH),
        (first_accept(max_connections=15), FallbackReason.CONNECTION_LIMIT),
        (first_accept(max_links=0), FallbackReason.LINK_LIMIT),
        (first_accept(max_links=3), FallbackReason.LINK_LIMIT),
        (first_accept(direct=False), FallbackReason.ROUTE_MISMATCH),
        (other_eid, FallbackReason.NO_COMMON_UEID),
        (version_1, FallbackReason.VERSION_MISMATCH),
        (unmapped, FallbackReason.NO_ROUTE),
    ],
)
def test_an_accept_with_wrong_terms(
    change: Callable[[clc.Message], clc.Message], reason: FallbackReason
) -> None:
    with World() as world:
        client, server = pair(world)
        healthy = world.connect(server, client)
        call = world.call(client, server, proposal=without_peer_id(client))
        tamper_with(call, 1, change)
        assert refusal(world, call) is reason
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.4/3")
def test_an_accept_on_an_existing_group_that_names_another_eid() -> None:
    with World() as world:
        client, server = pair(world)
        healthy = world.connect(client, server)
        call = world.call(client, server)
        tamper_with(call, 1, other_eid)
        assert refusal(world, call) is FallbackReason.NO_COMMON_UEID
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


def confirm(**changes: Any) -> Callable[[clc.Message], clc.Message]:
    def change(message: clc.Message) -> clc.Message:
        if not isinstance(message, clc.Confirm) or message.v2 is None or message.v2.first is None:
            return message
        return replace(message, v2=replace(message.v2, first=replace(message.v2.first, **changes)))

    return change


@pytest.mark.v2("v2.5/2", "v2.5/3")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (confirm(release=0), FallbackReason.RELEASE_MISMATCH),
        (confirm(max_connections=16), FallbackReason.CONNECTION_LIMIT),
        (confirm(max_links=1), FallbackReason.LINK_LIMIT),
        (other_eid, FallbackReason.NO_COMMON_UEID),
        (unmapped, FallbackReason.NO_ROUTE),
    ],
)
def test_a_confirm_with_wrong_terms(
    change: Callable[[clc.Message], clc.Message], reason: FallbackReason
) -> None:
    """The server declines.  The test does not check the client."""
    with World() as world:
        client, server = pair(world)
        healthy = world.connect(server, client)
        call = world.call(client, server)
        tamper_with(call, 0, change)
        world.finish()
        assert call.server.fallback.reason is reason
        assert call.server.fallback.origin is Origin.LOCAL
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


def old_confirm(message: clc.Message) -> clc.Message:
    if isinstance(message, clc.Confirm):
        return replace(message, version=1, first_contact=False, v2=None)
    return message


def late_confirm(message: clc.Message) -> clc.Message:
    if isinstance(message, clc.Confirm) and message.v2 is not None:
        v2 = replace(message.v2, first=None, gids=())
        return replace(message, first_contact=False, v2=v2)
    return message


@pytest.mark.v2("v2.5/4")
@pytest.mark.parametrize("change", [old_confirm, late_confirm])
def test_a_confirm_of_another_kind(change: Callable[[clc.Message], clc.Message]) -> None:
    with World() as world:
        client, server = pair(world)
        healthy = world.connect(server, client)
        call = world.call(client, server)
        tamper_with(call, 0, change)
        world.finish()
        assert call.server.state == "FAILED"
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


# --- LLC messages with wrong fields ---------------------------------------------------------------


def change_llc(world: World, change: Callable[[llc.Message], llc.Message | bytes]) -> None:
    """Change ADD LINK and the later messages on their way."""

    def tamper(_: object, message: bytes) -> list[bytes]:
        if message[0] != 0x22:
            return [message]
        changed = change(llc.V2.decode_untrusted(message))
        return [changed if isinstance(changed, bytes) else llc.V2.encode(changed)]

    world.fabric.tamper = tamper


def without_rtokens(message: llc.Message) -> llc.Message:
    assert isinstance(message, llc.AddLink)
    return replace(message, extension=None)


def contradicting(message: llc.Message) -> llc.Message:
    assert isinstance(message, llc.AddLink)
    if message.extension is None:
        return message
    pair = message.extension.pairs[0]
    pairs = pair, replace(pair, new_rkey=pair.new_rkey ^ 1)
    return replace(message, extension=replace(message.extension, pairs=pairs))


@pytest.mark.v2("v2.10/6")
@pytest.mark.parametrize("change", [without_rtokens, contradicting])
@pytest.mark.parametrize("replies", [False, True])
def test_an_add_link_with_wrong_rtokens_fails_the_new_link(
    change: Callable[[llc.Message], llc.Message], replies: bool
) -> None:
    with World() as world:
        client, server = pair(world, rnics=2)

        def some(message: llc.Message) -> llc.Message:
            assert isinstance(message, llc.AddLink)
            return change(message) if message.reply is replies else message

        change_llc(world, some)
        call = world.call(client, server)
        world.finish()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert client.group.kind is server.group.kind is LinkGroupKind.SINGLE
        assert exchange(world, call, HELLO) == HELLO[::-1]


def test_rtokens_of_unknown_rmbs_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line for any number of unknown RTokens."""

    def strange(message: llc.Message) -> llc.Message:
        assert isinstance(message, llc.AddLink)
        if message.extension is None:
            return message
        own = message.extension.pairs
        more = tuple(replace(own[0], reference_rkey=77 + n) for n in range(255 - len(own)))
        return replace(message, extension=replace(message.extension, pairs=own + more))

    caplog.set_level(logging.INFO, "trio_smc.link_group")
    with World() as world:
        client, server = pair(world, rnics=2)
        change_llc(world, strange)
        call = world.connect(client, server)
        assert client.group.kind is server.group.kind is LinkGroupKind.SYMMETRIC
        logged = [each for each in caplog.messages if "name no RMB" in each]
        assert len(logged) == 2, logged  # one at each end
        assert all(": 254 RKeys" in each for each in logged)
        assert exchange(world, call, HELLO) == HELLO[::-1]


def version_1_framing(message: llc.Message) -> bytes:
    return b"\x02\x2c" + llc.V2.encode(message)[2:44]


def cut_off(message: llc.Message) -> bytes:
    whole = llc.V2.encode(message)
    return whole[:-1] if len(whole) > 44 else whole


@pytest.mark.v2("v2.9/6")
@pytest.mark.parametrize("change", [version_1_framing, cut_off])
def test_framing_that_is_wrong_costs_the_connection(change: Callable[[llc.Message], bytes]) -> None:
    with World() as world:
        client, server = pair(world, rnics=2)
        other = world.side(V2, routable=True)
        healthy = world.connect(other, server)
        change_llc(world, change)
        call = world.call(client, server)
        world.finish()
        assert call.client.outcome is not None
        assert "ESTABLISHED" not in call.states
        world.fabric.tamper = None
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.11/3")
def test_a_request_from_the_wrong_side_costs_the_link() -> None:
    with World() as world:
        client, server = pair(world)
        world.connect(client, server)
        data = llc.V2.encode(llc.RequestAddLink(gids=(server.rnic.gid,)))
        client.group.on_llc_untrusted(client.group.links[1], data)
        world.settle()
        assert not client.groups


@pytest.mark.v2("v2.1/3")
def test_offers_stay_within_their_bounds() -> None:
    """The codec accepts every offer of this side."""
    with World() as world:
        side = world.side(Config(ueids=tuple(f"N{n}" for n in range(8))), routable=True)
        assert isinstance(side.stack.groups.offer, Offer)
        proposal = proposal_of(side)
        assert clc.decode_untrusted(proposal.encode()) == proposal
        assert len(proposal.encode()) == 132 + 8 * 32


# --- fields of messages ---------------------------------------------------------------------------


@pytest.mark.v2("v2.2/8")
def test_a_newer_version_nibble_is_answered_as_version_2() -> None:
    with World() as world:
        client, server = pair(world)
        client.record()
        call = world.connect(client, server, proposal=replace(proposal_of(client), version=3))
        assert [each.version for each in sent_messages(client, clc.Accept)] == [2]
        assert client.group.terms.version == server.group.terms.version == 2
        assert exchange(world, call, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.2/1", "v2.2/4", "v2.2/5")
@pytest.mark.parametrize(("release", "limits"), [(0, (0, 0)), (1, (255, 2))])
def test_a_proposal_of_ours_names_both_versions_and_itself(
    release: int, limits: tuple[int, int]
) -> None:
    with World() as world:
        client, _ = pair(world)
        change_offer(client, release=release)
        proposal = proposal_of(client)
        assert proposal.encode()[7] == 0x20
        assert proposal.offers_smc_r
        assert (proposal.peer_id, proposal.gid, proposal.mac) == (
            client.stack.groups.peer_id, client.rnic.gid, client.rnic.mac,
        )  # fmt: skip
        assert proposal.v2 is not None
        assert (proposal.v2.release, proposal.v2.gid) == (release, client.rnic.gid)
        assert (proposal.v2.max_connections, proposal.v2.max_links) == limits


@pytest.mark.v2("v2.10/5")
def test_a_rejection_has_44_bytes() -> None:
    """Each side has one RNIC, so a second link would be parallel to the first."""
    with World() as world:
        client, server = pair(world)
        client.record()
        world.connect(client, server)
        [reply] = [each for each in messages(client, llc.AddLink, llc.V2) if each.reply]
        assert (reply.rejected, reply.reason, reply.extension) == (True, 0, None)
        assert len(llc.V2.encode(reply)) == 44


@pytest.mark.v2("v2.10/1", "v2.10/4", "v2.10/7")
@pytest.mark.parametrize("direct", [True, False])
def test_add_link_repeats_the_route(direct: bool) -> None:
    with World() as world:
        client, server = pair(world, rnics=2)
        for side in (client, server):
            for rnic in side.rnics:
                world.fabric.direct[rnic.gid] = direct
        client.record()
        world.connect(client, server)
        extensions = [each.extension for each in messages(client, llc.AddLink, llc.V2)]
        assert [each and (each.direct, len(each.pairs)) for each in extensions] == [(direct, 1)] * 2
        kinds = [line(each) for each in client.recorder.messages()]
        at = kinds.index("out ADD_LINK reply")
        assert kinds[at + 1 :] == ["in CONFIRM_LINK", "out CONFIRM_LINK reply"]


@pytest.mark.v2("v2.7/4")
def test_a_link_is_named_by_gid_and_number_with_any_mac() -> None:
    def other_mac(message: clc.Message) -> clc.Message:
        if isinstance(message, clc.Accept | clc.Confirm):
            return replace(message, mac=bytes.fromhex("020304050607"))
        return message

    with World() as world:
        client, server = pair(world, rnics=2)
        first = world.connect(client, server)
        client.record()
        calls = [first]
        for _ in range(3):
            call = world.call(client, server)
            for end in (0, 1):
                tamper_with(call, end, other_mac)
            world.settle()
            calls.append(call)
        assert {call.states for call in calls} == {("ESTABLISHED", "ESTABLISHED")}
        assert len(client.groups) == 1
        for kind, side in ((clc.Accept, server), (clc.Confirm, client)):
            named = {each.gid for each in sent_messages(client, kind)}
            assert named == {rnic.gid for rnic in side.rnics}
        for call in calls:
            assert exchange(world, call, HELLO) == HELLO[::-1]


def receive_size(link: Link) -> int:
    """Bytes of each receive of its queue pair."""
    assert isinstance(link.qp, PlainQueuePair)
    return link.qp.receive_size


@pytest.mark.v2("v2.9/7")
def test_receives_hold_the_longest_message_of_the_groups_version() -> None:
    with World() as world:
        client, server = pair(world)
        plain = world.side(Config(), routable=True)
        world.connect(client, server)
        world.connect(plain, server)
        sizes = {
            group.terms.version: {receive_size(link) for link in group.links.values()}
            for group in server.groups
        }
        assert sizes == {1: {48}, 2: {llc.V2.largest}}


# --- Decline --------------------------------------------------------------------------------------


def declines(side: Side) -> list[tuple[int, int, bool, int]]:
    """Length, version, out-of-sync flag and system of each Decline."""
    return [
        (len(each.encode()), each.version, each.out_of_sync, each.system)
        for each in sent_messages(side, clc.Decline)
    ]


LONG, SHORT = (44, 2, False, clc.LINUX), (28, 1, False, 0)


@pytest.mark.v2("v2.6/1", "v2.3/9")
@pytest.mark.parametrize(
    ("config", "form", "reason"),
    [(V2, LONG, FallbackReason.NO_COMMON_UEID), (Config(), SHORT, FallbackReason.MODE_MISMATCH)],
)
def test_the_servers_decline(
    config: Config, form: tuple[int, int, bool, int], reason: FallbackReason
) -> None:
    with World() as world:
        client, server = world.side(V2, routable=True), world.side(config, routable=True)
        client.record()
        call = world.call(client, server, proposal=only_v2(client, eids=(encode_ueid("ELSE"),)))
        world.settle()
        assert call.server.fallback.reason is reason
        assert declines(client) == [form]


@pytest.mark.v2("v2.6/2")
@pytest.mark.parametrize(("change", "form"), [(other_eid, LONG), (version_1, SHORT)])
def test_the_clients_decline(
    change: Callable[[clc.Message], clc.Message], form: tuple[int, int, bool, int]
) -> None:
    with World() as world:
        client, server = pair(world)
        client.record()
        call = world.call(client, server, proposal=without_peer_id(client))
        tamper_with(call, 1, change)
        world.settle()
        assert declines(client) == [form]


@pytest.mark.v2("v2.6/2")
def test_a_decline_in_place_of_a_proposal() -> None:
    with World() as world:
        client, _ = pair(world)
        client.record()
        negotiation = ClientNegotiation(host=client.stack.groups, receive_buffer=1)
        negotiation.decline(FallbackReason.NO_RNIC)
        assert declines(client) == [SHORT]


@pytest.mark.v2("v2.6/3")
@pytest.mark.parametrize("long", [True, False])
@pytest.mark.parametrize("end", [0, 1])
def test_a_side_accepts_both_forms_of_decline(long: bool, end: int) -> None:
    """A Decline may replace Confirm or Accept."""

    def decline(message: clc.Message) -> clc.Message:
        if not isinstance(message, clc.Accept | clc.Confirm):
            return message
        more = {"version": 2, "more_diagnosis": (0, 0, 0, 0), "system": 2} if long else {}
        return clc.Decline(peer_id=message.peer_id, diagnosis=0x03030008, **more)  # type: ignore[arg-type]

    with World() as world:
        client, server = pair(world)
        healthy = world.connect(server, client)
        call = world.call(client, server)
        tamper_with(call, end, decline)
        world.finish()
        fallback = call.ends[1 - end].fallback
        assert (fallback.reason, fallback.peer_code) == (FallbackReason.NO_COMMON_UEID, 0x03030008)
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


@pytest.mark.v2("v2.4/8")
def test_an_accept_that_names_an_unknown_link() -> None:
    def unknown(message: clc.Message) -> clc.Message:
        if isinstance(message, clc.Accept):
            return replace(message, qp_number=message.qp_number ^ 0x800000)
        return message

    with World() as world:
        client, server = pair(world)
        world.connect(client, server)
        client.record()
        call = world.call(client, server)
        tamper_with(call, 1, unknown)
        world.finish()
        assert call.client.fallback.reason is FallbackReason.OUT_OF_SYNC
        assert declines(client) == [(44, 2, True, clc.LINUX)]
        assert call.server.fallback.peer_code == 0x04000000


@pytest.mark.v2("v2.5/5")
def test_a_confirm_of_another_peer_than_the_proposal() -> None:
    def other_peer(message: clc.Message) -> clc.Message:
        if isinstance(message, clc.Confirm):
            return replace(message, peer_id=b"OTHER ID")
        return message

    with World() as world:
        client, server = pair(world)
        healthy = world.connect(server, client)
        call = world.call(client, server)
        tamper_with(call, 0, other_peer)
        world.finish()
        assert call.server.state == "FAILED"
        assert exchange(world, healthy, HELLO) == HELLO[::-1]


# --- DELETE RKEY, as Linux answers it -------------------------------------------------------------


@pytest.mark.v2("v2.12/4")
def test_a_delete_rkey_reply_without_rkeys_is_accepted() -> None:
    with World() as world:
        client, server = pair(world, replace(V2, link_group_idle=1000))
        call = world.connect(client, server)
        others = [world.connect(client, server) for _ in range(8)]
        replies = 0

        def tamper(_: object, message: bytes) -> list[bytes]:
            nonlocal replies
            if message[0] != 0x29 or not message[3] & 0x80:
                return [message]
            replies += 1
            return [message[:8] + bytes(len(message) - 8)]

        world.fabric.tamper = tamper
        before = len(client.group.own_rmbs.pool.rmbs)
        for each in others:
            for connection in each.connections:
                connection.close()
        world.pass_time(200)
        assert replies
        assert len(client.group.own_rmbs.pool.rmbs) < before
        assert len(client.group.own_rmbs.pool.rmbs) == len(server.group.peer_rmbs)
        assert exchange(world, call, HELLO) == HELLO[::-1]
