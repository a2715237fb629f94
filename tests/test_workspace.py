from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.extraction.contents import made_from_data
from bertvision.pipelines.records import digest_of
from bertvision.pipelines.workspace.config import FinetuneConfig, WorkspaceConfig
from bertvision.pipelines.workspace.creation import new_config, open_workspace
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import FILE, Workspace


def write_squad(path: Path, contexts: int, *, impossible: bool = True) -> str:
    """Three questions to a context; the third is unanswerable."""
    paragraphs = []
    for c in range(contexts):
        answer = [{"text": "paris", "answer_start": 14}]
        qas = [
            {
                "id": f"{path.stem}-{c}-{q}",
                "question": f"where is anna {q} ?",
                "answers": [] if q == 2 and impossible else answer,
                "is_impossible": q == 2 and impossible,
            }
            for q in range(3)
        ]
        paragraphs.append({"context": f"anna lives in paris . {path.stem} {c} .", "qas": qas})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    return str(path)


@pytest.fixture
def small_squad(tmp_path: Path) -> dict[str, str]:
    return {
        "train": write_squad(tmp_path / "train.json", 14),
        "dev": write_squad(tmp_path / "dev.json", 4),
    }


@pytest.fixture
def options(tiny_bert: Path, small_squad: dict[str, str]) -> FinetuneOptions:
    return FinetuneOptions(
        model=str(tiny_bert), **small_squad, tune_fraction=0.2, save_at=("1e", "0.3e")
    )


@pytest.fixture
def workspace(tmp_path: Path, options: FinetuneOptions) -> Workspace:
    return open_workspace(tmp_path / "ws", options, resume=False)


def test_the_yaml_reads_back_as_the_same_settings(workspace: Workspace) -> None:
    again = Workspace.find(workspace.root)
    assert again.config == workspace.config
    assert again.config.digest() == workspace.config.digest()
    assert again.config.finetune.tags == ("0.3e", "1e")
    assert again.config.model.num_hidden_layers == 2
    assert list(workspace.root.iterdir()) == [workspace.root / "bertvision.yaml"]


def test_it_is_found_from_any_folder_inside_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = workspace.root / "heads" / "1e"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert Workspace.find().root == workspace.root


def test_where_there_is_none_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="bertvision finetune --model"):
        Workspace.find(tmp_path)


def test_resume_makes_no_new_workspace(tmp_path: Path, options: FinetuneOptions) -> None:
    with pytest.raises(WorkspaceError, match="no workspace"):
        open_workspace(tmp_path / "new", options, resume=True)
    assert not (tmp_path / "new").exists()


def test_a_second_one_is_not_made_over_the_first(workspace: Workspace) -> None:
    with pytest.raises(WorkspaceError, match="is a workspace already"):
        Workspace.create(workspace.root, workspace.config)
    workspace.snapshot_dir("1e").mkdir(parents=True)
    (workspace.root / "bertvision.yaml").unlink()
    with pytest.raises(WorkspaceError, match="is left of a workspace"):
        Workspace.create(workspace.root, workspace.config)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("format: 2", "reads format 1"),
        ("format: [1", "cannot be read"),
        ("- 1", "holds no settings"),
        ("format: 1", "Field required"),
        (None, "finetune.learning_rate: Extra inputs"),
    ],
    ids=["newer", "broken", "list", "incomplete", "unknown-field"],
)
def test_a_wrong_yaml_is_refused_with_the_reason(
    workspace: Workspace, text: str | None, reason: str
) -> None:
    path = workspace.root / "bertvision.yaml"
    if text is None:
        values = yaml.safe_load(path.read_text())
        values["finetune"]["learning_rate"] = 1
        text = yaml.safe_dump(values)
    path.write_text(text)
    with pytest.raises(WorkspaceError, match=reason):
        Workspace.find(workspace.root)


@pytest.mark.parametrize("file", ["quantised/1e/metrics.json", "analysis/cka-1e-dev.json"])
def test_results_of_a_workspace_that_is_gone_are_not_taken_for_those_of_a_new_one(
    file: str, tmp_path: Path, workspace: Workspace
) -> None:
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "notes.txt").write_text("of one's own")
    left = tmp_path / file
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("{}")
    with pytest.raises(WorkspaceError, match=f"{left.relative_to(tmp_path).parts[0]} is left of"):
        Workspace.create(tmp_path, workspace.config)
    left.unlink()
    Workspace.create(tmp_path, workspace.config)


