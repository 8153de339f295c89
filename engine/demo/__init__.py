"""The demo model: its file, and everything that made it."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo-moe.gguf"
"""The trained model that comes along."""
