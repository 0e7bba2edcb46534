"""What the pools show: designs, verdicts, and findings as tables and figures."""
