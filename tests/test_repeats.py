"""Many seeds in one command, and one table of methods: known answers, resume, what is refused."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_code
from scipy import stats
from terminal import cells, done, run
from workspaces import SETTINGS, write_squad

import bertvision
from bertvision.errors import BertvisionError, InputError, UnknownNameError, WorkspaceError
from bertvision.jobs.finetune import Spread
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.repeats.charts import apart, numbered
from bertvision.pipelines.repeats.spread import is_failed, welch
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.records import BertScores, read_run_metrics, read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

KILLED = """
import json, os, signal, sys
import bertvision
from bertvision.pipelines.repeats import run

def once(*given, real=run.finetune):
    real(*given)
    os.kill(os.getpid(), signal.SIGKILL)

run.finetune = once
bertvision.repeat(**json.loads(sys.argv[1]))
"""
"""A process that is killed between the first seed and the second."""


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("squad")
    data = {name: write_squad(folder / f"{name}.json", n, n) for name, n in _SIZES.items()}
    short = {"epochs": 0.5, "save_at": ["0.3e", "0.5e"], "seed": 0}
    return {"model": str(tiny_bert), **data, **SETTINGS, **short}


_SIZES = {"train": 10, "dev": 3}


@pytest.fixture(scope="module")
def made(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two methods with two seeds each; the second was killed, and continued."""
    root = tmp_path_factory.mktemp("methods")
    bertvision.repeat(**options, seeds=2, workspace=root / "plain")
    other = {**options, "variant": "reinit:1", "seeds": 2, "workspace": str(root / "reinit")}
    ended = run_code(KILLED, json.dumps(other), CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    found = bertvision.spread([str(root / "reinit")])
    assert [row.runs for row in found.rows] == [1]
    (missing,) = found.unfinished
    assert missing["seed"] == 1
    assert missing["command"].startswith("bertvision finetune --resume --workspace ")
    before = _times(root / "reinit" / "seed-0")
    bertvision.repeat(**other)
    assert _times(root / "reinit" / "seed-0") == before
    return root


def _times(root: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def methods(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "methods")
    return tmp_path / "methods"


@pytest.fixture
def scored(methods: Path) -> Callable[..., None]:
    """Gives the runs of a method other scores."""

    def score(method: str, *f1: float) -> None:
        for seed, value in enumerate(f1):
            path = methods / method / f"seed-{seed}" / "bert" / "0.5e" / "metrics.json"
            record = read_record(path, BertScores, "")
            record.rules["n-best"]["metrics"]["f1"] = value
            write_record(path, record)

    return score


def test_each_seed_is_the_run_that_finetune_makes_with_it(
    made: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    alone = {**options, "variant": ("reinit:1",), "seed": 1}
    finetune(tmp_path, FinetuneOptions(**alone))
    for file in ("snapshots/0.5e/model.safetensors", "bert/0.5e/predictions.json"):
        assert (tmp_path / file).read_bytes() == (made / "reinit/seed-1" / file).read_bytes()
    configs = [Workspace.find(path).config.digest() for path in (tmp_path, made / "reinit/seed-1")]
    assert len(set(configs)) == 1


def test_seeds_that_are_added_have_the_settings_of_those_there(methods: Path) -> None:
    before = _times(methods / "plain")
    found = bertvision.repeat(seeds=3, workspace=methods / "plain")
    assert [run.seed for run in found.runs] == [0, 1, 2]
    assert {p: t for p, t in _times(methods / "plain").items() if "seed-2" not in p.parts} == before
    new, old = (Workspace.find(methods / f"plain/seed-{i}").config for i in (2, 0))
    assert new.finetune == old.finetune.model_copy(update={"seed": 2})
    assert (new.model, new.task, new.data.keys()) == (old.model, old.task, old.data.keys())


def test_other_options_than_those_there_are_refused_before_anything_is_made(methods: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"seed-0 was made with lr = 0\.001, not 0\.1"):
        bertvision.repeat(seeds=3, lr=0.1, workspace=methods / "plain")
    assert not (methods / "plain" / "seed-2").exists()


def test_a_known_difference(methods: Path, scored: Callable[..., None]) -> None:
    """By hand: means 70 and 80, variances 32 and 8, √(32/2 + 8/2) = 4.472, ν = 400/272 = 1.47."""
    scored("plain", 66.0, 74.0)
    scored("reinit", 82.0, 78.0)
    found = bertvision.spread([str(methods / name) for name in ("plain", "reinit")])
    first, second = found.rows
    assert (first.score, first.lowest, first.highest, first.runs) == (70.0, 66.0, 74.0, 2)
    assert (first.score_sd, second.score_sd) == pytest.approx((32**0.5, 8**0.5))
    assert (first.difference, second.difference) == (None, 10.0)
    half = stats.t.ppf(0.975, 400 / 272) * math.sqrt(20)
    assert (second.difference_low, second.difference_high) == pytest.approx((10 - half, 10 + half))
    assert second.no_interval is None
    assert list(found.to_pandas()["method"]) == ["plain", "reinit"]
    assert [run.score for run in found.runs] == [66.0, 74.0, 82.0, 78.0]
    assert "over seeds alone" in str(found)


def test_a_run_that_is_not_above_never_answering_has_failed(
    methods: Path, scored: Callable[..., None]
) -> None:
    baseline = bertvision.spread(str(methods / "plain")).baseline
    assert baseline == pytest.approx(100 / 3)
    scored("plain", baseline, baseline + 0.5)
    (row,) = (found := bertvision.spread(str(methods / "plain"))).rows
    assert row.failed == 0.5
    assert [run.failed for run in found.runs] == [True, False]
    assert "50%" in str(found)
    assert "trivial answer: never answering 33.3" in str(found)


def test_costs_are_those_of_the_snapshots(made: Path) -> None:
    found = bertvision.spread(str(made / "plain"))
    infos = [read_snapshot_info(made / f"plain/seed-{seed}/snapshots/0.5e") for seed in range(2)]
    assert found.rows[0].trained_parameters == infos[0].trained_parameters > 0
    assert [run.fine_tuning_seconds for run in found.runs] == pytest.approx(
        [info.step * info.seconds_per_step for info in infos if info.seconds_per_step]
    )


def test_other_systems_than_the_last_snapshot_stand_beside_it(methods: Path) -> None:
    for seed in range(2):
        at = ["-w", methods / "plain" / f"seed-{seed}"]
        done("extract", "--checkpoint", "0.5e", *at)
        done("train", "learned-pooling", "--checkpoint", "0.5e", "--precision", "32", *at)
        if seed == 0:
            done("evaluate", "learned-pooling", "--trained-on", "0.5e", *at)
    plain = str(methods / "plain")
    found = bertvision.spread([plain, f"{plain}@bert:0.3e", f"{plain}@learned-pooling:0.5e"])
    last, early, head = found.rows
    assert [row.system for row in found.rows] == ["bert:0.5e", "bert:0.3e", "learned-pooling:0.5e"]
    scores = bertvision.results(workspace=f"{plain}/seed-0").to_pandas().set_index("written").score
    assert [run.score for run in found.runs if run.seed == 0] == list(
        scores[[row.system for row in found.rows]]
    )
    trained = read_run_metrics(methods / "plain/seed-0/heads/0.5e/learned-pooling")
    assert head.trained_parameters == trained.trainable < last.trained_parameters
    (weights,) = (methods / "plain/seed-0/heads/0.5e/learned-pooling").glob("*.safetensors")
    assert head.kept_bytes == weights.stat().st_size < last.kept_bytes
    assert head.training_seconds == trained.own_seconds > last.training_seconds == 0
    of_seed = [run.fine_tuning_seconds for run in found.runs if run.seed == 0]
    assert 0 < of_seed[1] < of_seed[0] == of_seed[2]
    assert early.fine_tuning_seconds < last.fine_tuning_seconds
    assert (head.runs, head.unfinished, head.difference_low) == (1, 1, None)
    assert head.no_interval == "one run alone has no spread"
    (missing,) = found.unfinished
    assert run(*missing["command"].split()[1:]).exit_code == 0  # as it says
    assert bertvision.spread([f"{plain}@learned-pooling"]).rows[0].runs == 2


def test_two_systems_are_compared_over_runs_and_questions(methods: Path) -> None:
    plain = methods / "plain"
    both = bertvision.compare("bert:0.5e", "bert:0.3e", workspace=plain)
    apart = [
        bertvision.compare("bert:0.5e", "bert:0.3e", workspace=plain / f"seed-{seed}")
        for seed in range(2)
    ]
    assert both.difference == pytest.approx((apart[0].difference + apart[1].difference) / 2)
    assert both.first_score == pytest.approx((apart[0].first_score + apart[1].first_score) / 2)
    assert both.low <= both.difference <= both.high
    assert (both.seeds, both.baseline) == ((2, 2), apart[0].baseline)
    assert "and 2 fine-tunings, each of which has both systems" in both.sentence
    with pytest.raises(InputError, match="holds several fine-tunings"):
        bertvision.compare("bert:0.5e", "bert:0.3e", seeds="all", workspace=plain)
    with pytest.raises(UnknownNameError, match="seed-0: no system learned-pooling was scored"):
        bertvision.compare("learned-pooling:0.5e", "bert:0.5e", workspace=plain)


def test_the_command_prints_writes_and_draws(methods: Path, tmp_path: Path) -> None:
    folders = [methods / "plain", methods / "reinit"]
    csv, plot = tmp_path / "rows.csv", tmp_path / "runs.svg"
    text = done("spread", *folders, "--csv", csv, "--plot", plot)
    header, *lines = cells("\n".join(text.split("\n\n")[1].splitlines()))
    assert header[:3] == ["method", "variant", "runs"]
    assert header[7] == "− plain (95 % interval)"
    assert [line[:3] for line in lines] == [["plain", "–", "2"], ["reinit", "reinit:1", "2"]]
    assert csv.read_text().startswith("method,variant,system,runs,")
    svg = plot.read_text()
    assert svg.count("<title>plain, seed ") == svg.count("<title>reinit, seed ") == 2
    found = json.loads(done("spread", *folders, "--json"))
    assert [run["seed"] for run in found["runs"]] == [0, 1, 0, 1]
    assert found == bertvision.spread(list(map(str, folders))).to_json()


def test_one_variant_with_three_numbers_is_a_curve_in_their_order(methods: Path) -> None:
    found = bertvision.spread([str(methods / name) for name in ("plain", "reinit")])
    assert "by number" not in found.charts()
    assert "K of reinit:K" not in found.figure()
    values = found.to_json()
    (reinit,) = (row for row in values["rows"] if row["method"] == "reinit")
    runs = [run for run in values["runs"] if run["method"] == "reinit"]
    for number in (10, 2):
        name = f"reinit-{number}"
        values["rows"].append({**reinit, "method": name, "variant": [f"reinit:{number}"]})
        values["runs"] += [{**run, "method": name} for run in runs]
    values["rows"].append({**reinit, "method": "both", "variant": ["reinit:3", "isobn"]})
    values["runs"] += [{**run, "method": "both"} for run in runs]
    wider = Spread.model_validate(values)
    of_number = numbered(values["rows"])
    assert [row["number"] for row in of_number["reinit"]] == [1, 2, 10]
    assert len(of_number) == 1
    assert "K of reinit:K" in wider.figure()
    (line,) = wider.charts()["by number"].series.values()  # type: ignore[union-attr]
    assert list(line.places) == [1, 2, 10]


@pytest.mark.parametrize(
    ("labels", "trivial"),
    [(["good", "bad", "good"], "majority class 66.7"), (["0.5", "1.5", "2"], "no correlation 0.0")],
    ids=["classes", "scores"],
)
def test_one_run_of_sentences_has_no_spread_and_the_trivial_answer_of_its_metric(
    tiny_bert: Path, made: Path, tmp_path: Path, labels: list[str], trivial: str
) -> None:
    for split, count in (("train", 12), ("dev", 6)):
        rows = [f"anna was born in {1900 + i},{labels[i % 3]}" for i in range(count)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *rows]))
    found = bertvision.repeat(
        model=str(tiny_bert),
        task="csv",
        data=str(tmp_path),
        batch_size=4,
        precision="32",
        seeds=1,
        seed=3,
        workspace=tmp_path / "runs",
    )
    assert f"trivial answer: {trivial}" in str(found)
    assert [run.seed for run in found.runs] == [3]
    (row,) = found.rows
    assert row.score == row.lowest == row.highest
    assert row.score_sd is None
    assert "±" not in str(found).splitlines()[3]
    with pytest.raises(WorkspaceError, match=r"task\.name is 'csv', there it is 'squad_v2'"):
        bertvision.spread([str(made / "plain"), str(tmp_path / "runs")])


def _another_seed(root: Path) -> None:
    (root / "plain" / "seed-1").rename(root / "plain" / "seed-7")


def _another_setting(root: Path) -> None:
    path = root / "plain" / "seed-1" / "bertvision.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.002"))


