"""Measure calls and bandwidth between two hosts, interleaved in one run.

    python -m benchmarks.hosts
    python -m benchmarks.hosts --peers telegrad,torch --rounds 3

The hosts are network namespaces of this machine: TCP is all that callee and caller share, and both
use the same cores. Telegrad runs encrypted, which is the default, and with TELEGRAD_TLS=off. torch
RPC is not encrypted; it uses TensorPipe over TCP, as between machines. gRPC uses TLS.

The limits are plain sockets in Python with one stream and with four, and the cipher of TLS. Every
byte is encrypted and decrypted on the same cores, so half the speed of the cipher on all cores is
the limit of encrypted bandwidth. It needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine, namespaces, plots, results
from benchmarks.core import ROUNDS, names, rounds
from benchmarks.entries import Entry, MachineEntry, start_peers
from benchmarks.limits import PING_BYTES
from benchmarks.namespaces import Host, Network
from benchmarks.peers import PEERS
from benchmarks.progress import say
from benchmarks.suite import MB, Case, bandwidth, latency, limit

PLAIN = "telegrad plain"
CIPHER = "aes-256-gcm"  # what OpenSSL prefers for TLS 1.3
SECONDS = 0.5
_SPECS = (
    replace(PEERS["telegrad"], about="TCP, encrypted by default"),
    replace(
        PEERS["telegrad"],
        name=PLAIN,
        about="TCP, TELEGRAD_TLS=off: authenticated, not encrypted",
        environment={"TELEGRAD_TLS": "off"},
    ),
    replace(
        PEERS["torch"],
        adapter="torch_rpc:TorchBetweenHosts",
        about="TensorPipe over TCP, not encrypted",
    ),
    replace(PEERS["grpc"], adapter="grpc_service:GrpcTls", about="TCP with TLS"),
    replace(PEERS["ray"], adapter="ray_actor:RayNodes", about="one node on each host, no TLS"),
)
SPECS = {spec.name: spec for spec in _SPECS}
CASES = tuple(
    replace(case, name=f"hosts-{case.name}", axis="MB" if "push" in case.name else "")
    for case in (
        latency("1-element", "1 element", function="add", elements=1),
        latency("1MB", "1 MB echoed", function="echo", elements=MB // 4),
        bandwidth("push", 1, "1 MB to the callee"),
        bandwidth("push", 100, "100 MB to the callee"),
        bandwidth("push", 1000, "1 GB to the callee"),
        bandwidth("pull", 100, "100 MB from the callee"),
    )
)


def limits(callee: Host) -> list[Case]:
    """Return the limits, measured from the other host."""
    there: dict[str, Any] = {"address": callee.address, "prefix": list(callee.prefix)}
    cores = len(os.sched_getaffinity(0))

    def sockets(name: str, title: str, unit: str, size: int, streams: int) -> Case:
        return limit(f"hosts-{name}", title, unit, "sockets", size=size, streams=streams, **there)

    def cipher(name: str, title: str, processes: int) -> Case:
        params = {"algorithm": CIPHER, "processes": processes}
        return limit(f"cipher-{name}", f"{CIPHER}, {title}", "GB/s", "cipher", **params)

    return [
        sockets("ping-pong", "TCP ping-pong, Python", "us", PING_BYTES, 1),
        sockets("1-stream", "sockets, 1 stream, 100 MB", "GB/s", 100 * MB, 1),
        sockets("4-streams", "sockets, 4 streams, 100 MB", "GB/s", 100 * MB, 4),
        cipher("1-thread", "one thread", 1),
        cipher("all-cores", "all cores", cores),
    ]


def start(
    wanted: list[str], network: Network, stack: ExitStack, run: dict[str, Any]
) -> list[Entry]:
    """Start the peers that are installed, and the process that measures limits."""
    specs = [SPECS[name] for name in wanted]
    entries = start_peers(specs, list(CASES), stack, run, network.hosts)
    callee, caller = network.hosts
    machine_entry = MachineEntry(limits(callee), caller.prefix)
    stack.callback(machine_entry.close)
    return [*entries, machine_entry]


def both_ends(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the limit of encrypted bandwidth: both ends use the same cores."""
    found = [line for line in lines if line["case"] == "limit/cipher-all-cores"]
    keys = ("median", "min", "max")
    return [
        {
            **line,
            "case": "limit/cipher-both-ends",
            "title": f"{CIPHER}, both ends on these cores",
            "rounds": [value / 2 for value in line["rounds"]],
            **{key: line[key] and line[key] / 2 for key in keys},
        }
        for line in found
    ]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if reason := namespaces.hindrance():
        say(f"skipped: {reason}")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `finally` blocks end the processes
    run = machine.heading(
        "hosts", rounds=options.rounds, seconds=options.seconds, peers={}, skipped={}
    )
    figures = results.Results()

    def lines() -> list[dict[str, Any]]:
        found = figures.lines()
        return found + both_ends(found)

    with results.kept(options.out, run, lines), ExitStack() as stack:
        network = stack.enter_context(Network(2))
        entries = start(options.peers, network, stack, run)
        cases = [*CASES, *limits(network.hosts[0])]
        rounds(entries, [case for case in cases if chosen(case, options)], options, figures)
    say(results.table(lines()))
    plots.save(options.out)
    return 0


def chosen(case: Case, options: argparse.Namespace) -> bool:
    return not options.cases or case.name.startswith(tuple(options.cases))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--peers", type=names(SPECS), default=",".join(SPECS), help=f"from {','.join(SPECS)}"
    )
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), help="run only the cases with these prefixes"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="per case")
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/hosts.jsonl"),
        help="default %(default)s",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
