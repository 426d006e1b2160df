"""Shell commands that change the network of guests: a router between two, a second interface.

A router is a network namespace of one of them.

The router has the guest's end of a wire, and the guest itself an interface behind it: one macvlan
of a dummy for each, which see each other.  They need the modules dummy and macvlan.
"""

from __future__ import annotations

__all__ = ["address", "behind_router", "below", "route_to", "second_interface", "undo"]


def address(wire: int) -> str:
    """The address behind the router of this wire."""
    return f"10.9.{7 + wire}.1"


def below(wire: int) -> str:
    """The interface below ``inWIRE``."""
    return f"dummy{wire}"


def behind_router(wire: int, *, number: int) -> str:
    """In guest ``number``: the wire goes to the router, and ``inWIRE`` is behind it."""
    gateway = f"10.9.{7 + wire}.254"
    return f"""set -e
        ip netns add router{wire}
        ip link set eth{wire} netns router{wire}
        ip link add dummy{wire} type dummy
        ip link set dummy{wire} up
        for end in in out; do
            ip link add link dummy{wire} name ${{end}}{wire} type macvlan mode bridge
        done
        ip link set out{wire} netns router{wire}
        ip netns exec router{wire} bash -ec "
            ip addr add 10.9.{wire}.{number}/24 dev eth{wire}; ip link set eth{wire} up
            ip addr add {gateway}/24 dev out{wire}; ip link set out{wire} up
            sysctl -q -w net.ipv4.ip_forward=1"
        ip addr add {address(wire)}/24 dev in{wire}; ip link set in{wire} up
        ip route add 10.9.{wire}.0/24 via {gateway}
        rxe {wire} in{wire}
    """


def undo(wire: int, *, number: int) -> str:
    """The wire is the guest's own again."""
    return f"""set -e
        rdma link delete rxe{wire}
        ip netns exec router{wire} ip link set eth{wire} netns 1
        ip netns delete router{wire}
        ip link delete dummy{wire}
        ip addr add 10.9.{wire}.{number}/24 dev eth{wire}; ip link set eth{wire} up
    """


def route_to(wire: int, *, number: int, verb: str = "replace") -> str:
    """In the other guest: the way to what is behind the router in guest ``number``."""
    return f"ip route {verb} 10.9.{7 + wire}.0/24 via 10.9.{wire}.{number}"


def second_interface(number: int | str) -> str:
    """mac0 with the address 10.9.0.NUMBER and RoCE port rxe1, on the wire of eth0: one RNIC of the
    other guest reaches it and eth0.  It needs the module macvlan."""
    return (
        "sysctl -q -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2;"
        "ip link add link eth0 name mac0 type macvlan mode bridge;"
        f"ip addr add 10.9.0.{number}/24 dev mac0; ip link set mac0 up; rxe 1 mac0"
    )
