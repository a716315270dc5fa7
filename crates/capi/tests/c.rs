//! The library from C: examples and tests, compiled by `cc` against the checked-in header, also as C++, run and, where it is
//! installed, run by valgrind.

#[path = "c/sqlite.rs"]
mod sqlite;

use std::io::{ErrorKind, Write as _, stderr};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where cargo has put the libraries that belong to this test.
fn built() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let places = [deps.clone(), deps.parent().unwrap().to_path_buf()];
    let found = places.into_iter().find(|d| d.join("libbraidfs_c.so").exists());
    found.expect("cargo builds the library before its tests")
}

fn run(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{command:?}: {}\n{err}", out.status);
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Compiles with all warnings as errors, for the library as `make install-lib` lays it out.
fn compile(compiler: &str, source: &Path, out: &Path) {
    compile_with(compiler, &[source], &[], out);
}

/// [`compile`] of several sources, with more arguments.
fn compile_with(compiler: &str, sources: &[&Path], arguments: &[&str], out: &Path) {
    let lib = out.parent().unwrap();
    for name in ["libbraidfs.so", "libbraidfs.so.0"] {
        match symlink(built().join("libbraidfs_c.so"), lib.join(name)) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => panic!("{e}"),
            _ => {}
        }
    }
    let mut c = Command::new(compiler);
    c.args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-g", "-pthread", "-D_GNU_SOURCE"]);
    c.arg(format!("-I{}", here().join("../../include").display())).args(sources);
    c.arg(format!("-L{}", lib.display())).arg("-lbraidfs").arg(format!("-Wl,-rpath,{}", lib.display()));
    run(c.args(arguments).arg("-o").arg(out));
}

#[test]
fn examples_run() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    compile("cc", &here().join("examples/first.c"), &program);
    let out = run(Command::new(&program).arg(dir.path().join("first.img")));
    assert!(out.starts_with("read: hello\nentry: 1, inode "), "{out}");
    compile("cc", &here().join("examples/log.c"), &program);
    let out = run(Command::new(&program).arg(dir.path().join("log.img")));
    assert_eq!(out, "200 records, 20 syncs without waiting, 0 failed\n");
}

#[test]
fn every_call_answers_as_the_header_says() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    compile("cc", &here().join("tests/calls.c"), &program);
    run(Command::new(&program).arg(dir.path().join("a.img")));
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("valgrind is not installed: the calls are not run by it");
        return;
    }
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["-q", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite"]);
    run(valgrind.arg(&program).arg(dir.path().join("b.img")));
}

/// A child's threads once stood in lists of the parent's, and one in a hundred slept for ever.
#[test]
fn children_open_volumes_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    compile("cc", &here().join("tests/forks.c"), &program);
    run(&mut Command::new(&program));
}

/// The header names each option of a volume, as the Rust library does, with values that it takes.
#[test]
fn the_header_has_all_options() {
    let part = |text: &str, from: &str, to: &str| {
        let start = text.find(from).unwrap_or_else(|| panic!("no {from}"));
        let all = &text[start..];
        all[..all.find(to).unwrap_or_else(|| panic!("no {to}"))].to_owned()
    };
    let read = |path: &str| std::fs::read_to_string(here().join(path)).unwrap();
    let header = part(&read("../../include/braidfs.h"), "those of mount.braidfs(8)", "int braidfs_open");
    let source = part(&read("../fs/src/options.rs"), "pub fn parse(text", "_ => return Err(UNKNOWN)");
    let words: Vec<&str> = header.split(|c: char| !c.is_ascii_lowercase()).collect();
    let names: Vec<&str> = source.lines().filter_map(|l| l.trim().strip_prefix("(\"")?.split('"').next()).collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        assert!(words.contains(&name), "{name} is not in braidfs.h");
    }
    for list in ["rw,nodefrag,commit=0,cache=0", "commit=3600,cache=4M,data=journal,overwrite=log,numa=off,readahead=0"]
    {
        assert!(braidfs_fs::Options::parse(list).is_ok(), "{list}");
    }
}

/// What `make install-lib` puts into place is what pkg-config tells a compiler of.
#[test]
fn programs_are_built_on_what_is_installed() {
    for tool in ["pkg-config", "make"] {
        if Command::new(tool).arg("--version").output().is_err() {
            // not captured, as what eprintln! says is
            _ = writeln!(stderr(), "SKIPPED: no {tool} here");
            return;
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let (root, target) = (dir.path().join("root"), dir.path().join("target"));
    std::fs::create_dir_all(target.join("release")).unwrap();
    for name in ["libbraidfs_c.so", "libbraidfs_c.a"] {
        symlink(built().join(name), target.join("release").join(name)).unwrap();
    }
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "--assume-old=lib", "install-lib", "PREFIX=/opt/b"])
        .current_dir(here().join("../.."));
    make.arg(format!("DESTDIR={}", root.display())).env("CARGO_TARGET_DIR", &target).env_remove("MAKEFLAGS");
    run(&mut make);
    let lib = root.join("opt/b/lib");
    let told = |arguments: &[&str]| -> Vec<String> {
        let mut command = Command::new("pkg-config");
        command.args(arguments).arg("braidfs").env("PKG_CONFIG_PATH", lib.join("pkgconfig"));
        let text = run(command.env("PKG_CONFIG_SYSROOT_DIR", &root));
        text.split_whitespace().map(String::from).collect()
    };
    assert_eq!(told(&["--modversion"]), [env!("CARGO_PKG_VERSION")]);
    let source = here().join("examples/first.c");
    let says = |program: &Path, image: &str| {
        let out = run(Command::new(program).arg(dir.path().join(image)).env("LD_LIBRARY_PATH", &lib));
        assert!(out.starts_with("read: hello\n"), "{out}");
    };
    let shared = dir.path().join("shared");
    run(Command::new("cc").arg(&source).args(told(&["--cflags", "--libs"])).arg("-o").arg(&shared));
    says(&shared, "a.img");
    // without the shared one the same words find the archive, with what it needs
    for name in ["libbraidfs.so", "libbraidfs.so.0"] {
        std::fs::remove_file(lib.join(name)).unwrap();
    }
    let of_archive = dir.path().join("of_archive");
    run(Command::new("cc").arg(&source).args(told(&["--static", "--cflags", "--libs"])).arg("-o").arg(&of_archive));
    says(&of_archive, "b.img");
}

