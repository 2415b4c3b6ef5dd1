//! libmemtrace.so: the hooks and the attribution.
