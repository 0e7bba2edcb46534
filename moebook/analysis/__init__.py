"""What routed models do with their tokens: shares, load, specialisation."""
