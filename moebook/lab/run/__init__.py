"""Notebooks: their parameters, their execution through papermill, what they leave and its checks.

Inside a notebook only this is needed::

    run = begin(In, globals())
    run.record("pesc/dense/accuracy", 0.43, "share")
"""

from moebook.lab.run.session import Run, begin
from moebook.lists import listed
