"""Norms of the gradients of a mixture of experts against those of all gradients, gathered by hand."""
