"""Groups of texts: known answers where groups differ by a shift alone, and invariances."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import v_measure_score

import bertvision
from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.analysis.languages import (
    LanguagesResult,
    between_share,
    centroids,
    check_groups,
    identified,
    retrieved,
    v_measure,
)
from bertvision.pipelines.analysis.languages import languages_of_groups as languages
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.workspace.workspace import Workspace

N, D = 60, 12


def shifted(by: float = 5.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three groups that say the same, each moved by a vector of its own."""
    random = np.random.default_rng(seed)
    same, shifts = random.normal(size=(N, D)), by * random.normal(size=(3, D))
    x = np.concatenate([same + shift for shift in shifts]).astype(np.float32)
    return x, np.repeat(np.arange(3), N)


def run(x: np.ndarray, groups: np.ndarray, **options: object) -> LanguagesResult:
    rows = [np.flatnonzero(groups == g) for g in range(groups.max() + 1)]
    names = ["de", "en", "fr"][: len(rows)]
    return languages(lambda layer: x, rows, names, layers=[0], **options)  # type: ignore[arg-type]


def test_groups_that_differ_by_a_shift_are_told_apart_until_they_are_centred() -> None:
    found = run(*shifted(), translations=True)
    assert found.identified[0] == found.clusters[0] == 1
    assert found.clusters_centred[0] < 0.2
    assert found.identified_centred[0] < 0.6
    assert found.retrieved[0] < found.retrieved_centred[0] == 1


def test_nothing_is_left_to_a_linear_classifier_where_all_groups_have_one_mean() -> None:
    """Centred groups are identified as often as the largest one occurs, whatever else differs."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(size=(N, D)), 9 * random.exponential(size=(N + 9, D))])
    found = run(x.astype(np.float32), np.repeat([0, 1], [N, N + 9]))
    assert found.clusters_centred[0] > 0.01
    assert found.identified_centred[0] == pytest.approx(found.majority)


def test_share_between_groups_is_that_of_the_analysis_of_variance() -> None:
    x, groups = shifted(0.3)
    means = np.stack([x[groups == g].mean(0) for g in range(3)])
    within = ((x - means[groups]) ** 2).sum()
    total = ((x - x.mean(0)) ** 2).sum()
    assert between_share(x, groups, 3) == pytest.approx(1 - within / total, rel=1e-5)
    assert between_share(x - means[groups], groups, 3) == pytest.approx(0, abs=1e-9)
    assert between_share(means[groups], groups, 3) == pytest.approx(1)
    assert np.isnan(between_share(np.ones((6, 2)), np.repeat([0, 1], 3), 2))


def test_measures_do_not_change_where_the_space_is_turned_moved_or_scaled() -> None:
    x, groups = shifted(0.4)
    turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(D, D)))
    one, other = (run(v.astype(np.float32), groups) for v in (x, 3 * x @ turn + 2))
    np.testing.assert_allclose(one.between, other.between, rtol=1e-4)
    np.testing.assert_allclose(one.clusters, other.clusters, rtol=1e-6)


def test_retrieval_is_that_of_all_pairs() -> None:
    x, groups = shifted(0.5, seed=3)
    each = [x[groups == g] for g in range(3)]
    hits = []
    for a in range(3):
        for b in range(3):
            for n in range(N if a != b else 0):
                cosines = [
                    v @ each[a][n] / np.linalg.norm(v) / np.linalg.norm(each[a][n]) for v in each[b]
                ]
                hits.append(int(np.argmax(cosines)) == n)
    assert retrieved(x, groups, 3) == pytest.approx(np.mean(hits))
    assert 0.02 < np.mean(hits) < 1


def test_clusters_are_scored_as_the_definition_says() -> None:
    x, groups = shifted()
    assert v_measure(x, groups, 3, 0) == pytest.approx(1)
    other = np.random.default_rng(0).integers(0, 3, len(groups))
    assert v_measure(x, other, 3, 0) == pytest.approx(v_measure_score(other, groups), abs=1e-9)


def test_a_classifier_is_scored_on_texts_it_did_not_see() -> None:
    random = np.random.default_rng(0)
    x, groups = random.normal(size=(200, 40)), random.integers(0, 2, 200)
    train = np.arange(200) < 100
    right = identified(x.astype(np.float32), groups, train)
    assert len(right) == 100
    assert 0.3 < right.mean() < 0.7  # labels at random: 40 features fit the seen half, not this one


def test_centroids_and_their_cosines_are_of_each_group() -> None:
    x, groups = shifted()
    means = centroids(x, groups, 3)
    np.testing.assert_allclose(means[1], x[groups == 1].mean(0), rtol=1e-5)
    found = run(x, groups).cosine[0]
    expected = means[0] @ means[2] / np.linalg.norm(means[0]) / np.linalg.norm(means[2])
    assert found[0, 2] == pytest.approx(expected)
    np.testing.assert_allclose(np.diag(found), 1)


def test_a_result_is_read_as_it_was_written() -> None:
    found = run(*shifted())
    assert LanguagesResult.from_json(found.to_json()).to_json() == found.to_json()
    assert "retrieved" not in found.table()
    assert "always naming the largest" in found.table().lower()


@pytest.mark.parametrize(
    ("sizes", "translations", "says"),
    [
        ([20], False, "give two"),
        ([20, 9], False, "'en' has 9 texts"),
        ([20, 21], True, "de 20, en 21"),
    ],
)
def test_groups_that_cannot_be_compared_are_refused(
    sizes: list[int], translations: bool, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        check_groups(["de", "en"][: len(sizes)], sizes, translations=translations)


def test_classes_of_a_file_and_data_sets_beside_each_other_are_groups(
    workspace: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(workspace.root, root, ignore=lambda *_: {"heads", "activations", "analysis"})
    files = {}
    for name, words in (("one", "anna founded rome in"), ("two", "who is the king of")):
        rows = [f"{' '.join(words.split()[: 2 + i % 3])} {i},{name}" for i in range(12)]
        files[name] = tmp_path / f"{name}.csv"
        files[name].write_text("text,label\n" + "\n".join(rows) + "\n")
    both = tmp_path / "both.csv"
    both.write_text(files["one"].read_text() + files["two"].read_text().split("\n", 1)[1])
    found = bertvision.languages("1e", task="csv", data=both, workspace=root)
    assert (found.groups, found.sizes) == (("one", "two"), (12, 12))
    assert len(found.layers) == 3
    assert np.isnan(found.retrieved).all()
    vectors = PooledSplit(Workspace.find(root), "1e", "both", "all", "mean").features([2])[:, 0]
    groups = np.repeat([0, 1], 12)
    assert found.between[2] == pytest.approx(between_share(vectors, groups, 2), rel=1e-6)
    with pytest.raises(InputError, match="has no texts of their own"):
        bertvision.languages("1e", task="squad_v2", workspace=root)
    again = both.rename(tmp_path / "again.csv")
    bertvision.extract("1e", task="csv", data=again, pool="mean", workspace=root)
    with pytest.raises(WorkspaceError, match="changed|gone|cannot be read"):
        bertvision.languages("1e", task="both,again", workspace=root)
    both.write_text(again.read_text())
    pair = bertvision.languages("1e", task="both,again", workspace=root, translations=True)
    assert (pair.groups, pair.sizes) == (("again", "both"), (24, 24))
    assert pair.between[2] == pytest.approx(0, abs=1e-9)
    assert pair.retrieved[2] == 1  # the same texts
    page = bertvision.report(out=tmp_path / "report", workspace=root).page.read_text()
    assert "How far languages, or other groups of texts, lie apart" in page
