"""What `make pack` builds for a room full of laptops; not part of the package."""
