"""Hypothesis strategies for every CLC, LLC and CDC message."""

from __future__ import annotations

from hypothesis import strategies as st

from trio_smc.wire import cdc, clc, llc

U8, U16, U24, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 24, 32, 64))
NIBBLE = st.integers(0, 15)
VERSIONS = st.integers(1, 15)
PEER_IDS = st.binary(min_size=8, max_size=8)
GIDS = st.binary(min_size=16, max_size=16)
REAL_GIDS = GIDS.filter(any)
MACS = st.binary(min_size=6, max_size=6)

IPV6_PREFIXES = st.builds(
    clc.Ipv6Prefix, prefix=st.binary(min_size=16, max_size=16), length=st.integers(0, 128)
)


EIDS = st.binary(min_size=32, max_size=32)
LIMITS = {"release": NIBBLE, "max_connections": U8, "max_links": U8, "features": U16}
V2_OFFERS = st.builds(clc.V2Offer, eids=st.lists(EIDS, max_size=8).map(tuple), gid=GIDS, **LIMITS)
FIRST_CONTACTS = st.builds(
    clc.FirstContact, direct=st.booleans(), system=NIBBLE, host=EIDS, **LIMITS
)


@st.composite
def proposals(draw: st.DrawFn) -> clc.Proposal:
    version = draw(VERSIONS)
    flags = draw(NIBBLE) if version > 1 else 0
    with_area = version == 1 or flags & 3 != 2
    return clc.Proposal(
        peer_id=draw(PEER_IDS),
        version=version,
        gid=draw(GIDS),
        mac=draw(MACS),
        flags=flags,
        ipv4_subnet=draw(st.binary(min_size=4, max_size=4)) if with_area else bytes(4),
        ipv4_mask_length=draw(st.integers(0, 32)) if with_area else 0,
        ipv6_prefixes=tuple(draw(st.lists(IPV6_PREFIXES, max_size=8))) if with_area else (),
        v2=draw(st.none() | V2_OFFERS) if version > 1 and flags >> 2 in (0, 3) else None,
    )


@st.composite
def v2_answers(
    draw: st.DrawFn, kind: type[clc.Accept | clc.Confirm], first_contact: bool
) -> clc.V2Answer:
    with_gids = first_contact and kind is clc.Confirm
    return clc.V2Answer(
        eid=draw(EIDS),
        first=draw(FIRST_CONTACTS) if first_contact else None,
        gids=tuple(draw(st.lists(REAL_GIDS, max_size=4))) if with_gids else (),
    )


@st.composite
def credentials(draw: st.DrawFn, kind: type[clc.Accept | clc.Confirm]) -> clc.Accept | clc.Confirm:
    index = draw(st.integers(1, 255))
    code = draw(NIBBLE)
    version = draw(VERSIONS)
    first_contact = draw(st.booleans()) if kind is clc.Accept or version > 1 else False
    return kind(
        peer_id=draw(PEER_IDS),
        version=version,
        first_contact=first_contact,
        v2=draw(st.none() | v2_answers(kind, first_contact)) if version > 1 else None,
        gid=draw(REAL_GIDS),
        mac=draw(MACS),
        qp_number=draw(st.integers(1, (1 << 24) - 1)),
        rkey=draw(U32),
        rmbe_index=index,
        alert_token=draw(U32),
        buffer_size_code=code,
        qp_mtu=draw(NIBBLE),
        rmb_address=draw(st.integers(0, (1 << 64) - index * (16384 << code))),
        initial_psn=draw(U24),
    )


DECLINES = st.builds(
    clc.Decline,
    peer_id=PEER_IDS,
    version=VERSIONS,
    out_of_sync=st.booleans(),
    diagnosis=U32,
    more_diagnosis=st.none() | st.tuples(U32, U32, U32, U32),
) | st.builds(
    clc.Decline,
    peer_id=PEER_IDS,
    version=VERSIONS,
    diagnosis=U32,
    more_diagnosis=st.tuples(U32, U32, U32, U32),
    system=NIBBLE,
)

CLC_MESSAGES: st.SearchStrategy[clc.Message] = (
    proposals() | credentials(clc.Accept) | credentials(clc.Confirm) | DECLINES
)

RTOKEN_PAIRS = st.builds(llc.RTokenPair, reference_rkey=U32, new_rkey=U32, new_address=U64)
LINK_RTOKENS = st.builds(llc.LinkRToken, link_number=U8, rkey=U32, address=U64)

