"""The Megatrons that the patches know, and the one that is installed here with what it needs."""
