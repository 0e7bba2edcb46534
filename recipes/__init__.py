"""How the bases, the tasks' rows and the corpus that ship with `moebook` were made.

Not part of the package: `moebook pretrain NAME`, `python -m recipes.tasks` and `make gpu` run it.
"""
