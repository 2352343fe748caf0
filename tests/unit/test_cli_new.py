"""`kvferry new`: from a check to a config that the workflow takes as it is; wrong wishes leave nothing behind."""

import json
import os
import subprocess
import sys

import huggingface_hub
import pytest
import yaml
from small_commands import refusal, run
from small_models import ROOT, checkout, edited
from transformers import AutoModelForCausalLM

from kvferry.cli.template import Text
from kvferry.config import load_project, read_yaml

FILE = "config/mine.yaml"


@pytest.fixture(scope="module")
def models(tiny_model, tokenizer, save_prepared, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    sizes = {"small": 6, "big": 8, "short": 4}
    positions = {"short": 32}
    return {
        name: save_prepared(
            directory, tiny_model("llama", layers, positions=positions.get(name, 4096)), tokenizer, name
        )[0]
        for name, layers in sizes.items()
    }


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return checkout(tmp_path)


@pytest.fixture
def new(models, workplace, capsys):
    """Run `kvferry new mine` on the two models; the checked project of what it wrote."""

    def write(*options, name="mine", source=models["small"], target=models["big"]):
        status, out, err = run(capsys, "new", name, "--source", source, "--target", target, *options)
        assert (status, err) == (0, "")
        file = f"config/{name}.yaml"
        assert f"{file} is written" in out
        return load_project(read_yaml(workplace / file), file, ROOT / "workflow/schemas")

    return write


def dry_run(workplace, file=FILE):
    """What Snakemake says to the config in this working directory."""
    how = ["-n", "--cores", "2", "-s", str(ROOT / "Snakefile"), "--configfile", file]
    command = [sys.executable, "-m", "snakemake", *how]
    return subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=120)


def test_check_then_new_then_a_dry_run_of_what_it_wrote(models, workplace, new, capsys):
    status, out, _ = run(capsys, "check", models["small"], models["big"])
    assert status == 0
    assert f"kvferry new NAME --source {models['small']} --target {models['big']}" in out
    new()
    done = dry_run(workplace)
    assert done.returncode == 0, done.stderr[-2000:]
    for job in ("model_by_reference", "fit_mine_qasper_24", "identity_big", "latency_mine", "verdict/mine.md"):
        assert job in done.stdout


def test_the_config_says_what_was_asked_for(models, new):
    project = new("--device", "cuda:1", "--k", "4,1", "--sequences", "40", "--items", "30")
    config = project.config
    assert config["pairs"] == ["mine"]
    assert project.pair("mine") == {"source": "small", "target": "big", "paper": None}
    assert {project.models[name]["path"] for name in ("small", "big")} == {str(models["small"]), str(models["big"])}
    assert config["compute"] == {"device": "cuda:1", "dtype": "bfloat16", "threads": 1}
    assert config["sweeps"]["k"]["over"] == {"k": [1, 4]}
    assert config["calibration"]["sequences"] == 40
    assert config["evaluation"]["benchmarks"]["hellaswag"]["limit"] == 30
    assert config["evaluation"]["benchmarks"]["gsm8k"]["limit"] == 6
    assert config["results"] == "results/mine"
    assert config["controls"]["pairs"] == ["mine"]


def test_every_section_says_why(new, workplace):
    new()
    lines = (workplace / FILE).read_text().splitlines()
    sections = [number for number, line in enumerate(lines) if line and line[0].isalpha()]
    for start, end in zip(sections, [*sections[1:], len(lines)], strict=True):
        if not lines[start].startswith(("pairs:", "results:", "figures:")):
            assert any("#" in line for line in lines[max(0, start - 3) : end]), lines[start]


def test_a_directory_below_the_checkout_is_named_relative_to_it(models, workplace, new):
    (workplace / "models").mkdir()
    (workplace / "models/small").symlink_to(models["small"])
    edited(models["big"], workplace / "models" / "of mine")
    project = new(source="./models/small/", target="models/of mine")
    assert project.models["small"]["path"] == "models/small"
    assert project.models["of-mine"]["path"] == "models/of mine"


def test_a_repository_is_pinned_to_the_commit_that_was_looked_at(models, workplace, new, monkeypatch):
    commit = "b" * 40
    snapshot = edited(models["big"], workplace / "hub" / commit)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    entry = new(target="owner/Big-1B").models["Big-1B"]
    assert (entry["kind"], entry["repository"], entry["revision"]) == ("hub", "owner/Big-1B", commit)
    assert entry["geometry"] == {"layers": 8, "kv_heads": 2, "head_dim": 8}
    assert entry["parameters"] == pytest.approx(
        AutoModelForCausalLM.from_pretrained(models["big"]).num_parameters() / 1e9, rel=0.01
    )


def test_two_directories_of_one_name_get_two_names(models, workplace, new):
    other = edited(models["big"], workplace / "other" / "small")
    project = new(target=other)
    assert project.pair("mine") == {"source": "small", "target": "other-small", "paper": None}


def test_a_name_that_the_registry_has_is_not_taken(models, workplace, new):
    other = edited(models["big"], workplace / "ours" / "qwen3-8b")
    assert new(target=other).pair("mine")["target"] == "ours-qwen3-8b"


@pytest.mark.parametrize("name", ["1e5", "null", "24", "on"])
def test_names_that_yaml_would_read_as_something_else(name, models, workplace, new):
    other = edited(models["big"], workplace / "other" / name)
    project = new(name=name, target=other)
    assert project.config["pairs"] == [name]
    assert project.pair(name)["target"] == name


