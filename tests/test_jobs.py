"""Jobs are called from Python as from the command line: same names, same results."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from terminal import done

import bertvision
from bertvision.errors import InputError, UnknownNameError
from bertvision.jobs.experiment import Status
from bertvision.jobs.results import Errors
from bertvision.jobs.show import Row, Rows
from bertvision.jobs.systems import Comparison, Ensemble
from bertvision.pipelines import analysis
from bertvision.pipelines.declare import bound
from bertvision.pipelines.reading import (
    parse_fractions,
    parse_layers,
    parse_names,
    parse_tags,
    parse_tokens,
)
from bertvision.pipelines.results.compare import compare as run_compare
from bertvision.pipelines.results.ensemble import ensemble as run_ensemble
from bertvision.pipelines.results.error_analysis import errors as run_errors
from bertvision.pipelines.training import trained_head
from bertvision.pipelines.workspace.job_options import ExtractOptions, TrainOptions
from bertvision.pipelines.workspace.status import status as run_status
from bertvision.pipelines.workspace.workspace import Workspace

JOBS = [
    *(
        name
        for name, home in bertvision._HOME.items()
        if home.startswith("jobs.") and name.islower()
    ),
    *analysis.names(),
]


@pytest.fixture(scope="module")
def space(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with scored heads, for reading."""
    root = shutil.copytree(trained, tmp_path_factory.mktemp("jobs") / "workspace")
    done("evaluate", "learned-pooling", "--trained-on", "1e", "-w", root, "--precision", "32")
    return root


@pytest.mark.parametrize("name", JOBS)
def test_help_says_every_parameter_of_a_job(name: str) -> None:
    job = getattr(bertvision, name)
    text = inspect.getdoc(job) or ""
    told = [line.split(":")[0].strip(" *") for line in text.splitlines() if line.startswith("    ")]
    assert set(inspect.signature(job).parameters) <= set(told)
    assert "changes" not in inspect.signature(job).parameters


def test_every_command_is_a_job_with_a_summary_that_fits_a_line() -> None:
    from bertvision.cli import _summary, app, commands

    group: Any = typer.main.get_command(app)
    lines = [_summary(place) for place in group.places.values()]
    assert {*group.places, "store"} == {name for names in commands().values() for name in names}
    assert all(line.endswith(".") and 10 < len(line) < 67 for line in lines)
    for name, place in group.places.items():
        job = getattr(bertvision, place.partition(":")[2])
        assert (job.__doc__ or "").splitlines()[0].replace("`", "") == _summary(place), name


def test_texts_with_commas_and_sequences_mean_the_same() -> None:
    assert parse_tags("0.3, 1e") == parse_tags([0.3, "1e"]) == ("0.3e", "1e")
    assert parse_tags(1) == parse_tags("1") == ("1e",)
    assert parse_layers("0,6") == parse_layers([0, 6]) == (0, 6)
    assert parse_layers("all") is parse_layers(None) is None
    assert parse_layers(3) == (3,)
    assert parse_names("train,dev") == parse_names(("train", "dev")) == ["train", "dev"]
    assert parse_tokens("none") == ("all",)
    assert parse_tokens(["cls", "mean", "cls"]) == ("cls", "mean")
    assert parse_fractions(0.5) == parse_fractions("0.5") == (0.5,)
    given = {"split": "dev", "layers": "0,-1"}
    expected = ExtractOptions(splits=("dev",), layers=(0, -1))
    assert bound(bertvision.extract, (), given)["options"] == expected


def test_keywords_go_before_the_object_of_options_and_wrong_ones_are_named() -> None:
    given = {"options": TrainOptions(epochs=3, lr=0.1), "lr": 0.2}
    assert bound(bertvision.train, ("x",), given)["options"] == TrainOptions(epochs=3, lr=0.2)
    said = r"train\(\) has no argument 'epoch': did you mean epochs.* there are .*batch_size.* seed"
    with pytest.raises(TypeError, match=said):
        bertvision.train("learned-pooling", epoch=3)
    with pytest.raises(InputError, match="--layers \\[1.5\\]: give indices"):
        bertvision.train("learned-pooling", layers=[1.5])


