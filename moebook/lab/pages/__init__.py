"""The book: pages made of pools and templates, rendered, served."""
