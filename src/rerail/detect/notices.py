"""Notices of what is going to happen to this machine or this job: preemption, maintenance, the end of its time.

Run by `detect.monitor`, which asks `watchers` for all of them. Files, Slurm, Kubernetes and the clouds' metadata services
are asked from time to time; what they say becomes a line `notice from WHO: TEXT`, and `notice over: WHO` when it is taken
back. What a line means is said by the catalogue (`faults/notices.toml`, `node.maintenance`, `scheduler.spot_notice`).
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import ssl
import stat
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from rerail.checks import CLOUDS
from rerail.config import Settings
from rerail.detect.detector import Line, Reading, Watcher
from rerail.detect.dropbox import Dropbox
from rerail.detect.host_services import run_tool
from rerail.texts import listed

METADATA = "http://169.254.169.254"
ANSWER_S = 2.0
"""Seconds a service may take to answer."""
MAX_ANSWER, MAX_NOTICE = 1 << 20, 2000
RECENT_S = 3600.0
"""A notice file that was there before us counts if it was written within this time."""
NOTHING = ("none", "false", "0", "ok", "no", "null", "[]", "{}")
"""Contents of a notice file that say that there is no notice."""
SLURM_S = 120.0
"""Seconds between two questions to Slurm's controller."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Of a pod or a node of Kubernetes."""
T = TypeVar("T")


