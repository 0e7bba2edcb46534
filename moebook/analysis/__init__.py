"""What a model does: where its routers send tokens, and whether representations form clusters."""
