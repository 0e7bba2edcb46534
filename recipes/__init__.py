"""How what ships with `moebook` was made, and what `make gpu` runs: no part of the package."""
