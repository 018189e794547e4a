"""What may be simulated: every number has a unit, a range and a source, and bad ones are refused with all three."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from rerail.errors import ConfigError, UsageError
from rerail.sim.scenario import Scenario, assumptions, book, parsed, preset, read_file, scenario


def test_every_field_has_a_note_and_every_note_a_field() -> None:
    fields = {field.name for field in msgspec.structs.fields(Scenario)}
    assert set(book().keys) == fields
    for key in book().keys.values():
        assert key.source.split(":")[0].split(";")[0].split(",")[0] in ("measured", "published", "derived", "assumed")


@pytest.mark.parametrize("name", ["llama3-405b", "mid-1024", "node8"])
def test_presets_are_sound_and_name_their_sources(name: str) -> None:
    one = preset(name)
    made = scenario(one.values)
    assert made.gpus == one.values["gpus"]
    assert set(one.source) <= set(one.values)
    told = {a.key: a for a in assumptions(made, one, {"days": 3})}
    assert told["days"].source == "given by hand"
    assert len(told) == len(msgspec.structs.fields(Scenario))


def test_the_published_rate_is_the_published_counts() -> None:
    made = scenario(preset("llama3-405b").values)
    hardware = made.faults / 1000 * made.gpus * made.days
    assert hardware == pytest.approx(419 - 56, rel=0.001)
    assert made.planned_per_day * made.days == pytest.approx(47, rel=0.01)


def test_units_are_understood() -> None:
    assert scenario({"reboot_s": "30min"}).reboot_s == 1800
    assert scenario({"days": "36 h"}).days == 1.5
    assert scenario({"days": "1d12h"}).days == 1.5
    assert scenario({"gpus": "16k"}).gpus == 16_000
    assert scenario({"state_gb": "2TB", "shard_gb": 250}).state_gb == 2000
    assert scenario({"storage_gb_s": "1.5TB/s"}).storage_gb_s == 1500
    assert scenario({"elastic": "yes"}).elastic is True


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus": "0"}, ["gpus", "0", "between 1"]),
        ({"gpus": "-8"}, ["gpus", "-8", "between 1"]),
        ({"gpus": "12"}, ["gpus", "12", "multiple", "16"]),
        ({"gpus": "8.5"}, ["gpus", "8.5", "whole"]),
        ({"gpus": "many"}, ["gpus", "many", "not a number"]),
        ({"days": "0"}, ["days", "0", "between"]),
        ({"days": "nan"}, ["days", "nan", "between"]),
        ({"days": "inf"}, ["days", "inf", "between"]),
        ({"faults": "-1"}, ["faults", "-1", "per 1000 device-days"]),
        ({"step_s": "0"}, ["step_s", "0", "(s)"]),
        ({"step_s": "3 parsec"}, ["step_s", "parsec", "ms, s, sec, secs, second, seconds, min"]),
        ({"gpus": "8M"}, ["gpus", "'M'", "k, K"]),
        ({"gpus": 10**400}, ["gpus", "401 characters", "between 1"]),
        ({"step_s": "9" * 400}, ["step_s", "402 characters", "between"]),
        ({"replicas": "3"}, ["replicas is 3", "8 ranks", "2 would do"]),
        ({"step_s": "1h30"}, ["step_s", "a time such as"]),
        ({"storage_gb_s": "3GB"}, ["storage_gb_s", "'GB'", "GB/s"]),
        ({"batch_least": "9", "batch_most": "3"}, ["batch_least", "9", "batch_most", "3"]),
        ({"replicas": "9"}, ["replicas", "9", "8 ranks"]),
        ({"shard_gb": "5", "state_gb": "1"}, ["shard_gb", "5", "state_gb"]),
        ({"elastic": "perhaps"}, ["elastic", "perhaps", "yes or no"]),
        ({"stepp_s": "1"}, ["stepp_s", "did you mean step_s"]),
        ({"lemon_share": "1.5"}, ["lemon_share", "1.5", "between 0 and 1"]),
    ],
)
def test_bad_values_are_refused_with_field_value_and_what_is_right(values: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario(values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("pair", ["gpus", "=3", "gpus=", ""])
def test_pairs_need_key_and_value(pair: str) -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        parsed([pair])
    assert parsed(["a=b=c"]) == {"a": "b=c"}


def test_unknown_presets_are_refused_with_a_guess() -> None:
    with pytest.raises(UsageError, match="did you mean llama3-405b"):
        preset("llama3-405")


def test_files_are_read_or_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.toml"
    good.write_text('preset = "node8"\nstep_s = 2\n')
    assert read_file(good) == tomllib.loads(good.read_text())
    with pytest.raises(UsageError, match="no such file"):
        read_file(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("step_s = = 2")
    with pytest.raises(UsageError, match=r"bad\.toml is not TOML"):
        read_file(bad)
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path)


def test_a_state_that_the_devices_cannot_hold_is_refused() -> None:
    values = {"gpus": 8, "per_node": 8, "state_gb": 4860, "shard_gb": 6.9}
    with pytest.raises(
        ConfigError, match=r"gpus is 8: shards of 6.9 GB \(shard_gb\) do not hold the 4860 GB of state_gb"
    ):
        scenario({**preset("llama3-405b").values, **values})


def test_what_is_said_to_hold_the_state_does() -> None:
    base = preset("llama3-405b").values
    with pytest.raises(ConfigError) as caught:
        scenario({**base, "gpus": 64})
    many = int(str(caught.value).split(" would,")[0].split()[-1])
    assert scenario({**base, "gpus": many}).gpus == many == 712
    shard = float(str(caught.value).split("shard_gb=")[1])
    assert scenario({**base, "gpus": 64, "shard_gb": shard}).shard_gb == shard
