"""Requests in the work queue that their worker has not taken, and never will.

An agent says at once that it has a request. So one of which nothing was heard ran nowhere, if
nothing can have been lost: its worker is passed over, which costs nothing. An old worker may be
at it without a word; there it is a miss. Either way it is cancelled, for whoever comes after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.wires.nats.sent import NatsSent


def lose(sent: NatsSent, why: str) -> bool:
    """Its worker has gone: what waits for it in a queue is taken by nobody. Whether this did."""
    if not sent.is_stored or sent.has_begun or sent.is_over:
        return False
    if sent.is_published and (sent.silence.was_exposed or not sent.peer.has_word):
        sent.miss(why)
        return True
    answered = sent.answered
    sent.close()
    if answered is not None:
        answered.on_broken(why, connecting=True)
    return True


def put_off(sent: NatsSent) -> None:
    """It has not left after all, and is sent later."""
    sent.is_published = False
    sent.silence.withdrawn()