CONFIRM_LINKS = st.builds(
    llc.ConfirmLink,
    reply=st.booleans(),
    no_eye_catcher=st.booleans(),
    mac=MACS,
    gid=GIDS,
    qp_number=U24,
    link_number=U8,
    link_user_id=U32,
    max_links=U8,
)
ADD_LINKS = st.builds(
    llc.AddLink,
    reply=st.booleans(),
    rejected=st.booleans(),
    reason=NIBBLE,
    mac=MACS,
    gid=GIDS,
    qp_number=U24,
    link_number=U8,
    qp_mtu=NIBBLE,
    initial_psn=U24,
)
DELETE_LINKS = st.builds(
    llc.DeleteLink,
    reply=st.booleans(),
    all_links=st.booleans(),
    orderly=st.booleans(),
    link_number=U8,
    reason=st.sampled_from(llc.DeleteLinkReason) | U32,
)
DELETE_RKEYS = st.builds(
    llc.DeleteRkey,
    reply=st.booleans(),
    negative=st.booleans(),
    error_mask=U8,
    rkeys=st.lists(U32, max_size=8).map(tuple),
)
TEST_LINKS = st.builds(
    llc.TestLink,
    reply=st.booleans(),
    user_data=st.binary(min_size=16, max_size=16),
)
OPTIONAL = st.builds(
    lambda kind, rest: llc.OptionalMessage(data=bytes((kind,)) + rest),
    st.integers(0x80, 0xBF),
    st.binary(min_size=43, max_size=43),
)


@st.composite
def add_link_continuations(draw: st.DrawFn) -> llc.AddLinkContinuation:
    left = draw(U8 | st.integers(0, 4))
    count = min(left, 2)
    return llc.AddLinkContinuation(
        reply=draw(st.booleans()),
        link_number=draw(U8),
        tokens_left=left,
        pairs=tuple(draw(st.lists(RTOKEN_PAIRS, min_size=count, max_size=count))),
    )


@st.composite
def confirm_rkeys(draw: st.DrawFn) -> llc.ConfirmRkey:
    others = draw(U8 | st.integers(0, 4))
    count = min(others, 2)
    return llc.ConfirmRkey(
        reply=draw(st.booleans()),
        negative=draw(st.booleans()),
        retry=draw(st.booleans()),
        other_tokens=others,
        rkey=draw(U32),
        address=draw(U64),
        others=tuple(draw(st.lists(LINK_RTOKENS, min_size=count, max_size=count))),
    )


@st.composite
def confirm_rkey_continuations(draw: st.DrawFn) -> llc.ConfirmRkeyContinuation:
    left = draw(U8 | st.integers(0, 6))
    count = min(left, 3)
    return llc.ConfirmRkeyContinuation(
        reply=draw(st.booleans()),
        negative=draw(st.booleans()),
        tokens_left=left,
        others=tuple(draw(st.lists(LINK_RTOKENS, min_size=count, max_size=count))),
    )


# The messages that tshark 4.0 reads: all but optional ones.
TSHARK_LLC: st.SearchStrategy[llc.Message] = (
    CONFIRM_LINKS
    | ADD_LINKS
    | add_link_continuations()
    | DELETE_LINKS
    | confirm_rkeys()
    | confirm_rkey_continuations()
    | DELETE_RKEYS
    | TEST_LINKS
)
LLC_MESSAGES: st.SearchStrategy[llc.Message] = TSHARK_LLC | OPTIONAL

# Messages with fields or types that only version 2 has, and common ones with other encodings.
V2_LLC: st.SearchStrategy[llc.Message] = (
    st.builds(
        llc.AddLink,
        reply=st.booleans(),
        mac=MACS,
        gid=GIDS,
        qp_number=U24,
        link_number=U8,
        qp_mtu=NIBBLE,
        initial_psn=U24,
        extension=st.builds(
            llc.AddLinkExtension,
            direct=st.booleans(),
            target_gid=GIDS,
            pairs=st.lists(RTOKEN_PAIRS, max_size=12).map(tuple),
        ),
    )
    | st.builds(
        llc.ConfirmLink,
        reply=st.booleans(),
        mac=MACS,
        gid=GIDS,
        qp_number=U24,
        link_number=U8,
        link_user_id=U32,
        max_links=U8,
        max_connections=U8,
    )
    | st.builds(
        llc.RequestAddLink, reply=st.booleans(), gids=st.lists(GIDS, max_size=12).map(tuple)
    )
    | st.builds(
        llc.DeleteRkey,
        reply=st.booleans(),
        negative=st.booleans(),
        unknown=U8,
        rkeys=st.lists(U32, max_size=40).map(tuple),
    )
    | st.one_of(DELETE_LINKS, confirm_rkeys(), TEST_LINKS, OPTIONAL)
)

CDC_MESSAGES = st.builds(
    cdc.CdcMessage,
    sequence=U16,
    alert_token=U32,
    producer_wrap=U16,
    producer_cursor=U32,
    consumer_wrap=U16,
    consumer_cursor=U32,
    producer_flags=U8,
    connection_flags=U8,
)
