"""What the engine is doing, live: one module for each panel that a person sees."""
