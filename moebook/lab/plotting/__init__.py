"""Figures in one style: the only package that imports matplotlib.

Every function returns a matplotlib `Figure` that is closed for pyplot, so a notebook
cell that ends in the call shows it once. Captions and alternative texts belong to the
cell's metadata.
"""

from moebook.errors import extra

with extra("notebook", "a figure"):
    from moebook.lab.plotting.charts import (
        check,
        curves,
        forest,
        heatmap,
        leads,
        loads,
        points,
        prices,
        style,
    )
