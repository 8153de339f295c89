"""From live counters and token rows to what panels show: pure values, no widgets."""