def test_train_and_tune_part_the_training_questions_by_context(workspace: Workspace) -> None:
    train, tune = workspace.items("train"), workspace.items("tune")
    assert workspace.splits() == ["train", "tune", "dev"]
    assert len(train) + len(tune) == 42
    assert len(tune) > 0
    assert not {q.context for q in train} & {q.context for q in tune}
    for split in workspace.splits():
        assert len(workspace.items(split)) == workspace.config.data[split].questions
    with pytest.raises(UnknownNameError, match="it has train, tune, dev"):
        workspace.items("test")


def test_train_questions_are_so_many_and_a_smaller_part_lies_in_a_larger(
    tmp_path: Path, workspace: Workspace, options: FinetuneOptions
) -> None:
    larger = workspace
    for count in (17, 5, 1):
        config = new_config(FinetuneOptions(**{**vars(options), "train_questions": count}))
        assert config.finetune.nested
        small = Workspace.create(tmp_path / str(count), config)
        assert sum(len(small.items(split)) for split in small.splits() if split != "dev") == count
        for split in set(small.splits()) - {"dev"}:
            assert {q.id for q in small.items(split)} < {q.id for q in larger.items(split)}
        assert len(small.items("dev")) == len(workspace.items("dev"))
        larger = small


def test_a_workspace_from_before_nested_parts_keeps_its_parts_and_its_digest(
    tmp_path: Path, workspace: Workspace, options: FinetuneOptions
) -> None:
    everything = workspace.items("train") + workspace.items("tune")
    config = new_config(FinetuneOptions(**{**vars(options), "train_questions": 17}))
    root = Workspace.create(tmp_path / "before", config).root
    text = (root / FILE).read_text()
    without = "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith(_LATER)
    )
    assert len(without.splitlines()) == len(text.splitlines()) - len(_LATER)
    (root / FILE).write_text(without)  # as it was written then
    before = Workspace.find(root)
    values = before.config.model_dump(mode="json")
    assert (values["finetune"]["nested"], values["finetune"]["order"]) == (False, "shuffled")
    assert before.config.digest() == _digest_of_before(before.config) != config.digest()
    chosen = before.items("train") + before.items("tune")
    assert len(chosen) == 15  # whole contexts
    contexts = {q.context for q in chosen}
    assert {q.id for q in chosen} == {q.id for q in everything if q.context in contexts}
    assert "nested" not in made_from_data(before.dataset(), "train")
    assert open_workspace(root, options, resume=True).config == before.config


_OF_OTHERS = ("distil", "temperature", "labels_weight", "teacher_sha256", "init_from")
_LATER = tuple(f"  {name}:" for name in ("nested", "order", *_OF_OTHERS))


def _digest_of_before(config: WorkspaceConfig) -> str:
    """The digest of a workspace when its settings had neither order nor nested parts."""
    values = config.model_dump(mode="json", exclude={"versions", "activations"})
    for field in ("nested", "order", "variant", *_OF_OTHERS):
        del values["finetune"][field]
    for field in ("classes", "text", "pair", "label", "dev_fraction", "linked", "windows", "date"):
        del values["task"][field]
    del values["task"]["skip_shared"], values["model"]["output_layer"]
    return digest_of(values)


def test_answerable_only_leaves_no_unanswerable_question_and_never_abstains(
    tmp_path: Path, options: FinetuneOptions
) -> None:
    config = new_config(FinetuneOptions(**{**vars(options), "answerable_only": True}))
    assert config.task.name == "squad_v1"
    workspace = Workspace.create(tmp_path / "answerable", config)
    for split in workspace.splits():
        assert not any(q.is_impossible for q in workspace.items(split))
    assert len(workspace.items("dev")) == 8


def test_the_task_is_squad_v2_only_with_unanswerable_training_questions(
    tmp_path: Path, options: FinetuneOptions
) -> None:
    assert new_config(options).task.name == "squad_v2"
    train = write_squad(tmp_path / "v1.json", 4, impossible=False)
    config = new_config(FinetuneOptions(**{**vars(options), "train": train}))
    assert config.task.name == "squad_v1"


def test_no_tune_split_without_a_held_out_part(options: FinetuneOptions) -> None:
    config = new_config(FinetuneOptions(**{**vars(options), "tune_fraction": 0.0}))
    assert list(config.data) == ["train", "dev"]
    assert config.data["train"].questions == 42