def test_results_are_those_of_the_command_field_for_field(space: Path) -> None:
    trained = {"epochs": 2, "batch_size": 8, "precision": "32"}
    pairs: list[tuple[Any, list[Any]]] = [
        (bertvision.status(workspace=space), ["status"]),
        (
            bertvision.train("learned-pooling", checkpoint=1, workspace=space, **trained),
            [*("train", "learned-pooling", "--checkpoint", 1, "--epochs", 2)]
            + ["--batch-size", 8, "--precision", 32],
        ),
        (
            bertvision.compare("bert:1e", "learned-pooling:1e", resamples=50, workspace=space),
            ["compare", "bert:1e", "learned-pooling:1e", "--resamples", 50],
        ),
        (
            bertvision.cka(0.5, "1e", max_tokens=100, workspace=space),
            ["cka", 0.5, 1, "--max-tokens", 100],
        ),
        (
            bertvision.error_analysis("learned-pooling:1e", workspace=space),
            ["errors", "learned-pooling:1e"],
        ),
    ]
    for result, words in pairs:
        printed = json.loads(done(*words, "-w", space, "--json"))
        assert json.loads(json.dumps(result.to_json())) == printed
        assert str(result) == done(*words, "-w", space).removesuffix("\n")


def test_typed_results_lose_no_field_of_what_the_pipelines_found(space: Path) -> None:
    opened = Workspace.find(space)
    on = {"trained_on": "1e", "tag": "1e"}
    found: list[tuple[type[Any], dict[str, Any]]] = [
        (Ensemble, run_ensemble(opened, ["learned-pooling"], with_bert=True, **on)),
        (Comparison, run_compare(opened, "bert:1e", "bert:0.5e", resamples=50)),
        (Errors, run_errors(opened, "learned-pooling:1e")),
        (Status, run_status(opened)),
    ]
    for kind, values in found:
        assert json.loads(json.dumps(kind.model_validate(values).to_json())) == values


def test_results_have_attributes_and_become_frames(space: Path) -> None:
    (scored,) = bertvision.evaluate("learned-pooling", trained_on="1e", workspace=space)
    assert scored.checkpoint == "1e"
    assert repr(scored).startswith("HeadScores(head='learned-pooling', trained_on='1e', ")
    assert f"f1={scored.rules['n-best']['metrics']['f1']:.1f}" in repr(scored)
    assert len(repr(scored)) < 240
    rows = bertvision.results(workspace=str(space))
    (head,) = [row for row in rows if row.system == "head"]
    assert head.f1 == scored.rules["n-best"]["metrics"]["f1"] == head["f1"]
    frame = rows.to_pandas()
    assert list(frame.system) == [row.system for row in rows]
    assert set(frame.system) >= {"bert", "head"}
    assert list(frame.columns[:3]) == ["system", "name", "run"]
    assert "learned-pooling" in repr(rows)
    assert "learned-pooling" not in repr(rows[:1])
    with pytest.raises(AttributeError, match="no 'F1': .*it has system"):
        _ = head.F1
    with pytest.raises(AttributeError, match="is not changed"):
        head.f1 = 100


def test_single_results_become_frames_and_tables_of_a_notebook(space: Path) -> None:
    status = bertvision.status(workspace=space)
    assert list(status.to_pandas().tag) == ["0.5e", "1e"]
    compared = bertvision.compare("bert:1e", "learned-pooling:1e", resamples=50, workspace=space)
    assert list(compared.to_pandas()["difference"]) == [compared.difference]
    both = bertvision.ensemble("learned-pooling", with_bert=True, trained_on=1, workspace=space)
    assert len(both.to_pandas()) == len(both.parts) + 1
    found = bertvision.error_analysis("learned-pooling:1e", workspace=space)
    frame = found.to_pandas()
    assert set(frame.grouping) == set(found.groups)
    assert set(frame.columns) >= {"group", "n", "f1"}
    for result in (status, compared, both, found):
        assert "<table>" in result._repr_html_()
    assert str(space) in Workspace.find(space)._repr_html_()


