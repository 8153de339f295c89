"""Turning knobs while the model talks: the form, undo, and what each change bought."""
