"""The laboratory: it runs the notebooks, keeps their evidence, and makes the book of it."""
