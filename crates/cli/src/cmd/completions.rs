//! `braidfs completions`: scripts that let a shell complete the command line.

use crate::failure::{Failure, Outcome};
use crate::personality::HELPERS;
use clap_complete::Shell;

/// Print a script with which a shell completes this command
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  . <(braidfs completions bash)     for this shell only\n  \
    braidfs completions zsh > ~/.zfunc/_braidfs\n  \
    braidfs completions fish fsck.braidfs > ~/.config/fish/completions/fsck.braidfs.fish\n\n\
    `make install` and the package put them where the shells look.")]
pub struct Args {
    /// The shell that they are for
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(["bash", "zsh", "fish"]))]
    shell: String,
    /// For this helper instead: mkfs.braidfs, umount.braidfs or fsck.braidfs
    #[arg(value_name = "HELPER", value_parser = clap::builder::PossibleValuesParser::new(HELPERS.map(|h| h.0)))]
    helper: Option<String>,
}

pub fn run(args: &Args, root: clap::Command) -> Outcome {
    let shell: Shell = args.shell.parse().map_err(|e: String| Failure::new(e))?;
    let mut command = match &args.helper {
        None => visible(&root),
        Some(name) => helper(root, name)?,
    };
    let name = command.get_name().to_string();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    crate::say(format_args!("{}", String::from_utf8_lossy(&script).trim_end()))?;
    Ok(0)
}

/// The command without what is not for people.
fn visible(root: &clap::Command) -> clap::Command {
    let mut shown = clap::Command::new("braidfs").version(env!("CARGO_PKG_VERSION"));
    shown = shown.about(root.get_about().cloned().unwrap_or_default()).args(root.get_arguments().cloned());
    shown.subcommands(root.get_subcommands().filter(|s| !s.is_hide_set()).cloned())
}

/// The command that the helper `name` is, under that name, with the options that all commands have.
fn helper(mut root: clap::Command, name: &str) -> Result<clap::Command, Failure> {
    root.build();
    let of = HELPERS.iter().find(|h| h.0 == name).and_then(|h| root.find_subcommand(h.1));
    let command = of.ok_or_else(|| Failure::new(format!("{name}: no such helper")))?.clone();
    Ok(command.name(name.to_string()).display_name(name.to_string()).bin_name(name.to_string()))
}
