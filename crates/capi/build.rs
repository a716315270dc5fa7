//! The library's soname: what programs that are linked with it look for.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libbraidfs.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
