"""The kinds of analyses that there are, in the order in which a report has them."""

from __future__ import annotations

from bertvision.pipelines.analysis.alike.cka import CkaResult
from bertvision.pipelines.analysis.alike.rsa import RsaResult
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.result import AnalysisResult

ANALYSES: tuple[type[AnalysisResult], ...] = (CkaResult, RsaResult, IsotropyResult)
"""Classes of their results."""
