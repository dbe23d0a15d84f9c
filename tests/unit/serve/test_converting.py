"""Items converted by several threads, the owner among them."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from serve.load.converting import Converting


def test_alone_the_owner_converts_all_in_order_and_only_as_far_as_it_waits():
    done = []
    with Converting("abcd", done.append, threads=1) as converting:
        assert done == []
        converting.wait_for("b")
        assert done == ["a", "b"]
        converting.wait_for("a")
        assert done == ["a", "b"]
        converting.wait_for_all()
    assert done == ["a", "b", "c", "d"]


def test_the_owner_goes_on_with_others_while_it_waits_for_one_under_way():
    begun, release, threads = threading.Event(), threading.Event(), {}

    def convert(item: str) -> None:
        threads[item] = threading.current_thread()
        if item == "slow":
            begun.set()
            assert release.wait(30)
        if item == "last":
            release.set()

    with Converting(["slow", "next", "last"], convert, threads=2) as converting:
        assert begun.wait(30)
        converting.wait_for("slow")
    owner = threading.current_thread()
    assert threads["slow"] is not owner and threads["next"] is threads["last"] is owner


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_is_raised_to_who_waits_and_ends_the_rest(threads: int):
    done = []

    def convert(item: int) -> None:
        if item == 5:
            raise ValueError("item 5")
        done.append(item)

    before = torch.get_num_threads(), sys.getswitchinterval(), os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="item 5"), Converting(range(1000), convert, threads) as converting:
        converting.wait_for_all()
    assert set(range(5)) <= set(done) and len(done) < 1000
    assert before == (torch.get_num_threads(), sys.getswitchinterval(), os.sched_getaffinity(0))
    assert not any(thread.name == "convert" for thread in threading.enumerate())


def test_leaving_early_forgets_what_nobody_began():
    done = []
    with pytest.raises(KeyError), Converting("abcd", done.append, threads=1) as converting:
        converting.wait_for("b")
        raise KeyError
    assert done == ["a", "b"]
