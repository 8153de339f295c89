"""Choosing a model: files that were open before, and those of a folder. `screen.ModelPicker`."""
