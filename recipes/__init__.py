"""How the bases, the tasks' rows and the corpus that ship with `moebook` were made.

Nothing here is part of the package: `moebook pretrain NAME` and `python -m recipes.tasks` run it.
"""