def test_predictions_average_to_the_score(space: Path) -> None:
    answers = bertvision.predictions("learned-pooling:1e", workspace=space)
    (row,) = [r for r in bertvision.results(workspace=space) if r.system == "head"]
    frame = answers.to_pandas()
    assert len(answers) == 24
    assert frame.f1.mean() == pytest.approx(row.f1)
    assert frame.exact.mean() == pytest.approx(row.exact)
    assert set(frame.gold.map(len)) == {0, 1}
    assert f"{len(answers)} rows in all" in repr(answers)


def test_a_figure_is_svg_that_a_notebook_shows(space: Path, tmp_path: Path) -> None:
    figure = bertvision.isotropy("1e", max_tokens=100, workspace=space).figure()
    assert figure._repr_svg_() == str(figure)
    assert figure.startswith("<svg ")
    figure.save(tmp_path / "new" / "isotropy.svg")
    assert (tmp_path / "new" / "isotropy.svg").read_text() == figure


def test_a_row_is_copied_whole() -> None:
    import copy
    import pickle

    row = Row({"head": "a", "f1": 1.0})
    assert pickle.loads(pickle.dumps(row)) == copy.copy(row) == row == {"head": "a", "f1": 1.0}
    assert repr(Rows([row, row])) == "head  f1\na      1\na      1"
    assert repr(Rows([])) == "no rows"


MISTAKES = {
    "bertvision.status(workspace='nowhere')": "no workspace in .*nowhere",
    "bertvision.train('learned-poling')": "did you mean learned-pooling",
    "bertvision.train('learned-pooling')": "which snapshot is meant.*0.5e, 1e.* checkpoint=",
    "bertvision.train('learned-pooling', checkpoint='9e')": "no activations of 9e.*0.5e, 1e",
    "bertvision.train('cls-last-state', checkpoint='1e')": "heads read train-cls.*are span heads",
    "bertvision.train('learned-pooling', epochs=0)": "--epochs 0: ",
    "bertvision.evaluate('learned-poling')": "did you mean learned-pooling",
    "bertvision.evaluate('learned-pooling', trained_on=1, split='tset')": "heads read tset.* of 1e",
    "bertvision.evaluate('learned-pooling', trained_on=1, checkpoint=9)": "no activations of 9e",
    "bertvision.evaluate('learned-pooling', precision='16')": "--precision '16': choose",
    "bertvision.extract('9e')": "no snapshot 9e: made are 0.5e, 1e",
    "bertvision.extract('1e', split='tset')": "'tset' is no split .* it has train, tune, dev",
    "bertvision.extract('1e', pool='top')": "--pool 'top': choose cls",
    "bertvision.extract('1e', encoding='int7')": "unknown encoding 'int7': choose one of int8",
    "bertvision.extract(task='colla')": "did you mean cola",
    "bertvision.finetune(decay='cosine')": "--decay 'cosine': choose none or linear",
    "bertvision.finetune(resume=True, workspace='nowhere')": "no workspace in",
    "bertvision.sweep(trained_on='9e')": "--trained-on 9e: no whole split train is stored",
    "bertvision.sweep(seeds=0)": "--seeds 0: give 1 or more",
    "bertvision.compare('bert:1e', 'learned-poling:1e')": "did you mean learned-pooling",
    "bertvision.compare('bert:1e', 'bert:0.5e', metric='f2')": "--metric 'f2': choose one of exact",
    "bertvision.ensemble('learned-poling')": "did you mean learned-pooling",
    "bertvision.predictions('learned-poling')": "did you mean learned-pooling",
    "bertvision.cka('1e', '9e')": "no activations of 9e",
    "bertvision.cka('1e', '1e', split='tset')": "no split 'tset' of 1e",
    "bertvision.lens('9e')": "no activations of 9e",
    "bertvision.context('1e,9e')": "no activations of 9e",
    "bertvision.twonn('9e')": "no activations of 9e",
    "bertvision.rsa('1e', '9e')": "no activations of 9e",
    "bertvision.cca('1e', '9e')": "no activations of 9e",
    "bertvision.structure('1e')": "no split",
    "bertvision.structure('1e,0.5e', plot='trees.png')": "give a file that ends in .svg",
    "bertvision.attention('9e')": "no snapshot 9e",
    "bertvision.prune('9e')": "no snapshot 9e",
    "bertvision.cloze('9e')": "no snapshot 9e",
    "bertvision.exits('9e')": "no snapshot 9e",
    "bertvision.relations('9e')": "no snapshot 9e",
    "bertvision.languages('9e', task='mr')": "no snapshot 9e",
    "bertvision.isotropy('1e', plot='spread.png')": "give a file that ends in .svg",
    "bertvision.isotropy('1e', scheduler='fast')": "unknown scheduler 'fast'; use threads",
    "bertvision.probe('bigram_shift')": "no data set 'bigram_shift'.*--data",
    "bertvision.probe('bigram_shift', checkpoint='9e', data='.')": "no snapshot 9e",
    "bertvision.rank('wikiqa', scorers='cos')": "--scorers 'cos': choose one of cosine",
    "bertvision.train('own_heads:Last', checkpoint='1e')": "attribute 'Last'.*: LastLayer$",
    "bertvision.finetune(model='./nowhere', data='a', workspace='n')": "there is no folder ./now",
    "bertvision.finetune(model='.', data='a', workspace='n')": "no checkpoint: .*config.json does",
    "bertvision.finetune(train='no.json', workspace='new')": "needs --model and --dev: such as",
    "bertvision.finetune(model='b', data='no.json', workspace='n')": "--data no.json: there is no",
    "bertvision.probe('csv', data='no.csv')": "--data no.csv: there is no such file",
    "bertvision.probe('csv', data='own.csv')": "columns .'review', 'stars'., but not .'text'",
    "bertvision.probe('csv', data='own.csv', text='review')": "but not .'label'",
    "bertvision.probe('mr', data='own.csv')": "named columns, of which the task csv is read",
    "bertvision.probe('mr', scheduler='threads')": "--scheduler 'threads': give tcp://HOST:PORT",
    "bertvision.extract('1e', scheduler='tcp://here')": "names no host and port",
    "bertvision.cka('0.5e', '1e', scheduler='tcp://127.0.0.1:9')": "no Dask scheduler answers",
}
HEAVY = {"torch", "transformers", "zarr", "datasets", "pytorch_lightning", "pyarrow", "pandas"}


