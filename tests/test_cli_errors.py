"""A user's mistake is one message and status 2; a mistake of ours keeps its traceback."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
from terminal import done, run

from bertvision.cli import _Lines
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.progress import progress
from bertvision.pipelines.training.lightning import TrainingLog

EXTRACT = ["--encoding", "float32", "--precision", "32"]


ERRORS: dict[str, tuple[list[Any], str]] = {
    "unknown head": (["train", "learned-poling", "--checkpoint", "1e"], "did you mean learned-po"),
    "untrained head": (["evaluate", "learned-poling"], "did you mean learned-pooling"),
    "head of two snapshots": (
        ["evaluate", "learned-pooling"],
        r"0\.5e, 1e; .* --trained-on, .* trained_on=$",
    ),
    "snapshot to extract": (["extract"], r"0\.5e, 1e; say so with --checkpoint, .* checkpoint=$"),
    "snapshot to train on": (["train", "learned-pooling"], r"0\.5e, 1e; say so with --check"),
    "second snapshot": (["extract", "--checkpoint", "0.5e,9e"], r"no snapshot 9e: made are 0\.5e"),
    "several for one": (["train", "x", "--checkpoint", "0.5,1"], "name one snapshot"),
    "split to extract": (
        ["extract", "--checkpoint", "1e", "--split", "tset", *EXTRACT],
        "'tset' is no split .* it has train, tune, dev",
    ),
    "other precision": (
        ["extract", "--checkpoint", "1e", "--precision", "bf16"],
        "with precision = '32', now it is 'bf16'",
    ),
    "layers text": (["extract", "--layers", "a,b", "--checkpoint", "1e"], "--layers 'a,b'"),
    "layers number": (["extract", "--layers", "7", "--checkpoint", "1e"], "hidden states 0 .* 2"),
    "save-at": (["finetune", "--save-at", "0.3x"], "'0.3x' is not a fraction of an epoch"),
    "save-at form": (["finetune", "--save-at", "0.30e"], "not in canonical form: write 0.3e"),
    "other settings": (["finetune", "--lr", 5], r"made with lr = 0\.001, not 5"),
    "epochs": (["train", "learned-pooling", "--checkpoint", 1, "--epochs", 0], "--epochs 0: "),
    "cka snapshot": (["cka", "0.5e", "2"], "no activations of 2e.*it holds 0.5e, 1e"),
    "cka split": (["cka", "0.5e", "1e", "--split", "test"], "no split 'test'"),
    "scheduler": (["cka", "0.5e", "1e", "--scheduler", "fast"], "use threads, processes, or"),
    "isotropy snapshot": (["isotropy", "One"], "'One' is not a snapshot tag"),
    "plot": (
        ["isotropy", "1e", "--plot", __file__ + "/plot.svg"],
        "test_cli_errors.py: File exists",
    ),
    "plot suffix": (
        ["cka", "0.5e", "1e", "--plot", "own.png"],
        "the plot own.png ends in '.png'.* give a file that ends in .svg, such as own.svg",
    ),
    "store split": (["store", "info", "1e"], "name a snapshot and a split of it, such as 0.3e/t"),
    "store unknown": (["store", "info", "1e/test"], "no split 'test' of 1e"),
    "workspace file": (["finetune", "-w", __file__], "is a file: give a folder"),
}


@pytest.mark.parametrize(("args", "message"), ERRORS.values(), ids=ERRORS)
def test_a_users_error_is_one_message_and_status_2(
    trained: Path, args: list[Any], message: str
) -> None:
    result = run(*args, *([] if "-w" in args else ["-w", trained]))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert re.search(message, last)
    assert "Traceback" not in result.stderr


def test_what_is_said_has_a_line_of_its_own_above_the_progress_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress(3, "work", "step") as bar:
        bar.update()
        _Lines().emit(logging.makeLogRecord({"msg": "a line"}))
    lines = re.split(r"[\r\n]", capsys.readouterr().err)
    assert "a line" in lines
    assert any(line.startswith("work: ") for line in lines[: lines.index("a line")])


def test_an_error_while_training_ends_the_line_of_its_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(TrainingLog):
        def on_train_batch_end(self, *_: Any) -> None:
            raise OSError("no space left")

    trainer = pl.Trainer(
        callbacks=[Full(tmp_path / "log.csv", 2, "train", ["loss"])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        max_steps=2,
    )
    with pytest.raises(OSError, match="no space"):
        trainer.fit(BoringModel())
    shown = capsys.readouterr().err
    assert "train: " in shown
    assert shown.endswith("\n")


def test_where_there_is_no_workspace_every_command_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [["status"], ["extract"], ["train", "x"], ["evaluate", "x"], ["cka", "1e", "1e"]]
    for args in [*commands, ["isotropy", "1e"], ["store", "ls"], ["store", "verify"]]:
        result = run(*args)
        assert result.exit_code == 2
        assert f"Error: no workspace in {tmp_path} and its parents" in result.stderr
        assert "bertvision quickstart" in result.stderr
        assert "`bertvision extract --model NAME --task text --data FILE`" in result.stderr
        assert ("a store needs none: name it with --store" in result.stderr) == ("store" in args)
    result = run("finetune", "--train", "x.json")
    assert (result.exit_code, "needs --model and --dev" in result.stderr) == (2, True)
    assert not (tmp_path / "bertvision.yaml").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[]", "expected an object"),
        ('{"2-0-0": 1}', "expected the answer text"),
        ('{"2-0-0": "x"}', "23 of 24 questions have no prediction"),
        ("{", "is not JSON"),
    ],
)
def test_malformed_predictions_are_named(dev_json: Path, text: str, message: str) -> None:
    predictions = dev_json.with_name("predictions.json")
    predictions.write_text(text)
    result = run("score", predictions, dev_json)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(f"Error: .*{message}.*\n", result.stderr)


def test_data_given_for_predictions_are_named(dev_json: Path) -> None:
    result = run("score", dev_json, dev_json)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is a file of questions in SQuAD's form, not of predictions" in result.stderr


def test_what_click_refuses_is_plain_text_and_status_2() -> None:
    for args in (["bogus"], ["store", "bogus"], ["train"], ["heads", "--hidden", "x"], ["--bogus"]):
        result = run(*args)
        assert result.exit_code == 2
        assert result.stderr.startswith("Usage: bertvision ") or "Usage:" in result.stderr
        assert "╭" not in result.output
        assert "behind the command" not in result.output
    assert "╭" not in done("store", "--help")


@pytest.mark.parametrize("args", [["--workspace", ".", "status"], ["store", "-w", ".", "ls"]])
def test_an_option_in_front_of_its_command_is_sent_behind_it(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    option = next(arg for arg in args if arg.startswith("-"))
    assert f"No such option: {option}: it belongs behind the command, " in result.stderr


@pytest.mark.parametrize(
    ("name", "command"), [("results", "table"), ("predictions", "errors")], ids=str
)
def test_a_function_that_is_no_command_sends_to_the_one_that_shows_its_rows(
    name: str, command: str
) -> None:
    result = run(name, "--csv", "x.csv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"bertvision.{name}(): take `bertvision {command}`" in result.stderr
    assert "--csv" in done(command, "--help")


@pytest.mark.parametrize("command", [["status"], ["store", "verify"]], ids=" ".join)
def test_ctrl_c_is_status_130_and_a_bug_keeps_its_traceback(
    trained: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    def interrupt(error: type[BaseException]) -> Callable[..., None]:
        def method(*args: object) -> None:
            raise error

        return method

    methods = {StoredSplit: "committed_shards", ActivationSplit: "verify"}
    for kind, method in methods.items():
        monkeypatch.setattr(kind, method, interrupt(KeyboardInterrupt))
    result = run(*command, "-w", trained)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Stopped; what was finished is kept.\n"
    for kind, method in methods.items():
        monkeypatch.setattr(kind, method, interrupt(ZeroDivisionError))
    assert isinstance(run(*command, "-w", trained).exception, ZeroDivisionError)
