"""Figures as SVG: canvas, scales, labels that do not collide, panels, legends, heat maps, lines.

May import `files`, `text` and the other modules on the ground; it knows no result and no task.
"""
