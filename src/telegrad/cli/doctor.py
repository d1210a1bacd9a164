"""`telegrad doctor`: check whether workers on this host, and between hosts, can work.

Each check yields findings: ok, a note (nothing is wrong, but you may want to know), or a problem
with what to do. The exit status is 1 if there is a problem.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from telegrad import plurals
from telegrad.cli import doctor_link
from telegrad.cli.help_text import HelpFormatter
from telegrad.config import Config
from telegrad.errors import AuthenticationError, JoinError, TelegradError, UsageError
from telegrad.group.hosts import describe_interfaces, interfaces, is_loopback
from telegrad.group.secret import group_key, is_random_key, key_file
from telegrad.timeouts import LONGEST_POLL
from telegrad.transport import sockets

_EXAMPLES = """\
  telegrad doctor                               check this host
  telegrad doctor --rendezvous 10.0.0.1:29500   and the store and the workers of a group
  telegrad doctor --listen                      wait for the doctor of another host
  telegrad doctor 10.0.0.1:29555                measure the connection to it
"""
_DEFAULT_LISTEN = "0.0.0.0:29555"
_MIN_FILES = 4096
_MIN_THREADS = 1024
_MIN_SHARED_MEMORY = 1 << 30
_STORE_TIMEOUT = 10.0

OK, NOTE, PROBLEM = "ok", "note", "problem"


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    status: str
    text: str
    advice: str = ""


def add(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check this host, and the connection to other hosts",
        description="Check whether workers can run here and reach each other. The settings are "
        "those of the TELEGRAD_* variables of the environment.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "peer", metavar="HOST:PORT", nargs="?", help="where `telegrad doctor --listen` runs"
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        nargs="?",
        const=_DEFAULT_LISTEN,
        help=f"wait for doctors of other hosts (default {_DEFAULT_LISTEN}) until Ctrl-C",
    )
    parser.add_argument(
        "--once", action="store_true", help="with --listen: end after the first doctor"
    )
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="the store of a group: MASTER_ADDR:MASTER_PORT"
    )
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")
    parser.set_defaults(command=lambda options: _doctor(parser, options))


def _doctor(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    for address in (options.peer, options.listen, options.rendezvous):
        try:
            if address is not None:
                doctor_link.parse(address)
        except ValueError as error:
            parser.error(str(error))
    findings = []
    for finding in _check_all(options):
        findings.append(finding)
        if not options.json:
            sys.stdout.write(f"{_line(finding)}\n")
            sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps([each._asdict() for each in findings], indent=2) + "\n")
    return 1 if any(each.status == PROBLEM for each in findings) else 0


def _line(finding: Finding) -> str:
    line = f"{finding.status:8} {finding.check}: {finding.text}"
    return f"{line}\n         -> {finding.advice}" if finding.advice else line


def _check_all(options: argparse.Namespace) -> Iterator[Finding]:
    try:
        config = Config.from_environment()
    except UsageError as error:
        yield Finding("settings", PROBLEM, str(error), "correct the TELEGRAD_* variable")
        return
    yield from _check_secret(config)
    try:
        key = group_key(config.secret)
    except UsageError:
        return  # the problem was found above
    yield from _check_versions(config, key)
    yield from _check_addresses(config)
    yield from _check_memory(config)
    yield from _check_limits()
    if options.rendezvous:
        yield from _check_rendezvous(options.rendezvous, config, key)
    if options.peer:
        yield from _check_peer(options.peer, config, key)
    if options.listen:
        yield from _listen(options, config, key)


# This host


def _check_secret(config: Config) -> Iterator[Finding]:
    advice = (
        "a random key is better: "
        "TELEGRAD_SECRET=$(python -c 'import secrets; print(secrets.token_hex(32))')"
    )
    if config.secret is not None:
        if is_random_key(config.secret):
            yield Finding("secret", OK, "TELEGRAD_SECRET is a random key")
        else:
            text = f"TELEGRAD_SECRET has {len(config.secret)} characters; it is stretched by scrypt"
            yield Finding("secret", NOTE, text, advice)
        return
    path = key_file()
    if not path.exists():
        text = f"no TELEGRAD_SECRET; a key will be made in {path}"
        other_hosts = "between hosts without a common home, set the same TELEGRAD_SECRET"
        yield Finding("secret", NOTE, text, other_hosts)
        return
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        text = f"{path} can be read by others ({stat.filemode(status.st_mode)})"
        yield Finding("secret", PROBLEM, text, f"chmod 600 {path}")
        return
    try:
        group_key(None)
    except UsageError as error:
        yield Finding("secret", PROBLEM, str(error), f"delete {path}")
    else:
        yield Finding("secret", OK, f"the key in {path}, which only you can read")


def _check_versions(config: Config, key: bytes) -> Iterator[Finding]:
    versions = doctor_link.versions(config, key)
    if versions["torch"] == "not installed":
        yield Finding("versions", PROBLEM, "torch is not installed", "pip install torch")
    names = ("telegrad", "protocol", "python", "torch")
    text = ", ".join(f"{name} {versions[name]}" for name in names)
    yield Finding("versions", OK, f"{text}, {ssl.OPENSSL_VERSION}")
    if config.tls == "off":
        advice = "unset TELEGRAD_TLS unless the network is trusted"
        yield Finding("tls", NOTE, "TCP connections are not encrypted", advice)
    elif "ephemeral" in versions["tls"] and importlib.util.find_spec("cryptography") is None:
        text = "this Python has no pre-shared keys, and the package cryptography is missing"
        yield Finding("tls", PROBLEM, text, "pip install cryptography")
    else:
        yield Finding("tls", OK, versions["tls"])


def _check_addresses(config: Config) -> Iterator[Finding]:
    yield Finding("interfaces", OK, describe_interfaces())
    try:
        with sockets.listen("unix", "")[0]:
            yield Finding("unix sockets", OK, "a worker can listen")
    except OSError as error:
        yield Finding("unix sockets", PROBLEM, str(error), "allow abstract unix sockets")
    try:
        listening, address = sockets.listen("tcp", config.listen)
    except UsageError as error:
        advice = f"set TELEGRAD_LISTEN to one of these: {describe_interfaces()}"
        yield Finding("listen", PROBLEM, str(error), advice)
        return
    with listening:
        if is_loopback(config.listen):
            text = f"TELEGRAD_LISTEN is {config.listen}: only workers of this host can connect"
            advice = "for several hosts, set TELEGRAD_LISTEN=0.0.0.0 or the address of an interface"
            yield Finding("listen", NOTE, text, advice)
        else:
            yield Finding("listen", OK, f"a worker can listen on {config.listen}")
        yield _check_advertised(config, int(address.rpartition(":")[2]))


def _check_advertised(config: Config, port: int) -> Finding:
    """Connect to the address that other workers would be told."""
    host = config.advertise or config.listen
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    advice = "set TELEGRAD_ADVERTISE to an address of this host that the other hosts can reach"
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, port)})
    except OSError as error:
        return Finding("address", PROBLEM, f"the name {host!r} is unknown here: {error}", advice)
    described = host if found == [host] else f"{host} ({', '.join(found)})"
    if all(map(is_loopback, found)) and not is_loopback(config.listen):
        text = f"other workers would be told {described}, which is loopback"
        return Finding("address", PROBLEM, text, advice)
    try:
        socket.create_connection((host, port), min(config.connect_timeout, LONGEST_POLL)).close()
    except OSError as error:
        own = [address for addresses in interfaces().values() for address in addresses]
        if not set(found) & set(own):  # for example the public address of a router
            text = f"{described} is not an address of an interface, and cannot be reached from here"
            return Finding("address", NOTE, text, f"try `telegrad doctor --listen`, or {advice}")
        text = f"other workers would be told {described}, but nothing listens there: {error}"
        return Finding("address", PROBLEM, text, advice)
    return Finding("address", OK, f"other workers are told {described}, which works from here")


def _check_memory(config: Config) -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("telegrad-doctor"))
    except OSError as error:
        yield Finding("shared memory", PROBLEM, f"no memfd: {error}", "use Linux 3.17 or newer")
        return
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _number("/sys/fs/cgroup/memory.max")
    if limit is not None:
        available = min(available, limit - (_number("/sys/fs/cgroup/memory.current") or 0))
    text = (
        f"{available / 1e9:.1f} GB are available; a worker uses up to "
        f"{config.shared_memory_limit / 1e9:.1f} GB (memory files; /dev/shm is not needed)"
    )
    if available < _MIN_SHARED_MEMORY:
        yield Finding("shared memory", PROBLEM, text, "give the container or host more memory")
    elif available < config.shared_memory_limit:
        yield Finding("shared memory", NOTE, text, "lower TELEGRAD_SHARED_MEMORY_LIMIT")
    else:
        yield Finding("shared memory", OK, text)


def _check_limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = f"{_count(files)} open files"
    if 0 <= files < _MIN_FILES:
        yield Finding("limits", PROBLEM, text, f"ulimit -n {16 * _MIN_FILES}")
    else:
        yield Finding("limits", OK, text)
    threads = [
        number
        for number in (
            resource.getrlimit(resource.RLIMIT_NPROC)[0],
            _number("/sys/fs/cgroup/pids.max"),
            _number("/proc/sys/kernel/threads-max"),
        )
        if number is not None and number >= 0
    ]
    text = f"{_count(min(threads, default=-1))} threads"
    if threads and min(threads) < _MIN_THREADS:
        yield Finding("limits", PROBLEM, text, "raise `ulimit -u`, or the pids limit of the cgroup")
    else:
        yield Finding("limits", OK, text)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size = "unlimited" if locked < 0 else f"{locked / 1e6:,.1f} MB of"
    text = f"{size} locked memory"
    if locked >= 0:
        yield Finding(
            "limits", NOTE, text, "RDMA networks need `ulimit -l unlimited`; other networks do not"
        )
    else:
        yield Finding("limits", OK, text)


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def _number(path: str) -> int | None:
    """Return the number in a file; None if there is no such file or it says "max"."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


