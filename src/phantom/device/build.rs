//! Sets the linker arguments that give the library its soname and its symbol binding.

fn main() {
    // By this name the loader finds the preloaded library for `dlopen("libcuda.so.1")` and for NEEDED entries, so
    // no driver has to be installed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // A call inside the library must not pass through the tracer's hooks, or it would be counted twice.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}
