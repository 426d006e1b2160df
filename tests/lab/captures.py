"""The lab's captures as tshark reads them: every SMC message, and nothing malformed.

tshark 4.0's two known errors are in docs/decisions.md: it calls our Proposals, which have no growth
area, malformed, and reads ADD LINK CONTINUATION two bytes early, which shows in values only.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Reading", "read"]

_PROPOSAL = bytes.fromhex("e2d4c3d901")
_FIELDS = ("frame.number", "frame.protocols", "tcp.payload", "smc.clc_msg", "smc.llc_msg",
           "_ws.malformed")  # fmt: skip
_NAMES = {
    1: "CONFIRM LINK", 2: "ADD LINK", 3: "ADD LINK CONTINUATION", 4: "DELETE LINK",
    6: "CONFIRM RKEY", 7: "TEST LINK", 8: "CONFIRM RKEY CONTINUATION", 9: "DELETE RKEY",
    0xFE: "CDC",
}  # fmt: skip
_CLC_NAMES = {1: "Proposal", 2: "Accept", 3: "Confirm", 4: "Decline"}


@dataclass
class Reading:
    """Messages by name, each with how many there were, and frames that tshark cannot read."""

    messages: Counter[str] = field(default_factory=Counter)
    malformed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.messages.items()))


def read(capture: Path) -> Reading:
    """Have tshark read a capture.  Raises CalledProcessError."""
    # Linux's "RPC over RDMA" would take messages for its own, and guesses about what applications
    # have written find protocols in random bytes.
    command = [
        "tshark",
        "--disable-protocol",
        "rpcordma",
        "-o",
        "infiniband.identify_payload:FALSE",
    ]
    command += ["-r", str(capture), "-Y", "smc || _ws.malformed", "-T", "fields"]
    command += [word for each in _FIELDS for word in ("-e", each)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    reading = Reading()
    for line in done.stdout.splitlines():
        number, protocols, payload, clc, llc, malformed = line.split("\t")
        reading.messages.update(_CLC_NAMES[int(each)] for each in clc.split(",") if each)
        reading.messages.update(_NAMES[int(each, 0)] for each in llc.split(",") if each)
        if malformed and not bytes.fromhex(payload).startswith(_PROPOSAL):
            reading.malformed.append(f"frame {number}, {protocols}: {malformed}")
    return reading
