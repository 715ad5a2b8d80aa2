"""Multi-token prediction (MTP): the loss of the heads, their acceptance rate, and where their gradient may go."""
