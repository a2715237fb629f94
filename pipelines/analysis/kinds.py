"""The kinds of analyses that there are, in the order in which a report has them."""

from __future__ import annotations

from bertvision.pipelines.analysis.attention import AttentionResult
from bertvision.pipelines.analysis.cca import CcaResult
from bertvision.pipelines.analysis.cka import CkaResult
from bertvision.pipelines.analysis.cloze import ClozeResult
from bertvision.pipelines.analysis.context import ContextResult
from bertvision.pipelines.analysis.exits import ExitsResult
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.languages import LanguagesResult
from bertvision.pipelines.analysis.lens import LensResult
from bertvision.pipelines.analysis.prune import PruningResult
from bertvision.pipelines.analysis.relations import RelationsResult
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.rsa import RsaResult
from bertvision.pipelines.analysis.structure import StructureResult

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