# A group


def _check_rendezvous(address: str, config: Config, key: bytes) -> Iterator[Finding]:
    host, port = doctor_link.parse(address)
    try:
        start = time.perf_counter()
        socket.create_connection((host, port), min(config.connect_timeout, LONGEST_POLL)).close()
        seconds = time.perf_counter() - start
    except OSError as error:
        advice = "start the worker with rank 0, check MASTER_ADDR and MASTER_PORT, and firewalls"
        yield Finding("rendezvous", PROBLEM, f"{address} does not answer: {error}", advice)
        return
    yield Finding("rendezvous", OK, f"{address} answers in {1000 * seconds:.1f} ms")
    # imported here, because it imports torch
    check_group = importlib.import_module("telegrad.cli.doctor_group").check_group
    try:
        count, problems = check_group(host, port, config, key, _STORE_TIMEOUT)
    except AuthenticationError as error:
        yield Finding("group", PROBLEM, str(error), "set the same TELEGRAD_SECRET everywhere")
    except (JoinError, RuntimeError, OSError) as error:
        advice = "the address must be that of a torch.distributed TCPStore"
        yield Finding("group", PROBLEM, f"the store does not answer: {error}", advice)
    else:
        if problems:
            yield from (Finding("group", PROBLEM, problem) for problem in problems)
        elif count:
            yield Finding(
                "group", OK, f"{plurals.count(count, 'worker')}, all can be reached from here"
            )
        else:
            yield Finding("group", NOTE, "no worker has joined yet")


