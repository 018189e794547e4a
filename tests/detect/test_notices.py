"""Notices from real files, a real `scontrol` that is a script, and a local server in the place of the metadata services."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rerail.config import Settings, load_settings
from rerail.detect import notices
from rerail.detect.detector import Line, Reading, Watcher
from rerail.detect.monitor import Found, Monitor
from rerail.detect.notices import Aws, Azure, Gcp, Kubernetes, NoticeFiles, Slurm, Source, watchers
from rerail.errors import ConfigError
from rerail.faults.catalog import load_catalog

CATALOG = load_catalog()
POD, NODE = "/api/v1/namespaces/ml/pods/train-0", "/api/v1/nodes/gpu-07"
ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"


class Service(ThreadingHTTPServer):
    """Answers what it was told to; 404 else."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Any] = {}
        self.needs: dict[str, str] = {}
        """Headers without which nobody is served."""
        self.asked: list[str] = []
        self.let_go = threading.Event()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        token = self.command == "PUT"
        refused = not token and any(self.headers.get(key) != value for key, value in self.server.needs.items())
        answer = self.server.answers.get(self.path, 404)
        if answer == "hang":
            self.server.let_go.wait(20)
            return
        status, body = (401, "") if refused else (answer, "") if isinstance(answer, int) else (200, answer)
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.let_go.set()
    server.shutdown()
    thread.join()
    server.server_close()


def said(source: Source) -> list[str]:
    lines = source.look()
    assert all(isinstance(line, Line) and line.source == "notice" for line in lines)
    return [line.text for line in lines if isinstance(line, Line)]


def codes(*items: Line | Reading) -> list[tuple[str, bool]]:
    """What the monitor makes of it."""
    found: list[Found] = []
    monitor = Monitor(CATALOG, found.append)
    for item in items:
        if isinstance(item, Line):
            monitor.line(item, "notice")
        else:
            monitor.reading(item, "notice")
    return [(one.code, one.over) for one in found]


def begun(*items: Line | Reading) -> list[str]:
    return [code for code, over in codes(*items) if not over]


# --- files ---


def test_a_file_that_appears_changes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    files = NoticeFiles([path])
    assert files.supported() == "" and files.look() == []
    path.write_text("this node is\n  reclaimed at 12:00\n")
    assert said(files) == [f"notice from file: {path}: this node is reclaimed at 12:00"] and said(files) == []
    path.write_text("NONE\n")
    assert said(files) == ["notice over: file"]
    path.write_text("shutdown at noon")
    assert begun(*files.look()) == ["notice.shutdown"]
    path.unlink()
    assert said(files) == ["notice over: file"] and said(files) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "notice.file"),
        ("the rack is moved on Monday", "notice.file"),
        ("preempted by queue urgent", "notice.preemption"),
        ("INFO: kernel update, reboot at 18:00", "notice.maintenance"),
        ("power off in 5 min", "notice.shutdown"),
        ("Spot Instance Interruption Warning", "scheduler.spot_notice"),
        ('{"EventType": "Preempt"}', "scheduler.spot_notice"),
        ('{\n "EventType": "Reboot"\n}', "node.maintenance"),
        ("TERMINATE_ON_HOST_MAINTENANCE", "node.maintenance"),
    ],
)
def test_every_content_is_one_fault(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "notice"
    files = NoticeFiles([path])
    path.write_text(text)
    assert begun(*files.look()) == [code]
    path.unlink()
    assert (code, True) in codes(*files.look()), "and it is over when the file is gone"


def test_an_old_file_is_no_notice_until_it_changes(tmp_path: Path) -> None:
    old, fresh = tmp_path / "old", tmp_path / "fresh"
    old.write_text("preempted")
    fresh.write_text("preempted")
    os.utime(old, (1e9, 1e9))
    files = NoticeFiles([old, fresh])
    assert said(files) == [f"notice from file: {fresh}: preempted"]
    old.write_text("preempted again")
    assert said(files) == [f"notice from file: {old}: preempted again"]


def test_strange_files_neither_hang_nor_flood(tmp_path: Path) -> None:
    pipe, large, folder = tmp_path / "pipe", tmp_path / "large", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    large.write_bytes(b"\xff\x00evict \n" * 100_000)
    lines = said(NoticeFiles([pipe, large, tmp_path / "none"]))
    assert len(lines) == 1 and "\n" not in lines[0] and len(lines[0]) < 2100
    NoticeFiles([folder]).look()


def test_a_file_is_heard_by_a_running_monitor(tmp_path: Path) -> None:
    found: list[Found] = []
    heard = threading.Event()

    def tell(one: Found) -> None:
        found.append(one)
        heard.set()

    path = tmp_path / "notice"
    Monitor(CATALOG, tell).run([], [NoticeFiles([path], every_s=0.01)])
    path.with_suffix(".new").write_text("evicted at noon")
    path.with_suffix(".new").rename(path)
    assert heard.wait(20) and found[0].code == "notice.preemption" and found[0].detector == "notice.files"


# --- Slurm ---


def slurm(folder: Path, answer: str, **env: str) -> Slurm:
    tool = folder / "scontrol"
    (folder / "answer").write_text(answer)
    tool.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\ncat {folder}/answer\n')
    tool.chmod(0o755)
    return Slurm({"SLURM_JOB_ID": "90417", "PATH": f"{folder}:{os.environ['PATH']}", **env})


SHOWN = """JobId=90417 JobName=train
   JobState={state} Reason=None Dependency=(null)
   StartTime=2025-05-18T10:40:26 EndTime={end} Deadline=N/A
   PreemptEligibleTime=2025-05-18T10:40:26 PreemptTime={preempt}
"""


def shown(state: str = "RUNNING", preempt: str = "None", end: str = "Unknown") -> str:
    return SHOWN.format(state=state, preempt=preempt, end=end)


def test_slurm_tells_the_time_that_is_left_and_its_end(tmp_path: Path) -> None:
    ends = time.time() + 200
    watched = Slurm({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(ends)), "PATH": str(tmp_path)})
    assert watched.supported() == ""
    (reading,) = watched.look()
    assert isinstance(reading, Reading) and reading.name == "job.time_left_s" and 190 < float(reading.value) <= 200
    assert begun(reading) == ["notice.time_left"]
    assert codes(reading, Reading(reading.name, reading.subject, 4000.0))[1] == ("notice.time_left", True)