def test_ids_of_the_registry_are_taken_as_they_are(models, workplace, new):
    registry = workplace / "config/models.yaml"
    registry.write_text(registry.read_text() + f"  ours: {{kind: local, path: '{models['big']}'}}\n")
    project = new(target="ours")
    assert project.pair("mine")["target"] == "ours"
    assert list(project.config["own"]["models"]) == ["small"]


def test_controls_that_do_not_fit_are_left_out_with_what_they_need(new, workplace, monkeypatch):
    monkeypatch.setattr("kvferry.cli.settings.Settings.with_identity", False)
    project = new()
    assert "controls" not in project.config
    assert "They need fit.memory_mb" in (workplace / FILE).read_text()


def test_more_memory_than_make_gives_is_in_the_command(models, workplace, capsys, monkeypatch):
    command = "make demo CONFIG=config/mine.yaml"
    arguments = ("new", "mine", "--source", models["small"], "--target", models["big"])
    assert f"{command}\n" in run(capsys, *arguments)[1]
    monkeypatch.setattr("kvferry.memory.latency_mb", lambda *_: 9100)
    assert f"{command} MEMORY_MB=9500\n" in run(capsys, *arguments, "--force")[1]
    assert f"{command} MEMORY_MB=9500\n" in (workplace / FILE).read_text()


def test_force_overwrites(new, workplace):
    new("--items", "10")
    assert new("--items", "20", "--force").config["evaluation"]["benchmarks"]["mmlu"]["limit"] == 20


@pytest.fixture
def wrong(models, workplace, capsys):
    """The sentence that refuses `kvferry new NAME …`, which leaves the folder of configs as it was."""

    def refuse(*options, name="mine", source=models["small"], target=models["big"], status=1):
        before = {file: file.read_bytes() for file in workplace.rglob("config/*")}
        message = refusal(capsys, "new", name, "--source", source, "--target", target, *options, status=status)
        assert {file: file.read_bytes() for file in workplace.rglob("config/*")} == before
        return message

    return refuse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--k", "0"], ["--k", "'0'", "≥ 1"]),
        (["--k", "1,two"], ["--k", "'two'"]),
        (["--k", ""], ["--k", "''"]),
        (["--sequences", "-4"], ["--sequences"]),
        (["--sequences", "1.5"], ["--sequences", "'1.5'"]),
        (["--items", "0"], ["--items", "'0'"]),
        (["--items", "many"], ["--items", "'many'"]),
        (["--device", "gpu"], ["--device", "'gpu' is not cpu, cuda or cuda:N"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
    ],
)
def test_wrong_numbers_and_words_are_a_wrong_command_line(wrong, options, words):
    message = wrong(*options, status=2)
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["a/b", "../up", "", ".hidden", "two words", "models", "pairs", "a" * 101])
def test_a_name_that_no_config_can_have_is_a_wrong_command_line(wrong, name):
    assert "NAME" in wrong(name=name, status=2)


def test_k_beyond_the_layers_is_refused(wrong):
    assert "7 is more than the 6 layers of the source" in wrong("--k", "1,7")


def test_an_existing_config_is_not_overwritten(wrong, new):
    assert "config/ci.yaml: is no config that `kvferry new` wrote" in wrong(name="ci")
    new(name="mine")
    assert "config/mine.yaml: is there already" in wrong(name="mine")


def test_the_name_of_a_known_pair_is_refused(wrong):
    assert "already a pair of config/pairs.yaml" in wrong(name="24l-to-30l")


def test_what_check_refuses_is_refused(wrong, models, workplace):
    bad = edited(models["big"], workplace / "bad")
    rules = json.loads((bad / "tokenizer.json").read_text())
    rules["model"]["vocab"]["zzz"] = 264
    (bad / "tokenizer.json").write_text(json.dumps(rules))
    message = wrong(target=bad)
    for word in ("cannot transfer", "the tokenizers differ", "264 and 265 tokens"):
        assert word in message


def test_models_of_few_positions_are_refused(wrong, models):
    assert "32 positions" in wrong(target=models["short"])


def test_a_model_that_is_not_there_is_refused(wrong):
    assert "neither a directory nor a repository" in wrong(source="./absent")


def test_outside_a_checkout_nothing_is_written(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = refusal(capsys, "new", "mine", "--source", models["small"], "--target", models["big"])
    assert "no checkout" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said(wrong, workplace):
    (workplace / "config").chmod(0o500)
    try:
        assert "cannot be written" in wrong()
    finally:
        (workplace / "config").chmod(0o700)


def test_a_disk_that_is_full_leaves_nothing(wrong, monkeypatch):
    from pathlib import Path

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "the disk is full" in wrong()


def test_the_text_is_checked_before_it_is_written(wrong, monkeypatch):
    original = Text.written
    monkeypatch.setattr(
        Text, "written", lambda self: original(self).replace("headline: ridge_k2", "headline: ridge_k3")
    )
    assert "ridge_k3" in wrong()


def test_the_text_is_plain_yaml(new, workplace):
    new()
    assert yaml.safe_load((workplace / FILE).read_text())["headline"] == "ridge_k2"


def test_a_config_that_nobody_wrote_with_this_command_is_never_overwritten(models, workplace, capsys):
    shipped = workplace / "config/config.yaml"
    before = shipped.read_text()
    for force in ([], ["--force"]):
        message = refusal(capsys, "new", "config", "--source", models["small"], "--target", models["big"], *force)
        assert "is no config that `kvferry new` wrote; choose another name" in message
    assert shipped.read_text() == before
