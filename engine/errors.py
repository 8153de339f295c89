"""What can go wrong, as errors for people: what was wrong, where, what is allowed, what to do."""

from __future__ import annotations


class TuiworkError(Exception):
    """Anything this project reports to a person; its text is the whole message."""


class InputError(TuiworkError):
    """A bad argument, profile, trace or model: the caller must change it (exit status 2)."""


class ModelError(InputError):
    """A file that cannot be opened or used as a model."""


class ContextFull(InputError):
    """The prompt, or the prompt and the answer, do not fit into the context."""


class AbiMismatch(TuiworkError):
    """The installed llama.cpp does not have the layout this engine relies on."""


class GraphError(TuiworkError):
    """A compute graph in which the engine cannot find, or no longer finds, the experts."""


class GraphChanged(GraphError):
    """The graph is not the one that was learned; learn again."""


class ReadError(TuiworkError):
    """Reading an expert from disk failed; the generation is lost, the session stays usable."""
