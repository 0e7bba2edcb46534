"""Figures in one style: the only package that imports matplotlib.

Every function returns a matplotlib `Figure` that is closed for pyplot, so a notebook cell that
ends in the call shows it once. Captions and alternative texts belong to the cell's metadata.
"""

from moebook.plotting.charts import accuracies, bars, curves
from moebook.plotting.forest import forest
from moebook.plotting.points import points
from moebook.plotting.shares import heatmap, loads
from moebook.plotting.theme import style

__all__ = ["accuracies", "bars", "curves", "forest", "heatmap", "loads", "points", "style"]
