"""Two machines, as far as one can be two: a torchrun agent in each of two network namespaces.

Each has its own loopback and one end of a cable, so that whatever does not go over the network, or
goes to the wrong address, fails here as it would on a cluster.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.loop import require_same, spread
from tests.servers.commands import REPOSITORY

CABLE = "rlhf{}"
PORT = 29_517


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """The names of two network namespaces with a cable between them: 10.213.7.1 and 10.213.7.2."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip`: install iproute2 (make nodes)")
    names = [f"rlhf-node-{number}-{os.getpid()}" for number in (1, 2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ends = [word for n in (0, 1) for word in ("name", CABLE.format(n), "netns", names[n])]
            ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not let us make network namespaces: {error.stderr}")
        for number, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", CABLE.format(number))
            ip("-n", name, "link", "set", CABLE.format(number), "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run_on(nodes: list[str], processes: int, *program: str) -> None:
    """Run `program` in so many processes of every node, under an agent on each."""
    started = []
    for number, name in enumerate(nodes):
        agent = [
            *("-m", "torch.distributed.run", f"--nnodes={len(nodes)}", "--rdzv-backend=c10d"),
            *(f"--nproc-per-node={processes}", f"--rdzv-endpoint=10.213.7.1:{PORT}"),
            *(f"--local-addr=10.213.7.{number + 1}", "--rdzv-id=test"),
            f"--rdzv-conf=is_host={int(number == 0)}",  # they share a name, so it cannot tell
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": CABLE.format(number),
        }
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *agent, *program],
                stderr=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
                env=environment,
            )
        )
    shown = [agent.communicate()[1] for agent in started]
    codes = [agent.returncode for agent in started]
    assert codes == [0] * len(nodes), "\n".join(words[-4000:] for words in shown)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "strategy"), [(1, "fsdp"), (2, "fsdp:2")])
def test_two_nodes_train_as_one_process_does(
    nodes: list[str], tiny_model: Path, tmp_path: Path, processes: int, strategy: str
) -> None:
    out = tmp_path / "nodes.json"
    arguments = ("-m", "tests.pipeline.processes.spread", str(tiny_model), str(out), strategy)
    run_on(nodes, processes, *arguments)
    expected = spread(1, str(tiny_model), str(tmp_path / "one.json"), "auto")["auto"]
    found = json.loads(out.read_text(encoding="utf-8"))[strategy]
    require_same(found, expected)
    assert found["ppo"]["resumed"]
    assert found["ppo"]["held"] == pytest.approx(
        expected["ppo"]["held"] / 2, rel=0.1
    )  # by pairs, also of four
