"""Multi-token prediction: its loss, what is measured beside it, and where its gradient may go."""
