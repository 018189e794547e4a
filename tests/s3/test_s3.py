"""Checkpoints in an S3 store, by a real client (s3fs) to a real server (moto) on the loopback interface: `make test-s3`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "checkpoint"))

from two_ranks import Job, start

from rerail.checkpoint import catalog, names, saving
from rerail.checkpoint.copying import copy_step
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.names import StepId
from rerail.checkpoint.retention import Keep
from rerail.checkpoint.tiers import Tier, tier_at
from rerail.cli.main import main

SERVER = os.environ.get("MOTO_SERVER", "")
pytestmark = [
    pytest.mark.skipif(not shutil.which(SERVER), reason="no S3 server: make test-s3 gets one"),
    pytest.mark.filterwarnings("default"),  # of the client's and its dependencies' making
]
LIMIT_S = 60.0
COLUMNS = 700_000
"""Makes a shard of 11 MB: a multipart upload."""


class Store:
    """The server, and a bucket on it."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.endpoint, self._log = f"http://127.0.0.1:{self.port}", log
        self.run()

    def run(self) -> None:
        with open(self._log, "ab") as log:
            command = [SERVER, "-H", "127.0.0.1", "-p", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + LIMIT_S
        while True:
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < until, self._log.read_text()
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = Store(tmp_path_factory.mktemp("s3") / "log")
    os.environ.update(
        AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1",
        AWS_ENDPOINT_URL=made.endpoint,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def bucket(store: Store, request: pytest.FixtureRequest) -> str:
    import s3fs  # type: ignore[import-not-found]

    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[-50:].strip("-")
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(columns=COLUMNS)
    yield made
    made.close()


def objects(bucket: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem()


def test_steps_are_saved_thinned_out_and_started_from(bucket: str, job: Job) -> None:
    for version in (10, 20, 30):
        outcomes = job.save(version, [f"{bucket}/run"], keep=Keep(last=1))
        assert all(outcome.ok for outcome in outcomes), outcomes
    tier = tier_at(f"{bucket}/run")
    assert [found.id.step for found in catalog.folders(tier)] == [30]
    assert start([tier], COLUMNS) == (30, [])


def test_every_claim_of_an_epoch_is_another_number(bucket: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: saving.claim_epoch(tier_at(f"{bucket}/run"), "job"), range(8)))
    assert sorted(claimed) == list(range(1, 9))


def test_a_job_that_was_replaced_does_not_commit(bucket: str, job: Job) -> None:
    tier = tier_at(f"{bucket}/run")
    for _ in range(2):
        saving.claim_epoch(tier, "job")
    outcomes = job.save(10, [tier.url], epoch=1)
    assert not any(outcome.ok for outcome in outcomes)
    assert start([tier], COLUMNS) == (0, [])


@pytest.mark.parametrize("how", ["flipped", "cut short", "gone"])
def test_a_damaged_object_is_passed_over(bucket: str, job: Job, how: str) -> None:
    for version in (10, 20):
        job.save(version, [f"{bucket}/run"])
    path = f"{bucket}/run/{StepId(1, 20, 0).folder}/{names.shard_name(1, 0)}"
    store = objects(bucket)
    data = bytearray(store.cat_file(path))
    data[-1] ^= 1
    if how == "gone":
        store.rm_file(path)
    else:
        store.pipe_file(path, bytes(data if how == "flipped" else data[:-1]))
    loaded = start([tier_at(f"{bucket}/run")], COLUMNS)
    assert loaded.version == 10 and loaded.reasons, loaded


def test_a_step_is_copied_from_a_disk_and_back(bucket: str, job: Job, tmp_path: Path) -> None:
    job.save(20, [tmp_path / "disk"])
    far: Tier = tier_at(f"{bucket}/run")
    assert copy_step(catalog.open_step(FileTier(tmp_path / "disk"), StepId(1, 20, 0)), far)
    assert copy_step(catalog.open_step(far, StepId(1, 20, 0)), FileTier(tmp_path / "back"))
    assert start([far], COLUMNS) == start([FileTier(tmp_path / "back")], COLUMNS) == (20, [])


def test_the_commands_take_a_url(bucket: str, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.save(20, [f"{bucket}/run"])
    assert main(["ckpt", "verify", f"{bucket}/run"]) == 0
    assert main(["ckpt", "ls", f"{bucket}/run", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["step"] == 20 and row["verified"]


def test_a_server_that_is_gone_is_an_outcome_and_the_next_place_takes_over(
    store: Store, bucket: str, job: Job, tmp_path: Path
) -> None:
    assert tier_at(f"{bucket}/run").names() == []
    store.stop()
    try:
        with pytest.raises(OSError, match="onnect"):
            tier_at(f"{bucket}/run").names()
        outcomes = job.save(20, [f"{bucket}/run", tmp_path])
        assert all(outcome.ok and outcome.url == str(tmp_path) for outcome in outcomes), outcomes
        assert bucket in outcomes[0].notes[0]
    finally:
        store.run()
