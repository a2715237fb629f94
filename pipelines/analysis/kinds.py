"""The kinds of analyses that there are, in the order in which a report has them."""

from __future__ import annotations

from bertvision.pipelines.analysis.alike.cca import CcaResult
from bertvision.pipelines.analysis.alike.cka import CkaResult
from bertvision.pipelines.analysis.alike.rsa import RsaResult
from bertvision.pipelines.analysis.attending.looks_result import AttentionResult
from bertvision.pipelines.analysis.attending.pruning_result import PruningResult
from bertvision.pipelines.analysis.attending.relations_result import RelationsResult
from bertvision.pipelines.analysis.cloze import ClozeResult
from bertvision.pipelines.analysis.exiting.exits_result import ExitsResult
from bertvision.pipelines.analysis.geometry.isotropy_result import IsotropyResult
from bertvision.pipelines.analysis.groups.languages_result import LanguagesResult
from bertvision.pipelines.analysis.lens import LensResult
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.structure import StructureResult
from bertvision.pipelines.analysis.words.context_result import ContextResult

ANALYSES: tuple[type[AnalysisResult], ...] = (
    CkaResult,
    CcaResult,
    RsaResult,
    IsotropyResult,
    ContextResult,
    LanguagesResult,
    AttentionResult,
    RelationsResult,
    PruningResult,
    LensResult,
    ClozeResult,
    StructureResult,
    ExitsResult,
)
"""Classes of their results."""
