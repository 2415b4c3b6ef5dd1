//! What the traced process and the command agree on: events, rows, the CSV, settings.