def test_a_raised_limit_is_heard_of_and_slurm_is_asked_seldom(tmp_path: Path) -> None:
    later = time.time() + 9000
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(later))
    watched = slurm(tmp_path, shown(end=end), SLURM_JOB_END_TIME=str(int(time.time() + 100)))
    for _ in range(3):
        (reading,) = watched.look()
        assert isinstance(reading, Reading) and float(reading.value) > 8900
    assert (tmp_path / "asked").read_text() == "show job 90417\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (shown(), ""),
        (shown("RESIZING"), ""),
        (shown(preempt="2025-05-18T11:40:26"), "notice.preemption"),
        (shown("PREEMPTED"), "notice.preemption"),
        (shown("REQUEUED"), "notice.requeue"),
        (shown("SUSPENDED"), "notice.job_ending"),
        (shown("NODE_FAIL"), "notice.job_ending"),
    ],
)
def test_states_of_a_slurm_job(tmp_path: Path, answer: str, code: str) -> None:
    assert begun(*slurm(tmp_path, answer).look()) == ([code] if code else [])


def test_what_slurm_takes_back_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "SLURM_S", 0.0)
    watched = slurm(tmp_path, shown("SUSPENDED"))
    lines = watched.look()
    (tmp_path / "answer").write_text("slurm_load_jobs error: Unable to contact slurm controller")
    assert watched.look() == [] and watched.blind_spots()
    (tmp_path / "answer").write_text(shown())
    assert ("notice.job_ending", True) in codes(*lines, *watched.look()) and not watched.blind_spots()


def test_only_one_node_asks_slurm_and_elsewhere_there_is_a_reason(tmp_path: Path) -> None:
    assert "scontrol" in slurm(tmp_path, "", SLURM_NODEID="3").supported()
    assert "Slurm" in Slurm({}).supported()
    watched = slurm(tmp_path, "", SLURM_JOB_ID="1; reboot", SLURM_JOB_END_TIME="soon")
    assert watched.supported() and watched.look() == [] and not (tmp_path / "asked").exists()


# --- Kubernetes ---


def pod(**meta: Any) -> dict[str, Any]:
    return {"metadata": meta, "spec": {"nodeName": "gpu-07", "containers": [{}]}, "status": {"phase": "Running"}}


def node(*taints: tuple[str, str], **spec: Any) -> dict[str, Any]:
    return {"spec": {"taints": [{"key": key, "effect": effect} for key, effect in taints], **spec}}


@pytest.fixture
def cluster(service: Service, tmp_path: Path) -> Kubernetes:
    account = tmp_path / ACCOUNT
    account.mkdir(parents=True)
    (account / "token").write_text("word\n")
    (account / "namespace").write_text("ml")
    service.needs = {"Authorization": "Bearer word"}
    service.answers = {POD: pod(), NODE: node(("nvidia.com/gpu", "NoSchedule"), ("own", "NoExecute"))}
    return Kubernetes(tmp_path, {"POD_NAME": "train-0"}, service.base)


