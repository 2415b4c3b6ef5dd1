//! From event to row: the hot path, its chunks, and the one thread that writes.