def _no_scores(root: Path) -> None:
    for path in (root / "plain").glob("seed-*/bert"):
        shutil.rmtree(path)


def _another_task(root: Path) -> None:
    for path in (root / "reinit").glob("seed-*/bertvision.yaml"):
        path.write_text(path.read_text().replace("name: squad_v2", "name: squad_v1"))


def _other_data(root: Path) -> None:
    for path in (root / "reinit").glob("seed-*/bertvision.yaml"):
        digest = Workspace.find(path.parent).config.data["dev"].sha256
        path.write_text(path.read_text().replace(digest, "a" * 64))


def _as_it_is(root: Path) -> None:
    pass


REFUSED: dict[str, tuple[Callable[[Path], None], str, type[BertvisionError], str]] = {
    "a workspace": (_as_it_is, "plain/seed-0", WorkspaceError, "is a workspace itself, of one"),
    "no folder": (_as_it_is, "nothing", WorkspaceError, "does not exist: a folder of runs has"),
    "no runs": (_as_it_is, ".", WorkspaceError, "holds no runs: a folder of runs has"),
    "a file": (_as_it_is, "plain/seed-0/bertvision.yaml", InputError, "is a file: name a folder"),
    "another seed": (_another_seed, "plain", WorkspaceError, "made with seed 1: rename it to"),
    "another setting": (
        _another_setting,
        "plain",
        WorkspaceError,
        r"seed-1 has finetune\.lr = 0\.002, .*seed-0 has 0\.001: .*in the seed alone",
    ),
    "no scores": (
        _no_scores,
        "plain",
        WorkspaceError,
        "none of its runs is scored yet; `bertvision finetune --resume --workspace .*seed-0` fin",
    ),
    "another task": (_another_task, "plain,reinit", WorkspaceError, "task.name is .squad_v1."),
    "other data": (_other_data, "plain,reinit", WorkspaceError, r"data\.dev is .aaa"),
    "twice": (_as_it_is, "plain,plain@bert:0.5e", InputError, "is named twice"),
    "no such head": (_as_it_is, "plain@learned:1e", UnknownNameError, "no system learned was sc"),
    "which snapshot": (_as_it_is, "plain@bert", UnknownNameError, "which bert is meant"),
    "nothing behind @": (_as_it_is, "plain@", InputError, "names no system behind the @"),
    "no folder at all": (_as_it_is, "", InputError, "name a folder of runs"),
}