def test_a_healthy_pod_says_nothing(cluster: Kubernetes) -> None:
    assert cluster.supported() == "" and cluster.look() == [] and cluster.blind_spots() == []


def test_a_pod_that_is_deleted(cluster: Kubernetes, service: Service) -> None:
    service.answers[POD] = pod(deletionTimestamp="2026-01-01T00:00:00Z", deletionGracePeriodSeconds=30)
    lines = cluster.look()
    assert begun(*lines) == ["notice.pod_deleted"] and "grace 30 s" in lines[0].text and cluster.look() == []  # type: ignore[union-attr]


def test_a_pod_that_is_preempted(cluster: Kubernetes, service: Service) -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    service.answers[POD] = {**pod(), "status": {"conditions": [{"type": "Ready", "status": "True"}, target]}}
    assert begun(*cluster.look()) == ["notice.preemption"]


def test_a_node_that_is_marked_and_freed(cluster: Kubernetes, service: Service) -> None:
    assert cluster.look() == []
    own = ("own", "NoExecute")
    for spec in (
        node(own, ("ToBeDeletedByClusterAutoscaler", "NoSchedule")),
        node(own, ("brand.new/evict", "NoExecute")),
        node(own, unschedulable=True),
    ):
        service.answers[NODE] = spec
        assert begun(*cluster.look()) == ["notice.node_leaving"]
    service.answers[NODE] = 500
    assert cluster.look() == [], "no answer takes nothing back"
    service.answers[NODE] = node(own)
    assert ("notice.node_leaving", True) in codes(*cluster.look())


def test_what_may_not_be_read_is_a_blind_spot(cluster: Kubernetes, service: Service) -> None:
    service.answers[NODE] = 403
    assert cluster.look() == [] and "nodes" in cluster.blind_spots()[0]
    service.answers[POD] = 403
    assert cluster.look() == [] and "pods" in cluster.blind_spots()[0]


@pytest.mark.parametrize(
    "answer", ["", "{", "[]", "null", {"metadata": 1, "spec": []}, {"spec": {"nodeName": "../../x"}}, 302]
)
def test_strange_answers_are_no_notices(cluster: Kubernetes, service: Service, answer: Any) -> None:
    service.answers[POD] = answer
    assert cluster.look() == []
    service.answers[POD] = pod()
    service.answers[NODE] = answer
    assert cluster.look() == []
    assert all(line.split()[1] in (POD, NODE) for line in service.asked), "nobody is sent elsewhere"


def test_outside_of_a_pod_there_is_a_reason(tmp_path: Path) -> None:
    assert "pod" in Kubernetes(tmp_path, {}).supported()
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "POD_NAME": "train-0"}
    assert "service account" in Kubernetes(tmp_path, inside).supported()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_only_the_clusters_own_certificate_is_trusted(service: Service, cluster: Kubernetes, tmp_path: Path) -> None:
    account = tmp_path / ACCOUNT
    for name in ("own", "other"):
        key, certificate = str(tmp_path / f"{name}.key"), str(tmp_path / f"{name}.crt")
        command = (
            "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
        )
        subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.crt", tmp_path / "own.key")
    service.socket = context.wrap_socket(service.socket, server_side=True)
    service.handle_error = lambda *_: None  # type: ignore[method-assign]
    service.answers[POD] = pod(deletionTimestamp="2026-01-01T00:00:00Z")
    env = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(service.server_port),
        "POD_NAME": "train-0",
    }
    for authority, heard in (("other", []), ("own", ["notice.pod_deleted"])):
        shutil.copy(tmp_path / f"{authority}.crt", account / "ca.crt")
        assert begun(*Kubernetes(tmp_path, env).look()) == heard
    (account / "ca.crt").write_text("no certificate")
    assert Kubernetes(tmp_path, env).look() == []


# --- clouds ---

SPOT, ADVICE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
SCHEDULED = "/latest/meta-data/events/maintenance/scheduled"
GCP = "/computeMetadata/v1/instance/"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


