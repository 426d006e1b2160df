"""tshark as an independent reader of CLC, LLC and CDC messages.

:func:`read` writes messages to a capture (CLC in TCP segments, LLC and CDC as RoCEv2 SENDs), runs
tshark, and returns each field that tshark shows.  :func:`expected` lists the fields that tshark
should show for a message.  Tests compare the two lists.  ``expected`` imitates the known errors of
tshark 4.0:

- tshark reads each Proposal as if it had a growth area of 40 bytes.  For a Proposal without this
  area, tshark shows no field after the offset, and reports a short Proposal (52 or 69 bytes) as
  malformed.
- tshark reads ADD LINK CONTINUATION two bytes early, as if bytes 6-7 were not reserved, and shows
  the address of the second pair under the name of the first one.

Newer versions of tshark have separate names for fields that version 4.0 shows under one name;
:func:`read` maps them to the names of version 4.0.

tshark never shows the reason of a rejected ADD LINK, the user data of TEST LINK, or reserved bits.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.timing import PATIENCE
from trio_smc.wire import cdc, clc, llc

Reading = tuple[str, int | bytes | str]
MALFORMED: Reading = ("malformed", 1)

_NAMED_SINCE = {
    "smc.add.link.cont.rmb.RTok2.virt": "smc.add.link.cont.rmb.RTok1.virt",
    "smc.rmbe.ctrl.cons.wrap.seq": "smc.rmbe.ctrl.prod.wrap.seq",
    "smc.rmbe.ctrl.peer.cons.curs": "smc.rmbe.ctrl.peer.prod.curs",
}
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_ETHERNET = bytes.fromhex("02000000000a 02000000000b 0800")
_ADDRESSES = bytes((10, 9, 0, 1, 10, 9, 0, 2))
_ROCE_PORT = 4791


def require_tshark() -> None:
    """Skip the test if tshark is missing, but fail if all tests must run."""
    if shutil.which("tshark"):
        return
    if os.environ.get("CI") == "true" or os.environ.get("TRIO_SMC_FULL") == "1":
        pytest.fail("tshark is not installed (apt-get install tshark)")
    pytest.skip("tshark is not installed (apt-get install tshark)")


def capture(messages: Sequence[bytes]) -> bytes:
    """A pcap file with one packet per message."""
    out = [struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)]
    for number, message in enumerate(messages):
        if message.startswith(clc.EYE_CATCHER):
            # One connection for each message, so that tshark does not reassemble any.
            ports = struct.pack(">HH", 10000 + number, 5000)
            segment = ports + struct.pack(">IIBBHHH", 1, 1, 5 << 4, 0x18, 65535, 0, 0) + message
            frame = _ETHERNET + _ipv4(6, segment)
        else:
            # BTH: RC SEND Only, default P_Key, QP 17; then the message, and an ICRC of zeros.
            bth = struct.pack(">BBHII", 0x04, 0, 0xFFFF, 17, number)
            packet = bth + message + bytes(4)
            udp = struct.pack(">HHHH", 49152, _ROCE_PORT, 8 + len(packet), 0)
            frame = _ETHERNET + _ipv4(17, udp + packet)
        out.append(struct.pack("<IIII", number, 0, len(frame), len(frame)) + frame)
    return b"".join(out)


def _ipv4(protocol: int, payload: bytes) -> bytes:
    size = 20 + len(payload)
    return struct.pack(">BBHHHBBH", 0x45, 0, size, 1, 0, 64, protocol, 0) + _ADDRESSES + payload


def read(messages: Sequence[bytes], directory: Path) -> list[list[Reading]]:
    """Run tshark; returns the fields that it shows for each message, in order."""
    path = directory / "messages.pcap"
    path.write_bytes(capture(messages))
    run = subprocess.run(
        ["tshark", "--disable-protocol", "rpcordma", "-r", path, "-T", "pdml"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=2 * PATIENCE,
    )
    return [_packet(packet) for packet in ET.fromstring(run.stdout).iter("packet")]


def _packet(packet: ET.Element) -> list[Reading]:
    seen: list[Reading] = []
    for proto in packet.findall("proto"):
        if proto.get("name") == "smc":
            seen += [
                (_NAMED_SINCE.get(name, name), value(show))
                for field in proto.iter("field")
                if (name := field.get("name", "")) and (show := field.get("show"))
                # Skip whole flag bytes, which tshark also shows bit by bit, and reserved bytes.
                if name.startswith("smc.") and not re.search(r"flags?[23]?$|flags\.2$", name)
                if name != "smc.reserved"
            ]
        elif proto.get("name") == "_ws.malformed":
            seen.append(MALFORMED)
    return seen


def value(show: str) -> int | bytes | str:
    """Convert a value from tshark's output: MAC, IPv6 and IPv4 addresses to bytes, numbers to
    int."""
    if _MAC.fullmatch(show):
        return bytes.fromhex(show.replace(":", ""))
    if show in ("False", "True"):  # since 4.2; 0 and 1 before
        return int(show == "True")
    if ":" in show or "." in show:
        return ipaddress.ip_address(show).packed
    return int(show, 0) if show[0].isdecimal() else show


def expected(message: Any) -> list[Reading]:
    """The fields that tshark 4.0 shows for a message, including its known errors."""
    return _EXPECTED[type(message)](message)


def _proposal(m: clc.Proposal) -> list[Reading]:
    p = "smc.proposal."
    seen: list[Reading] = [
        ("smc.clc_msg", 1),
        ("smc.length", len(m.encode())),
        (p + "smc.version", m.version),
    ]
    if m.version > 1:
        seen.append((p + "smcv2.type", m.flags >> 2))
    seen += [
        (p + "smc.type", m.flags & 3),
        (p + "sender.client.peer.id", int.from_bytes(m.peer_id, "big")),
        (p + "client.preferred.gid", m.gid),
        (p + "client.preferred.mac", m.mac),
        (p + "smcv1_subnet_ext_offset", 40 if m.version > 1 else 0),
    ]
    if m.version == 1:
        return [*seen, MALFORMED] if len(m.encode()) < 80 else seen
    seen.append((p + "smcv2_ext_offset", 0))
    subnet = "smc.outgoing.interface.subnet.mask"
    seen += [
        (subnet, m.ipv4_subnet),
        (subnet + ".number.of.significant.bits", m.ipv4_mask_length),
        (p + "ipv6.prefix.count", len(m.ipv6_prefixes)),
    ]
    for item in m.ipv6_prefixes:
        seen += [(p + "ipv6.prefix.value", item.prefix), (p + "ipv6.prefix.length", item.length)]
    return seen


def _credentials(m: clc.Accept | clc.Confirm) -> list[Reading]:
    accept = isinstance(m, clc.Accept)
    p = "smc.accept." if accept else "smc.confirm."
    server = p + "server." if accept else "smc.confirm.client."
    client = "smc.accept.server." if accept else "smc.client."
    seen: list[Reading] = [
        ("smc.clc_msg", m.TYPE),
        ("smc.length", 68),
        ("smc.proposal.smc.version", m.version),
        ("smc.proposal.first.contact" if accept else p + "first.contact", m.first_contact),
    ]
    if not accept:
        seen.append((p + "smc.type", 0))
    sender = "sender.server.peer.id" if accept else "sender.client.peer.id"
    return [
        *seen,
        (p + sender, int.from_bytes(m.peer_id, "big")),
        ("smc.accept.server.preferred.gid" if accept else "smc.client.gid", m.gid),
        (server + ("preferred.mac" if accept else "mac"), m.mac),
        (server + "qp.number", m.qp_number),
        (server + "rmb.rkey", m.rkey),
        (server + "tcp.conn.index", m.rmbe_index),
        (client + "rmb.element.alert.token", m.alert_token),
        (p + "rmb.buffer.size", m.buffer_size_code),
        (p + "qp.mtu.value", m.qp_mtu),
        (client + "rmb.virtual.address", m.rmb_address),
        ("smc.accept.initial.psn" if accept else "smc.initial.psn", m.initial_psn),
    ]


def _decline(m: clc.Decline) -> list[Reading]:
    seen: list[Reading] = [
        ("smc.clc_msg", 4),
        ("smc.length", len(m.encode())),
        ("smc.decline.smc.version", m.version),
        ("smc.decline.osync", m.out_of_sync),
        ("smc.sender.peer.id", int.from_bytes(m.peer_id, "big")),
        ("smc.peer.diag.info", m.diagnosis),
    ]
    if m.more_diagnosis is not None:
        seen.append(("smc.decline.os.type", m.system))
        seen += [("smc.peer.diag.info", word) for word in m.more_diagnosis]
    return seen


def _llc(message: llc.Message) -> list[Reading]:
    return [("smc.llc_msg", message.encode()[0]), ("smc.length", llc.MESSAGE_SIZE)]


def _confirm_link(m: llc.ConfirmLink) -> list[Reading]:
    p = "smc.confirm.link."
    return [
        *_llc(m),
        (p + "response", m.reply),
        (p + "sender.mac", m.mac),
        ("smc.sender.gid", m.gid),
        (p + "sender.qp.number", m.qp_number),
        (p + "number", m.link_number),
        (p + "sender.link.userid", m.link_user_id),
        (p + "max.links", m.max_links),
    ]


def _add_link(m: llc.AddLink) -> list[Reading]:
    p = "smc.add.link."
    return [
        *_llc(m),
        (p + "response", m.reply),
        (p + "response.rejected", m.rejected),
        (p + "sender.mac", m.mac),
        (p + "sender.gid", m.gid),
        (p + "sender.qp.number", m.qp_number),
        (p + "link.number", m.link_number),
        (p + "qp.mtu.value", m.qp_mtu),
        (p + "initial.psn", m.initial_psn),
    ]


def _add_link_continuation(m: llc.AddLinkContinuation) -> list[Reading]:
    p = "smc.add.link.cont."
    raw = m.encode()
    seen: list[Reading] = [
        *_llc(m),
        (p + "response", m.reply),
        (p + "link.number", m.link_number),
        (p + "rkey.number", m.tokens_left),
    ]
    for number in range(len(m.pairs)):
        names = (f"RTok{number + 1}.Rkey1", f"RTok{number + 1}.Rkey2", "RTok1.virt")
        values = struct.unpack_from(">IIQ", raw, 6 + 16 * number)  # two bytes early
        seen += zip((f"{p}rmb.{name}" for name in names), values, strict=True)
    return seen


def _delete_link(m: llc.DeleteLink) -> list[Reading]:
    p = "smc.delete.link."
    return [
        *_llc(m),
        (p + "response", m.reply),
        (p + "all", m.all_links),
        (p + "orderly", m.orderly),
        (p + "number", m.link_number),
        (p + "reason.code", m.reason),
    ]


def _confirm_rkey(m: llc.ConfirmRkey) -> list[Reading]:
    p = "smc.confirm.rkey."
    return [
        *_llc(m),
        (p + "response", m.reply),
        (p + "negative.response", m.negative),
        (p + "retry.rkey.set", m.retry),
        (p + "number.qp", m.other_tokens),
        (p + "new.rkey", m.rkey),
        (p + "new.virt", m.address),
        *_other_links(m.others),
    ]


def _confirm_rkey_continuation(m: llc.ConfirmRkeyContinuation) -> list[Reading]:
    p = "smc.confirm.rkey."
    return [
        *_llc(m),
        (p + "response", m.reply),
        (p + "negative.response", m.negative),
        (p + "retry.rkey.set", False),
        (p + "number.qp", m.tokens_left),
        *_other_links(m.others),
    ]


def _other_links(tokens: tuple[llc.LinkRToken, ...]) -> Iterator[Reading]:
    for token in tokens:
        yield "smc.confirm.rkey.link.number", token.link_number
        yield "smc.confirm.rkey.new.rkey", token.rkey
        yield "smc.confirm.rkey.new.virt", token.address


def _delete_rkey(m: llc.DeleteRkey) -> list[Reading]:
    p = "smc.delete.rkey."
    return [
        *_llc(m),
        (p + "response", m.reply),
        (p + "negative.response", m.negative),
        (p + "count", len(m.rkeys)),
        (p + "error.mask", m.error_mask),
        *((p + "deleted", rkey) for rkey in m.rkeys),
    ]


def _test_link(m: llc.TestLink) -> list[Reading]:
    return [*_llc(m), ("smc.test.link.response", m.reply)]


def _cdc(m: cdc.CdcMessage) -> list[Reading]:
    p = "smc.rmbe.ctrl."
    producer = ("write.blocked", "urgent.pending", "urgent.present", "cons.update.requested")
    connection = ("peer.sending.done", "peer.closed.conn", "peer.abnormal.close")
    return [
        ("smc.llc_msg", cdc.CDC_TYPE),
        ("smc.length", cdc.CDC_SIZE),
        (p + "seqno", m.sequence),
        (p + "alert.token", m.alert_token),
        # tshark uses the producer's names for both cursors.
        (p + "prod.wrap.seq", m.producer_wrap),
        (p + "peer.prod.curs", m.producer_cursor),
        (p + "prod.wrap.seq", m.consumer_wrap),
        (p + "peer.prod.curs", m.consumer_cursor),
        *(
            (p + name, m.producer_flags >> (7 - bit) & 1)
            for bit, name in enumerate((*producer, "failover.validation"))
        ),
        *((p + name, m.connection_flags >> (7 - bit) & 1) for bit, name in enumerate(connection)),
    ]


_EXPECTED: dict[type, Callable[[Any], list[Reading]]] = {
    clc.Proposal: _proposal,
    clc.Accept: _credentials,
    clc.Confirm: _credentials,
    clc.Decline: _decline,
    llc.ConfirmLink: _confirm_link,
    llc.AddLink: _add_link,
    llc.AddLinkContinuation: _add_link_continuation,
    llc.DeleteLink: _delete_link,
    llc.ConfirmRkey: _confirm_rkey,
    llc.ConfirmRkeyContinuation: _confirm_rkey_continuation,
    llc.DeleteRkey: _delete_rkey,
    llc.TestLink: _test_link,
    cdc.CdcMessage: _cdc,
}
