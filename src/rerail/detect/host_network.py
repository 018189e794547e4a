"""Turns network ports (InfiniBand and RoCE, Ethernet, bonds, TCP) into readings. Called by `detect.monitor`.

A port that has never been up is taken as unused and only mentioned: most machines have some. Virtual interfaces are not
looked at; a container with its own network namespace may see no physical one at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rerail.detect.detector import Detector, Reading
from rerail.detect.host_memory import Known, names, read_int, read_text, share, to_int

COUNTERS = [
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
]
HARDWARE_COUNTERS = [
    "local_ack_timeout_err",
    "req_cqe_error",
    "req_transport_retries_exceeded",
    "rnr_nak_retry_err",
    "out_of_sequence",
    "packet_seq_err",
    "roce_adp_retrans_to",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rx_icrc_encapsulated",
    "out_of_buffer",
    "rx_drops",
    "retrans_timeout_events",
    "unresponsive_remote_events",
]
"""mlx5 names, then those of EFA. Each read of the folder `counters` is a command to the card: only what is judged is read."""
LIST_EVERY = 20
"""Looks between two listings of the files of a port."""
IFF_UP = 1


def gigabits(text: str) -> float | None:
    """`400 Gb/sec (4X NDR)` as a number."""
    try:
        return float(text.split()[0]) or None
    except (IndexError, ValueError):
        return None


class Rdma:
    """State, rate and error counters of InfiniBand, RoCE and EFA ports."""

    name = "host.rdma"

    def __init__(
        self, root: Path = Path("/"), expected_ports: int = 0, expected_gbps: float = 0.0, every_s: float = 10.0
    ) -> None:
        self.every_s = every_s
        self.expected_ports = expected_ports
        """Ports that must be active, at `expected_gbps` or faster; 0: nobody said."""
        self.expected_gbps = expected_gbps
        self._base = root / "sys/class/infiniband"
        self._known = Known()
        self._was_up: set[str] = set()
        self._fastest: dict[str, float] = {}
        self._files: dict[str, list[tuple[str, str]]] = {}
        self._looks = 0

    def supported(self) -> str:
        if self.expected_ports or names(self._base):
            return ""
        return "no RDMA devices in /sys/class/infiniband (none, no driver, or a container that hides them)"

    def check(self) -> list[Reading]:
        self._looks += 1
        if self._looks % LIST_EVERY == 0:
            self._files.clear()
        devices = names(self._base)
        gone = self._known.gone(devices)
        all_gone = len(gone) > 1 and not devices
        found = [Reading("nic.rdma.all_gone", "rdma", int(all_gone))]
        if not all_gone:  # one driver that went, not many cards that broke
            found += [Reading("nic.rdma.gone", device, 1) for device in gone]
        found += [Reading("nic.rdma.gone", device, 0) for device in devices]
        rates: dict[str, tuple[str, float]] = {}
        for device in devices:
            model = read_text(self._base / device / "hca_type")
            for port in names(self._base / device / "ports"):
                found += self._port(f"{self._base}/{device}/ports/{port}", f"{device}/{port}", model, rates)
        found += self._beside_others(rates)
        if self.expected_ports:
            fast = sum(rate >= self.expected_gbps for _, rate in rates.values())
            found.append(Reading("nic.rdma.ports_missing", "rdma", max(0, self.expected_ports - fast)))
        return found

    def blind_spots(self) -> list[str]:
        blind = ["RoCE pause frames: only `ethtool -S` shows them"]
        if not self.expected_ports:
            blind.append("RDMA ports that are missing since boot: the expected number is not set")
        return blind

    def _port(self, folder: str, subject: str, model: str, rates: dict[str, tuple[str, float]]) -> Iterator[Reading]:
        state, phys = (read_text(f"{folder}/{file}").partition(": ")[2] for file in ("state", "phys_state"))
        if not state:
            return
        if state == "ACTIVE":
            self._was_up.add(subject)
        yield Reading("nic.rdma.port_never_up", subject, int(subject not in self._was_up), phys)
        if subject not in self._was_up:
            return
        yield Reading("nic.rdma.port_state", subject, state, phys)
        if phys:
            yield Reading("nic.rdma.phys_state", subject, phys)
        if state == "ACTIVE":
            layer = read_text(f"{folder}/link_layer")
            if layer == "InfiniBand":
                manager = read_int(f"{folder}/sm_lid")
                if manager is not None:
                    yield Reading("nic.rdma.subnet_manager_missing", subject, int(manager == 0))
            rate = gigabits(read_text(f"{folder}/rate"))
            if rate:
                rates[subject] = (f"{model} {layer}", rate)
                best = self._fastest[subject] = max(rate, self._fastest.get(subject, 0.0), self.expected_gbps)
                yield Reading("nic.rdma.rate_share", subject, share(rate, best), f"{rate:g} of {best:g} Gb/s")
        for name, file in self._counters(folder):
            value = read_int(file)
            if value is not None:
                yield Reading(f"nic.rdma.{name}", subject, value)

    def _counters(self, folder: str) -> list[tuple[str, str]]:
        if folder not in self._files:
            there = {kind: set(names(f"{folder}/{kind}")) for kind in ("counters", "hw_counters")}
            self._files[folder] = [
                (name, f"{folder}/{kind}/{name}")
                for kind, wanted in (("counters", COUNTERS), ("hw_counters", HARDWARE_COUNTERS))
                for name in wanted
                if name in there[kind]
            ]
        return self._files[folder]

    @staticmethod
    def _beside_others(rates: dict[str, tuple[str, float]]) -> Iterator[Reading]:
        """Each port's rate as a share of the fastest of the same model."""
        best: dict[str, float] = {}
        for model, rate in rates.values():
            best[model] = max(rate, best.get(model, 0.0))
        for subject, (model, rate) in rates.items():
            note = f"{rate:g} Gb/s, the fastest {model} has {best[model]:g}"
            yield Reading("nic.rdma.peer_rate_share", subject, share(rate, best[model]), note)


