"""Data: target tasks, mixtures, chat formats, encoding, readers of files and of the hub's sets."""
