"""Whole screens and dialogs around the panels and the chat."""
