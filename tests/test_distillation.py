"""Students learn from what a teacher says: the loss by hand, and what stands for plain training."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import run_code
from safetensors.numpy import load_file, save_file
from workspaces import STOP_AT

import bertvision
from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.models.outputs import SpanOutput, distillation_loss
from bertvision.pipelines.finetuning import kept_logits
from bertvision.pipelines.finetuning.kept_logits import keep_logits
from bertvision.pipelines.results.sweep import sweep
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.teacher import Teacher, TeacherFile
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.records import read_run_config
from bertvision.pipelines.workspace.reproduce import training_command
from bertvision.pipelines.workspace.runs import Run, check_told
from bertvision.pipelines.workspace.workspace import Workspace

OPTIONS = TrainOptions(epochs=2, batch_size=4, precision="32")
HEAD = "adapter-64-shared"


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    return Workspace.find(root)


def weights(space: Workspace, name: str) -> dict[str, np.ndarray]:
    return load_file(space.head_dir("1e", name) / "model.safetensors")


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


# --- the loss ---


def test_the_loss_is_hintons_by_hand() -> None:
    student, teacher = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, -2.0]])
    p = 1 / (1 + np.exp(-2.0))  # softmax of (2, −2) / 2, its first
    q = 1 / (1 + np.exp(1.0))  # softmax of (1, 3) / 2
    by_hand = 4 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
    found = distillation_loss(student, teacher, temperature=2)
    assert float(found) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 7.5])
def test_the_loss_is_torchs_divergence_times_the_square_of_the_temperature(
    temperature: float,
) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 5), torch.randn(6, 5)
    expected = F.kl_div(
        (student / temperature).log_softmax(1), (teacher / temperature).softmax(1), reduction="none"
    ).sum(1)
    found = distillation_loss(student, teacher, temperature=temperature, reduction="none")
    assert torch.allclose(found, temperature**2 * expected, atol=1e-5)
    mean = distillation_loss(student, teacher, temperature=temperature)
    assert torch.equal(mean, found.mean())


def test_a_high_temperature_matches_logits_less_their_means() -> None:
    """The gradient of Hinton's equation 4: that of half the mean squared difference."""
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    distillation_loss(student, teacher, temperature=500).backward()
    apart = (student - student.mean(1, keepdim=True)) - (teacher - teacher.mean(1, keepdim=True))
    (limit,) = torch.autograd.grad((apart**2).mean(1).mean() / 2, student)
    assert student.grad is not None
    assert torch.allclose(student.grad, limit, rtol=0.01, atol=1e-4)


def test_a_score_has_the_squared_error_whatever_the_temperature() -> None:
    student, teacher = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.5]])
    for temperature in (1.0, 9.0):
        found = distillation_loss(student, teacher, temperature=temperature, reduction="none")
        assert found.tolist() == [4.0, 0.25]


# --- the teacher of a batch ---


def span_teacher() -> tuple[Teacher, dict[str, np.ndarray]]:
    arrays = {
        name: np.random.default_rng(i).normal(size=5).astype(np.float32)
        for i, name in enumerate(("start_logits", "end_logits"))
    }
    index = WindowIndex([], np.array([3, 2], np.int32), np.array([0, 1], np.int32), None)
    rows = np.array([1, 0])  # as a store has them: the second window first
    return Teacher(Logits(arrays, index), rows, temperature=2, labels_weight=0.25), arrays


def test_spans_are_told_start_and_end_of_their_own_window_without_padding() -> None:
    teacher, arrays = span_teacher()
    torch.manual_seed(1)
    output = SpanOutput(torch.randn(2, 3), torch.randn(2, 3))  # padding not masked
    distances = []
    for row, (first, n) in enumerate([(3, 2), (0, 3)]):  # example 0 is window 1
        of = [
            distillation_loss(
                getattr(output, name)[row : row + 1, :n],
                torch.from_numpy(arrays[name][first : first + n])[None],
                temperature=2,
            )
            for name in ("start_logits", "end_logits")
        ]
        distances.append((of[0] + of[1]) / 2)
    task, loss = load_task("squad_v2"), torch.tensor(3.0)
    found = teacher.mixed(task, output, torch.tensor([0, 1]), loss)
    assert float(found) == pytest.approx(0.25 * 3 + 0.75 * float(sum(distances)) / 2, rel=1e-5)
    summed = teacher.mixed(task, output, torch.tensor([0, 1]), loss, "sum")
    assert float(summed) == pytest.approx(0.25 * 3 + 0.75 * float(sum(distances)), rel=1e-5)