/// `api.txt` is what `make api` holds the header against.
#[test]
fn the_library_exports_what_the_list_names_and_nothing_else() {
    let list = std::fs::read_to_string(here().join("api.txt")).unwrap();
    let mut named: Vec<&str> = list
        .lines()
        .filter(|line| !line.starts_with("#define ") && !line.starts_with("typedef ") && !line.starts_with("struct "))
        .map(|line| line.split('(').next().unwrap().rsplit([' ', '*']).next().unwrap())
        .collect();
    named.sort_unstable();
    let symbols = run(Command::new("nm").args(["-D", "--defined-only", "-j"]).arg(built().join("libbraidfs_c.so")));
    let mut exported: Vec<&str> = symbols.lines().collect();
    exported.sort_unstable();
    assert_eq!(exported, named);
}

#[test]
fn the_header_is_also_of_cpp() {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("c++ is not installed");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("a.cpp");
    std::fs::write(&source, "#include <braidfs.h>\nint main() { return *braidfs_error(); }\n").unwrap();
    compile("c++", &source, &dir.path().join("program"));
    run(&mut Command::new(dir.path().join("program")));
}

/// The C prototype of a function of the sources.
fn prototype(function: &str) -> String {
    let (name, rest) = function.split_once('(').unwrap();
    let (arguments, answer) = rest.rsplit_once(')').unwrap();
    // a function type has parentheses and commas of its own
    let arguments = arguments.replace("done: Done", "done: Callback");
    let c = |rust: &str| -> String {
        let (base, stars) = match rust.trim() {
            "*const *const c_char" => ("const char *const", "*"),
            "*mut *mut Volume" => ("braidfs_volume", "**"),
            "*mut *mut File" => ("braidfs_file", "**"),
            "*mut *mut Dir" => ("braidfs_dir", "**"),
            "*mut *mut Pinned" => ("braidfs_pinned", "**"),
            "*mut *const Piece" => ("const struct braidfs_piece", "**"),
            "*const Pinned" => ("const braidfs_pinned", "*"),
            "*mut Pinned" => ("braidfs_pinned", "*"),
            "*const c_char" => ("const char", "*"),
            "*const c_void" => ("const void", "*"),
            "*mut c_void" => ("void", "*"),
            "*const Volume" => ("const braidfs_volume", "*"),
            "*mut Volume" => ("braidfs_volume", "*"),
            "*const File" => ("const braidfs_file", "*"),
            "*mut File" => ("braidfs_file", "*"),
            "*const Dir" => ("const braidfs_dir", "*"),
            "*mut Dir" => ("braidfs_dir", "*"),
            "*mut Stat" => ("struct braidfs_stat", "*"),
            "*mut StatVfs" => ("struct braidfs_statvfs", "*"),
            "*mut Dirent" => ("struct braidfs_dirent", "*"),
            "*const Time" => ("const struct braidfs_time", "*"),
            "*mut u64" => ("uint64_t", "*"),
            "u64" => ("uint64_t", ""),
            "u32" => ("uint32_t", ""),
            "i64" => ("int64_t", ""),
            "usize" => ("size_t", ""),
            "c_int" => ("int", ""),
            "Callback" => return "void (*)(void *, int)".into(),
            other => panic!("{name}: no type of C is known for {other}"),
        };
        if stars.is_empty() { base.into() } else { format!("{base} {stars}") }
    };
    let arguments: Vec<String> =
        arguments.split(',').filter(|a| !a.trim().is_empty()).map(|a| c(a.split_once(':').unwrap().1)).collect();
    let arguments = if arguments.is_empty() { "void".into() } else { arguments.join(", ") };
    let answer = c(answer.trim().trim_start_matches("->"));
    let space = if answer.ends_with('*') { "" } else { " " };
    format!("{answer}{space}{name}({arguments});")
}

/// Declared again with the types of the sources, every function must be the same one to the compiler.
#[test]
fn the_header_declares_what_the_library_has() {
    let mut prototypes = Vec::new();
    for file in std::fs::read_dir(here().join("src")).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for part in text.split("#[unsafe(no_mangle)]\n").skip(1) {
            let (head, _) = part.split_once(" {\n").unwrap();
            let head = head.split_once("extern \"C\" fn ").unwrap().1.replace('\n', " ");
            prototypes.push(prototype(&head));
        }
    }
    let header = std::fs::read_to_string(here().join("../../include/braidfs.h")).unwrap();
    let declared = header.lines().filter(|l| l.ends_with(");") && l.contains("braidfs_")).count();
    assert_eq!(declared, prototypes.len(), "functions declared and defined: {prototypes:#?}");
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("a.c");
    let text = format!("#include <braidfs.h>\n{}\nint main(void) {{ return 0; }}\n", prototypes.join("\n"));
    std::fs::write(&source, text).unwrap();
    compile("cc", &source, &dir.path().join("program"));
}
