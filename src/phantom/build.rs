//! How the library presents itself to the loader.

fn main() {
    // Under this name `dlopen("libcuda.so.1")` and every NEEDED entry find the phantom when it is
    // already loaded, so no driver has to be installed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // A call from one answer to another must not pass through the tracer's hooks, or it would be
    // counted twice.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}
