"""BM25, the baseline that reads words (Robertson & Zaragoza 2009; computed by bm25s, Lù 2024)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.ranking.metrics import Candidates
from bertvision.pipelines.tasks.sentences.ranking_data import RankingData

SETTINGS: dict[str, Any] = {"method": "lucene", "k1": 1.5, "b": 0.75}
"""Lucene's form, whose inverse document frequency is never negative, at the usual constants."""
TOKENS: dict[str, Any] = {"lower": True, "token_pattern": r"(?u)\b\w\w+\b", "stopwords": "en"}
"""Lower-cased runs of two or more word characters but 33 English stop words; no stemming."""


def bm25(data: RankingData, candidates: Candidates) -> npt.NDArray[np.float32]:
    """Score each candidate for its question by BM25: (pairs,).

    Document frequencies and the mean length are those of the distinct candidate passages of the
    part that is scored, of all its questions together: the collection that would be searched.

    Args:
        data: whose texts are compared.
        candidates: of one part of it.
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG

    passages, place = np.unique(candidates.passage, return_inverse=True)
    quiet = {"return_ids": False, "show_progress": False}
    words = bm25s.tokenize([data.passages[i].text for i in passages], **TOKENS, **quiet)
    asked, question = np.unique(candidates.query, return_inverse=True)
    queries = bm25s.tokenize([data.queries[i].text for i in asked], **TOKENS, **quiet)
    scores = np.zeros(len(candidates), np.float32)
    if not any(words):
        return scores  # no passage has a word: all are alike
    index = bm25s.BM25(**SETTINGS)
    index.index(words, show_progress=False)
    for i, query in enumerate(queries):
        if known := index.get_tokens_ids(query):
            mine = question == i
            scores[mine] = index.get_scores_from_ids(known)[place[mine]]
    return scores
