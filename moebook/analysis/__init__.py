"""What a model does and needs: where its routers send tokens, what a training step holds."""
