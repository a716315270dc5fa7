//! `braidfs man`: writes the manual pages, for packagers.

use crate::failure::{Failure, Outcome, host_error};
use std::path::PathBuf;

/// Write the manual pages into a directory
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  braidfs man /usr/share/man/man8")]
pub struct Args {
    /// Where to (made if it is missing)
    dir: PathBuf,
}

/// Helpers of mkfs(8) and so on, and the page that describes each.
const ALIASES: [(&str, &str); 4] = [
    ("mkfs.braidfs", "braidfs-mkfs"),
    ("mount.braidfs", "braidfs-mount"),
    ("umount.braidfs", "braidfs-umount"),
    ("fsck.braidfs", "braidfs-fsck"),
];

/// Writes `braidfs.8`, a page per command, and the aliases of the helpers.
pub fn run(args: &Args, root: clap::Command) -> Outcome {
    let fail = |e: std::io::Error| Failure::at("cannot write manual pages to", args.dir.display(), host_error(&e));
    std::fs::create_dir_all(&args.dir).map_err(fail)?;
    let mut root = root;
    root.build();
    let mut pages: Vec<(String, clap::Command)> = vec![("braidfs".into(), root.clone())];
    for sub in root.get_subcommands().filter(|s| !s.is_hide_set() && s.get_name() != "help") {
        let title = format!("braidfs-{}", sub.get_name());
        pages.push((title.clone(), sub.clone().name(title)));
    }
    for (title, command) in pages {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).title(title.as_str()).section("8").render(&mut page).map_err(fail)?;
        std::fs::write(args.dir.join(format!("{title}.8")), page).map_err(fail)?;
    }
    for (alias, page) in ALIASES {
        std::fs::write(args.dir.join(format!("{alias}.8")), format!(".so man8/{page}.8\n")).map_err(fail)?;
    }
    Ok(0)
}
