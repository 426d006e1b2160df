"""The rules by which two sides agree, as pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason as Reason
from trio_smc.rendezvous.terms import (
    LINK_LIMIT,
    VERSION_1,
    Offer,
    Terms,
    answer,
    check_accept,
    check_confirm,
    is_routable,
    proposed,
    with_v2_offer,
)
from trio_smc.wire import clc, llc
from trio_smc.wire.fields import encode_ueid

ONE, TWO, ELSE = map(encode_ueid, ("ONE", "TWO", "ELSE"))
GID = bytes(10) + b"\xff\xff" + bytes((10, 0, 0, 1))
OFFER = Offer(eids=(ONE, TWO), host=b"here".ljust(32))
PLAIN = clc.Proposal(peer_id=bytes(range(8)), gid=GID, mac=bytes(6), ipv4_mask_length=8)
BOTH = with_v2_offer(PLAIN, OFFER)
ONLY_2 = replace(BOTH, flags=clc.proposal_flags(v1=False, v2=True), ipv4_mask_length=0)
PREFIX = Reason.PREFIX_MISMATCH
AGREED = Terms(version=2, release=1, eid=TWO, max_connections=255, max_links=2)


def credentials(terms: Terms, kind: type[clc.Accept | clc.Confirm], *, first: bool) -> object:
    v2 = terms.v2_part(first=first, host=OFFER.host) if terms.version == 2 else None
    flagged = first and (kind is clc.Accept or terms.version == 2)
    return kind(
        peer_id=bytes(8), version=terms.version, first_contact=flagged, gid=GID, mac=bytes(6),
        qp_number=2, rkey=1, rmbe_index=1, alert_token=1, buffer_size_code=0, qp_mtu=3,
        rmb_address=4096, initial_psn=0, v2=v2,
    )  # fmt: skip


def accept(terms: Terms, *, first: bool = True) -> clc.Accept:
    message = credentials(terms, clc.Accept, first=first)
    assert isinstance(message, clc.Accept)
    return message


def confirm(terms: Terms, *, first: bool = True) -> clc.Confirm:
    message = credentials(terms, clc.Confirm, first=first)
    assert isinstance(message, clc.Confirm)
    return message


# --- the server -----------------------------------------------------------------------------------


@pytest.mark.v2("v2.3/1", "v2.3/6", "v2.3/8", "v2.3/9")
@pytest.mark.parametrize(
    ("proposal", "offer", "v1", "result"),
    [
        (PLAIN, None, None, VERSION_1),
        (PLAIN, OFFER, None, VERSION_1),
        (PLAIN, OFFER, PREFIX, PREFIX),
        (BOTH, None, None, VERSION_1),
        (BOTH, None, PREFIX, PREFIX),
        (BOTH, replace(OFFER, eids=(ELSE,)), None, VERSION_1),
        (BOTH, replace(OFFER, eids=(ELSE,)), PREFIX, Reason.NO_COMMON_UEID),
        (BOTH, replace(OFFER, eids=(ELSE, TWO)), PREFIX, AGREED),
        (ONLY_2, None, None, Reason.MODE_MISMATCH),
        (ONLY_2, replace(OFFER, eids=(TWO,)), PREFIX, AGREED),
        (ONLY_2, replace(OFFER, eids=(ELSE,)), None, Reason.NO_COMMON_UEID),
    ],
)
def test_a_server_answers_a_proposal_with_terms_or_a_reason(
    proposal: clc.Proposal, offer: Offer | None, v1: Reason | None, result: Terms | Reason
) -> None:
    assert answer(proposal, offer, v1, True) == result


@pytest.mark.v2("v2.3/5")
def test_the_first_eid_of_the_proposal_counts() -> None:
    terms = answer(BOTH, replace(OFFER, eids=(TWO, ONE)), None, True)
    assert isinstance(terms, Terms)
    assert terms.eid == ONE


@pytest.mark.v2("v2.3/3", "v2.3/4")
@pytest.mark.parametrize(
    ("theirs", "ours", "result"),
    [
        ((255, 2), (255, 2), (255, 2)),
        ((16, 1), (255, 2), (16, 1)),
        ((255, 255), (16, 1), (16, 1)),
        ((15, 2), (255, 2), Reason.CONNECTION_LIMIT),
        ((255, 0), (255, 2), Reason.LINK_LIMIT),
    ],
)
def test_the_lower_limits_count(
    theirs: tuple[int, int], ours: tuple[int, int], result: tuple[int, int] | Reason
) -> None:
    proposal = with_v2_offer(PLAIN, replace(OFFER, max_connections=theirs[0], max_links=theirs[1]))
    offer = replace(OFFER, max_connections=ours[0], max_links=ours[1])
    terms = answer(proposal, offer, PREFIX, True)
    if isinstance(terms, Terms):
        assert (terms.max_connections, terms.max_links) == result
    else:
        assert terms is result


@pytest.mark.v2("v2.3/2", "v2.3/3")
@pytest.mark.parametrize(
    ("theirs", "ours", "release"), [(0, 1, 0), (1, 0, 0), (1, 1, 1), (15, 1, 1)]
)
def test_the_lower_release_counts(theirs: int, ours: int, release: int) -> None:
    proposal = with_v2_offer(PLAIN, replace(OFFER, release=theirs))
    terms = answer(proposal, replace(OFFER, release=ours), None, True)
    assert isinstance(terms, Terms)
    assert (terms.release, terms.max_connections, terms.max_links) == (release, 255, 2)


@pytest.mark.v2("v2.3/7")
@pytest.mark.parametrize(
    ("direct", "result"), [(True, True), (False, False), (None, Reason.NO_ROUTE)]
)
def test_a_server_checks_the_route(direct: bool | None, result: bool | Reason) -> None:
    terms = answer(ONLY_2, OFFER, None, direct)
    assert (terms.direct if isinstance(terms, Terms) else terms) == result


@pytest.mark.v2("v2.3/7")
@pytest.mark.parametrize("gid", [bytes(16), b"\xfe\x80" + bytes(14), b"\xfd" + bytes(15)])
def test_gids_must_be_mapped(gid: bytes) -> None:
    assert not is_routable(gid)
    proposal = with_v2_offer(replace(PLAIN, gid=gid), OFFER)
    assert answer(replace(proposal, flags=2, ipv4_mask_length=0), OFFER, None, True) is (
        Reason.NO_ROUTE
    )
    if any(gid):
        assert check_accept(replace(accept(AGREED), gid=gid), BOTH, True) is Reason.NO_ROUTE


# --- the client -----------------------------------------------------------------------------------


@pytest.mark.v2("v2.4/7")
@pytest.mark.parametrize("terms", [
    AGREED, replace(AGREED, direct=False), replace(AGREED, max_connections=16, max_links=1),
    replace(AGREED, release=0), VERSION_1,
])  # fmt: skip
def test_a_client_accepts_proposed_terms(terms: Terms) -> None:
    assert check_accept(accept(terms), BOTH, terms.direct) == terms


def test_a_subsequent_contact_has_the_eid() -> None:
    terms = check_accept(accept(AGREED, first=False), BOTH, None)
    assert isinstance(terms, Terms)
    assert (terms.version, terms.eid) == (2, TWO)
    assert terms.fits(AGREED)
    assert not VERSION_1.fits(AGREED)


@pytest.mark.v2("v2.4/2", "v2.4/3", "v2.4/4", "v2.4/5", "v2.4/6")
@pytest.mark.parametrize(
    ("answer", "proposal", "direct", "reason"),
    [
        (VERSION_1, ONLY_2, True, Reason.VERSION_MISMATCH),
        (AGREED, PLAIN, True, Reason.VERSION_MISMATCH),
        (replace(AGREED, eid=ELSE), BOTH, True, Reason.NO_COMMON_UEID),
        (replace(AGREED, release=2), BOTH, True, Reason.RELEASE_MISMATCH),
        (AGREED, with_v2_offer(PLAIN, replace(OFFER, release=0)), True, Reason.RELEASE_MISMATCH),
        (replace(AGREED, max_connections=15), BOTH, True, Reason.CONNECTION_LIMIT),
        (AGREED, with_v2_offer(PLAIN, replace(OFFER, max_connections=254)), True,
         Reason.CONNECTION_LIMIT),
        (replace(AGREED, max_links=3), BOTH, True, Reason.LINK_LIMIT),
        (replace(AGREED, max_links=0), BOTH, True, Reason.LINK_LIMIT),
        (AGREED, BOTH, None, Reason.NO_ROUTE),
        (replace(AGREED, direct=False), BOTH, True, Reason.ROUTE_MISMATCH),
    ],
)  # fmt: skip
def test_a_client_declines_terms_it_did_not_propose(
    answer: Terms, proposal: clc.Proposal, direct: bool | None, reason: Reason
) -> None:
    assert check_accept(accept(answer), proposal, direct) is reason


# --- the server, on Confirm -----------------------------------------------------------------------


@pytest.mark.v2("v2.5/1")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("terms", [AGREED, replace(AGREED, release=0), VERSION_1])
def test_confirm_repeats_the_terms(terms: Terms, first: bool) -> None:
    assert check_confirm(confirm(terms, first=first), terms) is None


@pytest.mark.v2("v2.5/2", "v2.5/3")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (replace(AGREED, eid=ONE), Reason.NO_COMMON_UEID),
        (replace(AGREED, release=0), Reason.RELEASE_MISMATCH),
        (replace(AGREED, max_connections=16), Reason.CONNECTION_LIMIT),
        (replace(AGREED, max_links=1), Reason.LINK_LIMIT),
    ],
)
def test_a_confirm_that_differs_from_the_accept(answer: Terms, reason: Reason) -> None:
    assert check_confirm(confirm(answer), AGREED) is reason


@pytest.mark.v2("v2.5/4")
@pytest.mark.parametrize(("answer", "terms"), [(VERSION_1, AGREED), (AGREED, VERSION_1)])
def test_confirm_of_another_version(answer: Terms, terms: Terms) -> None:
    with pytest.raises(ProtocolError, match="another version"):
        check_confirm(confirm(answer), terms)


# --- terms ----------------------------------------------------------------------------------------


def test_version_1_is_one_constant() -> None:
    assert VERSION_1.framing is llc.V1
    assert AGREED.framing is llc.V2
    assert (VERSION_1.max_links, VERSION_1.max_connections) == (LINK_LIMIT, None)


@pytest.mark.v2("v2.7/2")
def test_the_identity_of_a_client() -> None:
    assert proposed(BOTH, VERSION_1) == (PLAIN.peer_id, PLAIN.gid)
    assert proposed(BOTH, AGREED) == (PLAIN.peer_id, GID)
    assert proposed(replace(ONLY_2, peer_id=bytes(8)), AGREED) == (bytes(8), GID)
