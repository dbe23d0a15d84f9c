"""The lifeline's end is the signal that the other side is dead, however the socket tells it."""

import asyncio
import socket

import pytest

from runtime.errors import ChannelClosed
from runtime.processes.child import receive, send


@pytest.mark.parametrize("write_first", [False, True], ids=["read", "write-then-read"])
async def test_a_dead_peer_closes_the_channel_also_after_a_failed_write(write_first):
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    theirs.close()
    if write_first:
        with pytest.raises(ChannelClosed):
            await send(writer, {"call": "echo"})
    with pytest.raises(ChannelClosed):
        await receive(reader)
    writer.close()