def watchers(settings: Settings) -> list[Watcher]:
    """All that may tell of things to come, and the directory where others drop what they have found."""
    named = listed(settings.notice_files)
    files = [Path(item) for item in named if item not in CLOUDS]
    clouds: dict[str, type[Aws] | type[Gcp] | type[Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
    asked = [clouds[item]() for item in CLOUDS if item in named]
    return [Dropbox(settings), NoticeFiles(files), Slurm(), Kubernetes(), *asked]


class Source(ABC):
    """Something that is asked from time to time; only what is new is told."""

    name: str
    who: str

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._known: dict[str, str] = {}
        self._silent = ""

    @abstractmethod
    def ask(self) -> dict[str, str] | None:
        """All notices that stand now, by a name that stays; None if that cannot be told."""

    def supported(self) -> str:
        return ""

    def blind_spots(self) -> list[str]:
        return [self._silent] if self._silent else []

    def watch(self) -> Iterator[Line | Reading]:
        while True:
            yield from self.look()
            time.sleep(self.every_s)

    def look(self) -> list[Line | Reading]:
        """What has changed since the last look. No answer changes nothing."""
        found = self.ask()
        if found is None:
            return []
        fresh = [text for key, text in found.items() if self._known.get(key) != text]
        over = bool(self._known) and not found
        self._known = found
        lines = [f"notice from {self.who}: {' '.join(text.split())[:MAX_NOTICE]}" for text in fresh]
        return [Line("notice", text) for text in (*lines, *([f"notice over: {self.who}"] if over else []))]


class NoticeFiles(Source):
    """Files that a cloud's agent or an administrator writes when something is coming."""

    name, who = "notice.files", "file"

    def __init__(self, files: Sequence[Path], every_s: float = 1.0) -> None:
        super().__init__(every_s)
        self._files = files
        seen = {path: _written(path) for path in files}
        self._old = {path: at for path, at in seen.items() if at and at < time.time() - RECENT_S}
        """Left over from an earlier notice."""

    def supported(self) -> str:
        return "" if self._files else "the setting notice_files names no file"

    def ask(self) -> dict[str, str]:
        found = {}
        for path in self._files:
            written = _written(path)
            if not written or self._old.get(path) == written:
                continue
            text = _content(path)
            if text.strip().lower() not in NOTHING:
                found[str(path)] = f"{path}: {text or '(empty file)'}"  # that an empty one is there is the notice
        return found


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _content(path: Path) -> str:
    """The beginning of a regular file; of anything else nothing, since a pipe would be waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return "none"
            return file.read(2 * MAX_NOTICE).decode("utf-8", "replace").replace("\0", " ")
    except OSError as error:
        return f"(cannot be read: {error.strerror})"


class Slurm(Source):
    """How long the job may still run, and whether Slurm is about to take it off its nodes."""

    name, who = "notice.slurm", "slurm"
    RUNS = ("RUNNING", "CONFIGURING", "PENDING", "RESIZING", "SIGNALING", "STAGE_OUT")
    """States of a job that goes on."""

    def __init__(self, env: Mapping[str, str] = os.environ, every_s: float = 30.0) -> None:
        super().__init__(every_s)
        self._job, self._end = env.get("SLURM_JOB_ID", ""), _time(env.get("SLURM_JOB_END_TIME", ""))
        # one node asks for all: Slurm's controller answers for the whole cluster
        first = env.get("SLURM_NODEID", "0") == "0" and self._job.isdigit()
        self._scontrol = (shutil.which("scontrol", path=env.get("PATH")) or "") if first else ""
        self._next = 0.0

    def supported(self) -> str:
        if not self._job:
            return "not started by Slurm"
        return "" if self._end or self._scontrol else "neither SLURM_JOB_END_TIME nor scontrol is there"

    def look(self) -> list[Line | Reading]:
        lines = super().look()
        left = Reading("job.time_left_s", f"slurm job {self._job}", round(self._end - time.time(), 1))
        return [*lines, left] if self._end else lines

    def ask(self) -> dict[str, str] | None:
        if not self._scontrol or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + SLURM_S
        text = run_tool([self._scontrol, "show", "job", self._job], 10.0) or ""
        fields = dict(re.findall(r"\b(JobState|Reason|PreemptTime|EndTime)=(\S+)", text))
        self._silent = "" if "JobState" in fields else "scontrol does not answer: preemption by Slurm is seen late"
        if self._silent:
            return None
        self._end = _time(fields.get("EndTime", "")) or self._end  # the limit may have been raised
        state, preempted = fields["JobState"], fields.get("PreemptTime", "None")
        found = {}
        if preempted not in ("None", "Unknown", "N/A", "(null)"):
            found["preempt"] = f"job {self._job} is going to be preempted, PreemptTime={preempted}"
        elif state not in self.RUNS:
            found["state"] = f"job {self._job} is in state {state}, Reason={fields.get('Reason', 'None')}"
        return found


def _time(text: str) -> float:
    """Seconds since the epoch, as such or as Slurm writes local time; 0 if it is neither."""
    try:
        return float(text) if re.fullmatch(r"\d{1,12}", text) else time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:
        return None  # a token must not travel on to wherever an answer points


def fetch(
    url: str, headers: Mapping[str, str], *, method: str = "GET", context: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    """Status and body, by no proxy and no redirect; status 0 if there is no whole answer in time."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    deadline = time.monotonic() + ANSWER_S
    try:
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        with urllib.request.build_opener(*handlers).open(request, timeout=ANSWER_S) as answer:
            body = bytearray()
            while part := answer.read1(1 << 16):
                body += part
                if len(body) > MAX_ANSWER or time.monotonic() > deadline:
                    return 0, b""
            return answer.status, bytes(body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except (OSError, ValueError, http.client.HTTPException):
        return 0, b""


def _json(body: bytes | str) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _part(found: Any, *keys: str) -> Any:
    """What stands under these keys; None if there is nothing like it."""
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _list(found: Any, kind: type[T]) -> list[T]:
    return [one for one in found if isinstance(one, kind)] if isinstance(found, list) else []


class Kubernetes(Source):
    """Whether this pod is being deleted, and whether its node is marked to go."""

    name, who = "notice.kubernetes", "kubernetes"
    GOING = re.compile(
        r"node\.kubernetes\.io/(unschedulable|out-of-service)|node\.cloudprovider\.kubernetes\.io/shutdown"
        r"|ToBeDeletedByClusterAutoscaler|cloud\.google\.com/impending-node-termination|karpenter\.sh/disrupt\w+"
        r"|aws-node-termination-handler/.*|weave\.works/kured-node-reboot"
    )
    """Taints of a node that is to be emptied. Many others are on every GPU node from the beginning."""

    def __init__(
        self, root: Path = Path("/"), env: Mapping[str, str] = os.environ, base: str = "", every_s: float = 30.0
    ) -> None:
        super().__init__(every_s)
        self._account = root / "var/run/secrets/kubernetes.io/serviceaccount"
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
        self._base = base or (f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}" if host else "")
        self._pod = env.get("POD_NAME") or env.get("HOSTNAME") or socket.gethostname()
        self._tainted: set[str] | None = None
        """NoExecute taints that were there at first; None before that."""

    def supported(self) -> str:
        if not self._base:
            return "not in a pod of Kubernetes"
        if not (os.access(self._account / "token", os.R_OK) and _NAME.fullmatch(self._pod)):
            return "no service account is mounted, or the pod's name is not known (POD_NAME)"
        return ""

    def ask(self) -> dict[str, str] | None:
        try:
            space = (self._account / "namespace").read_text().strip()
        except (OSError, ValueError):
            return None
        pod = self._get(f"/api/v1/namespaces/{space}/pods/{self._pod}")
        if pod is None:
            return None
        found = {}
        told = {one.get("type"): one for one in _list(_part(pod, "status", "conditions"), dict)}
        target = told.get("DisruptionTarget", {})
        why = f" ({target.get('reason')})" if target.get("status") == "True" else ""
        if _part(pod, "metadata", "deletionTimestamp"):
            grace = _part(pod, "metadata", "deletionGracePeriodSeconds")
            found["pod"] = f"pod {self._pod} is being deleted, grace {grace} s{why}"
        elif why:
            found["pod"] = f"pod {self._pod} is going to be deleted{why}"
        name = _part(pod, "spec", "nodeName")
        node = self._get(f"/api/v1/nodes/{name}") if isinstance(name, str) and _NAME.fullmatch(name) else None
        if node is None and "node" in self._known:
            found["node"] = self._known["node"]
        elif node is not None and (marks := self._marks(node)):
            found["node"] = f"node {name} is marked: {', '.join(marks)}"
        return found

    def _marks(self, node: Any) -> list[str]:
        taints = {str(one.get("key")): one.get("effect") for one in _list(_part(node, "spec", "taints"), dict)}
        expelling = {key for key, effect in taints.items() if effect == "NoExecute"}
        if self._tainted is None:
            self._tainted = expelling
        going = {key for key in taints if self.GOING.fullmatch(key)} | (expelling - self._tainted)
        return sorted(going | ({"unschedulable"} if _part(node, "spec", "unschedulable") is True else set()))

    def _get(self, path: str) -> Any:
        try:
            token = (self._account / "token").read_text().strip()  # it is renewed now and then
            authority = self._account / "ca.crt"
            context = ssl.create_default_context(cafile=str(authority)) if self._base.startswith("https:") else None
        except (OSError, ValueError):
            return None
        status, body = fetch(self._base + path, {"Authorization": f"Bearer {token}"}, context=context)
        kind = "nodes" if "/nodes/" in path else "pods"
        self._silent = f"the service account may not `get` {kind} of Kubernetes" if status == 403 else ""
        return _json(body) if status == 200 else None


class Cloud(Source):
    """A metadata service."""

    def __init__(self, base: str = METADATA, every_s: float = 5.0) -> None:
        super().__init__(every_s)
        self._base = base

    def _get(self, path: str, headers: Mapping[str, str]) -> str | None:
        """What stands there; empty if nothing does, None if there is no answer."""
        status, body = fetch(self._base + path, headers)
        if status not in (200, 404):
            self._silent = f"the metadata service of {self.who} does not answer: preemption is seen late"
            return None
        return body.decode("utf-8", "replace").strip() if status == 200 else ""


class Aws(Cloud):
    """EC2: the end of a spot instance, the advice to leave it, scheduled maintenance."""

    name, who = "notice.aws", "aws"
    _token = ""
    _token_ends = 0.0

    def ask(self) -> dict[str, str] | None:
        self._silent = ""
        if time.monotonic() > self._token_ends:
            lives = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            status, body = fetch(f"{self._base}/latest/api/token", lives, method="PUT")
            if status != 200:
                self._silent = "the metadata service of aws gives no token: preemption is seen late"
                return None
            self._token, self._token_ends = body.decode("ascii", "ignore").strip(), time.monotonic() + 20_000
        headers = {"X-aws-ec2-metadata-token": self._token}
        paths = ("spot/instance-action", "events/recommendations/rebalance", "events/maintenance/scheduled")
        answers = [self._get(f"/latest/meta-data/{path}", headers) for path in paths]
        if any(answer is None for answer in answers):
            self._token_ends = 0.0  # it may have been the token
            return None
        action, advice, scheduled = (answer or "" for answer in answers)
        found = {"action": f"spot/instance-action: {action}"} if action else {}
        if advice:
            found["advice"] = f"EC2 Instance Rebalance Recommendation: {advice}"
        for event in _list(_json(scheduled), dict):
            if event.get("State") == "active":
                found[str(event.get("EventId"))] = f"scheduled event {_shown(event, 'Code', 'NotBefore', 'EventId')}"
        return found


class Gcp(Cloud):
    """Compute Engine: host maintenance and preemption."""

    name, who = "notice.gcp", "gcp"

    def ask(self) -> dict[str, str] | None:
        self._silent = ""
        where, headers = "/computeMetadata/v1/instance/", {"Metadata-Flavor": "Google"}
        event, preempted = self._get(f"{where}maintenance-event", headers), self._get(f"{where}preempted", headers)
        if event is None or preempted is None:
            return None
        found = {"maintenance": f"maintenance-event {event}"} if event not in ("", "NONE") else {}
        return {**found, "preempted": "instance is being preempted"} if preempted == "TRUE" else found


class Azure(Cloud):
    """Scheduled events of this virtual machine."""

    name, who = "notice.azure", "azure"
    _machine = ""

    def ask(self) -> dict[str, str] | None:
        self._silent, headers = "", {"Metadata": "true"}
        where = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        self._machine = self._machine or self._get(where, headers) or ""
        body = self._get("/metadata/scheduledevents?api-version=2020-07-01", headers)
        events = _part(_json(body or ""), "Events")
        if not isinstance(events, list):
            return None
        # all machines of a scale set get the events of all
        ours = [one for one in _list(events, dict) if self._machine in ("", *_list(one.get("Resources"), str))]
        keys = ("EventType", "EventStatus", "NotBefore", "EventId")
        return {str(one.get("EventId")): f"scheduled event {_shown(one, *keys)}" for one in ours}


def _shown(event: dict[str, Any], *keys: str) -> str:
    return msgspec.json.encode({key: str(event.get(key, "")) for key in keys}).decode()
