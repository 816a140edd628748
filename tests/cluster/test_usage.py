"""Shares of the time of emulated ranks by thread names, and bytes of a class."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from scripts.cluster.topology import Topology
from scripts.cluster.usage import Sample, Split, bytes_between_nodes, processor_seconds, sent_by_class


def test_shares_divide_the_time_of_all_ranks() -> None:
    topology = Topology(1, 2, cores_per_rank=0.5)
    middle = Sample(17.0, (4.0, 1.0, 0.0), 9)
    samples = [Sample(10.0, (1.0, 1.0, 0.0), 5), middle, Sample(20.0, (6.0, 2.0, 1.0), 4_000_005)]
    split = Split.of(samples, topology)
    assert split == Split(5.0, 0.5, 0.1, 0.1, pytest.approx(0.3), 2e6)
    assert str(split) == "5.0 s a step: computing 50%, sending 10%, other 10%, waiting 30%; 2.0 MB between nodes"


def test_threads_are_classified_by_name(tmp_path: Path) -> None:
    process = tmp_path / "7"
    stats = ((process, "python (x)", 180), (7, "python (x)", 100), (8, "pt_gloo_runner", 30), (9, "loader", 20))
    for place, name, ticks in stats:
        folder = place if isinstance(place, Path) else process / "task" / str(place)
        folder.mkdir(parents=True)
        fields = " ".join(["S", *["0"] * 10, str(ticks), str(ticks)])
        (folder / "stat").write_text(f"7 ({name}) {fields} 0 0\n")
    (process / "task" / "10").mkdir()  # a thread that has ended since it was listed
    second = os.sysconf("SC_CLK_TCK")
    seconds = processor_seconds(process)
    assert seconds == pytest.approx((200 / second, 60 / second, 100 / second)), "30 ticks belong to an ended thread"
    assert processor_seconds(tmp_path / "gone") == (0.0, 0.0, 0.0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_this_process_has_computed() -> None:
    own = Path(f"/proc/{os.getpid()}")

    def burn() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    before = processor_seconds(own)
    burn()
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    main, _, other = processor_seconds(own)
    assert main - before[0] >= 0.05
    assert other - before[2] >= 0.05


def test_bytes_of_the_class_between_nodes() -> None:
    classes = """class htb 1:1 root prio 0 rate 4Gbit ceil 4Gbit burst 64Kb cburst 64Kb
 Sent 7 bytes 3 pkt (dropped 0, overlimits 0 requeues 0)
class htb 1:2 root prio 0 rate 100Mbit ceil 100Mbit burst 64Kb cburst 64Kb
 Sent 512 bytes 2 pkt (dropped 0, overlimits 0 requeues 0)
"""
    assert sent_by_class(classes) == 512
    with pytest.raises(ValueError, match="no class 1:2"):
        sent_by_class(classes.replace("1:2", "1:3"))
    assert bytes_between_nodes(Topology(1, 4)) == 0