# --- kept logits ---


def test_logits_of_train_are_computed_once_and_say_which_weights_left_them(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = keep_logits(space, "1e", ["train"])
    assert (space.root / kept.file).stat().st_size == kept.bytes
    windows = kept.windows
    assert windows == len(space.split("1e", "train"))
    monkeypatch.setattr(kept_logits, "predict_logits", lambda *_, **__: pytest.fail("ran again"))
    assert keep_logits(space, "1e", ["train"]) == [kept]


def test_logits_in_parts_are_those_of_one_run_and_a_kept_part_is_not_computed_again(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_logits(space, "1e", ["train"])
    path = space.bert_dir("1e") / "train.safetensors"
    whole = load_file(path)
    path.unlink()
    monkeypatch.setattr(kept_logits, "_PART", 10)
    real, ran = kept_logits.predict_logits, []

    def stop_in_the_third(*given: object, **options: object) -> object:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(given)
        return real(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kept_logits, "predict_logits", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        keep_logits(space, "1e", ["train"])
    assert len([*path.parent.glob(".train-*.safetensors")]) == 2
    monkeypatch.setattr(
        kept_logits, "predict_logits", lambda *a, **k: ran.append(a) or real(*a, **k)
    )
    keep_logits(space, "1e", ["train"])
    parts = -(-len(whole["question_index"]) // 10)
    assert len(ran) == parts  # none of them twice
    found = load_file(path)
    assert found.keys() == whole.keys()
    for name in whole:
        assert np.allclose(found[name], whole[name], atol=1e-5)
    assert not [*path.parent.glob(".train-*")]


# --- heads ---


def test_a_head_is_told_the_logits_of_its_own_examples(space: Workspace) -> None:
    """The store has windows in another order than the data: those of each are found again."""
    keep_logits(space, "1e", ["train"])
    split = space.split("1e", "train")
    rows = split.plan.example_id
    assert list(rows) != sorted(rows)
    logits = TeacherFile.find(space, "1e").for_split(split)
    first = np.cumsum(logits.windows.n_tokens) - logits.windows.n_tokens
    teacher = Teacher(logits, rows, temperature=1, labels_weight=0.5)
    told = teacher.of(torch.arange(len(split)))["start_logits"]
    for example, row in enumerate(rows):
        n = split.plan.n_tokens[example]
        own = logits.arrays["start_logits"][first[row] : first[row] + n]
        assert np.array_equal(told[example, :n].numpy(), own)


def test_all_weight_on_labels_is_plain_training_bit_for_bit(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    train(space, [HEAD, f"{HEAD}@d1e@w1", f"{HEAD}@d1e"], "1e", OPTIONS)
    assert same(weights(space, HEAD), weights(space, f"{HEAD}@d1e@w1"))
    assert not same(weights(space, HEAD), weights(space, f"{HEAD}@d1e"))


def test_a_distilled_head_comes_closer_to_its_teacher_than_one_of_labels(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    many = replace(OPTIONS, epochs=8, lr=0.01)
    train(space, [HEAD, f"{HEAD}@d1e@t1@w0"], "1e", many)
    losses = {}
    for name in (HEAD, f"{HEAD}@d1e@t1@w0"):
        losses[name] = distance(space, name)
    assert losses[f"{HEAD}@d1e@t1@w0"] < 0.9 * losses[HEAD]


def distance(space: Workspace, name: str) -> float:
    """The mean divergence of a head from its teacher on the training windows."""
    from bertvision.featurestore.stream import ActivationLoader
    from bertvision.pipelines.training.datamodule import decoded
    from bertvision.pipelines.training.trained_head import load_head

    split, head = space.split("1e", "train"), load_head(space.head_dir("1e", name))
    file = TeacherFile.find(space, "1e")
    teacher = Teacher(file.for_split(split), split.plan.example_id, temperature=1, labels_weight=0)
    batches = [
        decoded(b, torch.float32) for b in ActivationLoader(split, batch_size=64, shuffle=False)
    ]
    with torch.no_grad():
        found = [
            teacher.mixed(
                load_task("squad_v2"),
                head.module(b.hidden_states, b.lengths),
                b.examples,
                torch.zeros(()),
                "sum",
            )
            for b in batches
        ]
    return float(sum(found)) / len(split)


def test_a_distilled_head_has_a_name_of_its_own_that_says_everything(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    options = replace(OPTIONS, distil="1e", temperature=4, labels_weight=0.1)
    (made,) = train(space, [HEAD], "1e", options)
    assert made.head == f"{HEAD}@d1e@t4@w0.1"
    config = read_run_config(space.head_dir("1e", made.head))
    assert config.teacher_sha256 == TeacherFile.find(space, "1e").weights_sha256
    assert (config.training.distil, config.training.temperature) == ("1e", 4)
    command = training_command(config, 3)
    assert command.startswith(f"bertvision train {HEAD}@d1e@t4@w0.1 --checkpoint 1e")
    assert "--distil" not in command
    (other,) = train(space, [HEAD], "1e", OPTIONS)
    assert other.head == HEAD
    assert "distil" not in (space.head_dir("1e", HEAD) / "config.json").read_text()


def test_a_sweep_has_distilled_heads_beside_the_others(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    found = sweep(
        space, [HEAD, f"{HEAD}@d1e"], trained_on=["1e"], checkpoints=["1e"], options=OPTIONS
    )
    assert [result.name for result in found] == [HEAD, f"{HEAD}@d1e"]
    (distilled,) = sweep(
        space,
        [HEAD],
        trained_on=["1e"],
        checkpoints=["1e"],
        options=replace(OPTIONS, distil="1e"),
    )
    assert distilled == found[1]


def test_options_beside_a_teacher_in_the_name_are_refused_where_they_would_say_nothing() -> None:
    own, plain = Run.parse("a@d1e"), Run.parse("b")
    check_told([own, plain], "0.5e", 2, 0.5)  # b learns from 0.5e
    with pytest.raises(InputError, match=r"--distil 0\.5e .*: a@d1e names another way"):
        check_told([own], "0.5e", 2, 0.5)
    with pytest.raises(InputError, match="--temperature 4 .*: a@d1e names another way"):
        check_told([own, plain], "0.5e", 4, 0.5)
    check_told([own], "1e", 2, 0.5)
    check_told([Run.parse("a@d1e@t4"), plain], "1e", 4, 0.5)


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_commands_refuse_them_too(command: str, space: Workspace) -> None:
    options = replace(OPTIONS, distil="0.5e", temperature=4)
    with pytest.raises(InputError, match="names another way of learning"):
        getattr(bertvision, command)(f"{HEAD}@d1e", options=options, workspace=space.root)


def test_a_trained_head_needs_its_teacher_no_more(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    name = f"{HEAD}@d1e"
    made = train(space, [name], "1e", OPTIONS)
    shutil.rmtree(space.bert_dir("1e"))
    assert train(space, [name], "1e", OPTIONS) == made
    with pytest.raises(WorkspaceError, match="`bertvision logits --checkpoint 1e` computes them"):
        train(space, [name, f"{name}@s1"], "1e", OPTIONS)
    with pytest.raises(WorkspaceError, match="`bertvision logits --checkpoint 1e` computes them"):
        train(space, [name], "1e", OPTIONS, overwrite=True)


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("a@d1e", "a@d1e"),
        ("a@d1e@t2@w0.5", "a@d1e"),
        ("a@t4.0@d2e+3e@w0.25@s3", "a@d2e+3e@t4@w0.25@s3"),
        ("a@d1e@t1000000", "a@d1e@t1e06"),
    ],
)
def test_one_way_of_distilling_has_one_name(name: str, again: str) -> None:
    run = Run.parse(name)
    assert run.name == again
    assert Run.parse(again) == run


# --- what is refused ---


def test_without_logits_the_command_that_keeps_them_is_named(space: Workspace) -> None:
    with pytest.raises(WorkspaceError, match="`bertvision logits --checkpoint 1e` computes them"):
        train(space, [f"{HEAD}@d1e"], "1e", OPTIONS)
    assert not (space.root / "heads").exists()


def test_a_teacher_of_other_weights_is_refused_by_name(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    path = space.bert_dir("1e") / "train.safetensors"
    held = load_file(path)
    save_file(held, path, {"weights_sha256": "0" * 64, "seconds": "1", "snapshot": "1e"})
    with pytest.raises(ProvenanceError, match=r"1e.train.safetensors is of a teacher with.*0000"):
        train(space, [f"{HEAD}@d1e"], "1e", OPTIONS)
    (kept,) = keep_logits(space, "1e", ["train"])  # the command that was named mends it
    assert kept.windows == len(held["question_index"])
    train(space, [f"{HEAD}@d1e"], "1e", OPTIONS)


def test_a_head_of_a_teacher_that_changed_since_is_not_taken_for_its_own(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    train(space, [f"{HEAD}@d1e"], "1e", OPTIONS)
    config = space.head_dir("1e", f"{HEAD}@d1e") / "config.json"
    from byhand import change

    change(config, teacher_sha256="1" * 64)
    metrics = config.with_name("metrics.json")
    change(metrics, sha256={})
    with pytest.raises(WorkspaceError, match=r"teacher_sha256 = 1{12}.*--overwrite"):
        train(space, [f"{HEAD}@d1e"], "1e", OPTIONS)


def test_logits_of_other_windows_are_refused(space: Workspace) -> None:
    keep_logits(space, "1e", ["dev", "train"])
    folder = space.bert_dir("1e")
    shutil.copy(folder / "dev.safetensors", folder / "train.safetensors")
    with pytest.raises(WorkspaceError, match=r"are of other data.*`bertvision logits --ch"):
        train(space, [f"{HEAD}@d1e"], "1e", OPTIONS)
    assert not [*space.root.glob("heads/1e/.run-*")]  # nothing was begun


def test_heads_of_classes_do_not_learn_from_spans(space: Workspace) -> None:
    from bertvision.pipelines.extraction.extract import extract

    extract(space, "1e", tokens="cls", encoding="float32", precision="32")
    keep_logits(space, "1e", ["train"])
    with pytest.raises(InputError, match="cls-learned-pooling@d1e cannot learn from the logits"):
        train(space, ["cls-learned-pooling@d1e"], "1e", OPTIONS)


@pytest.mark.parametrize(
    ("tag", "message"), [("0e", "0e cannot teach"), ("untrained", "untrained cannot teach")]
)
def test_an_output_layer_that_learned_nothing_cannot_teach(
    space: Workspace, tag: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        TeacherFile.find(space, tag)


def test_trees_are_not_learned_from_a_teacher(workspace: Workspace) -> None:
    task = workspace.config.task.model_copy(update={"name": "parsing"})
    config = workspace.config.model_copy(update={"task": task})
    with pytest.raises(InputError, match="1e of .* cannot teach: its output layer reads"):
        TeacherFile.find(replace(workspace, config=config), "1e")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 3.0}, "--temperature 3 .*--distil 1e"),
        ({"labels_weight": 0.1}, "--labels-weight 0.1 .*--distil 1e"),
        ({"distil": "1e", "temperature": 0.5}, "--temperature"),
        ({"distil": "1e", "labels_weight": 1.5}, "--labels-weight"),
        ({"distil": "One"}, "'One' is not a snapshot tag"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainOptions(**options)  # type: ignore[arg-type]


def test_a_temperature_without_a_teacher_names_no_run() -> None:
    with pytest.raises(InputError, match="write its tag too"):
        Run.parse("a@t4")


# --- going on ---

RUN = (
    STOP_AT
    + """
from pathlib import Path
from bertvision.pipelines.training.resume import StoppedError
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.workspace import Workspace

options = TrainOptions(epochs=2, batch_size=4, precision="32")
try:
    train(Workspace.find(Path(sys.argv[3])), sys.argv[4:], "1e", options, resume_every_seconds=0)
except StoppedError as stopped:
    sys.exit(stopped.exit_code)
"""
)


def test_an_interrupted_distillation_ends_bit_for_bit_the_same(space: Workspace) -> None:
    keep_logits(space, "1e", ["train"])
    name = f"{HEAD}@d1e@f0.55"
    train(space, [name], "1e", OPTIONS)
    whole = weights(space, name)
    shutil.rmtree(space.root / "heads")
    for step, expected in ((7, 128 + signal.SIGINT), (0, 0)):
        arguments = [str(step), str(int(signal.SIGINT)), str(space.root), name]
        assert run_code(RUN, *arguments).returncode == expected
    assert same(whole, weights(space, name))