def test_aws_spot_rebalance_and_maintenance(service: Service) -> None:
    service.answers = {"/latest/api/token": "word", SCHEDULED: "[]"}
    service.needs = {"X-aws-ec2-metadata-token": "word"}
    aws = Aws(service.base)
    assert aws.look() == [] and service.asked[0] == "PUT /latest/api/token"
    service.answers[ADVICE] = {"noticeTime": "2026-01-01T08:22:00Z"}
    assert begun(*aws.look()) == ["scheduler.spot_notice"]
    service.answers[SPOT] = {"action": "terminate", "time": "2026-01-01T08:24:00Z"}
    (line,) = said(aws)
    assert "instance-action" in line and begun(Line("notice", line)) == ["scheduler.spot_notice"]
    event = {"Code": "system-reboot", "State": "active", "EventId": "e1", "NotBefore": "21 Jan 2026 09:00:43 GMT"}
    service.answers[SCHEDULED] = [event, {**event, "EventId": "e2", "State": "completed"}]
    assert begun(*aws.look()) == ["node.maintenance"]
    assert sum(one.startswith("PUT") for one in service.asked) == 1, "a token is kept"
    service.needs["X-aws-ec2-metadata-token"] = service.answers["/latest/api/token"] = "other"
    assert aws.look() == [] and aws.blind_spots(), "it has run out"
    service.answers |= {SPOT: 404, ADVICE: 404, SCHEDULED: "[]"}
    assert said(aws) == ["notice over: aws"] and aws.blind_spots() == []


def test_gcp_maintenance_and_preemption(service: Service) -> None:
    service.needs = {"Metadata-Flavor": "Google"}
    service.answers = {f"{GCP}maintenance-event": "NONE", f"{GCP}preempted": "FALSE"}
    gcp = Gcp(service.base)
    assert gcp.look() == []
    service.answers[f"{GCP}maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    first = gcp.look()
    assert begun(*first) == ["node.maintenance"]
    service.answers[f"{GCP}maintenance-event"] = 503
    assert gcp.look() == [] and gcp.blind_spots()
    service.answers[f"{GCP}maintenance-event"] = "NONE"
    assert ("node.maintenance", True) in codes(*first, *gcp.look())
    service.answers[f"{GCP}preempted"] = "TRUE"
    assert begun(*gcp.look()) == ["scheduler.spot_notice"] and gcp.look() == []


def test_azure_events_of_this_machine_only(service: Service) -> None:
    service.needs = {"Metadata": "true"}
    service.answers = {NAME: "vm_3", EVENTS: {"DocumentIncarnation": 1, "Events": []}}
    azure = Azure(service.base)
    assert azure.look() == []
    event = {
        "EventId": "602d",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "Resources": ["vm_3"],
        "NotBefore": "",
    }
    others = [{**event, "EventId": "9", "Resources": ["vm_30"]}, {**event, "EventId": "8", "Resources": 3}, 7]
    service.answers[EVENTS] = {"Events": [event, *others]}
    assert begun(*azure.look()) == ["scheduler.spot_notice"]
    service.answers[EVENTS] = {"Events": [{**event, "EventType": "Redeploy"}]}
    assert begun(*azure.look()) == ["node.maintenance"]
    service.answers[EVENTS] = "<html>busy</html>"
    assert azure.look() == []
    service.answers[EVENTS] = {"Events": []}
    assert said(azure) == ["notice over: azure"]


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
def test_a_service_that_is_away_or_hangs_costs_little(
    service: Service, monkeypatch: pytest.MonkeyPatch, cloud: type[Aws] | type[Gcp] | type[Azure]
) -> None:
    monkeypatch.setattr(notices, "ANSWER_S", 0.2)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    paths = ("/latest/api/token", f"{GCP}maintenance-event", f"{GCP}preempted", NAME, EVENTS)
    service.answers = dict.fromkeys(paths, "hang")
    began = time.monotonic()
    source = cloud(service.base)
    assert source.look() == [] and source.blind_spots() and time.monotonic() - began < 5
    assert service.asked, "no proxy stands between"
    assert cloud("http://127.0.0.1:1").look() == [] and cloud("rubbish").look() == []


# --- all of them ---


def test_clouds_are_asked_only_when_named() -> None:
    named = [watcher.name for watcher in watchers(Settings(notice_files="/run/notice, gcp ,azure"))]
    assert named == ["dropbox", "notice.files", "notice.slurm", "notice.kubernetes", "notice.gcp", "notice.azure"]
    plain = watchers(Settings())
    assert not any(watcher.name in ("notice.aws", "notice.gcp", "notice.azure") for watcher in plain)
    assert all(isinstance(watcher, Watcher) for watcher in plain)
    assert {watcher.name for watcher in plain if "notice_files" in watcher.supported()} == {"notice.files"}


@pytest.mark.parametrize("wrong", ["run/notice", "aws, oracle", "/ok, ../up"])
def test_a_wrong_name_is_refused_before_anything_starts(wrong: str) -> None:
    with pytest.raises(ConfigError, match="notice_files"):
        load_settings(env={"RERAIL_NOTICE_FILES": wrong})
