//! libmemtrace_phantom.so: a CUDA device that is not there.