# Another host


def _check_peer(address: str, config: Config, key: bytes) -> Iterator[Finding]:
    try:
        link = doctor_link.measure(address, config, key)
    except AuthenticationError as error:
        advice = "set the same TELEGRAD_SECRET on both hosts"
        yield Finding("connection", PROBLEM, str(error), advice)
    except ConnectionRefusedError as error:
        advice = "start `telegrad doctor --listen` there"
        yield Finding("connection", PROBLEM, f"nothing listens at {address}: {error}", advice)
    except (OSError, TelegradError) as error:
        advice = "check the address, firewalls between the hosts, and TELEGRAD_TLS on both"
        yield Finding("connection", PROBLEM, f"{address} cannot be reached: {error}", advice)
    else:
        text = (
            f"round trip {1e6 * link.round_trip:.0f} us, {link.upload / 1e9:.2f} GB/s there, "
            f"{link.download / 1e9:.2f} GB/s back (one stream)"
        )
        yield Finding("connection", OK, text)
        yield from _compare(link.peer, config, key)


def _compare(peer: dict[str, Any], config: Config, key: bytes) -> Iterator[Finding]:
    """Compare the versions of this host and another one."""
    own = doctor_link.versions(config, key)
    name = str(peer.get("name"))
    different = {each: str(peer.get(each)) for each in own if peer.get(each) != own[each]}
    if not different:
        yield Finding("versions there", OK, f"{name} has the same versions")
    for each, value in different.items():
        same_minor = value.split(".")[:2] == own[each].split(".")[:2]
        status = NOTE if each in ("python", "torch") and same_minor else PROBLEM
        text = f"{each} is {value} at {name}, and {own[each]} here"
        yield Finding("versions there", status, text, "install the same version on both hosts")


def _listen(options: argparse.Namespace, config: Config, key: bytes) -> Iterator[Finding]:
    try:
        listening = doctor_link.listen(options.listen)
    except OSError as error:
        advice = "choose another address: --listen HOST:PORT"
        yield Finding("listening", PROBLEM, f"{options.listen}: {error}", advice)
        return
    with listening:
        port = listening.getsockname()[1]
        sys.stderr.write(
            f"listening; run on the other host: telegrad doctor {socket.gethostname()}:{port}\n"
        )
        sys.stderr.flush()
        try:
            while True:
                yield from _serve(listening, config, key)
                if options.once:
                    return
        except KeyboardInterrupt:
            return


def _serve(listening: socket.socket, config: Config, key: bytes) -> Iterator[Finding]:
    try:
        peer = doctor_link.serve_one(listening, config, key)
    except AuthenticationError as error:
        advice = "set the same TELEGRAD_SECRET on both hosts"
        yield Finding("connection", PROBLEM, str(error), advice)
    except (OSError, TelegradError) as error:
        advice = "try again; compare TELEGRAD_TLS on both hosts"
        yield Finding("connection", PROBLEM, f"a connection failed: {error}", advice)
    else:
        yield Finding("connection", OK, f"{peer.get('name')} ({peer['address']}) connected")
        yield from _compare(peer, config, key)
