//! Sets the linker arguments that give the library its soname and its symbol binding.

fn main() {
    // With this soname, the loader finds the preloaded library for `dlopen("libcuda.so.1")` and for NEEDED
    // entries. So no driver has to be installed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // With this option, a call from the library to its own exported function does not pass through the
    // tracer's hooks, which would count it a second time.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}
