//! `braidfs`: format, mount, check and inspect braidfs volumes.
//!
//! One binary. Called as `mkfs.braidfs`, `mount.braidfs`, `umount.braidfs` or `fsck.braidfs` (links), it acts as that
//! helper of mkfs(8), mount(8), umount(8) and fsck(8). A command is one file in `cmd`; this file finds the command,
//! sets up logging, and turns a `Failure` into a message and an exit code.

mod cmd;
mod failure;
mod log;
mod log_level;
mod mounted;
mod mountinfo;
mod names;
mod notify;
mod open;
mod personality;
mod probe;
mod system_log;
mod text;
mod tree;

use clap::{CommandFactory, FromArgMatches, Parser};
use cmd::mount_options::log_file;
use failure::{Outcome, fsck_code, mount_code};
use std::ffi::OsString;
use std::process::ExitCode;

/// What one thread makes another often drops (a commit drops what operations made), which this one is good at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const _: () = assert!(!braidfs::planted::POSSIBLE, "the feature planted-bugs is for tests, not for the command line");
const _: () = assert!(!braidfs::planted::sharing::POSSIBLE, "nor is planted-sharing");

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "braidfs",
    version,
    about = "A file system of many independent logs braided into one namespace",
    // as of e2fsprogs and util-linux: an option that is given again counts as the last says
    args_override_self = true,
    after_help = "Examples:\n  \
        braidfs mkfs --size 10G disk.img       make a volume in an image file\n  \
        braidfs mount disk.img /mnt            mount it\n  \
        braidfs umount /mnt                    unmount it and wait until it is closed\n  \
        braidfs fsck disk.img                  check it\n  \
        braidfs cp -r ./dir disk.img:/dir      copy into it without mounting"
)]
struct Cli {
    #[command(flatten)]
    log: log::LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Mkfs(cmd::mkfs::Args),
    Mount(cmd::mount::Args),
    #[command(name = "mount.braidfs", hide = true)]
    MountHelper(cmd::mount::HelperArgs),
    Umount(cmd::umount::Args),
    Fsck(cmd::fsck::Args),
    Info(cmd::info::Args),
    Probe(cmd::probe::Args),
    Dump(cmd::dump::Args),
    Image(cmd::image::Args),
    Ls(cmd::ls::Args),
    Cat(cmd::cat::Args),
    Cp(cmd::cp::Args),
    Rm(cmd::rm::Args),
    Mkdir(cmd::mkdir::Args),
    Scrub(cmd::scrub::Args),
    Stats(cmd::stats::Args),
    Top(cmd::top::Args),
    Label(cmd::label::Args),
    Resize(cmd::resize::Args),
    Upgrade(cmd::upgrade::Args),
    Device(cmd::device::Args),
    Defrag(cmd::defrag::Args),
    Quota(cmd::quota::Args),
    Tenant(cmd::tenant::Args),
    // boxed: its arguments are many
    #[command(after_help = cmd::bench::EXAMPLES)]
    Bench(Box<fxmark::cli::Args>),
    #[command(hide = true)]
    Man(cmd::man::Args),
    #[command(hide = true)]
    Completions(cmd::completions::Args),
}