class Interfaces:
    """Carrier, speed and errors of the physical network interfaces in this network namespace."""

    name = "host.net"
    FIELDS = (
        ("rx_errors", 2),
        ("rx_dropped", 3),
        ("rx_frame_errors", 5),
        ("tx_errors", 10),
        ("tx_dropped", 11),
        ("tx_carrier_errors", 14),
    )
    """Column of /proc/net/dev, which has all counters of all interfaces in one read."""

    def __init__(self, root: Path = Path("/"), every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._base, self._counts = root / "sys/class/net", root / "proc/net/dev"
        self._known = Known()
        self._physical: dict[str, bool] = {}
        self._was_up: set[str] = set()
        self._fastest: dict[str, int] = {}

    def supported(self) -> str:
        return "" if self._list() else "no physical network interface in this network namespace"

    def check(self) -> list[Reading]:
        interfaces = self._list()
        if not interfaces:
            return []
        found = [Reading("nic.eth.gone", interface, 1) for interface in self._known.gone(interfaces)]
        counts = {}
        for line in read_text(self._counts).splitlines():
            interface, _, columns = line.partition(":")
            counts[interface.strip()] = columns.split()
        for interface in interfaces:
            found.append(Reading("nic.eth.gone", interface, 0))
            found += self._look(interface, counts.get(interface, []))
        return found

    def blind_spots(self) -> list[str]:
        return []

    def _list(self) -> list[str]:
        for interface in names(self._base):
            if interface not in self._physical:
                device = self._base / interface / "device"
                self._physical[interface] = device.exists() and not (device / "physfn").exists()
        return [interface for interface in names(self._base) if self._physical.get(interface)]

    def _look(self, interface: str, columns: list[str]) -> Iterator[Reading]:
        folder = f"{self._base}/{interface}"
        flags, carrier = read_int(f"{folder}/flags"), read_int(f"{folder}/carrier")
        if carrier:
            self._was_up.add(interface)
        if interface not in self._was_up or not (flags or 0) & IFF_UP:
            return  # unused, or somebody has taken it down
        if carrier is not None:
            yield Reading("nic.eth.carrier", interface, carrier, read_text(f"{folder}/operstate"))
        changes = read_int(f"{folder}/carrier_changes")
        if changes is not None:
            yield Reading("nic.eth.carrier_changes", interface, changes)
        speed = read_int(f"{folder}/speed") if carrier else None
        if speed and speed > 0:
            best = self._fastest[interface] = max(speed, self._fastest.get(interface, 0))
            yield Reading("nic.eth.speed_share", interface, share(speed, best), f"{speed} of {best} Mb/s")
        for name, column in self.FIELDS:
            value = to_int(columns[column]) if column < len(columns) else None
            if value is not None:
                yield Reading(f"nic.eth.{name}", interface, value)


class Bonds:
    """Bonded interfaces and their members."""

    name = "host.bonds"

    def __init__(self, root: Path = Path("/"), every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._base = root / "sys/class/net"
        self._members: dict[str, set[str]] = {}

    def supported(self) -> str:
        return "" if self._list() else "no bonded interface in this network namespace"

    def check(self) -> list[Reading]:
        found = []
        for bond in self._list():
            now = set(read_text(self._base / bond / "bonding/slaves").split())
            members = self._members.setdefault(bond, set())
            members |= now
            states = {member: read_text(self._base / member / "bonding_slave/mii_status") for member in members}
            down = sorted(member for member, state in states.items() if member not in now or state not in ("up", ""))
            if members:
                found.append(Reading("nic.bond.members_down", bond, len(down), " ".join(down)))
            for member in sorted(now):
                failures = read_int(self._base / member / "bonding_slave/link_failure_count")
                if failures is not None:
                    found.append(Reading("nic.bond.link_failures", f"{bond}/{member}", failures))
        return found

    def blind_spots(self) -> list[str]:
        return []

    def _list(self) -> list[str]:
        return read_text(self._base / "bonding_masters").split()


class Tcp:
    """How much of what TCP sends in this network namespace has to be sent again."""

    name = "host.tcp"
    ENOUGH = 10_000
    """Segments between two looks below which a share says nothing."""

    def __init__(self, root: Path = Path("/"), every_s: float = 30.0) -> None:
        self.every_s = every_s
        self._file = root / "proc/net/snmp"
        self._last: dict[str, int] = {}

    def supported(self) -> str:
        return "" if self._read() else "no TCP figures in /proc/net/snmp"

    def check(self) -> list[Reading]:
        now, last = self._read(), self._last
        self._last = now
        sent = now.get("OutSegs", 0) - last.get("OutSegs", now.get("OutSegs", 0))
        again = now.get("RetransSegs", 0) - last.get("RetransSegs", 0)
        if sent < self.ENOUGH or again < 0:
            return []
        return [Reading("nic.tcp.retransmitted_share", "tcp", share(again, sent), f"{again} of {sent} segments")]

    def blind_spots(self) -> list[str]:
        return []

    def _read(self) -> dict[str, int]:
        lines = [line.split() for line in read_text(self._file).splitlines() if line.startswith("Tcp:")]
        if len(lines) != 2:
            return {}
        pairs = ((name, to_int(word)) for name, word in zip(*lines, strict=False))
        return {name: value for name, value in pairs if value is not None}


def detectors(root: Path = Path("/"), expected_ports: int = 0, expected_gbps: float = 0.0) -> list[Detector]:
    """All detectors of this module; the expectations are of the RDMA ports of this machine."""
    return [Rdma(root, expected_ports, expected_gbps), Interfaces(root), Bonds(root), Tcp(root)]
