"""What a model does: where its routers send tokens, whether representations cluster."""
