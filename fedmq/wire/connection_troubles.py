"""What a silo's operator reads when its channel has no session: silence, another key at the other end, a refusal."""

from __future__ import annotations

from fedmq.wire.handshake import Accepted, HelloRefusedError
from fedmq.wire.keys import Identity, words
from fedmq.wire.messages import COORDINATOR, Reason
from fedmq.wire.transports.tcp import unknown_host

#: What to do about another scenario.
SAME_SCENARIO = "both sides need the same file and the same --set and --seed"


def silent(uri: str, seconds: float) -> str:
    """The line about a coordinator that has not answered for a time [s]."""
    why = "no coordinator listens there yet, a firewall is in between, or it is busy; it keeps trying"
    if host := unknown_host(uri):
        why = f"the name {host} is unknown on this machine"
    return f"no answer from {uri} for {seconds:.0f} s: {why}"


def foreign(uri: str, accepted: Accepted) -> str:
    """The line about a process that has another key than the accepted one of the coordinator."""
    key = accepted.get(COORDINATOR)
    return (
        f"what listens at {uri} does not have the coordinator's key in the folder accepted/ here "
        f"({'which has none' if key is None else words(key)}): it is another process, or the coordinator has a new "
        "key; accept that with `fedmq keys accept`, and this process connects"
    )


def refused(uri: str, identity: Identity, refusal: HelloRefusedError, differing: str) -> str:
    """The line about a coordinator that refuses the handshake.

    Args:
        uri: URI at which it listens.
        identity: this process.
        refusal: its answer.
        differing: keys of the scenario with other values there, if known.
    """
    match refusal.reason:
        case Reason.UNKNOWN_SENDER:
            ask = f"its operator accepts it with `fedmq keys accept` ({words(identity)})"
            ask += ", or this process was started with the wrong key file (--keys)"
            return f"the coordinator at {uri} does not accept this key of {identity.name}: {ask}"
        case Reason.WRONG_RUN:
            which = f"{refusal.detail}{f', with other values of {differing}' if differing else ''}"
            return f"the coordinator at {uri} has another scenario: {which}; {SAME_SCENARIO}"
        case _:
            return f"the coordinator at {uri} refuses the handshake: {refusal.reason}: {refusal.detail}"
