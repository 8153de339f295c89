"""The conversation: what was said, kept, streamed and shown. `pane.ChatPane` is all of it."""