def test_a_part_of_the_training_data_is_dev_where_there_is_no_other(
    tmp_path: Path, tiny_bert: Path, options: FinetuneOptions
) -> None:
    """Nothing is scored on what it was trained on, and no text is in two parts."""
    given = {**vars(options), "dev": None, "dev_fraction": 0.3}
    workspace = open_workspace(tmp_path / "held", FinetuneOptions(**given), resume=False)
    parts = {split: workspace.items(split) for split in ("train", "tune", "dev")}
    texts = {split: {q.context for q in items} for split, items in parts.items()}
    assert not texts["train"] & texts["dev"] | texts["tune"] & texts["dev"]
    everything = open_workspace(tmp_path / "all", options, resume=False)
    whole = [*everything.items("train"), *everything.items("tune")]
    assert sorted(q.id for items in parts.values() for q in items) == sorted(q.id for q in whole)
    assert len(texts["dev"]) == 4  # 0.3 of 14 contexts
    assert made_from_data(workspace.dataset(), "dev")["dev_fraction"] == 0.3
    assert "dev_fraction" not in made_from_data(everything.dataset(), "dev")
    with pytest.raises(InputError, match="--dev-fraction.*one of the two"):
        new_config(FinetuneOptions(**{**given, "dev": options.dev}))


def test_one_file_of_ones_own_is_trained_and_scored_on_parts_of_it(
    tmp_path: Path, tiny_bert: Path
) -> None:
    rows = "".join(f"text {i},{'good' if i % 2 else 'bad'}\n" for i in range(40))
    (tmp_path / "mine.csv").write_text(f"text,label\n{rows}")
    given = {"model": str(tiny_bert), "task": "csv", "data": str(tmp_path / "mine.csv")}
    with pytest.raises(InputError, match=r"--dev-fraction 0\.1 to hold out a part"):
        new_config(FinetuneOptions(**given))
    config = new_config(FinetuneOptions(**given, dev_fraction=0.25))
    counts = {split: data.questions for split, data in config.data.items()}
    assert counts == {"train": 28, "tune": 2, "dev": 10}


def test_a_changed_source_is_refused_by_name(
    tmp_path: Path, tiny_bert: Path, small_squad: dict[str, str]
) -> None:
    train = tmp_path / "mine.json"
    train.write_bytes(Path(small_squad["train"]).read_bytes())
    options = FinetuneOptions(model=str(tiny_bert), train=str(train), dev=small_squad["dev"])
    workspace = open_workspace(tmp_path / "ws", options, resume=False)
    document = json.loads(train.read_text())
    document["data"][0]["paragraphs"].pop()
    train.write_text(json.dumps(document))
    with pytest.raises(WorkspaceError, match=r"mine\.json changed since"):
        workspace.items("train")
    train.unlink()
    with pytest.raises(WorkspaceError, match=r"mine\.json"):
        workspace.items("tune")


def test_what_lies_in_a_workspace_is_moved_with_it(
    tmp_path: Path, tiny_bert: Path, options: FinetuneOptions
) -> None:
    place = tmp_path / "here"
    given = {**vars(options), "train": place / "data/train.json", "dev": place / "data/dev.json"}
    for split in ("train", "dev"):
        given[split].parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(vars(options)[split]), given[split])
    made = open_workspace(place, FinetuneOptions(**given), resume=False)
    questions = [q.id for q in made.items("tune")]
    moved = place.rename(tmp_path / "there")
    assert [q.id for q in Workspace.find(moved).items("tune")] == questions
    given |= {split: moved / "data" / f"{split}.json" for split in ("train", "dev")}
    assert open_workspace(moved, FinetuneOptions(**given), resume=True).root == moved
    # as a copy, beside the first or another one in its place
    shutil.copytree(moved, place)
    for changed in (False, True):
        if changed:
            (place / "data/train.json").write_text("another's")
        assert Workspace.find(moved).dataset().source("train") == str(given["train"])
        assert [q.id for q in Workspace.find(moved).items("tune")] == questions
    shutil.rmtree(place)
    with given["train"].open("a") as file:
        file.write(" ")
    with pytest.raises(WorkspaceError, match="cannot be read again"):
        Workspace.find(moved).items("train")


def test_a_data_set_is_read_once(workspace: Workspace, small_squad: dict[str, str]) -> None:
    first = workspace.items("dev")
    assert workspace.dataset("squad_v2") is workspace.dataset()
    assert workspace.at(str(workspace.root / "elsewhere")).dataset() is workspace.dataset()
    Path(small_squad["dev"]).unlink()
    assert workspace.items("dev") is first
    with pytest.raises(WorkspaceError, match=r"dev\.json"):
        Workspace.find(workspace.root).items("dev")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", 0.5, r"lr = 1e-05, not 0\.5"),
        ("save_at", ("1e",), r"save_at = 0\.3e,1e, not 1e"),
        ("max_length", 128, "max_length = 386, not 128"),
        ("model", "bert-base-uncased", "not bert-base-uncased"),
        ("dev", "squad_v2", r"dev\.json, not squad_v2"),
    ],
)
def test_other_settings_are_refused_with_both_values(
    workspace: Workspace, name: str, value: object, message: str
) -> None:
    with pytest.raises(WorkspaceError, match=message):
        open_workspace(workspace.root, FinetuneOptions(**{name: value}), resume=False)


