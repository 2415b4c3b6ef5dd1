//! From file to replayed state to answers.
