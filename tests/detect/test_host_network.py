from __future__ import annotations

import os
import shutil
from pathlib import Path

from test_host_memory import lay, values

from rerail.detect.host_network import LIST_EVERY, Bonds, Interfaces, Rdma, Tcp, gigabits

IB = "sys/class/infiniband"
NET = "sys/class/net"
HEADER = "Inter-|   Receive   |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes ...\n"


def port(root: Path, device: str, **files: str) -> Path:
    """One port that works, but for what is given."""
    given = {
        "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand", "sm_lid": "0x1",
        "counters/link_downed": "0", "counters/symbol_error": "3", "counters/port_xmit_data": "1",
        "hw_counters/local_ack_timeout_err": "0", "hw_counters/lifespan": "10",
    }  # fmt: skip
    folder = root / IB / device / "ports/1"
    lay(folder, given | {name.replace("__", "/"): text for name, text in files.items()})
    lay(root, {f"{IB}/{device}/hca_type": "MT4129"})
    return folder


def test_rates_are_numbers() -> None:
    assert [gigabits(text) for text in ("400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "", "x")] == [
        400.0,
        2.5,
        None,
        None,
    ]


def test_a_healthy_port_gives_state_rate_and_the_counters_that_are_judged(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    found = {reading.name: reading.value for reading in Rdma(tmp_path).check() if reading.subject == "mlx5_0/1"}
    assert found == {
        "nic.rdma.port_never_up": 0, "nic.rdma.port_state": "ACTIVE", "nic.rdma.phys_state": "LinkUp",
        "nic.rdma.subnet_manager_missing": 0, "nic.rdma.rate_share": 1.0, "nic.rdma.peer_rate_share": 1.0,
        "nic.rdma.symbol_error": 3, "nic.rdma.link_downed": 0, "nic.rdma.local_ack_timeout_err": 0,
    }  # fmt: skip


def test_a_port_that_goes_down_comes_back_slow_and_counts(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1")
    rdma = Rdma(tmp_path)
    rdma.check()
    port(tmp_path, "mlx5_0", state="1: DOWN", phys_state="2: Polling", counters__link_downed="1")
    found = rdma.check()
    assert values(found, "nic.rdma.port_state") == {"mlx5_0/1": "DOWN", "mlx5_1/1": "ACTIVE"}
    assert values(found, "nic.rdma.link_downed")["mlx5_0/1"] == 1
    assert values(found, "nic.rdma.rate_share") == {"mlx5_1/1": 1.0}
    port(tmp_path, "mlx5_0", rate="100 Gb/sec (1X NDR)", sm_lid="0x0")
    found = rdma.check()
    assert values(found, "nic.rdma.rate_share") == {"mlx5_0/1": 0.25, "mlx5_1/1": 1.0}
    assert values(found, "nic.rdma.peer_rate_share") == {"mlx5_0/1": 0.25, "mlx5_1/1": 1.0}
    assert values(found, "nic.rdma.subnet_manager_missing")["mlx5_0/1"] == 1


def test_a_port_that_was_never_up_is_only_mentioned(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", state="1: DOWN", phys_state="3: Disabled")
    rdma = Rdma(tmp_path)
    found = rdma.check()
    assert values(found, "nic.rdma.port_never_up") == {"mlx5_0/1": 1} and values(found, "nic.rdma.port_state") == {}
    port(tmp_path, "mlx5_0")
    assert values(rdma.check(), "nic.rdma.port_never_up") == {"mlx5_0/1": 0}


def test_roce_has_no_subnet_manager(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", link_layer="Ethernet", sm_lid="0x0")
    assert values(Rdma(tmp_path).check(), "nic.rdma.subnet_manager_missing") == {}


def test_one_device_that_is_gone_is_told_and_all_at_once_are_one_fault(tmp_path: Path) -> None:
    for device in ("mlx5_0", "mlx5_1", "mlx5_2"):
        port(tmp_path, device)
    rdma = Rdma(tmp_path)
    rdma.check()
    shutil.rmtree(tmp_path / IB / "mlx5_1")
    found = rdma.check()
    assert values(found, "nic.rdma.gone") == {"mlx5_0": 0, "mlx5_1": 1, "mlx5_2": 0}
    assert values(found, "nic.rdma.all_gone") == {"rdma": 0}
    shutil.rmtree(tmp_path / IB)
    found = rdma.check()
    assert values(found, "nic.rdma.gone") == {} and values(found, "nic.rdma.all_gone") == {"rdma": 1}


def test_ports_are_counted_against_what_is_expected(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", rate="100 Gb/sec (1X NDR)")
    found = Rdma(tmp_path, expected_ports=2, expected_gbps=400).check()
    assert values(found, "nic.rdma.ports_missing") == {"rdma": 1}
    assert values(found, "nic.rdma.rate_share")["mlx5_1/1"] == 0.25
    absent = Rdma(tmp_path / "none", expected_ports=2)
    assert absent.supported() == "" and values(absent.check(), "nic.rdma.ports_missing") == {"rdma": 2}


def test_garbage_in_a_port_is_left_out(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", counters__symbol_error="N/A (no PMA)", rate="\ufffd", counters__link_downed="")
    found = Rdma(tmp_path).check()
    assert values(found, "nic.rdma.symbol_error") == values(found, "nic.rdma.link_downed") == {}
    assert values(found, "nic.rdma.rate_share") == {}
    port(tmp_path, "mlx5_0", state="rubbish")
    assert values(Rdma(tmp_path).check(), "nic.rdma.port_state") == {}


def test_counters_that_come_later_are_found(tmp_path: Path) -> None:
    folder = port(tmp_path, "mlx5_0")
    rdma = Rdma(tmp_path)
    rdma.check()
    lay(folder, {"hw_counters/out_of_sequence": "5"})
    looks = [values(rdma.check(), "nic.rdma.out_of_sequence") for _ in range(LIST_EVERY)]
    assert looks[0] == {} and looks[-1] == {"mlx5_0/1": 5}


def interface(
    root: Path, name: str, columns: str = "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", physical: bool = True, **files: str
) -> None:
    given = {"flags": "0x1003", "carrier": "1", "carrier_changes": "2", "operstate": "up", "speed": "100000"}
    lay(root / NET / name, given | files)
    if physical:
        (root / NET / name / "device").mkdir(exist_ok=True)
    lay(root, {"proc/net/dev": f"{HEADER}    lo: 1 2 3\n {name}: {columns}\n"})


def test_an_interface_before_and_after(tmp_path: Path) -> None:
    interface(tmp_path, "veth0", physical=False)
    interface(tmp_path, "eth0")
    net = Interfaces(tmp_path)
    assert net.supported() == ""
    assert values(net.check(), "nic.eth.carrier") == {"eth0": 1}
    interface(
        tmp_path,
        "eth0",
        "9 9 5 6 0 7 0 0 9 9 10 11 0 0 14 0",
        carrier="0",
        carrier_changes="3",
        operstate="down",
        speed="-1",
    )
    found = {reading.name: reading.value for reading in net.check()}
    assert found == {
        "nic.eth.gone": 0, "nic.eth.carrier": 0, "nic.eth.carrier_changes": 3, "nic.eth.rx_errors": 5, "nic.eth.rx_dropped": 6,
        "nic.eth.rx_frame_errors": 7, "nic.eth.tx_errors": 10, "nic.eth.tx_dropped": 11, "nic.eth.tx_carrier_errors": 14,
    }  # fmt: skip
    interface(tmp_path, "eth0", speed="10000")
    assert values(net.check(), "nic.eth.speed_share") == {"eth0": 0.1}


def test_an_interface_that_is_unused_or_was_taken_down_says_nothing(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", carrier="0")
    net = Interfaces(tmp_path)
    assert [reading.name for reading in net.check()] == ["nic.eth.gone"]
    interface(tmp_path, "eth0")
    assert values(net.check(), "nic.eth.carrier") == {"eth0": 1}
    interface(tmp_path, "eth0", flags="0x1002", carrier="")
    assert [reading.name for reading in net.check()] == ["nic.eth.gone"]


def test_an_interface_that_is_gone_is_told(tmp_path: Path) -> None:
    interface(tmp_path, "eth0")
    interface(tmp_path, "eth1")
    net = Interfaces(tmp_path)
    net.check()
    shutil.rmtree(tmp_path / NET / "eth1")
    assert values(net.check(), "nic.eth.gone") == {"eth0": 0, "eth1": 1}


def test_a_container_without_physical_interfaces_has_a_reason(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", physical=False)
    assert "namespace" in Interfaces(tmp_path).supported()
    assert Interfaces(tmp_path).check() == []
    assert "infiniband" in Rdma(tmp_path).supported()


def test_a_bond_counts_members_that_are_down_or_were_thrown_out(tmp_path: Path) -> None:
    member = "bonding_slave/mii_status"
    lay(tmp_path, {
        f"{NET}/bonding_masters": "bond0\n", f"{NET}/bond0/bonding/slaves": "eth0 eth1 eth2\n",
        f"{NET}/eth0/{member}": "up", f"{NET}/eth1/{member}": "up", f"{NET}/eth2/{member}": "up",
        f"{NET}/eth1/bonding_slave/link_failure_count": "4",
    })  # fmt: skip
    bonds = Bonds(tmp_path)
    assert values(bonds.check(), "nic.bond.members_down") == {"bond0": 0}
    lay(tmp_path, {f"{NET}/eth1/{member}": "down", f"{NET}/bond0/bonding/slaves": "eth0 eth1"})
    found = bonds.check()
    assert values(found, "nic.bond.members_down") == {"bond0": 2} and found[0].note == "eth1 eth2"
    assert values(found, "nic.bond.link_failures") == {"bond0/eth1": 4}
    assert Bonds(tmp_path / "none").supported()


def test_the_share_of_segments_sent_again_needs_enough_segments(tmp_path: Path) -> None:
    text = "Ip: a b\nIp: 1 2\nTcp: RtoMin MaxConn OutSegs RetransSegs\nTcp: 200 -1 {sent} {again}\n"
    lay(tmp_path, {"proc/net/snmp": text.format(sent=1000, again=10)})
    tcp = Tcp(tmp_path)
    assert tcp.supported() == "" and tcp.check() == []
    lay(tmp_path, {"proc/net/snmp": text.format(sent=1100, again=60)})
    assert tcp.check() == []
    lay(tmp_path, {"proc/net/snmp": text.format(sent=101_100, again=5060)})
    assert values(tcp.check(), "nic.tcp.retransmitted_share") == {"tcp": 0.05}
    lay(tmp_path, {"proc/net/snmp": "Tcp: rubbish\n"})
    assert tcp.check() == [] and tcp.supported()


def test_a_port_that_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    folder = port(tmp_path, "mlx5_0")
    (folder / "state").unlink()
    os.mkfifo(folder / "state")  # as silent as a file without permission, even for root
    assert values(Rdma(tmp_path).check(), "nic.rdma.port_state") == {}
