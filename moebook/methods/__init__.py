"""The papers' methods, one module each; none imports another."""
