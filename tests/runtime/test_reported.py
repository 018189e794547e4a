"""Faults that other systems report, at the door of a real controller."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_agent import LIMIT_S, FakeAgent
from test_controller import Job, play, running, training

from rerail.errors import WireError
from rerail.faults.catalog import load_catalog
from rerail.flow import Role
from rerail.runtime.orders import FormAll
from rerail.runtime.reported import MAX_BODY, MAX_FAULTS, Desk, Refused

OPEN = {"fault_senders": "dcgm, gpud"}
FAULT = {"sender": "dcgm", "code": "gpu.xid.79", "subject": "gpu3", "text": "fell off"}
CATALOG = load_catalog()


def post(port: int, body: object, token: str = "secret", method: str = "POST") -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/faults", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else {}


async def heard(job: Job, count: int) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        while len(found := [one for one in job.records("signal") if one.source == "machine"]) < count:
            await asyncio.sleep(0.01)
    return found


def test_a_reported_fault_begins_and_ends_as_one_of_our_own_would(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, OPEN) as (job, agent):
            assert await asyncio.to_thread(post, agent.port, FAULT) == (202, {"accepted": 1})
            (signal,) = await heard(job, 1)
            assert (signal.node, signal.rank, signal.job) == ("n0", -1, "j") and signal.at > 1e9
            assert signal.payload == {
                "code": "gpu.xid.79", "detector": "reported by dcgm", "subject": "gpu3", "evidence": "fell off", "over": False,
            }  # fmt: skip
            events = [one for one in job.records("event") if one.cause_id == signal.id]
            assert [one.code for one in events] == ["gpu.xid.79"]
            assert "n0 gpu3: GPU has fallen off the bus (gpu.xid.79): fell off" in job.said(), "which one is sick"
            over = [{**FAULT, "node": "n0", "over": True}, {"sender": "gpud", "code": "GPU-XID-79", "node": "n0"}]
            assert await asyncio.to_thread(post, agent.port, over) == (202, {"accepted": 2})
            assert [one.payload["over"] for one in await heard(job, 3)] == [False, True, False]
            assert "n0: gpu.xid.79 is over (gpu3)" in job.said()

    play(scenario, tmp_path)


def test_a_reported_fault_is_the_cause_of_a_death_soon_after(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, OPEN) as (job, agent):
            own = {**FAULT, "code": "gpu.xid.48", "subject": "gpu1", "at": 0.5}  # the fake agent's clock stands at 1
            await asyncio.to_thread(post, agent.port, own)
            await heard(job, 1)
            await agent.kill(1, "SIGBUS")
            (report,) = await job.reports(1)
            assert report.code == "gpu.xid.48" and report.ok

    play(scenario, tmp_path)


def test_reports_wake_a_controller_that_waits_and_change_no_heartbeat(tmp_path: Path) -> None:
    """A report about a silent node is no sign of life of that node."""

    async def scenario(folder: Path) -> None:
        async with training(folder, {**OPEN, "agent_lost_s": 1.0}) as (job, agent):
            async with asyncio.timeout(LIMIT_S):
                while not [one for one in job.records("signal") if one.source == "agent.lost"]:
                    await asyncio.to_thread(post, agent.port, FAULT)
                    await asyncio.sleep(0.05)

    play(scenario, tmp_path)


def test_who_may_not_report_is_told_why(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder, OPEN) as (job, port):
            for token in ("guess", "", "secre", "secrets"):
                status, answer = await asyncio.to_thread(post, port, FAULT, token)
                assert status == 401 and "token" in answer["error"]
            assert (await asyncio.to_thread(post, port, FAULT, "secret", "GET"))[0] == 405
            status, answer = await asyncio.to_thread(post, port, FAULT)
            assert status == 422 and "not a node of this job (nodes: none yet)" in answer["error"]
            agent = FakeAgent(port)
            await agent.dial()
            await agent.wait_for(FormAll)
            status, answer = await asyncio.to_thread(post, port, {**FAULT, "sender": "mallory"})
            assert status == 403 and "'mallory' is not in the setting fault_senders" in answer["error"]
            status, answer = await asyncio.to_thread(post, port, b"x" * (MAX_BODY + 1))
            assert status == 413 and "64 KiB" in answer["error"]
            status, answer = await asyncio.to_thread(post, port, [FAULT] * (MAX_FAULTS + 1))
            assert status == 413 and "at most 100" in answer["error"]
            assert not [one for one in job.records("signal") if one.source == "machine"]
            await agent.hang_up()

    play(scenario, tmp_path)


def test_without_the_setting_the_door_is_closed_and_says_how_to_open_it(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder) as (_, port):
            status, answer = await asyncio.to_thread(post, port, FAULT)
            assert status == 403 and "RERAIL_FAULT_SENDERS=" in answer["error"]

    play(scenario, tmp_path)


def test_what_the_user_has_switched_off_is_passed_over_and_said_to_be(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, {**OPEN, "fault_levels": "gpu.xid.63=off"}) as (job, agent):
            off = {**FAULT, "code": "gpu.xid.63"}
            status, answer = await asyncio.to_thread(post, agent.port, off)
            assert (status, answer["accepted"], answer["switched_off"]) == (200, 0, ["gpu.xid.63"])
            assert "fault_levels" in answer["note"]
            status, answer = await asyncio.to_thread(post, agent.port, [off, FAULT, off])
            assert (status, answer["accepted"], answer["switched_off"]) == (202, 1, ["gpu.xid.63"])
            (signal,) = await heard(job, 1)
            assert signal.payload["code"] == "gpu.xid.79"
            status, answer = await asyncio.to_thread(post, agent.port, {**FAULT, "code": "gpu.xid.no"})
            assert status == 422 and "there is no fault" in answer["error"]

    play(scenario, tmp_path)


def test_a_request_that_breaks_off_harms_nobody(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, OPEN) as (job, agent):
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", agent.port)) as link:
                    head = b"POST /faults HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 99\r\n\r\n{"
                    link.sendall(head)
            assert (await asyncio.to_thread(post, agent.port, FAULT))[0] == 202
            assert "Traceback" not in job.said()

    play(scenario, tmp_path)


def take(body: object, desk: Desk | None = None, now: float = 1e9) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (desk or Desk("dcgm", CATALOG)).take(data, {"n0", "n1"}, "n0", now).faults


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 60_000, 400, "not JSON"),
        (b'{"sender":' * 6000, 400, "not JSON"),
        (b"null", 422, "fault 0"),
        (b"[]", 422, "no fault"),
        (b"[[]]", 422, "fault 0"),
        (b'{"sender": "dcgm", "code": "\\ud800"}', 400, "not JSON"),
        ([FAULT, {"sender": "dcgm"}], 422, "fault 1: .*`code`"),
        ({**FAULT, "code": 79}, 422, r"Expected `str`, got `int` - at `\$.code`"),
        ({**FAULT, "over": "yes"}, 422, "`over`|`bool`"),
        ({**FAULT, "at": "noon"}, 422, r"\$.at"),
        ({**FAULT, "at": -1}, 422, "seconds since the epoch"),
        ({**FAULT, "at": 1e12}, 422, "seconds since the epoch"),
        ({**FAULT, "subjekt": "x"}, 422, "subjekt"),
        ({**FAULT, "sender": ""}, 403, "fault_senders"),
        ({**FAULT, "node": "n2"}, 422, r"'n2' is not a node of this job \(nodes: n0, n1\)"),
        ({**FAULT, "node": "../n0"}, 422, "not a node"),
        ({**FAULT, "code": "gpu.xid.79x"}, 422, r"there is no fault 'gpu.xid.79x' .*did you mean gpu\.xid\.79\?"),
        ({**FAULT, "code": "gpu.fallen_of_bus"}, 422, "there is no fault 'gpu.fallen_of_bus'"),
        ({**FAULT, "code": "x" * 60_000}, 422, "there is no fault"),
    ],
)
def test_what_is_wrong_is_refused_with_its_reason(body: object, status: int, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        take(body)
    assert refused.value.status == status and isinstance(refused.value, WireError)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("role", [Role.CLEAR, Role.BENIGN])
def test_what_is_no_fault_is_not_taken_for_one(role: Role) -> None:
    code = next(fault.code for fault in CATALOG.faults if fault.role is role)
    with pytest.raises(Refused, match="is over" if role is Role.CLEAR else "is no fault"):
        take({**FAULT, "code": code})


def test_texts_are_cut_and_cannot_move_a_cursor() -> None:
    long = {**FAULT, "sender": " dcgm ", "subject": "g\n" * 900, "text": "\x1b[2J\r\nall is well\x00" + "x" * 9000}
    (one,) = take(long)
    assert one.sender == "dcgm" and len(one.subject) <= 128 and 4000 < len(one.text) <= 4096
    assert (one.subject + one.text).isprintable() and "all is well" in one.text


def test_times_are_kept_and_a_clock_that_is_a_little_ahead_is_now() -> None:
    assert [take({**FAULT, "at": at})[0].at for at in (0, 5.5, 1e9 + 60)] == [1e9, 5.5, 1e9]
    (one,) = Desk("dcgm", CATALOG).take(json.dumps(FAULT).encode(), {"n0"}, "n0", 1e9, written=1e8).faults
    assert one.at == 1e8 and one.node == "n0"


def test_one_wrong_fault_refuses_all_and_a_flood_is_held_back() -> None:
    desk = Desk("dcgm", CATALOG, per_minute=150)
    with pytest.raises(Refused):
        take([FAULT, {**FAULT, "code": "?"}], desk)
    assert len(take([FAULT] * 100, desk)) == 100
    with pytest.raises(Refused, match="one minute") as refused:
        take([FAULT] * 100, desk)
    assert refused.value.status == 429
    assert len(take([FAULT] * 100, desk, now=1e9 + 60)) == 100