def test_equal_or_omitted_settings_continue_the_workspace(
    workspace: Workspace, options: FinetuneOptions
) -> None:
    for again in (options, FinetuneOptions(), FinetuneOptions(precision="auto", batch_size=8)):
        assert open_workspace(workspace.root, again, resume=True).config == workspace.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None, "dev": None}, "needs --model and --dev"),
        ({"save_at": ("0.1e", "2e")}, "snapshot 2e lies after the end of 1 epochs"),
        ({"save_at": ("0.10e",)}, "write 0.1e"),
        ({"save_at": ("1e", "0.5e+1e")}, r"0\.5e, which a mean is asked of, is not among"),
        ({"save_at": ()}, "names no snapshot"),
        ({"lr": -1.0}, "--lr -1.0: "),
        ({"max_length": 512}, "more than the 400 positions"),
        ({"order": "longest"}, "--order 'longest': choose shuffled, given or length"),
        ({"decay": "cosine"}, "--decay 'cosine': "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_make_no_workspace(
    tmp_path: Path, options: FinetuneOptions, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        open_workspace(
            tmp_path / "ws", FinetuneOptions(**{**vars(options), **change}), resume=False
        )
    assert not (tmp_path / "ws").exists()


def test_status_names_what_is_there_and_what_can_be_run_next(workspace: Workspace) -> None:
    before = status(workspace)
    assert json.loads(json.dumps(before)) == before
    assert [s["tag"] for s in before["snapshots"]] == ["0.3e", "1e"]
    assert not any(s["made"] for s in before["snapshots"])
    assert before["next"] == ["bertvision finetune --resume"]

    folder = workspace.snapshot_dir("0.3e")
    folder.mkdir(parents=True)
    assert workspace.snapshots() == []
    (folder / "snapshot.json").write_text("{}")
    assert workspace.snapshots() == ["0.3e"]
    assert status(workspace)["next"] == [
        "bertvision finetune --resume",
        "bertvision extract --checkpoint 0.3e --split train,tune,dev",
    ]


def test_the_digest_covers_every_setting_but_not_the_versions(workspace: Workspace) -> None:
    config = workspace.config
    values = config.model_dump(mode="json")
    newer = WorkspaceConfig.model_validate({**values, "versions": {"torch": "99"}})
    assert newer.digest() == config.digest()
    other = FinetuneConfig(
        epochs=2,
        save_at=("2e",),
        batch_size=9,
        lr=0.1,
        weight_decay=0.1,
        warmup=0.1,
        decay="linear",
        accumulate=2,
        gradient_clip=1,
        distil="/teacher:1e",  # which the temperature needs
        precision="bf16" if config.finetune.precision == "32" else "32",
        train_questions=9,
        nested=True,
        order="length",
        variant=("freeze:1",),
        temperature=4,
        labels_weight=0,
        teacher_sha256="0" * 64,
        init_from="/other:1e",
        seed=9,
    )
    for name in set(FinetuneConfig.model_fields) - {"distil"}:  # its weights say which it is
        changed = config.finetune.model_copy(update={name: getattr(other, name)})
        assert config.model_copy(update={"finetune": changed}).digest() != config.digest()


@pytest.mark.parametrize(
    "text",
    [
        "format: &a [x, x]\nmodel: &b [*a, *a]\n",
        "format: " + "[" * 100_000,
        "".join(" " * depth + "a:\n" for depth in range(1000)),
        "format: " + "1" * 100_000,
        "format: 2001-99-99",
        "format: 1\n" + "# " * (1 << 20),
        "format: !!python/object/apply:os.system [ls]",
        "format: \x00",
        "- 1",
        "format: [" + "x, " * 10_000 + "]",
    ],
    ids=["references", "deep", "nested", "a number", "a date", "large", "code", "a control",
         "a list", "long"],
)  # fmt: skip
def test_settings_that_are_none_are_one_short_message(tmp_path: Path, text: str) -> None:
    """Whatever a workspace that somebody else made says of itself."""
    path = tmp_path / "bertvision.yaml"
    path.write_text(text)
    with pytest.raises(WorkspaceError, match=r"bertvision\.yaml") as error:
        WorkspaceConfig.read(path)
    assert len(str(error.value)) < 1000


def test_a_pipe_is_no_settings_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bertvision.yaml")
    with pytest.raises(WorkspaceError, match="it is no file"):
        WorkspaceConfig.read(tmp_path / "bertvision.yaml")
