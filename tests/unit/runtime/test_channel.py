"""The lifeline's end is the signal that the other side is dead, however the socket tells it."""

import asyncio
import socket

import pytest

from runtime.errors import ChannelClosed
from runtime.processes.lifeline import AsyncChannel


@pytest.mark.parametrize("write_first", [False, True], ids=["read", "write-then-read"])
async def test_a_dead_peer_closes_the_channel_also_after_a_failed_write(write_first):
    ours, theirs = socket.socketpair()
    channel = AsyncChannel(*await asyncio.open_unix_connection(sock=ours))
    theirs.close()
    if write_first:
        with pytest.raises(ChannelClosed):
            await channel.send({"call": "echo"})
    with pytest.raises(ChannelClosed):
        await channel.receive()
    channel.close()
