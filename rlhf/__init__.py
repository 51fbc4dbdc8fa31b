"""The command line of the RLHF toolkit and what all its stages share."""

__version__ = "0.1.0"
