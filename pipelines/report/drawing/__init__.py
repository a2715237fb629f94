"""Figures as SVG: scales, labels that do not collide, curves, charts."""