fn main() -> ExitCode {
    let args = personality::rewrite(std::env::args_os().collect());
    let command = Cli::command().mut_arg("level", |a| a.value_parser(log_level::parse));
    let parsed = command.try_get_matches_from(&args).and_then(|found| Cli::from_arg_matches(&found));
    let mut cli = match parsed {
        Ok(cli) => cli,
        Err(e) => {
            // Printing fails only where nobody reads.
            let _ = e.print();
            return if e.use_stderr() { usage_code(&args).into() } else { ExitCode::SUCCESS };
        }
    };
    cli.log.prefer(match &cli.command {
        Command::Mount(a) => log_file(&a.options),
        Command::MountHelper(a) => log_file(&a.options),
        _ => None,
    });
    let background = match &cli.command {
        Command::Mount(a) => !a.foreground,
        command => matches!(command, Command::MountHelper(_)),
    };
    let level = match &cli.command {
        // A mount in the background says nothing where all is well.
        Command::Mount(a) if a.foreground => "info",
        Command::MountHelper(a) if a.verbose => "info",
        Command::Mount(_) | Command::MountHelper(_) if cli.log.to_file() => "info",
        // Its report has all that is wrong.
        Command::Fsck(_) => "error",
        _ => "warn",
    };
    let codes = match &cli.command {
        Command::Fsck(_) => log::Codes { usage: fsck_code::USAGE, file: fsck_code::OPERATIONAL },
        Command::Mount(_) | Command::MountHelper(_) | Command::Umount(_) => {
            log::Codes { usage: mount_code::USAGE, file: mount_code::SYSTEM }
        }
        _ => log::Codes { usage: 1, file: 1 },
    };
    let outside = match &cli.command {
        Command::Mount(a) => a.mountpoint().map_or(Ok(()), |at| cli.log.check_outside(at, a.is_mounted(), &codes)),
        Command::MountHelper(a) => cli.log.check_outside(&a.mountpoint, false, &codes),
        _ => Ok(()),
    };
    let started = outside.and_then(|()| log::start(&cli.log, level, &codes, background));
    let outcome = started.and_then(|()| run(cli.command));
    match outcome {
        Ok(code) => code.into(),
        Err(failure) => {
            if !failure.message.is_empty() {
                complain(format_args!("{}", failure.message));
            }
            failure.code.into()
        }
    }
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Mkfs(a) => cmd::mkfs::run(&a),
        Command::Mount(a) => cmd::mount::run(&a),
        Command::MountHelper(a) => cmd::mount::run_helper(&a),
        Command::Umount(a) => cmd::umount::run(&a),
        Command::Fsck(a) => cmd::fsck::run(&a),
        Command::Info(a) => cmd::info::run(&a),
        Command::Probe(a) => cmd::probe::run(&a),
        Command::Dump(a) => cmd::dump::run(&a),
        Command::Image(a) => cmd::image::run(&a),
        Command::Ls(a) => cmd::ls::run(&a),
        Command::Cat(a) => cmd::cat::run(&a),
        Command::Cp(a) => cmd::cp::run(&a),
        Command::Rm(a) => cmd::rm::run(&a),
        Command::Mkdir(a) => cmd::mkdir::run(&a),
        Command::Scrub(a) => cmd::scrub::run(&a),
        Command::Stats(a) => cmd::stats::run(&a),
        Command::Top(a) => cmd::top::run(&a),
        Command::Label(a) => cmd::label::run(&a),
        Command::Resize(a) => cmd::resize::run(&a),
        Command::Upgrade(a) => cmd::upgrade::run(&a),
        Command::Device(a) => cmd::device::run(&a),
        Command::Defrag(a) => cmd::defrag::run(&a),
        Command::Quota(a) => cmd::quota::run(&a),
        Command::Tenant(a) => cmd::tenant::run(&a),
        Command::Bench(a) => cmd::bench::run(a),
        Command::Man(a) => cmd::man::run(&a, Cli::command()),
        Command::Completions(a) => cmd::completions::run(&a, Cli::command()),
    }
}

/// Prints a line on standard output.
///
/// # Errors
/// Nobody reads, or the disk behind it is full.
fn say(line: std::fmt::Arguments<'_>) -> Result<(), failure::Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|e| failure::Failure::output(&e))
}

/// Prints a line on standard error, behind the program's name. Where that cannot be written the exit code has to say enough:
/// `eprintln!` would panic, and give another one.
fn complain(line: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let line = format!("braidfs: {line}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// The exit code that wrong usage of the command in `args` has.
fn usage_code(args: &[OsString]) -> u8 {
    let commands = Cli::command();
    let called = args.iter().skip(1).find_map(|a| commands.find_subcommand(a));
    if called.is_some_and(|c| c.get_name() == "fsck") { fsck_code::USAGE } else { mount_code::USAGE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for sub in Cli::command().get_subcommands().filter(|s| !s.is_hide_set()) {
            let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example"), "{} has no example", sub.get_name());
        }
    }

    #[test]
    fn fsck_has_its_own_usage_code() {
        assert_eq!(usage_code(&["braidfs".into(), "--log".into(), "warn".into(), "fsck".into()]), 16);
        assert_eq!(usage_code(&["braidfs".into(), "mkfs".into()]), 1);
        assert_eq!(usage_code(&["braidfs".into()]), 1);
    }
}
