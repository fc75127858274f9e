"""The program as one graph; judges nothing."""