@pytest.mark.parametrize(("spoil", "named", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused_by_name(
    methods: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    named: str,
    error: type[BertvisionError],
    message: str,
) -> None:
    spoil(methods)
    monkeypatch.chdir(methods)
    with pytest.raises(error, match=message):
        bertvision.spread(named)
    assert run("spread", *named.split(",")).exit_code == 2


def test_repeat_refuses_what_is_wrong_before_it_makes_a_folder(
    made: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(WorkspaceError, match="is a workspace itself"):
        bertvision.repeat(**options, workspace=made / "plain" / "seed-0")
    with pytest.raises(InputError, match="a new workspace needs --model and"):
        bertvision.repeat(workspace=tmp_path / "new")
    with pytest.raises(InputError, match="--seeds 0: give 1 or more"):
        bertvision.repeat(**options, seeds=0, workspace=tmp_path / "new")
    with pytest.raises(InputError, match="lr"):
        bertvision.repeat(**{**options, "lr": -1}, workspace=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_text_of_an_at_sign_may_be_part_of_a_folder(methods: Path) -> None:
    (methods / "plain").rename(methods / "plain@home")
    found = bertvision.spread([str(methods / "plain@home@bert:0.3e")])
    assert found.rows[0].method == "plain@home@bert:0.3e"


SCORES = st.lists(st.integers(0, 1000).map(lambda n: n / 10), min_size=2, max_size=8)


def test_one_run_has_no_interval() -> None:
    assert welch([1.0], [2.0, 3.0])[1:] == (None, None, "one run alone has no spread")


@pytest.mark.filterwarnings("ignore:Precision loss")  # scipy's, where all runs of one are alike
@given(SCORES, SCORES)
def test_welch_is_that_of_scipy(a: list[float], b: list[float]) -> None:
    found = welch(a, b)
    assert found.value == pytest.approx(sum(a) / len(a) - sum(b) / len(b), abs=1e-9)
    if len(set(a)) == len(set(b)) == 1:
        assert found[1:] == (None, None, "all runs of both score the same")
        return
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_as_good_as_the_commonest_answer_is_failed() -> None:
    assert [is_failed(score, 100 / 3) for score in (0.0, 100 * (1 / 3), 33.4)] == [
        True,
        True,
        False,
    ]
    assert is_failed(-2.0, 0.0)


@given(st.lists(st.integers(0, 100).map(float), max_size=30))
def test_no_point_of_the_figure_lies_on_another(scores: list[float]) -> None:
    points = list(zip(scores, apart(scores, 1.5), strict=True))
    assert all(abs(aside) <= 0.2 for _, aside in points)
    for i, (score, aside) in enumerate(points):
        assert all(abs(score - a) > 1.5 or aside != b for a, b in points[:i])
