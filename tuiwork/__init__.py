"""The app and the command line; both reach the model only through `engine`'s public face."""

__version__ = "0.1.0"
