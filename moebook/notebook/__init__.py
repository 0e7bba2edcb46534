"""Notebooks: their parameters, their execution through papermill, what they leave and its checks.

Inside a notebook only this is needed::

    run = notebook.begin(In, globals())
    run.record("pesc/dense/accuracy", 0.43, "share")
"""

from moebook.lists import listed
from moebook.notebook.session import Run, begin