def test_a_wrong_name_is_said_before_anything_heavy_is_imported(space: Path) -> None:
    """All in one process: a first mistake that imports something names itself."""
    (space / "own_heads.py").write_text("class LastLayer:\n    pass\n")
    (space / "own.csv").write_text("review,stars\ngood,1\nbad,0\n")
    code = f"""
import json, sys
import bertvision
said = {{}}
for mistake in {list(MISTAKES)}:
    try:
        eval(mistake)
    except bertvision.BertvisionError as error:
        said[mistake] = str(error), sorted({HEAVY!r} & set(sys.modules))
print(json.dumps(said))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=space, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert list(said) == list(MISTAKES)
    for mistake, message in MISTAKES.items():
        assert re.search(message, said[mistake][0], re.DOTALL), (mistake, said[mistake][0])
    assert {mistake: heavy for mistake, (_, heavy) in said.items() if heavy} == {}


def test_a_head_is_loaded_by_a_text_and_a_wrong_path_is_no_damage(
    space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(space)
    head = bertvision.load_head("heads/1e/learned-pooling")
    assert head.config.head == "learned-pooling"
    with pytest.raises(UnknownNameError, match="there is no folder heads/1e/pooling: give that"):
        bertvision.load_head("heads/1e/pooling")
    with pytest.raises(TypeError):
        bertvision.load_head(None)  # type: ignore[arg-type]


def test_a_path_is_a_text_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("a text")
    for folder in (str(tmp_path), tmp_path):
        found = bertvision.find_file(folder, ["train.tsv"], "tone")
        for path in (found, str(found)):
            assert bertvision.read_text(path)[0] == "a text"
        assert bertvision.splits_in(folder, {"train": ["train.tsv"]}, "tone") == ("train",)


def test_what_a_class_of_ones_own_raises_is_not_called_damage(
    space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise TypeError("a mistake of the class")

    monkeypatch.setattr(trained_head, "build_head", broken)
    with pytest.raises(TypeError, match="a mistake of the class"):
        bertvision.load_head(space / "heads" / "1e" / "learned-pooling")
